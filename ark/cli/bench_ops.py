"""`ark bench ops`: compares single ops with torch, and prints a table, JSON or a chart."""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import sys
from collections.abc import Iterator, Sequence

from ark.backend import registry
from ark.backend.protocol import InspectedBackend
from ark.cli.common import check_device, output, write_file, write_results
from ark.cli.measure.case import OpCase
from ark.cli.measure.cases import cases
from ark.cli.measure.ceiling import copy_bandwidth
from ark.cli.measure.chart import bars
from ark.cli.measure.ops import OpFigures, inspected, measure
from ark.cli.measure.results import Figure, figure, results
from ark.cli.measure.sweep.cases import SWEEP
from ark.cli.measure.turn import Turn
from ark.cli.parser import SVG, Subparsers, add_measurement, flag, option
from ark.cli.tables import FigureTable
from ark.errors import InvalidUsageError, SystemError
from ark.machine import Machine


def register(kinds: Subparsers) -> None:
    p = kinds.add_parser("ops", help="time, rate and share of the limit of single ops")
    p.add_argument(
        "names", nargs="*", metavar="NAME", help="cases, with * and ? (default: all but sweeps)"
    )
    flag(p, "--list", "print the cases' names")
    option(p, "--vs", "measure torch in the same run (default: no)", choices=("torch",))
    add_measurement(p)
    option(
        p,
        "--isa ARCH",
        "read the machine code of products and attention for this architecture, no device "
        "needed (default: measure)",
    )
    option(p, "--svg FILE", SVG)
    p.set_defaults(func=run)


def chosen(names: list[str], cpu: bool) -> list[OpCase]:
    """The bench cases with these names. Without names, all cases that suit the backend, except
    those of the sweep (many shapes of common torch ops).
    """
    known = cases()
    if not names:
        suited = [c for c in known if c.on_cpu or not cpu]
        return [c for c in suited if not c.name.startswith(SWEEP)]
    selected = []
    for name in names:
        fitting = [c for c in known if fnmatch.fnmatch(c.name, name) and c not in selected]
        if not any(fnmatch.fnmatch(c.name, name) for c in known):
            raise InvalidUsageError(
                f"the case {name!r} does not exist; `ark bench ops --list` shows them all"
            )
        selected += fitting
    return selected


def run(args: argparse.Namespace) -> int:
    if args.list:
        print("\n".join(c.name for c in cases()))
        return 0
    if args.isa:
        return _inspect(args)
    if args.svg and not args.vs:
        raise InvalidUsageError("--svg draws ratios to torch's times; add --vs torch")
    backend, probe = registry.choose(args.backend)
    wanted = chosen(args.names, backend.name == registry.FALLBACK)
    check_device(args.device, backend.name, len(probe.devices))
    rows: list[OpFigures] = []
    turn, peer = Turn(args.turn), bool(args.vs)
    device = backend.open(args.device)
    try:
        machine = device.machine
        empty = results(probe, args.device, machine, args.words, [])
        for number, case in enumerate(wanted, 1):
            print(f"{number} of {len(wanted)}: {case.name}", file=sys.stderr, flush=True)
            figures = measure(
                case, backend, device, machine, repeats=args.repeats, peer=peer, turn=turn
            )
            rows.append(figures)
            write_results(args.json, empty.holding(_figures(rows, args.vs)), done=False)
        copied = any(r.copy_seconds for r in rows)
        with turn:
            most = copy_bandwidth(backend.name != registry.FALLBACK) if copied else None
    finally:
        device.close()
    name = probe.devices[args.device].name
    if args.svg:
        ratios = [(r.name, r.peer_seconds / r.seconds) for r in rows if r.peer_seconds]
        write_file(args.svg, bars(f"ark's speed, in {args.vs}'s, on {name}", ratios))
    if args.json != "-":
        _show(name, machine, rows, most)
    write_results(args.json, empty.holding(_figures(rows, args.vs, most)))
    return 0


def _figures(rows: list[OpFigures], peer: str | None, most: float | None = None) -> list[Figure]:
    return [f for row in rows for f in figures_of(row, peer or "", most)]


def figures_of(row: OpFigures, peer: str, most: float | None) -> list[Figure]:
    """The measurements of one case as records (Figure) for the JSON file, one for each peer
    (library that is timed for comparison). most: bytes per second of a large copy, which is
    recorded for ops that only move data.
    """
    detail = {
        "flops": row.flops,
        "bytes": row.nbytes,
        "variant": row.variant,
        "plan_s": row.plan_s,
        "build_s": row.build_s,
        "distance": row.distance,
        "copy_us": row.copy_seconds and row.copy_seconds * 1e6,
        "copy_bandwidth": most if row.copy_seconds else None,
    }
    name = f"ops/{row.name}"
    if row.peer_errors:
        detail["peer_errors"] = {n or peer: error for n, error in row.peer_errors.items()}
    figures = [figure(name, row.seconds, peer, row.peer_seconds, row.error, detail)]
    for other, (seconds, distance) in row.others.items():
        more = {**detail, "distance": distance}
        figures.append(figure(name, row.seconds, other, seconds, detail=more))
    return figures


def _inspect(args: argparse.Namespace) -> int:
    """Prints statistics of the machine code that compilers generate for the loops of the chosen
    matmuls and attention cases.
    """
    backend = _inspecting(args.backend, args.isa)
    wanted = chosen(args.names or ["matmul-*"], False)
    rows = {case.name: inspected(case, backend, args.isa) for case in wanted}
    data = {name: dataclasses.asdict(figures) for name, figures in rows.items()}
    if args.json == "-":
        print(json.dumps(data))
        return 0
    if args.json:
        write_file(args.json, json.dumps(data, indent=1))
    heads = (
        "case",
        "slots of matrix units",
        "bank conflicts",
        "instructions of the loop",
        "registers",
        "spilled",
    )
    title = f"matrix loops on {args.isa}: compiled; bank conflicts of an emulated tile"
    table = FigureTable(title, heads)
    for name, row in rows.items():
        kinds = sorted(row.instructions.items(), key=lambda item: -item[1])
        listed = ", ".join(f"{count} {kind}" for kind, count in kinds)
        spilled = f"{row.spills} ({row.scratch_bytes} bytes a lane)"
        lost = "-" if row.bank_conflicts is None else f"{row.bank_conflicts:.0%}"
        table.add_row(name, f"{row.matrix_share:.0%}", lost, listed, str(row.registers), spilled)
    output().print(table)
    return 0


def _inspecting(name: str | None, arch: str) -> InspectedBackend:
    """The backend with this name. Without a name, the backend that compiles for the architecture
    `arch`.
    """
    broken, read = "", set[str]()
    for known in [name] if name else registry.names():
        try:
            backend = registry.get(known)
        except SystemError as error:
            broken += f"; {error}"
            continue
        if isinstance(backend, InspectedBackend):
            if arch in backend.archs():
                return backend
            read.update(backend.archs())
    choice = f"; choose one of {', '.join(sorted(read))}" if read else ""
    raise InvalidUsageError(
        f"--isa {arch}: no installed backend reads machine code of that architecture{choice}"
        f"{broken}"
    )


def _cells(row: OpFigures, machine: Machine) -> Iterator[str]:
    yield f"{row.seconds * 1e6:.1f} us"
    bound = max(row.flops / (machine.tflops * 1e12), row.nbytes / (machine.bandwidth_gbps * 1e9))
    if row.flops:
        yield f"{row.flops / row.seconds / 1e12:.3g} TFLOP/s"
    else:
        yield f"{row.nbytes / row.seconds / 1e9:.0f} GB/s"
    yield f"{bound / row.seconds:.0%}"
    if row.peer_seconds is not None and row.distance is not None:
        yield f"{row.peer_seconds * 1e6:.1f} us"
        yield f"{row.peer_seconds / row.seconds:.2f}"
        yield f"{row.distance:.1e}"
    elif row.peer_errors:
        yield from ("-", "-", "-")


def _cannot(error: str) -> str:
    return f"cannot: {error:.80}"


def _copy_cells(row: OpFigures, most: float | None) -> Iterator[str]:
    """Table cells with the op's speed as fractions of two copies' speeds: one of the same size, and
    a large one.
    """
    if row.copy_seconds and most:
        yield f"{row.copy_seconds / row.seconds:.2f}"
        yield f"{row.nbytes / row.seconds / most:.2f}"


def _show(name: str, machine: Machine, rows: list[OpFigures], most: float | None) -> None:
    """Prints each case's name on a line of its own and its figures below it, within 80 columns."""
    beside = f"; a large copy: {most / 1e9:.0f} GB/s" if most else ""
    print(f"ops on {name}{beside}")
    heads = ["time", "rate", "limit"]
    if any(r.peer_seconds or r.peer_errors for r in rows):
        heads += ["torch", "ratio", "distance"]
    if most:
        heads += ["copy", "large copy"]
    print(_columns(heads))
    for row in rows:
        print(row.name)
        if row.error:
            print(f"  {row.error}")
            continue
        print(_columns([*_cells(row, machine), *_copy_cells(row, most)]))
        for other, (seconds, apart) in row.others.items():
            cells = f"{seconds * 1e6:.1f} us", f"{seconds / row.seconds:.2f}", f"{apart:.1e}"
            print(_columns([f"beside {other}", "", "", *cells]))
        for other, error in row.peer_errors.items():
            print(f"  {other or 'torch'} {_cannot(error)}"[:80])
    print("limit: share of the model's limit; ratio: torch's time by ark's")
    if most:
        print("copy, large copy: speed in that of a copy of as many bytes, of a large one")


def _columns(cells: Sequence[str]) -> str:
    """Joins cells to a line, with columns at the same places in every line."""
    widths = (12, 14, 6, 12, 6, 8, 5, 10)
    line = "".join(f"{cell:<{width}} " for cell, width in zip(cells, widths, strict=False))
    return f"  {line.rstrip()}"
