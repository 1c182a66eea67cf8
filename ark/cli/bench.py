"""`ark bench decode`: prints the time per token, the used share of the read bandwidth, the fidelity
of the logits and the memory, also for a peer: a library (PyTorch) that is timed for comparison in
the same run.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from ark.backend import registry
from ark.backend.protocol import PredictingBackend
from ark.cli import (
    bench_comm,
    bench_fidelity,
    bench_models,
    bench_ops,
    bench_parallel,
    bench_perplexity,
    bench_serve,
    bench_torch,
)
from ark.cli.common import device_index, errors, output, share, to_be_started, write_results
from ark.cli.machine_settings import change
from ark.cli.measure.decode import ContextFigures, Figures, PromptFigures, decode
from ark.cli.measure.fidelity import GREEDY_STEPS, TOLERANCE
from ark.cli.measure.peer import check_peer
from ark.cli.measure.results import Figure, figure, results
from ark.cli.measure.scaled import scaled
from ark.cli.measure.turn import Turn
from ark.cli.parser import (
    CHUNK,
    Subparsers,
    add_backend,
    add_device,
    add_figures,
    add_quantize,
    add_repeats,
    add_turn,
    flag,
    option,
    positive,
)
from ark.cli.tables import FigureTable
from ark.errors import InvalidUsageError
from ark.ir.dtype import DataType, by_name
from ark.models.build import Shape
from ark.models.checkpoint import Checkpoint
from ark.models.config import builtin_config
from ark.models.gguf_file import is_gguf
from ark.models.holding import quantised_config
from ark.models.plans import usual_chunk
from ark.runtime.bootstrap import Bootstrap
from ark.runtime.launch import launch_command
from ark.runtime.rank_info import rank_from_environment

NAMES = {
    "compiled": "torch.compile + graph replay",
    "graph": "torch + graph replay",
    "eager": "torch eager fp32",
}


def register(subparsers: Subparsers) -> None:
    p = subparsers.add_parser(
        "bench", help="measure decoding, collectives and single ops beside a peer"
    )
    kinds = p.add_subparsers(dest="what", metavar="WHAT", required=True)
    compiled = (bench_torch, bench_models)
    modules = (bench_ops, bench_fidelity, bench_comm, bench_parallel, *compiled, bench_serve)
    for module in (*modules, bench_perplexity):
        module.register(kinds)
    d = kinds.add_parser("decode", help="time per token of one launch")
    option(
        d,
        "--config NAME",
        "a built-in shape with random bf16 weights, or a checkpoint directory",
        default="llama-3.2-1b",
    )
    option(
        d,
        "--context N,...",
        "positions in the cache before the first token; one plan serves all (default: 512, or "
        "the model's limit)",
        listed,
    )
    option(d, "--prompt N,...", "time prompts of N tokens too (default: none)", listed, [])
    option(d, "--chunk N", CHUNK, positive)
    add_quantize(d)
    option(
        d,
        "--batch N,...",
        "sequences decoded together, a plan for each number (default: 1)",
        listed,
        [1],
    )
    option(d, "--tokens N", "tokens of one launch", positive, 128)
    add_repeats(d)
    add_backend(d)
    add_device(d, of_rank=True)
    option(d, "--ranks N", "tensor parallel ranks, one device each", positive, 1)
    option(d, "--processors N", "processors to use (default: all)", positive)
    option(
        d,
        "--set FIELD=NUMBER",
        "change a number of the machine model, for experiments (default: none)",
        several=True,
    )
    option(
        d,
        "--vs",
        "measure torch and the read ceiling in the same run, and check each row of logits of 16 "
        "greedy steps against torch in fp32; the code is 1 if one is too far away (default: no)",
        choices=("torch",),
    )
    flag(d, "--check", "check the logits as --vs does, without the times of torch (default: no)")
    option(
        d,
        "--model NAME",
        "predict for this product by the backend's timing model (default: measure)",
    )
    option(
        d,
        "--layers FEW,MORE",
        "with --model: predict these two numbers of layers, and scale (default: all layers)",
        listed,
    )
    add_figures(d)
    add_turn(d)
    d.set_defaults(func=run)


def cut(shape: Shape, layers: list[int] | None, args: argparse.Namespace) -> list[Shape]:
    """Copies of the shape, one with each of the two numbers of layers; without `layers`, the shape
    itself. Raises InvalidUsageError unless these are two ascending numbers, not above the model's
    number of layers, and the run is a prediction for a built-in shape.
    """
    if layers is None:
        return [shape]
    most = shape.config.num_hidden_layers
    if len(layers) != 2 or not layers[0] < layers[1] <= most:
        raise InvalidUsageError(
            f"--layers {','.join(map(str, layers))} is not valid: give two different numbers of "
            f"layers, the smaller one first, each from 1 to the model's {most}, as in --layers 1,3"
        )
    if not args.model or args.prompt or args.vs or args.check or "/" in args.config:
        raise InvalidUsageError(
            "--layers scales a prediction of a built-in shape: give --model, and omit --prompt, "
            "--vs and --check"
        )
    configs = [dataclasses.replace(shape.config, num_hidden_layers=n) for n in layers]
    return [dataclasses.replace(shape, config=c) for c in configs]


def run(args: argparse.Namespace) -> int:
    rank_info = rank_from_environment()
    checkpoint = None
    if "/" in args.config or args.config.startswith(".") or is_gguf(args.config):
        checkpoint = Checkpoint.open(args.config, args.quantize)
        config, dtype = checkpoint.config, DataType.from_numpy(checkpoint.dtype)
    else:
        config, dtype = builtin_config(args.config), by_name("bf16")
        config = quantised_config(config, args.quantize, args.config)
    compares = args.vs or args.check
    if compares and config.layouts:
        raise InvalidUsageError(
            "torch's weights are not quantised; omit --quantize, or --vs and --check"
        )
    contexts, tokens = places(args, config.max_position_embeddings)
    world = max(args.ranks, rank_info.world_size)
    after = max(tokens, GREEDY_STEPS if compares else 0)
    context = max(*(c + after + 1 for c in contexts), *(n + 1 for n in args.prompt), 0)
    shape = Shape(config, dtype, context, 0, rank_info.rank, world)
    whole = config.num_hidden_layers
    cuts = cut(shape, args.layers, args)
    batches = [dataclasses.replace(one, batch=n) for n in args.batch for one in cuts]
    if args.batch != [1] and args.prompt:
        raise InvalidUsageError("--batch measures decoding alone; omit --prompt")
    if compares:
        check_peer(config, world)
    if args.model:
        predict(args.backend, args.model)
    backend, probe = registry.choose(args.backend)
    if to_be_started(args.ranks, rank_info):
        return launch_command(args.ranks, [sys.executable, "-m", "ark", *args.words])
    index = device_index(args.device, rank_info, len(probe.devices))
    with Bootstrap.from_environment(rank_info=rank_info) as ranks:
        device = backend.open(index)
        try:
            machine = change(device.machine, args.set)
            machine = share(machine, backend.name, world, len(probe.devices))
            if args.processors:
                machine = machine.with_processors(args.processors)
            if args.prompt:
                chunk = args.chunk or usual_chunk(machine, dtype)
                batches = [dataclasses.replace(shape, chunk=chunk)]
            peers: tuple[str, ...] = ()
            if args.vs:
                peers = ("eager",) if backend.name == registry.FALLBACK else ("compiled",)
            measured = [
                decode(
                    one,
                    backend,
                    device,
                    contexts=contexts,
                    tokens=tokens,
                    prompts=args.prompt,
                    repeats=args.repeats,
                    checkpoint=checkpoint,
                    machine=machine,
                    ranks=ranks,
                    peers=peers,
                    check=args.check,
                    turn=Turn(args.turn),
                    # With --model times are predicted and nothing runs, so no warm-up is needed.
                    warm_up=0 if args.model else 1,
                    beside_one=bool(args.model),
                )
                for one in batches
            ]
        finally:
            device.close()
    name = probe.devices[index].name
    if args.model:
        name = f"{args.model}, predicted by a timing model ({name})"
    if args.layers:
        pairs = zip(measured[::2], measured[1::2], strict=True)
        measured = [scaled(few, more, args.layers, whole) for few, more in pairs]
        name += f"; {args.layers[0]} and {args.layers[1]} layers of {whole}, scaled"
    if world > 1:
        name = f"{world} ranks, {name}; sizes are one rank's"
    if rank_info.rank != 0:
        return 0
    if args.json:
        label = args.config + (f"-{args.quantize}" if args.quantize else "")
        rows = [f for figures in measured for f in figures_of(figures, label, world)]
        results_file = results(probe, index, machine, args.words, rows, devices=world, name=name)
        write_results(args.json, results_file)
    if args.json != "-":
        for figures in measured:
            show(figures, name, probe.notes)
    failed = [
        f"{c.context} positions" + (f" of {figures.batch} texts" if figures.batch > 1 else "")
        for figures in measured
        for c in figures.contexts
        if "ark" in c.fidelity and not c.fidelity["ark"].passes(dtype.name)
    ]
    if failed:
        errors.print(
            f"the logits after {', '.join(failed)} are further than {TOLERANCE[dtype.name]:g} of "
            "their norm from torch's in fp32; do not trust these times, and please report it",
            style="red",
        )
    return 1 if failed else 0


def figures_of(figures: Figures, config: str, ranks: int = 1) -> list[Figure]:
    """Records (Figure) of the results: one for each context, prompt length and peer."""
    shape = f"decode/{Path(config).name}"
    shape += f"-batch-{figures.batch}" if figures.batch > 1 else ""
    shape += f"-{ranks}-ranks" if ranks > 1 else ""
    common = dataclasses.asdict(figures)
    del common["contexts"], common["prompts"]
    rows: list[tuple[str, float, ContextFigures | PromptFigures]] = []
    rows += [(f"{shape}-at-{c.context}", c.per_token, c) for c in figures.contexts]
    rows += [(f"{shape}-prompt-{p.length}", p.seconds, p) for p in figures.prompts]
    result = []
    for name, seconds, row in rows:
        detail = {**common, **dataclasses.asdict(row)}
        for peer, peer_s in row.peer_s.items() or [("", None)]:
            result.append(figure(name, seconds, NAMES.get(peer, ""), peer_s, detail=detail))
    return result


def predict(name: str | None, model: str) -> None:
    """Replaces the backend's devices by a timing model. model: its name, such as "mi300x".

    Raises InvalidUsageError if the backend has no timing models.
    """
    backend = registry.get(name or registry.FALLBACK)
    if not isinstance(backend, PredictingBackend):
        raise InvalidUsageError(
            f"--model {model}: the backend {backend.name!r} has no timing model; use "
            "--backend to choose a backend that has one"
        )
    backend.predict(model)


def listed(text: str) -> list[int]:
    """An argparse type: integers of at least 1, separated by commas."""
    return [positive(part) for part in text.split(",")]


def places(args: argparse.Namespace, limit: int) -> tuple[list[int], int]:
    """Returns the contexts at which decoding starts, and the number of tokens to decode. Raises
    InvalidUsageError if the model has too few positions.
    """
    tokens = min(args.tokens, max(1, limit - 2))
    room = limit - 1 - max(tokens, GREEDY_STEPS if args.vs or args.check else 0)
    contexts = args.context or [min(512, room)]
    asked = [("a context", c, room) for c in contexts]
    for subject, number, most in asked + [("a prompt", n, limit - 1) for n in args.prompt]:
        if number > most:
            raise InvalidUsageError(
                f"{subject} of {number} tokens is too long: of the model's {limit} positions at "
                f"most {most} are left for it; use fewer"
            )
    return contexts, tokens


def show(figures: Figures, name: str, notes: tuple[str, ...]) -> None:
    console = output()
    for note in notes:
        console.print(note, style="yellow")
    several = f"{figures.batch} sequences, " if figures.batch > 1 else ""
    title = f"decode on {name}, {several}variant {figures.variant}"
    table = FigureTable(title, ("", ""), left=2)
    for row in figures.contexts:
        _show_context(table, row, figures)
    for prompt in figures.prompts:
        table.add_row(
            f"prompt of {prompt.length}",
            f"{prompt.seconds * 1e3:.2f} ms to the first token (median of {len(prompt.runs)}), "
            f"{prompt.length / prompt.seconds:.0f} tokens/s",
        )
        for peer, seconds in prompt.peer_s.items():
            ratio = f"{seconds / prompt.seconds:.2f} times ark's"
            table.add_row(f"  {NAMES[peer]}", f"{seconds * 1e3:.2f} ms, {ratio}")
    if figures.read_bandwidth:
        table.add_row(
            "read ceiling", f"{figures.read_bandwidth / 1e9:.0f} GB/s, torch's reductions"
        )
    over = figures.device_bytes - figures.needed_bytes
    table.add_row(
        "device memory",
        f"{figures.device_bytes / 1e6:.0f} MB: weights, cache and state "
        f"{figures.needed_bytes / 1e6:.0f}, the rest {over / 1e6:.1f}",
    )
    table.add_row("plan and verify", f"{figures.plan_s:.2f} s")
    table.add_row(
        "emit, compile, load",
        f"{figures.build_s:.2f} s" + (" (from the cache)" if figures.cached else ""),
    )
    console.print(table)


def _show_context(table: FigureTable, row: ContextFigures, figures: Figures) -> None:
    low, high = min(row.runs) * 1e6, max(row.runs) * 1e6
    each = " of each sequence" if figures.batch > 1 else ""
    table.add_row(
        f"from {row.context} positions on",
        f"{row.per_token * 1e6:.1f} us a token{each} (median of {len(row.runs)}; {low:.1f} to "
        f"{high:.1f})",
    )
    if row.further is not None:
        table.add_row("  each further token", f"{row.further * 1e6:.1f} us, without a launch's own")
    rate = row.read_bytes / row.per_token
    share = (
        f", {rate / figures.read_bandwidth:.1%} of the ceiling" if figures.read_bandwidth else ""
    )
    keys = (row.read_bytes - figures.weight_bytes) / 1e9
    table.add_row(
        "  read",
        f"{figures.weight_bytes / 1e9:.3f} GB of weights, {keys:.3f} of keys and values: "
        f"{rate / 1e9:.0f} GB/s{share}",
    )
    for peer, seconds in row.peer_s.items():
        ratio = f"{seconds / row.per_token:.2f} times ark's"
        table.add_row(f"  {NAMES[peer]}", f"{seconds * 1e6:.1f} us, {ratio}")
    for who, fidelity in row.fidelity.items():
        table.add_row(
            f"  {who}'s logits",
            f"{fidelity.rows} rows beside fp32: |error| {fidelity.mean:.1e} mean, "
            f"{fidelity.most:.1e} most; a row's distance {fidelity.distance:.1e} at most; "
            f"{fidelity.agreed} of {fidelity.rows} agree on the best token",
        )
