"""`ark bench models`: measures whole models, compiled by torch.compile's backend "ark", and ONNX
files, compares each with a peer (another compiler or onnxruntime), and prints a table or JSON.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ark.cli.bench_torch import add_networks, check_names, measure_each
from ark.cli.common import output
from ark.cli.measure.onnx_files import FILES
from ark.cli.measure.peer import import_torch
from ark.cli.measure.results import Figure
from ark.cli.measure.turn import Turn
from ark.cli.measure.whole_models import MODELS, TRAINING
from ark.cli.parser import Subparsers, flag
from ark.cli.tables import FigureTable
from ark.errors import InvalidUsageError

if TYPE_CHECKING:
    from ark.cli.measure.modules import ModuleFigures

NAMES = (*MODELS, *FILES)


def register(kinds: Subparsers) -> None:
    """Adds `ark bench models`."""
    p = kinds.add_parser("models", help="whole models by torch.compile, and ONNX files")
    add_networks(p, "models", NAMES, ("inductor", "eager", "onnxruntime"))
    flag(
        p,
        "--resume",
        "keep the figures of --json FILE that the same ark measured on the same machine",
    )
    flag(p, "--train", "measure a training step: forward pass, gradients and AdamW in one kernel")
    p.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    names = tuple(MODELS) if args.train else NAMES
    check_names(args.names, names)
    if args.train and args.vs == "onnxruntime":
        raise InvalidUsageError("onnxruntime does not train; choose --vs inductor or --vs eager")
    if args.resume and args.json in (None, "-"):
        raise InvalidUsageError("--resume continues a file of figures; add --json FILE")
    import_torch()
    turn = Turn(args.turn)
    measured = measure_each(
        args,
        names,
        lambda n, place: _measure(n, place, args.repeats, args.vs or "", turn, args.train),
        args.resume,
        TRAINING if args.train else "",
    )
    if args.json == "-":
        return 0
    title = f"microseconds a call and seconds to build on {measured.device}"
    title += f", peer {args.vs}" if args.vs else ""
    output().print(table(title, args.vs or "", measured.figures))
    for row in measured.figures:
        for note in notes(row):
            print(f"{_name(row)}: {note}")
    return 0


def _measure(
    name: str, place: str, repeats: int, peer: str, turn: Turn, train: bool
) -> ModuleFigures:
    from ark.cli.measure import modules, onnx_models, training_step

    if train:
        return training_step.measure(name, place, repeats, peer, turn)
    if name in MODELS:
        return modules.measure(name, place, repeats, peer, turn)
    with turn:
        return onnx_models.measure(name, repeats, peer)


def table(title: str, peer: str, rows: Sequence[Figure]) -> FigureTable:
    """A table with a row for each measured model."""
    heads = ["model", "ark", "kernel", "built", "MB", "error"]
    lines = FigureTable(title, [*heads, *(["peer", "built", "ratio"] if peer else [])])
    for row in rows:
        if row.us is not None:
            lines.add_row(*_cells(row))
    return lines


def _name(row: Figure) -> str:
    return row.figure.split("/", 1)[1]


def _cells(row: Figure) -> list[str]:
    detail = row.detail
    cells = [_name(row), f"{row.us:.0f}", f"{detail['kernel'] * 1e6:.0f}"]
    cells += [f"{detail['build']:.1f}", f"{detail['memory'] / 1e6:.1f}"]
    cells.append(f"{detail['distance']:.0e}")
    if row.peer_us and row.ratio:
        cells += [f"{row.peer_us:.0f}", f"{detail['peer_build']:.1f}", f"{row.ratio:.2f}"]
    return cells


def notes(row: Figure) -> list[str]:
    """Notes below the table: why a figure of ark or of the peer is missing, and which operators
    torch computed instead of ark.
    """
    if row.us is None:
        return [row.error]
    left = [f"left to torch: {why}" for why in row.detail["left"]]
    failed = row.detail["peer_error"]
    return left + ([f"no figure of the peer: {failed}"] if failed else [])
