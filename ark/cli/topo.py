"""`ark topo`: describes a network, computes bounds for the time of collectives on it, and finds
programs for them.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from ark import log
from ark.cli import topo_arguments, topo_measure
from ark.cli.common import output, write_file
from ark.cli.parser import Subparsers, flag
from ark.cli.tables import FigureTable
from ark.cli.topo_inputs import named_counts, named_network, named_program, with_costs
from ark.collective.bounds import least_us
from ark.collective.forestcoll import Optimum, optimal
from ark.collective.page import render_page
from ark.collective.programs import (
    REDUCTIONS,
    CollectiveProgram,
    Counts,
    Kind,
    check,
    dump,
    steps,
    to_execution_plan,
    to_json,
    to_xml,
)
from ark.collective.simulate import SimulationResult, simulate, tune_pieces
from ark.collective.synthesis import FORESTCOLL, algorithms, synthesize
from ark.collective.taccl import parse_size
from ark.collective.topology import GRAMMAR, Topology
from ark.collective.topology import to_json as topology_json
from ark.errors import REFUSALS, InvalidUsageError, SystemError, UnsupportedError

_MOST_OPERATIONS = 1 << 16  # limit of a program's operations, all pieces counted
_MAX_COMPARED_OPERATIONS = 1 << 18  # limit of the operations of all programs that `compare` tries
_MOST_IN_WINDOWS = 1 << 16  # larger programs are simulated only without a limit of puts in flight
_WINDOWS = (0, 2)
_WRITERS: dict[str, Callable[[CollectiveProgram], str]] = dict(
    zip(topo_arguments.FORMATS, (dump, to_json, to_xml), strict=True)
)


def register(subparsers: Subparsers) -> None:
    """Adds `ark topo` with its own subcommands."""
    parser = subparsers.add_parser(
        "topo",
        help="show, solve, synthesize and simulate collectives on a network topology",
        description=f"TOPOLOGY is {GRAMMAR}",
    )
    commands = parser.add_subparsers(dest="topo_command", metavar="COMMAND", required=True)
    command = commands.add_parser("measure", help="latency, bandwidth and costs of this machine")
    command.set_defaults(func=topo_measure.run)
    topo_measure.add_arguments(command)
    command = commands.add_parser("detect", help="nodes and links of this machine: `show detect`")
    command.set_defaults(func=_show, topology="detect", group=None)
    flag(command, "--json", "print the topology as JSON")
    for name, function, summary in (
        ("show", _show, "nodes and links"),
        ("optimal", _optimal, "the optimum 1/x* with the cut that proves it"),
        ("synthesize", _synthesize, "write a program"),
        ("simulate", _simulate, "predict a program's time"),
        ("compare", _compare, "predict the times of all algorithms, and draw a page"),
    ):
        command = commands.add_parser(name, help=summary, description=f"{summary}.")
        command.set_defaults(func=function)
        topo_arguments.add_arguments(command, name)


def _show(args: argparse.Namespace) -> int:
    topology = named_network(args)
    if args.json:
        print(topology_json(topology), end="")
        return 0
    topology.validate()
    kinds = {node: re.sub(r"\d+", "*", node) for node in topology.nodes}
    equal = Counter(
        (kinds[link.src], kinds[link.dst], link.bandwidth, link.latency_us)
        for link in topology.links
    )
    title = f"{topology.name}: {len(topology.ranks)} ranks, {len(topology.switches)} switches, "
    title += f"{len(topology.links)} links"
    table = FigureTable(title, ("from", "to", "links", "GB/s", "latency us"), left=2)
    for (src, dst, bandwidth, latency), count in equal.items():
        table.add_row(src, dst, str(count), str(bandwidth), f"{latency:g}")
    output(highlight=False).print(table)
    return 0


def _optimal(args: argparse.Namespace) -> int:
    topology = named_network(args)
    roots = None if args.root is None else {_rank(topology, args.root): 1}
    with log.slow(f"computing the optimum of {topology.name}"):
        best = optimal(topology, args.k, roots)
    if args.json:
        print(json.dumps(optimum_json(best)))
        return 0
    inside = [rank for rank in topology.ranks if rank in best.cut]
    title = f"{topology.name}: {'all-gather' if roots is None else 'broadcast'}"
    table = FigureTable(title, ("", ""))
    table.add_row("1/x* (s per GB and root)", str(best.lower_bound))
    table.add_row(f"1/x with k = {best.k}", f"{best.inv_x}{' (optimal)' if best.exact else ''}")
    table.add_row("trees a root (k)", str(best.k))
    table.add_row("algbw, GB/s", f"{float(best.algbw):.2f}")
    table.add_row("proving cut", f"{len(inside)} ranks: {_some(inside)}")
    output(highlight=False).print(table)
    return 0


def optimum_json(best: Optimum) -> dict[str, Any]:
    """The optimum in the JSON form of `ark topo optimal --json`; algbw is in GB/s."""
    return {
        "inv_x": str(best.inv_x),
        "k": best.k,
        "algbw": float(best.algbw),
        "cut": list(best.cut),
    }


def _synthesize(args: argparse.Namespace) -> int:
    program = named_program(args, named_network(args))
    text = _written(program, args.format, args.target)
    if args.out is None:
        print(text, end="")
        return 0
    _write(args.out, text)
    report = check(program)
    print(f"{program.name}: {report.puts} puts in {report.steps} steps, checked -> {args.out}")
    return 0


def _written(program: CollectiveProgram, form: str | None, target: str | None) -> str:
    """Returns the program in the requested format, or in the format that its target runtime
    reads.
    """
    if target is None:
        return _WRITERS[form or "text"](program)
    reads = "json" if target == topo_arguments.MSCCLPP else "xml"
    if form not in (None, reads):
        raise InvalidUsageError(f"{target} reads {reads}, not {form}; leave --format out.")
    return (
        to_execution_plan(program) if target == topo_arguments.MSCCLPP else to_xml(program, target)
    )


def _simulate(args: argparse.Namespace) -> int:
    topology = with_costs(args, named_network(args))
    size = parse_size(args.size)
    program = named_program(args, topology)
    if args.pieces is None and args.program is None:
        program, result = _tuned(program, topology, size)
    else:
        result = simulate(program, topology, size)
    on = "" if program.name.endswith(f" on {topology.name}") else f" on {topology.name}"
    table = FigureTable(f"{program.name}{on}, {args.size} bytes (predicted)", ("", ""))
    table.add_row("time, us", f"{result.time_us:.1f}")
    table.add_row("algbw, GB/s", f"{result.algbw:.1f}")
    bound = _bound(args, topology, program.collective.value, size, program.counts)
    if bound:
        table.add_row("optimum without latency, us", f"{bound:.1f}")
        table.add_row("of the optimum", f"{bound / result.time_us:.1%}")
    table.add_row("pieces a chunk", str(result.pieces))
    for link in sorted(result.link_busy, key=result.link_busy.__getitem__, reverse=True)[:5]:
        table.add_row(f"busy: {link[0]} -> {link[1]}", f"{result.link_busy[link]:.1%}")
    output(highlight=False).print(table)
    if args.html:
        write_file(args.html, render_page(topology, [(program, result)], bound))
    return 0


def _compare(args: argparse.Namespace) -> int:
    topology = with_costs(args, named_network(args))
    size = parse_size(args.size)
    bound = _bound(args, topology, args.collective, size, named_counts(args))
    title = f"{args.collective} of {args.size} bytes on {topology.name} (predicted)"
    if bound:
        title += f"; the optimum without latency is {bound:.1f} us"
    heads = ("algorithm", "time us", "algbw GB/s", "optimum", "steps", "puts", "pieces")
    table = FigureTable(title, heads)
    runs, failures = [], []
    missing: SystemError | None = None
    left = _MAX_COMPARED_OPERATIONS
    for name, k in _candidates(args, topology):
        try:
            with log.slow(f"synthesising and simulating {name} for {topology.name}"):
                best, operations_made = _best(args, topology, name, k, size, left)
            runs.append(best)
            left = max(0, left - operations_made)
        except REFUSALS as error:
            failures.append(f"{name} is left out: {error}")
        except SystemError as error:
            missing = error
            failures.append(f"{name} is left out: {error}")
    if not runs and missing is not None:
        raise missing
    if not runs:
        raise InvalidUsageError(
            f"no algorithm supports {args.collective} with reduction {args.reduction or 'sum'} on "
            f"{topology.name}. {' '.join(failures)}"
        )
    runs.sort(key=lambda run: run[1].time_us)
    for program, result in runs:
        puts = [ref for ref in program.refs() if program.op(ref).kind is Kind.PUT]
        before = steps(program)
        table.add_row(
            program.name.partition(f" {args.collective}")[0],
            f"{result.time_us:.1f}",
            f"{result.algbw:.1f}",
            f"{bound / result.time_us:.1%}" if bound else "",
            str(1 + max(before[ref] for ref in puts)),
            str(len(puts)),
            str(result.pieces),
        )
    console = output(highlight=False)
    console.print(table)
    for failure in failures:
        console.print(failure, markup=False)
    write_file(args.html, render_page(topology, runs, bound))
    print(f"The page {args.html} draws the links' load, the trees and the steps.")
    return 0


def _candidates(args: argparse.Namespace, topology: Topology) -> Iterator[tuple[str, int | None]]:
    """Yields (algorithm, k) for every algorithm that supports the collective. k is the number of
    trees per root, which only forestcoll uses; None means the default. forestcoll is yielded with
    its default and with k = 1.
    """
    for name in algorithms(topology, args.collective, args.reduction):
        yield name, None
        if name == FORESTCOLL and optimal(topology).k > 1:
            yield name, 1


def _best(
    args: argparse.Namespace,
    topology: Topology,
    name: str,
    k: int | None,
    size: int,
    most_operations: int,
) -> tuple[tuple[CollectiveProgram, SimulationResult], int]:
    """Returns the fastest variant of an algorithm according to the simulator, with its times, and
    the number of operations of all variants.
    """
    variants: list[tuple[CollectiveProgram, SimulationResult]] = []
    operation_count = 0
    for window in _WINDOWS if name == FORESTCOLL else _WINDOWS[:1]:
        if variants and operation_count > min(_MOST_IN_WINDOWS, most_operations - operation_count):
            break
        program = synthesize(
            topology,
            args.collective,
            name,
            k=k,
            root=args.root,
            reduction=args.reduction,
            counts=named_counts(args),
            window=window,
            size_bytes=size,
            time_limit_s=args.time_limit,
            most_operations=most_operations - operation_count,
        )
        operation_count += sum(len(operations) for operations in program.operations)
        variants.append(_tuned(program, topology, size))
    return min(variants, key=lambda run: run[1].time_us), operation_count


def _tuned(
    program: CollectiveProgram, topology: Topology, size: int
) -> tuple[CollectiveProgram, SimulationResult]:
    """Returns the program with its data divided into the number of pieces for which the simulator
    predicts the least time, and its simulated times. A program that cannot be divided is returned
    as it is.
    """
    if program.reduction is not None and not REDUCTIONS[program.reduction].elementwise:
        return program, simulate(program, topology, size)
    with log.slow(f"simulating {program.name}"):
        return tune_pieces(program, topology, size, most_operations=_MOST_OPERATIONS)


def _bound(
    args: argparse.Namespace,
    topology: Topology,
    collective: str,
    size: int,
    counts: Counts | None,
) -> float | None:
    """Returns the least time of any schedule, in us, or None if the problem is too large to
    solve.
    """
    try:
        return least_us(topology, collective, size, args.root, counts)
    except UnsupportedError:
        return None


def _rank(topology: Topology, number: int) -> str:
    if not 0 <= number < len(topology.ranks):
        raise InvalidUsageError(
            f"rank {number} is out of range; {topology.name} has the ranks 0 to "
            f"{len(topology.ranks) - 1}."
        )
    return topology.ranks[number]


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def _write(path: str, text: str) -> None:
    write_file(path, text)
