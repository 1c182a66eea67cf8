"""`synthesize`: computes a checked program for a topology in one call, with ForestColl, TACCL, a
flow or a classic algorithm.

Users import it from `ark.comm`; the command line and the planner call it too.
"""

from __future__ import annotations

from ark.collective import classics, taccl
from ark.collective.classics.order import widest_ring
from ark.collective.exchange import exchange_program
from ark.collective.forestcoll import COLLECTIVES, forest, lower
from ark.collective.programs import REDUCTIONS, Collective, CollectiveProgram, Counts, check
from ark.collective.programs.types import check_counts, no_algorithm
from ark.collective.topology import Topology, load
from ark.errors import InvalidUsageError, UnsupportedError

FORESTCOLL = "forestcoll"
TACCL = "taccl"
FLOW = "flow"


def algorithms(topology: Topology, collective: str, reduction: str | None = None) -> list[str]:
    """Returns the names that `synthesize` accepts for this collective on this topology.

    Examples:
        >>> "two_shot" in ark.comm.algorithms(ark.comm.topology.load("ring4"), "all_reduce")
        True
    """
    asked = Collective(collective)
    _check_reduction(asked, reduction)
    names = [FORESTCOLL] if collective in COLLECTIVES else []
    names += [TACCL] if asked in taccl.COLLECTIVES else []
    names += [FLOW] if asked is Collective.ALL_TO_ALL else []
    names = names if _elementwise(reduction) else []
    return names + classics.supported(asked, len(topology.ranks), topology.equal_boxes(), reduction)


def synthesize(
    topology: Topology | str,
    collective: str,
    algorithm: str = FORESTCOLL,
    *,
    k: int | None = None,
    root: int | None = None,
    reduction: str | None = None,
    parts: int = 1,
    pieces: int = 1,
    window: int = 0,
    sketch: taccl.Sketch | None = None,
    size_bytes: int | None = None,
    time_limit_s: float = 60.0,
    most_operations: int | None = None,
    counts: Counts | None = None,
) -> CollectiveProgram:
    """Returns a program that has passed the checker.

    Args:
        topology: a topology, a file or a name (`ark.collective.topology.GRAMMAR`).
        collective: all_gather, reduce_scatter, all_reduce, broadcast, reduce or all_to_all.
        algorithm: one of `algorithms(topology, collective)`: forestcoll, taccl, flow (all-to-all)
            or a classic.
        k: trees per root (forestcoll); by default the number that attains the optimum.
        root: the root's rank number, for broadcast and reduce (0 by default).
        reduction: sum by default; for forestcoll an elementwise one.
        parts: the number of chunks into which a rank's share is cut (classics).
        pieces: the number of pieces into which every chunk is cut, so that long paths are
            pipelined.
        window: puts in flight at a time, see `ark.collective.forestcoll.lower` (forestcoll).
        sketch: the restrictions of taccl's search; by default a sketch made from the topology.
        size_bytes: bytes that a rank contributes, for which taccl searches.
        time_limit_s: seconds that taccl's search may take.
        most_operations: no limit by default.
        counts: the number of chunks from each rank (row) to each rank (column), for an all-to-all
            with unequal parts (flow, one_shot).

    Raises:
        InvalidUsageError: an unknown name, or options that do not fit.
        TopologyError: the topology is at fault.
        UnsupportedError: too many ranks for trees, or too many operations.

    Examples:
        >>> ark.comm.synthesize("ring4", "all_gather", "ring").ranks
        4
    """
    if isinstance(topology, str):
        topology = load(topology)
    asked = Collective(collective)
    if min(parts, pieces) < 1 or window < 0:
        raise InvalidUsageError(
            f"parts {parts}, pieces {pieces}, window {window}; expected at least 1, 1 and 0."
        )
    if asked.rooted:
        root = root or 0
        if not 0 <= root < len(topology.ranks):
            raise InvalidUsageError(
                f"root {root} is not a rank of {topology.name}, whose ranks are 0 to "
                f"{len(topology.ranks) - 1}."
            )
    elif root is not None:
        raise InvalidUsageError(f"{collective} has no root; broadcast and reduce have one.")
    _check_reduction(asked, reduction)
    known = (FORESTCOLL, TACCL, FLOW, *classics.ALGORITHMS)
    if algorithm not in known:
        raise no_algorithm(algorithm, known)
    if counts is not None:
        check_counts(asked, len(topology.ranks), counts)
        if algorithm not in (FLOW, classics.ONE_SHOT):
            raise InvalidUsageError(
                f"{algorithm} does not support counts; {FLOW} and {classics.ONE_SHOT} do."
            )
    if algorithm == FLOW and asked is not Collective.ALL_TO_ALL:
        raise InvalidUsageError(f"flow supports all_to_all only, not {collective}.")
    if algorithm != FORESTCOLL and (k is not None or window):
        raise InvalidUsageError(f"{algorithm} does not support k and window; only forestcoll does.")
    if algorithm != TACCL and sketch is not None:
        raise InvalidUsageError(f"{algorithm} does not support a sketch; only taccl does.")
    if algorithm == FORESTCOLL:
        if not _elementwise(reduction):
            raise InvalidUsageError(
                f"ForestColl splits the data, but {reduction} needs whole tensors; use one of "
                f"{', '.join(algorithms(topology, collective, reduction))} instead."
            )
        root_id = None if root is None else topology.ranks[root]
        planned = forest(topology, collective, k, root_id)
        program = lower(planned, reduction or "sum", pieces, window, most_operations)
    elif algorithm == TACCL:
        phases = 2 if asked is Collective.ALL_REDUCE else 1
        puts = phases * len(topology.ranks) * (len(topology.ranks) - 1)
        if most_operations is not None and puts > most_operations:
            raise UnsupportedError(
                f"taccl puts at least {puts} chunks for {collective} over {len(topology.ranks)} "
                f"ranks, more than the {most_operations} operations allowed."
            )
        program = taccl.synthesize_taccl(
            topology, sketch, asked, time_limit_s, size_bytes, reduction, pieces
        ).program
    elif algorithm == FLOW:
        program = exchange_program(topology, pieces, counts)
    else:
        boxes = topology.equal_boxes()
        if boxes is None and classics.ALGORITHMS[algorithm].ring_per_place:
            boxes = [widest_ring(topology)]
        program = classics.build(
            algorithm,
            asked,
            len(topology.ranks),
            boxes=boxes,
            reduction=reduction,
            root=root,
            parts=parts,
            pieces=pieces,
            most_operations=most_operations,
            counts=counts,
        )
    check(program)
    return program


def _check_reduction(asked: Collective, reduction: str | None) -> None:
    if reduction is not None and not asked.reduces:
        raise InvalidUsageError(f"{asked.value} does not reduce; omit the reduction {reduction}.")


def _elementwise(reduction: str | None) -> bool:
    if reduction is not None and reduction not in REDUCTIONS:
        raise InvalidUsageError(
            f"{reduction!r} is not a reduction; choose one of {', '.join(REDUCTIONS)}."
        )
    return reduction is None or REDUCTIONS[reduction].elementwise
