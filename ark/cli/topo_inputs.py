"""Reads the inputs that the arguments of `ark topo` name: the network, the program, and the counts
(chunks from each rank to each other rank). Called by ark.cli.topo.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import replace

from ark import log
from ark.cli.common import read_file
from ark.collective.programs import CollectiveProgram, Counts, read_program
from ark.collective.synthesis import synthesize
from ark.collective.taccl import Sketch, parse_size
from ark.collective.topology import TYPICAL, Topology, load
from ark.errors import InvalidUsageError
from ark.ir.json_reader import read as read_json


def named_network(args: argparse.Namespace) -> Topology:
    """Returns the named topology. If the arguments name a group of ranks, returns only its part of
    the topology.
    """
    topology = load(args.topology)
    if args.group is None:
        return topology
    members: list[int] = []
    for word in args.group.split(","):
        ends = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", word)
        if ends is None:
            raise InvalidUsageError(f"--group {args.group!r} is not a list of ranks such as 0-3,8.")
        members += range(int(ends[1]), int(ends[2] or ends[1]) + 1)
    return topology.subgroup(members)


def with_costs(args: argparse.Namespace, topology: Topology) -> Topology:
    """Returns the topology with a cost model (time of a put, speed of sums), from which times are
    predicted.
    """
    if args.costs is None:
        return replace(topology, costs=topology.costs or TYPICAL)
    return replace(topology, costs=TYPICAL if args.costs == "typical" else None)


def _agrees(args: argparse.Namespace, program: CollectiveProgram) -> None:
    """Raises InvalidUsageError if an option contradicts the program's file."""
    for option, given, has_value in (
        ("--collective", args.collective, program.collective.value),
        ("--reduction", args.reduction, program.reduction),
        ("--root", args.root, program.root),
        ("--pieces", args.pieces, program.pieces),
    ):
        if given is not None and given != has_value:
            has = "none" if has_value is None else repr(has_value)
            raise InvalidUsageError(
                f"{option} says {given!r}, but the program {args.program} has {has}; leave "
                f"{option} out, or synthesize another program"
            )
    made_by = (
        ("--counts", args.counts),
        ("--algorithm", args.algorithm),
        ("--k", args.k),
        ("--sketch", args.sketch),
        ("--window", args.window or None),
    )
    for option, given in made_by:
        if given is not None:
            raise InvalidUsageError(
                f"{option} is for synthesizing a program, but {args.program} is one already; leave "
                f"{option} out"
            )


def named_program(args: argparse.Namespace, topology: Topology) -> CollectiveProgram:
    """Returns the program in the file that the arguments name or, without a file, the program that
    is synthesised from the arguments.
    """
    if getattr(args, "program", None):
        program = read_program(read_file(args.program, "a program"))
        _agrees(args, program)
        args.root = program.root
        return program
    algorithm = args.algorithm or "forestcoll"
    sketch = None if args.sketch is None else Sketch.from_json(read_file(args.sketch, "a sketch"))
    with log.slow(f"synthesising {algorithm} for {topology.name}"):
        return synthesize(
            topology,
            args.collective or "all_gather",
            algorithm,
            k=args.k,
            root=args.root,
            reduction=args.reduction,
            counts=named_counts(args),
            pieces=1 if args.pieces is None else args.pieces,
            window=args.window,
            sketch=sketch,
            size_bytes=parse_size(args.size),
            time_limit_s=args.time_limit,
        )


def named_counts(args: argparse.Namespace) -> Counts | None:
    """Reads the file of `--counts`: for an all-to-all, the number of chunks from each rank (row) to
    each rank (column). None without the option.
    """
    if args.counts is None:
        return None
    return read_json(read_file(args.counts, "counts"), Counts, "the table of counts")
