"""`ark bench serve`: measures latencies of requests, at given rates, to a server with OpenAI's
routes.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import platform
from collections.abc import Iterable
from typing import Any

from ark.backend import registry
from ark.cli.common import errors, output, visible, write_file, write_results
from ark.cli.measure.own_server import own_server
from ark.cli.measure.results import Figure, Place, Results, figure, results, results_at
from ark.cli.measure.serve import Summary, Target, asks, first_model, load, summary
from ark.cli.measure.serve_chart import curves
from ark.cli.measure.turn import Turn
from ark.cli.parser import Subparsers, add_backend, add_figures, add_turn, flag, option, positive
from ark.cli.tables import FigureTable
from ark.errors import InvalidUsageError

MEASURED = {
    "first": "first_s",
    "between": "between_s",
    "per-token": "per_token_s",
    "whole": "whole_s",
}
SHOWN = {
    "first token": "first_s",
    "between pieces": "between_s",
    "a token, mean of a request": "per_token_s",
    "whole answer": "whole_s",
}


def register(kinds: Subparsers) -> None:
    p = kinds.add_parser(
        "serve",
        help="time to first token and between tokens of a server over HTTP",
        description="Sends requests to a server at random times and shows what each has waited.",
    )
    p.add_argument(
        "directory",
        nargs="?",
        help="checkpoint to serve on this machine meanwhile (default: measure the server at --url)",
    )
    p.add_argument(
        "--url",
        help="address of a server with OpenAI's routes (default: http://127.0.0.1:8000)",
    )
    option(p, "--model NAME", "the model's name (default: the server's first)")
    option(p, "--api-key KEY", "key of the server (default: ARK_API_KEY)")
    option(
        p,
        "--rate R,...",
        "requests a second, at random times (default: inf, all at once)",
        rates,
        [math.inf],
    )
    option(p, "--requests N", "number of requests at each rate", positive, 64)
    option(p, "--prompt N", "mean words of a prompt", positive, 128)
    option(p, "--tokens N", "mean tokens of an answer", positive, 64)
    option(p, "--seed N", "seed of lengths, words and times", int, 0)
    flag(p, "--chat", "use /v1/chat/completions")
    flag(p, "--ignore-eos", "no answer ends early (ark and vLLM know it)")
    option(
        p,
        "--first-goal MS",
        "goodput: most milliseconds to the first token (default: none)",
        milliseconds,
    )
    option(
        p,
        "--token-goal MS",
        "goodput: most milliseconds a further token, mean (default: none)",
        milliseconds,
    )
    option(p, "--svg FILE", "FILE for a chart of times by rate (default: none)")
    add_backend(p)
    add_figures(p)
    add_turn(p)
    p.set_defaults(func=run)


def rates(text: str) -> list[float]:
    """An argparse type: rates in requests per second, separated by commas."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [0.0]
    if not all(value > 0 for value in values):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of rates above 0, such as 2,8,inf"
        )
    return values


def milliseconds(text: str) -> float:
    """An argparse type: a number of milliseconds above 0, returned in seconds."""
    try:
        value = float(text) / 1e3
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of milliseconds above 0")
    return value


def run(args: argparse.Namespace) -> int:
    if args.directory is None:
        with Turn(args.turn):
            return _measure(args, args.url or "http://127.0.0.1:8000")
    if args.url is not None:
        raise InvalidUsageError(
            f"the checkpoint {args.directory!r}, which would be served here, and --url, the "
            "address of a running server, were both given; give one of them"
        )
    options = ["--backend", args.backend] if args.backend else []
    # Benches that share a device use it one after another (Turn). The server is started before this
    # bench waits for its turn, because a server only plans and compiles until it gets the first
    # request.
    with own_server(args.directory, options) as url, Turn(args.turn):
        return _measure(args, url)


def _measure(args: argparse.Namespace, url: str) -> int:
    """Measures the server at a URL. Returns the exit code."""
    key = args.api_key or os.environ.get("ARK_API_KEY", "")
    if not (key.isascii() and (key.isprintable() or not key)):
        raise InvalidUsageError("the API key has characters that HTTP headers cannot carry")
    target = Target(url, args.model or "", key, args.chat)
    target = dataclasses.replace(target, model=args.model or first_model(target))
    extra: dict[str, Any] = {"ignore_eos": True} if args.ignore_eos else {}
    measured = []
    for rate in args.rate:
        listed = asks(args.requests, rate, args.prompt, args.tokens, args.seed)
        outcomes = load(target, listed, extra)
        measured.append(summary(rate, listed, outcomes, args.first_goal, args.token_goal))
    if args.json:
        figures = [row for one in measured for row in figures_of(one, target.model)]
        write_results(args.json, _results(args, url, figures))
    if args.svg:
        write_file(args.svg, curves(f"{target.model} at {url}, {args.requests} requests", measured))
    if args.json != "-":
        show(measured, target)
    failed = sum(one.failed for one in measured)
    for message in sorted({message for one in measured for message in one.errors}):
        errors.print(visible(f"failed: {message}"), style="red", soft_wrap=True)
    return 1 if failed else 0


def _results(args: argparse.Namespace, url: str, figures: list[Figure]) -> Results:
    """The results with the machine that they were measured on. For a server that this command
    started (args.directory) this is the server's device. For a server at --url, whose device is not
    known, it is the server's address.
    """
    if args.directory is None:
        place = Place(f"server at {url}"[:200], platform.machine(), "http", os.cpu_count() or 1)
        return results_at(place, args.words, figures)
    backend, probe = registry.choose(args.backend)
    device = backend.open(0)
    try:
        return results(probe, 0, device.machine, args.words, figures)
    finally:
        device.close()


def figures_of(one: Summary, model: str) -> Iterable[Figure]:
    """The results of one rate of requests as records (Figure) for the JSON file: one for each
    percentile of each time. If all requests failed, there is a single record with the reason.
    """
    name = f"serve/{''.join(c if c.isalnum() or c in '._-' else '-' for c in model)[:80]}"
    name += f"-rate-{one.rate:g}"
    detail = dataclasses.asdict(one)
    if one.failed == one.requests:
        yield figure(name, None, error=f"all requests failed: {one.errors[0]}", detail=detail)
        return
    for label, times in MEASURED.items():
        for share, seconds in getattr(one, times).items():
            yield figure(f"{name}-{label}-{share}", max(seconds, 1e-9), detail=detail)
            detail = {}


def show(measured: Iterable[Summary], target: Target) -> None:
    """Prints a table for each rate of requests."""
    console = output()
    for one in measured:
        arrive = "all at once" if math.isinf(one.rate) else f"{one.rate:g} a second"
        title = visible(f"{target.model} at {target.url}: {one.requests} requests, {arrive}")
        table = FigureTable(title, ("", "p50", "p90", "p99"))
        for label, times in SHOWN.items():
            values = getattr(one, times)
            table.add_row(label, *(f"{values[p] * 1e3:.1f} ms" if values else "-" for p in values))
        console.print(table)
        good = "" if one.goodput is None else f", {one.goodput:.2f} requests/s kept the goals"
        console.print(
            f"{one.requests_per_s:.2f} requests/s, {one.tokens_per_s:.1f} new tokens/s "
            f"({one.tokens} new and {one.prompt_tokens} prompt tokens in {one.seconds:.2f} s){good}"
            + (f"; {one.failed} failed" if one.failed else "")
        )
