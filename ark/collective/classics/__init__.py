"""The well-known collective algorithms (ring, trees, recursive doubling, ...) as programs, for
comparison with synthesised programs. `build` makes the program of an algorithm for any number of
ranks; `supported` lists the algorithms that apply. The programs do not depend on the network, so
their puts (one-sided writes) name no route. Only hierarchical algorithms use boxes, which are
groups of ranks that share fast links.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ark.collective.classics import direct, hierarchical, recursive, ring, trees, whole
from ark.collective.programs import (
    IN,
    OUT,
    REDUCTIONS,
    Collective,
    CollectiveProgram,
    Counts,
    ProgramBuilder,
    Span,
)
from ark.collective.programs.builder import OperationCounter
from ark.collective.programs.types import no_algorithm
from ark.errors import InvalidUsageError

ONE_SHOT = "one_shot"  # the algorithm that supports `counts`
__all__ = ["ALGORITHMS", "build", "supported"]

Boxes = Sequence[Sequence[int]]
Writer = Callable[[ProgramBuilder, list[list[int]]], None]


@dataclass(frozen=True)
class Algorithm:
    """The functions that write the programs of one algorithm, and the algorithm's requirements.

    writers: the function for each collective. cut: the number of equal parts into which each rank's
    shard of the data must be cut. If the collective does not divide the data among ranks, all data
    must be cut into so many parts. dealt: True if the all-reduce begins with a reduce-scatter, so
    that its chunks are divided among the ranks. boxed: True if the algorithm needs boxes.
    ring_per_place: True if, with boxes, every local rank number has a ring or trees of its own;
    `cut` is then multiplied by the number of ranks in a box.
    """

    name: str
    writers: dict[Collective, Writer]
    cut: int = 1
    dealt: bool = False
    power_of_two: bool = False
    boxed: bool = False
    ring_per_place: bool = False
    reductions: tuple[str, ...] = ("sum", "product", "max", "min", "mean")


def _line(b: ProgramBuilder, boxes: list[list[int]]) -> list[int]:
    """All ranks in the order in which rings and chains connect them: one box after another. The
    root, if the collective has one, comes first.
    """
    order = [rank for box in boxes for rank in box]
    first = order.index(b.root or 0)
    return order[first:] + order[:first]


def _rings(b: ProgramBuilder, boxes: list[list[int]]) -> list[list[int]]:
    """The rings, one for each place in a box (local rank number). Each ring visits the ranks of a
    box in another order, so that each ring uses links of its own between boxes.
    """
    if len(boxes) == 1:
        return [_line(b, boxes)]
    places = range(len(boxes[0]))
    return [[r for box in boxes for r in (*box[p:], *box[:p])] for p in places]


def _both_directions(b: ProgramBuilder, boxes: list[list[int]]) -> list[list[int]]:
    return [way for ring in _rings(b, boxes) for way in (ring, ring[::-1])]


def _gathering(gather: Writer) -> Writer:
    def write(b: ProgramBuilder, boxes: list[list[int]]) -> None:
        ring.load_shards(b)
        gather(b, boxes)

    return write


def _in_two_shots(scatter: Writer, gather: Writer) -> dict[Collective, Writer]:
    """The writers of three collectives, from functions that write the two halves of an all-reduce.
    An all-gather is `gather`, a reduce-scatter is `scatter`, and an all-reduce is `scatter`
    followed by `gather`.
    """

    def write_both(b: ProgramBuilder, boxes: list[list[int]]) -> None:
        scatter(b, boxes)
        gather(b, boxes)

    return {
        Collective.ALL_GATHER: _gathering(gather),
        Collective.REDUCE_SCATTER: scatter,
        Collective.ALL_REDUCE: write_both,
    }


_ALGORITHMS = [
    Algorithm(
        "ring",
        {
            **_in_two_shots(
                lambda b, boxes: ring.reduce_scatter_ring(b, _rings(b, boxes)),
                lambda b, boxes: ring.gather_ring(b, _rings(b, boxes)),
            ),
            Collective.BROADCAST: lambda b, boxes: ring.broadcast_chain(b, _line(b, boxes)),
            Collective.REDUCE: lambda b, boxes: ring.reduce_chain(b, _line(b, boxes)),
        },
        dealt=True,
        ring_per_place=True,
    ),
    Algorithm(
        "bidirectional_ring",
        _in_two_shots(
            lambda b, boxes: ring.reduce_scatter_ring(b, _both_directions(b, boxes)),
            lambda b, boxes: ring.gather_ring(b, _both_directions(b, boxes)),
        ),
        cut=2,
        dealt=True,
        ring_per_place=True,
    ),
    Algorithm(
        "recursive_doubling",
        {
            Collective.ALL_GATHER: _gathering(lambda b, _: recursive.gather_doubling(b)),
            Collective.ALL_REDUCE: lambda b, _: recursive.all_reduce_doubling(b),
        },
        power_of_two=True,
    ),
    Algorithm(
        "recursive_halving",
        {
            k: v
            for k, v in _in_two_shots(
                lambda b, _: recursive.reduce_scatter_halving(b),
                lambda b, _: recursive.gather_doubling(b),
            ).items()
            if k is not Collective.ALL_GATHER
        },
        dealt=True,
        power_of_two=True,
    ),
    Algorithm(
        "double_binary_tree",
        {
            Collective.ALL_REDUCE: lambda b, boxes: trees.all_reduce_trees(b, boxes),
            Collective.BROADCAST: lambda b, _: trees.broadcast_trees(b, b.root or 0),
            Collective.REDUCE: lambda b, _: trees.reduce_trees(b, b.root or 0),
        },
        cut=2,
        ring_per_place=True,
    ),
    Algorithm(
        "one_shot",
        {
            Collective.ALL_GATHER: _gathering(lambda b, _: direct.gather_direct(b)),
            Collective.REDUCE_SCATTER: lambda b, _: direct.reduce_scatter_direct(b),
            Collective.ALL_REDUCE: lambda b, _: direct.all_reduce_one_shot(b),
            Collective.BROADCAST: lambda b, _: direct.broadcast_direct(b, b.root or 0),
            Collective.REDUCE: lambda b, _: direct.reduce_direct(b, b.root or 0),
            Collective.ALL_TO_ALL: lambda b, _: direct.all_to_all_direct(b),
        },
    ),
    Algorithm(
        "two_shot",
        {
            Collective.ALL_REDUCE: _in_two_shots(
                lambda b, _: direct.reduce_scatter_direct(b),
                lambda b, _: direct.gather_direct(b),
            )[Collective.ALL_REDUCE],
        },
        dealt=True,
    ),
    Algorithm(
        "hierarchical",
        {
            **_in_two_shots(hierarchical.reduce_scatter_boxes, hierarchical.gather_boxes),
            Collective.ALL_TO_ALL: hierarchical.all_to_all_boxes,
        },
        dealt=True,
        boxed=True,
    ),
    Algorithm(
        "adasum_tree",
        {Collective.ALL_REDUCE: lambda b, _: whole.adasum_tree(b)},
        power_of_two=True,
        reductions=("adasum",),
    ),
    Algorithm(
        "adasum_halving",
        {Collective.ALL_REDUCE: lambda b, _: whole.adasum_halving(b)},
        dealt=True,
        power_of_two=True,
        reductions=("adasum",),
    ),
    Algorithm(
        "combiner_chain",
        {Collective.ALL_REDUCE: lambda b, _: whole.combiner_chain(b)},
        reductions=("combiner",),
    ),
    Algorithm(
        "combiner_one_shot",
        {
            Collective.ALL_REDUCE: lambda b, _: direct.all_reduce_one_shot(b),
            Collective.REDUCE: lambda b, _: direct.reduce_direct(b, b.root or 0),
        },
        reductions=("combiner",),
    ),
]

ALGORITHMS: dict[str, Algorithm] = {algorithm.name: algorithm for algorithm in _ALGORITHMS}


def supported(
    collective: Collective | str,
    ranks: int,
    boxes: Boxes | None = None,
    reduction: str | None = None,
) -> list[str]:
    """The names of the algorithms that `build` can write for this collective and these ranks."""
    wanted = Collective(collective)
    return [
        a.name
        for a in _ALGORITHMS
        if wanted in a.writers and _misfit(a, wanted, ranks, boxes, reduction or "sum") is None
    ]


def build(
    algorithm: str,
    collective: Collective | str,
    ranks: int,
    *,
    boxes: Boxes | None = None,
    reduction: str | None = None,
    root: int | None = None,
    parts: int = 1,
    pieces: int = 1,
    most_operations: int | None = None,
    counts: Counts | None = None,
) -> CollectiveProgram:
    """Returns the program of a known algorithm.

    Args:
        algorithm: a name from `ALGORITHMS`.
        collective: the collective; broadcast and reduce have a `root` (by default 0).
        ranks: the number of ranks, at least 1.
        boxes: groups of equal size, whose ranks share fast links. Hierarchical algorithms need
        them. Other algorithms then build a ring or trees for every local rank number. A single
        group only states the order of ranks in a ring. reduction: sum (the default), max, min,
        mean; adasum and combiner have algorithms of their own. counts: the counts of an all-to-all
        with unequal parts (one_shot only).

    Raises:
        InvalidUsageError: there is no such algorithm, or it does not apply. UnsupportedError: the
        program has more than `most_operations` operations.
    """
    if algorithm not in ALGORITHMS:
        raise no_algorithm(algorithm, ALGORITHMS)
    chosen, wanted = ALGORITHMS[algorithm], Collective(collective)
    if wanted not in chosen.writers:
        names = ", ".join(c.value for c in chosen.writers)
        raise InvalidUsageError(
            f"{algorithm} does not support {wanted.value}; it supports {names}."
        )
    if reduction is None and wanted.reduces:
        reduction = chosen.reductions[0]
    if why := _misfit(chosen, wanted, ranks, boxes, reduction):
        raise InvalidUsageError(
            f"{algorithm} does not support {wanted.value} on this topology: {why}"
        )
    if counts is not None and algorithm != ONE_SHOT:
        raise InvalidUsageError(f"{algorithm} does not support counts; {ONE_SHOT} does.")
    dealt = wanted.sharded or (chosen.dealt and wanted is Collective.ALL_REDUCE)
    groups = [list(box) for box in boxes or [range(ranks)]]
    cut = chosen.cut
    if chosen.ring_per_place and not wanted.rooted:
        if why := _uneven(groups, ranks):
            raise InvalidUsageError(
                f"{algorithm} does not support {wanted.value} on this topology: {why}"
            )
        cut *= len(groups[0]) if len(groups) > 1 else 1
    chunks = max(parts, 1) * cut * (ranks if dealt else 1)

    def make(kind: type[ProgramBuilder]) -> ProgramBuilder:
        return kind(
            algorithm,
            wanted,
            ranks,
            chunks if counts is None else max(map(sum, counts), default=0),
            reduction,
            (root or 0) if wanted.rooted else None,
            pieces,
            most_operations,
            counts,
        )

    if most_operations is not None and ranks > 1:
        chosen.writers[wanted](make(OperationCounter), groups)
    b = make(ProgramBuilder)
    if ranks == 1 and counts is None:
        b.copy(0, Span(IN, 0, b.chunks), Span(OUT, 0, b.chunks))
    else:
        chosen.writers[wanted](b, groups)
    return b.build()


def _misfit(
    algorithm: Algorithm,
    collective: Collective,
    ranks: int,
    boxes: Boxes | None,
    reduction: str | None,
) -> str | None:
    """The reason, as a sentence, why the algorithm does not apply; None if it does."""
    if collective.reduces and reduction not in algorithm.reductions:
        known = "" if reduction in REDUCTIONS else " (no such reduction)"
        return f"it reduces by {', '.join(algorithm.reductions)}, not by {reduction}{known}."
    if algorithm.power_of_two and ranks & (ranks - 1):
        return f"it needs a power of two of ranks, and there are {ranks}."
    several = boxes if boxes is not None and len(boxes) > 1 else []
    return _uneven(several, ranks) if algorithm.boxed else None


def _uneven(boxes: Boxes, ranks: int) -> str | None:
    members = sorted(rank for box in boxes for rank in box)
    if members != list(range(ranks)) or len({len(box) for box in boxes}) != 1:
        return "it needs boxes of equal size that hold every rank once."
    return None
