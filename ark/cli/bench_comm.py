"""`ark bench comm`: measures collectives over ranks, in the format of nccl-tests."""

from __future__ import annotations

import argparse
import dataclasses
import sys

from rich.console import Console

from ark.backend import registry
from ark.backend.protocol import Backend, Probe
from ark.cli.common import (
    device_index,
    output,
    to_be_started,
    write_file,
    write_results,
)
from ark.cli.measure.chart import bars
from ark.cli.measure.comm import COLLECTIVES, CommFigures, measure
from ark.cli.measure.comm_norm import NormFigures, measure_norm, norm_shapes
from ark.cli.measure.comm_overlap import OVERLAPS, OverlapFigures, measure_overlap, overlap_case
from ark.cli.measure.comm_peer import ALONE, GRAPH, CommCase, Peer
from ark.cli.measure.results import Figure, figure, results
from ark.cli.parser import SVG, Subparsers, add_backend, add_figures, add_repeats, option, positive
from ark.cli.tables import FigureTable
from ark.collective.synthesis import algorithms
from ark.collective.topology import Topology, full_mesh, load
from ark.errors import InvalidUsageError
from ark.ir.dtype import by_name
from ark.lower.engines import AUTO, ENGINES
from ark.runtime.bootstrap import Bootstrap
from ark.runtime.launch import launch_command
from ark.runtime.rank_info import RankInfo, rank_from_environment

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def register(kinds: Subparsers) -> None:
    p = kinds.add_parser("comm", help="time and bandwidth of collectives over ranks")
    p.add_argument(
        "names", nargs="*", metavar="COLLECTIVE", help=f"{', '.join(COLLECTIVES)} (default: all)"
    )
    option(p, "--ranks N", "ranks to start", positive, 1)
    option(p, "--sizes FROM:TO", "bytes of messages, with K, M or G", default="1K:16M")
    option(p, "--factor N", "ratio of a size to the one before", positive, 4)
    option(p, "--type TYPE", "of elements: fp32, fp16, bf16 or int32", default="fp32")
    option(
        p,
        "--way",
        "in one launch of a plan, or call by call on arrays",
        default=GRAPH,
        choices=(GRAPH, ALONE),
    )
    option(
        p, "--algorithm NAME", "as `ark topo synthesize` names them; all for each", default="auto"
    )
    option(
        p,
        "--topology NET",
        "topology between the ranks, as `ark topo measure` writes it: predict times too "
        "(default: none)",
    )
    option(p, "--engine", "way in which bytes travel", default=AUTO, choices=(AUTO, *ENGINES))
    option(
        p,
        "--overlap ROWSxCOLUMNSxDEPTH",
        "a product of this shape, whose depth the ranks share, and the collective it meets: each "
        "alone, one behind the other, and as one op (default: collectives alone)",
    )
    option(
        p,
        "--norm ROWSxCOLUMNS,...",
        "an all_reduce of rows with its residual and rmsnorm: alone, op by op, and as one op "
        "(default: collectives alone)",
    )
    option(p, "--vs", "measure torch's in the same run (default: no)", choices=("nccl", "gloo"))
    add_repeats(p)
    add_backend(p)
    add_figures(p)
    option(p, "--svg FILE", SVG)
    p.set_defaults(func=run, device=None)


def size(text: str) -> int:
    """The number of bytes of a size such as 4K. Raises InvalidUsageError if the text is not a
    size.
    """
    unit = text[-1:].upper() if text[-1:].upper() in "KMG" else ""
    digits = text[: len(text) - len(unit)]
    if not digits.isdigit() or not 1 <= int(digits) * _UNITS[unit] <= 1 << 33:
        raise InvalidUsageError(f"{text!r} is not a size; write a number followed by K, M or G")
    return int(digits) * _UNITS[unit]


def sizes(text: str, factor: int) -> list[int]:
    """The sizes of a range FROM:TO, each `factor` times the previous one, or a single size."""
    first, _, last = text.partition(":")
    begin, end = size(first), size(last or first)
    if begin > end or (factor < 2 and begin != end):
        raise InvalidUsageError(
            f"--sizes {text} with --factor {factor} do not form increasing sizes; give MIN-MAX "
            "and a factor above 1"
        )
    bytes_of = [begin]
    while bytes_of[-1] * factor <= end:
        bytes_of.append(bytes_of[-1] * factor)
    return bytes_of


def _algorithms(asked: str, topology: Topology, collective: str) -> list[str]:
    return algorithms(topology, collective) if asked == "all" else [asked]


def run(args: argparse.Namespace) -> int:
    unknown = [n for n in args.names if n not in COLLECTIVES]
    if unknown:
        raise InvalidUsageError(
            f"the collective {unknown[0]!r} does not exist; choose one of {', '.join(COLLECTIVES)}"
        )
    if args.svg and not args.vs:
        raise InvalidUsageError(
            "--svg draws ratios to another library's times; add --vs nccl or --vs gloo"
        )
    if args.way == ALONE and (args.topology is not None or args.algorithm != "auto"):
        raise InvalidUsageError(
            "--way alone measures single calls; --topology and --algorithm require --way graph"
        )
    rank_info = rank_from_environment()
    dtype = by_name(args.type)
    backend, probe = registry.choose(args.backend)
    if args.ranks < 2 and rank_info.world_size < 2:
        raise InvalidUsageError(
            "collectives need at least 2 ranks; set their number with --ranks N"
        )
    topology = None if args.topology is None else load(args.topology)
    row = sizes(args.sizes, args.factor)
    if to_be_started(args.ranks, rank_info):
        return launch_command(args.ranks, [sys.executable, "-m", "ark", *args.words])
    world = rank_info.world_size
    if args.overlap is not None or args.norm is not None:
        return _fused(args, backend, probe, rank_info)
    cases = [
        CommCase(name, nbytes, dtype, args.way, how, args.engine, args.repeats, topology)
        for name in args.names or COLLECTIVES[:1]
        for how in _algorithms(args.algorithm, topology or full_mesh(world), name)
        for nbytes in row
    ]
    index = device_index(args.device, rank_info, len(probe.devices))
    rows: list[CommFigures] = []
    with Bootstrap.from_environment(rank_info=rank_info) as job:
        device = backend.open(index)
        try:
            peer = Peer(args.vs, job, device) if args.vs else None
            for number, case in enumerate(cases, 1):
                if rank_info.rank == 0:
                    label = f"{case.collective} of {case.nbytes} bytes, {case.algorithm}"
                    print(f"{number} of {len(cases)}: {label}", file=sys.stderr, flush=True)
                rows.append(measure(case, job, backend, device, peer))
            if peer is not None:
                peer.close()
        finally:
            device.close()
    if rank_info.rank != 0:
        return 0
    name = probe.devices[index].name
    if args.svg:
        ratios = [
            (f"{r.collective} {r.nbytes}", r.peer_seconds / r.seconds)
            for r in rows
            if r.peer_seconds
        ]
        title = f"ark's speed, in {args.vs}'s, {rows[0].ranks} ranks, {name}"
        write_file(args.svg, bars(title, ratios))
    if args.json:
        figures = [_figure(r, args.vs or "") for r in rows]
        write_results(
            args.json, results(probe, index, device.machine, args.words, figures, devices=world)
        )
    if args.json != "-":
        show(name, probe.notes, rows, args.vs)
    return 0


def _figure(row: CommFigures, peer: str) -> Figure:
    shape = f"{row.nbytes}-{row.dtype}-{row.ranks}-ranks-{row.way}-{row.algorithm}-{row.engine}"
    detail = dataclasses.asdict(row)
    return figure(f"comm/{row.collective}-{shape}", row.seconds, peer, row.peer_seconds, "", detail)


def _fused_figure(row: OverlapFigures | NormFigures) -> Figure:
    """The result as a record (Figure) for the JSON file: the time of the fused op, and in the place
    of a peer's time the time of the separate ops in sequence.
    """
    label = (
        f"{row.collective}-of-{row.shape}-{row.engine}"
        if isinstance(row, OverlapFigures)
        else f"norm-{row.rows}x{row.columns}"
    )
    detail = dataclasses.asdict(row)
    name = f"comm/{label}-{row.dtype}-{row.ranks}-ranks"
    return figure(name, row.seconds, "apart", row.apart_seconds, "", detail)


def _fused(args: argparse.Namespace, backend: Backend, probe: Probe, ranks: RankInfo) -> int:
    """Measures collectives that are fused with the op before or after them. Returns the exit
    code.
    """
    names = args.names or OVERLAPS
    if not set(names) <= set(OVERLAPS):
        raise InvalidUsageError(
            f"only {', '.join(OVERLAPS)} can be fused with a matmul; name some of these"
        )
    dtype, world = by_name(args.type), ranks.world_size
    cases = [
        overlap_case(name, args.overlap, dtype, args.engine, args.repeats, world)
        for name in (names if args.overlap is not None else ())
    ]
    shapes = norm_shapes(args.norm) if args.norm is not None else []
    index = device_index(args.device, ranks, len(probe.devices))
    with Bootstrap.from_environment(rank_info=ranks) as job:
        device = backend.open(index)
        try:
            overlaps = [measure_overlap(case, job, backend, device) for case in cases]
            norms = [
                measure_norm(shape, dtype, args.repeats, job, backend, device) for shape in shapes
            ]
        finally:
            device.close()
    if ranks.rank != 0:
        return 0
    name = probe.devices[index].name
    if args.json:
        figures = [*map(_fused_figure, overlaps), *map(_fused_figure, norms)]
        write_results(
            args.json, results(probe, index, device.machine, args.words, figures, devices=world)
        )
    if args.json == "-":
        return 0
    console = _console(probe.notes)
    if overlaps:
        console.print(overlap_table(name, overlaps))
    if norms:
        console.print(_norm_table(name, norms))
    return 0


def _norm_table(name: str, rows: list[NormFigures]) -> FigureTable:
    title = f"all_reduce, residual and rmsnorm, {rows[0].ranks} ranks, {name}; the slowest rank's"
    heads = ("rows", "columns", "type", "sum us", "op by op us", "as one us", "wrong")
    table = FigureTable(title, heads, left=3)
    for r in rows:
        times = (f"{t * 1e6:.2f}" for t in (r.sum_seconds, r.apart_seconds, r.seconds))
        table.add_row(str(r.rows), str(r.columns), r.dtype, *times, str(r.wrong))
    return table


def _console(notes: tuple[str, ...]) -> Console:
    console = output()
    for note in notes:
        console.print(note, style="yellow")
    return console


def overlap_table(name: str, rows: list[OverlapFigures]) -> FigureTable:
    title = f"a product and its collective, {rows[0].ranks} ranks, {name}; the slowest rank's time"
    heads = ("collective", "shape", "type", "engine", "product us", "collective us", "apart us")
    table = FigureTable(title, (*heads, "as one us", "hidden", "wrong"), left=4)
    for r in rows:
        times = (r.product_seconds, r.collective_seconds, r.apart_seconds, r.seconds)
        cells = [r.collective, r.shape, r.dtype, r.engine, *(f"{t * 1e6:.2f}" for t in times)]
        table.add_row(*cells, f"{r.hidden:.0%}", str(r.wrong))
    return table


def show(name: str, notes: tuple[str, ...], rows: list[CommFigures], peer: str | None) -> None:
    console = _console(notes)
    heads = ["collective", "bytes", "elements", "type", "algorithm"]
    heads += ["us", "algbw GB/s", "busbw GB/s"]
    predicted = rows[0].predicted_seconds is not None
    more = ("predicted us", "predicted / us") if predicted else ()
    heads += ["wrong", *more, *((f"{peer} us", f"{peer} / ark") if peer else ())]
    title = f"{rows[0].way}, {rows[0].ranks} ranks, {name}; the slowest rank's time"
    table = FigureTable(title, heads, left=5)
    for r in rows:
        cells = [r.collective, str(r.nbytes), str(r.elements), r.dtype, r.algorithm]
        cells += [f"{r.seconds * 1e6:.2f}", f"{r.algbw_gbps:.2f}", f"{r.busbw_gbps:.2f}"]
        cells.append(str(r.wrong))
        if r.predicted_seconds is not None:
            cells += [f"{r.predicted_seconds * 1e6:.2f}", f"{r.predicted_seconds / r.seconds:.2f}"]
        if r.peer_seconds is not None:
            cells += [f"{r.peer_seconds * 1e6:.2f}", f"{r.peer_seconds / r.seconds:.2f}"]
        table.add_row(*cells)
    console.print(table)
