"""`ark bench parallel`: compares predictions of `ark parallelize` with measurements."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from ark.backend import registry
from ark.cli.common import device_index, output, share, to_be_started, write_results
from ark.cli.measure.parallel import ParallelCase, ParallelFigures, measure
from ark.cli.measure.results import Figure, figure, results
from ark.cli.parser import (
    Subparsers,
    add_backend,
    add_device,
    add_figures,
    add_repeats,
    option,
    positive,
)
from ark.cli.tables import FigureTable
from ark.errors import InvalidUsageError
from ark.ir.dtype import by_name
from ark.models.checkpoint import Checkpoint
from ark.models.config import builtin_config
from ark.runtime.bootstrap import Bootstrap
from ark.runtime.launch import launch_command
from ark.runtime.rank_info import rank_from_environment


def register(kinds: Subparsers) -> None:
    """Adds `ark bench parallel`."""
    p = kinds.add_parser("parallel", help="a plan's predicted time beside its measured time")
    option(
        p,
        "--config NAME",
        "a built-in shape, or a checkpoint's; random weights",
        default="llama-3.1-8b",
    )
    option(p, "--ranks N", "ranks to start, one device each", positive, 1)
    option(p, "--plan NAME,...", "plans, one after another", default="megatron,1f1b")
    option(p, "--width N", "ranks of a stage, of 1f1b+megatron", positive, 1)
    option(p, "--sequence N", "tokens of a sequence", positive, 512)
    option(p, "--batch N", "sequences of a step", positive, 8)
    option(p, "--layers N", "layers (default: the shape's)", positive)
    option(p, "--type TYPE", "of the weights", default="bf16")
    option(p, "--link-gbps N", "GB/s of a link, one way", float, 450.0)
    add_repeats(p)
    add_backend(p)
    add_device(p, of_rank=True)
    add_figures(p)
    p.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    rank_info = rank_from_environment()
    local = Path(args.config).is_dir()
    config = Checkpoint.open(args.config).config if local else builtin_config(args.config)
    if args.layers:
        config = dataclasses.replace(config, num_hidden_layers=args.layers)
    backend, probe = registry.choose(args.backend)
    if args.ranks < 2 and rank_info.world_size < 2:
        raise InvalidUsageError("a plan is for at least 2 ranks; set their number with --ranks N")
    how = (args.sequence, args.batch, args.link_gbps, args.repeats, args.width)
    cases = [ParallelCase(config, by_name(args.type), p, *how) for p in args.plan.split(",")]
    for case in cases:
        case.check(max(args.ranks, rank_info.world_size))
    if to_be_started(args.ranks, rank_info):
        return launch_command(args.ranks, [sys.executable, "-m", "ark", *args.words])
    index = device_index(args.device, rank_info, len(probe.devices))
    device = backend.open(index)
    try:
        machine = share(device.machine, backend.name, rank_info.world_size, len(probe.devices))
        with Bootstrap.from_environment(rank_info=rank_info) as job:
            rows = [measure(case, job, backend, device, machine) for case in cases]
    finally:
        device.close()
    if rank_info.rank != 0:
        return 0
    if args.json:
        figures = [_figure(row, args.config) for row in rows]
        world = rank_info.world_size
        write_results(args.json, results(probe, index, machine, args.words, figures, devices=world))
    if args.json != "-":
        show(probe.devices[index].name, rows)
    return 0


def _figure(row: ParallelFigures, config: str) -> Figure:
    """The result of one measured step as a record (Figure) for the JSON file. The predicted time
    takes the place of a peer's time.
    """
    name = f"parallel/{Path(config).name}-{row.plan}-{row.ranks}-ranks"
    shape = f"{row.batch}x{row.sequence}"
    return figure(
        f"{name}-{shape}",
        row.measured_us / 1e6,
        "predicted",
        row.predicted_us / 1e6,
        detail=dataclasses.asdict(row),
    )


def show(device: str, rows: list[ParallelFigures]) -> None:
    console = output()
    title = f"a step of {rows[0].batch} x {rows[0].sequence} tokens, {device}"
    heads = ("plan", "ranks", "predicted us", "measured us", "measured / predicted")
    table = FigureTable(title, heads)
    for row in rows:
        times = f"{row.predicted_us:.1f}", f"{row.measured_us:.1f}", f"{row.ratio:.3f}"
        table.add_row(row.plan, str(row.ranks), *times)
    console.print(table)
