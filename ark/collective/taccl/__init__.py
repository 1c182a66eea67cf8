"""TACCL: collectives synthesised from a sketch, which restricts the links and symmetries that the
search may use. The steps are routing, ordering and contiguity (merging of messages). Shah et al.,
"TACCL: Guiding Collective Algorithm Synthesis using Communication Sketches" (NSDI 2023).

`ark.comm.synthesize` and the command line call `synthesize_taccl`. The modules sketch, logical,
routing, ordering and lower have the steps, in this order.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from ark.collective.programs import Collective, CollectiveProgram
from ark.collective.taccl.logical import Logical, default_sketch, logical
from ark.collective.taccl.lower import Plan, lower
from ark.collective.taccl.ordering import Schedule, order
from ark.collective.taccl.routing import Routing, route
from ark.collective.taccl.sketch import Sketch, parse_size
from ark.collective.topology import Topology
from ark.errors import InvalidUsageError

__all__ = [
    "COLLECTIVES",
    "Logical",
    "Routing",
    "Schedule",
    "Sketch",
    "Synthesis",
    "default_sketch",
    "logical",
    "order",
    "parse_size",
    "route",
    "synthesize_taccl",
]

COLLECTIVES = (
    Collective.ALL_GATHER,
    Collective.REDUCE_SCATTER,
    Collective.ALL_REDUCE,
    Collective.ALL_TO_ALL,
)
DEFAULT_SIZE = 1 << 20


@dataclass(frozen=True)
class Synthesis:
    """A program and its time in TACCL's own alpha-beta model.

    `time_us` is the time of the ordered schedule. `routing_us` is the time of the routes before the
    sends on a link are ordered. `gap` (0 to 1) bounds how far, as a fraction, `routing_us` is above
    the least possible time; `optimal` is true if the gap is 0. The least possible time refers to
    this sketch and to the `paths` that the model considered. `ark.collective.bounds.least_us`
    computes a bound for the network itself.
    """

    program: CollectiveProgram
    time_us: float
    routing_us: float
    gap: float
    optimal: bool
    paths: str


def synthesize_taccl(
    topology: Topology,
    sketch: Sketch | None = None,
    collective: Collective | str = "all_gather",
    time_limit_s: float = 60.0,
    size_bytes: int | None = None,
    reduction: str | None = None,
    pieces: int = 1,
) -> Synthesis:
    """Synthesises one collective.

    Args: topology: the network. sketch: the search space; `default_sketch(topology)` if not given.
    collective: all_gather, reduce_scatter, all_reduce or all_to_all. time_limit_s: the limit of the
    search, all stages and phases together; the best result so far is returned with its gap. Writing
    the models and a first schedule do not count. size_bytes: M as in
    `ark.collective.simulate.simulate`; by default the sketch's input_size (bytes of one rank's
    share) or 1 MiB. reduction: sum (default), max, min or mean, if the collective reduces. pieces:
    see `ark.collective.programs.types`.

    Raises: ModelError: the sketch does not fit or forbids every route of a demand.
    InvalidUsageError: another collective, or a number out of range.
    """
    wanted = Collective(collective)
    if wanted not in COLLECTIVES:
        raise InvalidUsageError(
            f"TACCL does not support {wanted.value}; it supports "
            f"{', '.join(c.value for c in COLLECTIVES)}."
        )
    ranks = len(topology.ranks)
    if ranks < 2 or not time_limit_s > 0 or (size_bytes is not None and size_bytes < 1):
        raise InvalidUsageError(
            f"TACCL needs at least 2 ranks, a time limit above 0 s and a size of at least 1 byte, "
            f"but got {ranks} ranks, {time_limit_s} s and {size_bytes} bytes."
        )
    if reduction not in (None, "sum", "max", "min", "mean"):
        raise InvalidUsageError(
            f"TACCL programs reduce by sum, max, min or mean, not by {reduction}."
        )
    deadline = time.monotonic() + time_limit_s
    sketch = sketch or default_sketch(topology)
    graph = logical(topology, sketch)
    if size_bytes is None:
        size_bytes = sketch.input_size * ranks if sketch.input_size else DEFAULT_SIZE
    chunk = size_bytes / ranks / sketch.input_chunkup
    gathering = reducing = None
    middle = deadline  # the second of two phases (all-reduce) may use the time that remains
    if wanted is Collective.ALL_REDUCE:
        middle = (time.monotonic() + deadline) / 2
    if wanted is not Collective.REDUCE_SCATTER:
        gathering = _plan(graph, wanted is Collective.ALL_TO_ALL, chunk, middle)
    if wanted.reduces:
        reducing = _plan(graph.reversed(), False, chunk, deadline)
    plans = [plan for plan in (reducing, gathering) if plan is not None]
    routing_us = sum(routing.time_us for _, routing, _ in plans)
    bound_us = sum(routing.bound_us for _, routing, _ in plans)
    program = lower(graph, wanted, gathering, reducing, reduction, pieces)
    return Synthesis(
        program=program,
        time_us=sum(schedule.time_us for _, _, schedule in plans),
        routing_us=routing_us,
        gap=1 - bound_us / routing_us if routing_us else 0.0,
        optimal=all(routing.optimal for _, routing, _ in plans),
        paths=max((routing.paths for _, routing, _ in plans), key=len),
    )


def _plan(graph: Logical, all_to_all: bool, chunk_bytes: float, deadline: float) -> Plan:
    """Searches for routes in two thirds of the time until `deadline` (by time.monotonic()), then
    orders the sends.
    """
    limit = (deadline - time.monotonic()) * 2 / 3
    routing = route(graph, all_to_all, chunk_bytes, limit)
    return graph, routing, order(graph, routing, chunk_bytes, deadline)
