"""`ark serve DIR`: a checkpoint behind the HTTP interface that OpenAI's clients use."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import math
import os
from contextlib import ExitStack
from dataclasses import replace

from ark.backend import registry
from ark.cli.common import errors, progress, read_file, visible
from ark.cli.parser import CHUNK, add_backend, add_device, positive
from ark.errors import InvalidUsageError, SystemError
from ark.machine import Machine
from ark.models.chat import DEFAULT, ChatTemplates
from ark.models.checkpoint import Checkpoint
from ark.models.plans import choose_context
from ark.models.tokenizer import Tokenizer

PACKAGES = ("jinja2", "prometheus_client", "starlette", "uvicorn")


def register(subparsers: argparse._SubParsersAction) -> None:
    p = subparsers.add_parser(
        "serve",
        help="serve a checkpoint over HTTP, as OpenAI's clients expect",
        description="Serves a checkpoint directory over HTTP with OpenAI's routes.",
    )
    p.add_argument("directory", help="config.json, safetensors and tokenizer.json")
    p.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (127.0.0.1: this machine alone; 0.0.0.0: all)",
    )
    p.add_argument("--port", type=port, default=8000, metavar="N", help="TCP port; 0: any free one")
    p.add_argument(
        "--served-model-name",
        metavar="NAME",
        help="the model's name in requests (default: the directory's)",
    )
    p.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="requests must have this key, or one of several (default: ARK_API_KEY's, or none)",
    )
    p.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="pages of this origin may use the server from a browser; * is all (default: none)",
    )
    p.add_argument(
        "--slots", type=positive, default=8, metavar="N", help="requests that run at once"
    )
    p.add_argument(
        "--context",
        type=positive,
        metavar="N",
        help="positions of a request, its answer included (default: the model's, at most 4096)",
    )
    p.add_argument("--chunk", type=positive, metavar="N", help=CHUNK)
    p.add_argument(
        "--pages",
        type=positive,
        metavar="N",
        help="pages of keys and values (default: for all slots)",
    )
    p.add_argument(
        "--chat-template", metavar="FILE", help="a Jinja template (default: the checkpoint's)"
    )
    p.add_argument(
        "--queue", type=positive, default=256, metavar="N", help="requests that wait at most"
    )
    p.add_argument(
        "--body-limit",
        type=positive,
        default=32,
        metavar="MIB",
        help="largest body of a request, in MiB",
    )
    p.add_argument(
        "--timeout",
        type=seconds,
        default=600.0,
        metavar="S",
        help="seconds that a request may take, its wait included",
    )
    p.add_argument(
        "--drain",
        type=seconds,
        default=30.0,
        metavar="S",
        help="seconds that answers may go on after SIGTERM",
    )
    add_backend(p)
    add_device(p)
    p.set_defaults(func=run)


def port(text: str) -> int:
    """An argparse type: a TCP port."""
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to 65535")
    return int(text)


def seconds(text: str) -> float:
    """An argparse type: seconds above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to 1e6")
    return value


def run(args: argparse.Namespace) -> int:
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemError(
            f"ark serve needs {', '.join(missing)}, which the extra `serve` installs: "
            "pip install 'ark-gpu[serve]'"
        )
    from ark.server.app import Limits
    from ark.server.model import ServedModel
    from ark.server.run import Options, bound, serve, url_of
    from ark.serving.engine import Engine

    keys = args.api_key or [key for key in [os.environ.get("ARK_API_KEY")] if key]
    if not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
        raise InvalidUsageError("an API key has characters that HTTP headers cannot carry")
    checkpoint = Checkpoint.open(args.directory)
    config = checkpoint.config
    tokenizer = Tokenizer.open(args.directory, vocab_size=config.vocab_size)
    templates = ChatTemplates.open(args.directory, tokenizer.special_tokens)
    if args.chat_template:
        text = read_file(args.chat_template, "a chat template")
        templates = replace(templates, source=args.chat_template, texts={DEFAULT: text})
    backend, probe = registry.choose(args.backend)
    if args.backend is None and backend.name == registry.FALLBACK:
        errors.print(f"no accelerator found; running on {probe.devices[0].name}", style="dim")
    for note in probe.notes:
        errors.print(note, style="yellow")
    with ExitStack() as stack:
        listener = bound(args.host, args.port)
        stack.callback(listener.close)
        device = backend.open(args.device)
        stack.callback(device.close)
        check_memory(checkpoint, device.machine, args.slots, args.context)
        with progress(False) as tell:
            engine = Engine.open(
                checkpoint,
                backend,
                device,
                slots=args.slots,
                context=args.context,
                chunk=args.chunk,
                pages=args.pages,
                progress=tell,
            )
        stack.callback(engine.close)
        name = args.served_model_name or checkpoint.directory.resolve().name
        ends = frozenset(config.eos_token_ids)
        model = ServedModel(name, tokenizer, templates, engine.context, config.vocab_size, ends)
        limits = Limits(args.body_limit << 20, request_s=args.timeout, queue=args.queue)
        options = Options(keys, args.cors_origin, args.drain, limits)

        def ready() -> None:
            shape = f"{args.slots} slots of {engine.context} positions"
            print(f"{visible(name)} is served at {url_of(listener)} ({shape})", flush=True)

        asyncio.run(serve(engine, model, options, listener, ready))
    return 0


def check_memory(checkpoint: Checkpoint, machine: Machine, slots: int, context: int | None) -> None:
    """Says before anything is loaded what weights, keys and values take; SystemError where the
    device does not have as much memory.
    """
    config, item = checkpoint.config, checkpoint.dtype.itemsize
    length = choose_context(checkpoint, context)
    stored = {weight.stored_name: math.prod(weight.shape) for weight in checkpoint.weights.values()}
    weights = item * sum(stored.values())
    position = 2 * item * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    cache = position * length * slots
    said = (
        f"weights take {weights / 1e9:.2f} GB, keys and values of {slots} slots of {length} "
        f"positions {cache / 1e9:.2f} GB"
    )
    room = machine.memory_bytes
    if room and weights + cache > room:
        most = (room - weights) // (position * slots)
        help_ = f"--context {most}" if most > 0 else "fewer --slots or a smaller model"
        raise SystemError(f"{said}, but {machine.name} has {room / 1e9:.2f} GB; use {help_}")
    errors.print(f"{said}" + (f", of {room / 1e9:.2f} GB" if room else ""), style="dim")
