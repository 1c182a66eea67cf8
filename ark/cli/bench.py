"""`ark bench decode`: time per token, bandwidth and memory, beside a peer in the same run."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys

import numpy as np
from rich.console import Console
from rich.table import Table

from ark.backend import registry
from ark.bench.decode import Figures, decode
from ark.cli import bench_comm, bench_ops
from ark.cli.common import device_index, positive, share, to_be_started
from ark.errors import InvalidUsageError
from ark.ir.dtype import DataType, by_name
from ark.machine import Machine
from ark.models.build import Shape
from ark.models.checkpoint import Checkpoint
from ark.models.config import builtin_config
from ark.plan.schema import read_machine
from ark.runtime.bootstrap import Bootstrap
from ark.runtime.launch import launch_command
from ark.runtime.rank_info import rank_from_environment
from ark.variant import Variant


def register(subparsers: argparse._SubParsersAction) -> None:
    p = subparsers.add_parser("bench", help="measure decoding and single ops beside a peer")
    kinds = p.add_subparsers(dest="what", metavar="WHAT", required=True)
    bench_ops.register(kinds)
    bench_comm.register(kinds)
    d = kinds.add_parser("decode", help="time per token of one launch")
    d.add_argument(
        "--config",
        default="llama-3.2-1b",
        help="a built-in shape with random bf16 weights, or a checkpoint directory",
    )
    d.add_argument("--context", type=positive, default=512, help="positions already in the cache")
    d.add_argument("--tokens", type=positive, default=128)
    d.add_argument("--repeats", type=positive, default=5)
    d.add_argument("--backend")
    d.add_argument("--device", type=int, metavar="I", help="device index")
    d.add_argument("--ranks", type=positive, default=1, metavar="N", help="tensor parallel ranks")
    d.add_argument("--processors", type=positive, help="use so many processors")
    d.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=NUMBER",
        help="change a number of the machine model, for experiments",
    )
    d.add_argument("--vs", choices=("torch",), help="measure torch in the same run")
    d.add_argument(
        "--read-bandwidth",
        type=float,
        metavar="GB/S",
        help="the device's measured read bandwidth, to print a share of it",
    )
    d.add_argument("--json", action="store_true")
    d.set_defaults(func=run)


def _numbers(value: Machine | Variant) -> set[str]:
    """Names of the fields that hold a number."""
    names = {f.name for f in dataclasses.fields(value)}
    return {n for n in names - {"lanes"} if isinstance(getattr(value, n), (int, float))}


def change(machine: Machine, settings: list[str]) -> Machine:
    """Applies FIELD=NUMBER pairs to a machine model and its kernel variants."""
    ring = _numbers(machine.variant)
    numbers = ring | _numbers(machine)
    changes = {}
    for text in settings:
        name, _, value = text.partition("=")
        if name not in numbers or not re.fullmatch(r"[0-9]{1,15}(\.[0-9]{1,15})?", value):
            raise InvalidUsageError(
                f"--set {text} is not understood; write FIELD=NUMBER with a field of "
                f"{', '.join(sorted(numbers))}"
            )
        changes[name] = float(value) if "." in value else int(value)
    shape = {k: int(v) for k, v in changes.items() if k in ring}
    rest = {k: v for k, v in changes.items() if k not in ring}
    made = dataclasses.replace(machine.shaped(**shape), **rest)  # type: ignore[arg-type]
    return read_machine(dataclasses.asdict(made))


def run(args: argparse.Namespace) -> int:
    rank_info = rank_from_environment()
    checkpoint = None
    if "/" in args.config or args.config.startswith("."):
        checkpoint = Checkpoint.open(args.config)
        config, dtype = checkpoint.config, DataType.from_numpy(checkpoint.dtype)
    else:
        config, dtype = builtin_config(args.config), by_name("bf16")
    room = config.max_position_embeddings - 1
    tokens = min(args.tokens, max(1, room - 1))
    position = min(args.context, room - tokens)
    world = max(args.ranks, rank_info.world_size)
    shape = Shape(config, dtype, position + tokens + 1, 0, rank_info.rank, world)
    if args.vs and world > 1:
        raise InvalidUsageError("--vs measures a peer on one device; leave it or the ranks away")
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
            peers: tuple[str, ...] = ()
            if args.vs:
                peers = ("eager",) if backend.name == registry.FALLBACK else ("compiled",)
            figures = decode(
                shape,
                backend,
                device,
                position=position,
                tokens=tokens,
                repeats=args.repeats,
                checkpoint=checkpoint,
                machine=machine,
                ranks=ranks,
                peers=peers,
            )
        finally:
            device.close()
    name = probe.devices[index].name
    if world > 1:
        name = f"{world} ranks, {name}; sizes are one rank's"
    if rank_info.rank != 0:
        return 0
    if args.json:
        row = dataclasses.asdict(figures)
        print(json.dumps({"device": name, "notes": list(probe.notes), **row}))
    else:
        show(figures, name, probe.notes, args.read_bandwidth)
    return 0


def show(figures: Figures, name: str, notes: tuple[str, ...], read_bandwidth: float | None) -> None:
    console = Console(markup=False)
    for note in notes:
        console.print(note, style="yellow")
    table = Table(title=f"decode on {name}", show_header=False)
    rate = figures.weight_bytes / figures.per_token / 1e9
    spread = np.array(figures.runs) * 1e6
    table.add_row(
        "time per token",
        f"{figures.per_token * 1e6:.1f} us (median of {len(spread)}; "
        f"{spread.min():.1f} to {spread.max():.1f})",
    )
    table.add_row("weights streamed", f"{figures.weight_bytes / 1e9:.3f} GB, {rate:.0f} GB/s")
    if read_bandwidth:
        table.add_row(
            "share of read bandwidth", f"{rate / read_bandwidth:.1%} of {read_bandwidth:.0f} GB/s"
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
    for peer, seconds in figures.peer_per_token.items():
        label = "torch.compile + graph replay" if peer == "compiled" else "torch eager fp32"
        table.add_row(
            label, f"{seconds * 1e6:.1f} us, {seconds / figures.per_token:.2f} times ark's"
        )
    if figures.logits_error is not None:
        table.add_row("logits against torch", f"relative error {figures.logits_error:.2e}")
    console.print(table)
