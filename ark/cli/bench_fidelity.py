"""`ark bench fidelity`: compares the cost model's predictions with measured times."""

from __future__ import annotations

import argparse
import contextlib
import sys

from ark.backend import registry
from ark.cli.bench_ops import chosen as named
from ark.cli.common import check_device, output, write_results
from ark.cli.measure.predicted import (
    FITTED,
    MEAN_GOAL,
    PROGRAMS,
    WORST_GOAL,
    Fidelity,
    chosen,
    compare,
)
from ark.cli.measure.results import Figure, figure, results
from ark.cli.measure.turn import Turn
from ark.cli.parser import Subparsers, add_measurement
from ark.cli.tables import FigureTable

PEER = "cost model"


def register(kinds: Subparsers) -> None:
    p = kinds.add_parser("fidelity", help="predicted times beside measured ones, forty programs")
    p.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="cases of `ark bench ops` (default: forty programs)",
    )
    add_measurement(p, 3)
    p.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    backend, probe = registry.choose(args.backend)
    check_device(args.device, backend.name, len(probe.devices))
    cpu = backend.name == registry.FALLBACK
    listed = named(args.names, cpu) if args.names else chosen(PROGRAMS, cpu)
    with contextlib.closing(backend.open(args.device)) as device:
        machine = device.machine
        empty = results(probe, args.device, machine, args.words, [])
        rows: list[Fidelity] = []
        for row in compare(listed, backend, device, args.repeats, Turn(args.turn)):
            rows.append(row)
            done = f"{len(rows)} of {len(listed)} measured: {row.name}"
            print(done, file=sys.stderr, flush=True)
            write_results(args.json, empty.holding(map(_figure, rows)), done=False)
    if args.json != "-":
        _show(rows, f"{backend.name} {machine.name}; costs: {machine.costs.source}")
    write_results(args.json, empty.holding(map(_figure, rows)))
    return int(any(row.error for row in rows))


def _figure(row: Fidelity) -> Figure:
    """The result of one program as a record (Figure) for the JSON file. It has the measured time,
    and in the place of a peer's time the predicted time.
    """
    us = 1e-6
    return figure(
        f"fidelity/{row.name}", row.measured_us * us, PEER, row.predicted_us * us, row.error
    )


def _show(rows: list[Fidelity], title: str) -> None:
    table = FigureTable(title, ("program", "predicted us", "measured us", "off"))
    for row in rows:
        if row.error:
            table.add_row(row.name, "", "", row.error)
        else:
            off = f"{100 * row.off:+.0f}%"
            table.add_row(row.name, f"{row.predicted_us:.2f}", f"{row.measured_us:.2f}", off)
    console = output()
    console.print(table)
    known = [row for row in rows if not row.error]
    apart = [row for row in known if row.name not in FITTED]
    for listed, label in ((known, "programs"), (apart, "of them that no cost was fitted to")):
        errors = [abs(row.off) for row in listed]
        if errors:
            console.print(
                f"{len(errors)} {label}: mean error {100 * sum(errors) / len(errors):.0f}% "
                f"(goal {100 * MEAN_GOAL:.0f}%), worst {100 * max(errors):.0f}% "
                f"(goal {100 * WORST_GOAL:.0f}%)"
            )
