"""Computes the page's content as plain JSON data: nodes with positions, links, and runs with their
puts.

`ark.collective.page` embeds the data in the page; the scripts under `assets` read it.
"""

from __future__ import annotations

import base64
import bisect
import itertools
import json
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ark.collective.page.layout import layout
from ark.collective.programs import CollectiveProgram, Kind, OpRef, Role, in_order, steps
from ark.collective.simulate import Routes, SimulationResult
from ark.collective.topology import Topology

MOST_EVENTS = 40000  # most puts of all runs; the first piece of every chunk is always included
TICKS_PER_RUN = 100_000  # resolution of times on the page

Carried = dict[OpRef, tuple[int, int, bool]]


def page_data(
    topology: Topology,
    runs: Sequence[tuple[CollectiveProgram, SimulationResult]],
    bound_us: float | None,
) -> dict[str, Any]:
    """Returns the page's data. Times are in microseconds.

    The entry of a run contains `packed`, two lists encoded by `pack`: the puts of the run, and the
    pieces of each put as (number of the put, piece, start, duration). Start and duration are in
    ticks; a run has TICKS_PER_RUN of them.
    """
    index = {node: i for i, node in enumerate(topology.nodes)}
    places = layout(topology)
    capacity = topology.capacities()
    latency = Routes(topology).latency
    program, result = runs[0]
    return {
        "topology": topology.name,
        "ranks": len(topology.ranks),
        "nodes": [
            {
                "id": node,
                "rank": i < len(topology.ranks),
                "x": places[node][0],
                "y": places[node][1],
            }
            for node, i in index.items()
        ],
        "links": [[index[a], index[b], float(gbps)] for (a, b), gbps in capacity.items()],
        "collective": program.collective.value,
        "reduction": program.reduction,
        "rooted": program.collective.rooted,
        "size": result.size_bytes,
        "bound": None if bound_us is None else round(bound_us, 3),
        "runs": [_run(p, r, index, latency, MOST_EVENTS // len(runs)) for p, r in runs],
    }


def carried(program: CollectiveProgram) -> Carried:
    """For every put of data: the number of its chunk, the rank whose contribution it carries (-1 if
    it carries a sum of several ranks), and True if the data is already completely reduced.
    """
    everyone = (1 << program.ranks) - 1
    held: dict[tuple[int, str, int], tuple[int, int]] = {}
    gathers = program.collective.value == "all_gather"
    for rank in range(program.ranks):
        for slot in range(program.buffer_by_name["in"].slots):
            chunk = slot + (rank * program.shard if gathers else 0)
            held[rank, "in", slot] = (chunk, 1 << rank)
    result: Carried = {}
    for ref in in_order(program):
        op = program.op(ref)
        if program.buffer_by_name[op.dst.buffer].role is Role.DOTS:
            continue
        data = [s for s in op.srcs if program.buffer_by_name[s.buffer].role is not Role.DOTS]
        owner = op.writes_on(ref.rank)
        for i, slot in enumerate(op.dst.slots()):
            parts = [held.get((ref.rank, s.buffer, s.start + i), (0, 0)) for s in data]
            mask = 0
            for part in parts:
                mask |= part[1]
            held[owner, op.dst.buffer, slot] = (parts[0][0], mask)
            if i == 0 and op.kind is Kind.PUT:
                source = mask.bit_length() - 1 if mask & (mask - 1) == 0 else -1
                if program.collective.reduces:
                    source = -1
                result[ref] = (parts[0][0], source, mask == everyone)
    return result


def compressed(value: Any) -> str:
    """Encodes a value as JSON, compressed by deflate, in base64. The page stores all runs in this
    form; the browser decodes only the run that the user selects.
    """
    text = json.dumps(value, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def _run(
    program: CollectiveProgram,
    result: SimulationResult,
    index: dict[str, int],
    latency: dict[tuple[str, str], float],
    most: int,
) -> dict[str, Any]:
    step, cargo = steps(program), carried(program)
    puts = [e for e in result.events if e.route and e.ref in cargo]
    shown = program.pieces
    if len(puts) > most:
        # The drawn part of the program includes all ranks, and as many pieces as fit on the page.
        # Trees are drawn from the first piece.
        counts = Counter(e.piece for e in puts)
        total = list(itertools.accumulate(counts[piece] for piece in range(program.pieces)))
        shown = max(1, bisect.bisect_right(total, most))
        puts = [e for e in puts if e.piece < shown]
    routes: dict[tuple[str, ...], int] = {}
    numbers: dict[OpRef, int] = {}
    ops: list[list[int | None]] = []
    for event in puts:
        if event.ref not in numbers:
            numbers[event.ref] = len(ops)
            op = program.op(event.ref)
            route = routes.setdefault(event.route, len(routes))
            chunk, source, reduced = cargo[event.ref]
            rank, where = event.ref.rank, step[event.ref]
            ops.append([rank, op.peer, route, chunk, source, int(reduced), where, op.dst.count])
    tick = result.time_us / TICKS_PER_RUN or 1.0
    times = [
        [numbers[e.ref], e.piece, round(e.start_us / tick), round((e.left_us - e.start_us) / tick)]
        for e in puts
    ]
    kinds = [op.kind for ops in program.operations for op in ops]
    return {
        "name": program.name.partition(f" {program.collective.value}")[0],
        "title": program.name,
        "time": round(result.time_us, 3),
        "algbw": round(result.algbw, 3) if result.time_us else 0.0,
        "pieces": program.pieces,
        "chunks": program.chunks,
        "puts": kinds.count(Kind.PUT),
        "steps": 1 + max((step[e.ref] for e in puts), default=-1),
        "busy": [round(result.link_busy[pair], 4) for pair in result.link_busy],
        "bytes": [round(result.link_bytes[pair]) for pair in result.link_bytes],
        "routes": [[index[node] for node in route] for route in routes],
        "latency": [
            round(sum(latency[hop] for hop in itertools.pairwise(route)), 3) for route in routes
        ],
        "ticks": TICKS_PER_RUN,
        "packed": compressed([ops, times]),
        "shown": shown,
    }
