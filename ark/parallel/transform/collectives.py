"""Finds transfers of a plan that together form one collective of all ranks.

If every rank has a partial sum of a value, and all ranks need the whole value, the transfers are an
all-reduce. If each rank needs one equal part, in rank order, they are a reduce-scatter. If every
rank has one such part and all need the whole value, they are an all-gather. Parts are along the
first dimension, so that they are contiguous. Called by ark.parallel.transform.materialise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from ark.collective.programs import Collective
from ark.collective.programs.attributes import CollectiveAttributes
from ark.lower.engines import ONE_SHOT
from ark.ops.communication.collectives import choose_program
from ark.parallel.transform.views import View


@dataclass(frozen=True)
class JointCollective:
    """A collective of all ranks that replaces separate transfers. reads: the view that each rank
    gets as its result.
    """

    collective: Collective
    reads: tuple[View, ...]

    def node(self, algorithm: str) -> tuple[str, dict[str, Any]]:
        """The op name and the attributes of the node that each rank's graph gets for the
        collective.
        """
        if self.collective is Collective.ALL_REDUCE and algorithm == ONE_SHOT:
            return "all_reduce", {"packet": False}
        reduction = "sum" if self.collective.reduces else None
        ranks = len(self.reads)
        program = choose_program(self.collective, ranks, algorithm, None, None, reduction)
        return "collective", CollectiveAttributes(program).to_node()


def joint_collective(
    view: View,
    sources: Sequence[tuple[Sequence[int], View]],
    wanted: Mapping[View, Set[int]],
    ranks: int,
) -> JointCollective | None:
    """The collective by which all readers of a value get their views of it. None if the transfers
    do not form a collective.

    sources: the views of the value that were written, with the ranks that have them. wanted: for
    each view, the ranks that read it.
    """
    owners = sorted(tuple(each) for each, _ in sources)
    if ranks == 1 or view.share != (0, 1) or set(owners) != {(r,) for r in range(ranks)}:
        return None
    everywhere = len(wanted[view]) == ranks
    box = sources[0][1].box
    shares = sorted(written.share for _, written in sources)
    if shares == [(i, len(sources)) for i in range(len(sources))]:
        if any(written.box != box for _, written in sources):
            return None
        if view.box == box:
            return JointCollective(Collective.ALL_REDUCE, (view,) * ranks) if everywhere else None
        parts = _parts(View(view.buffer, box), ranks)
        if view in parts and all(r in wanted.get(part, ()) for r, part in enumerate(parts)):
            return JointCollective(Collective.REDUCE_SCATTER, parts)
        return None
    by_rank = tuple(written for _, written in sorted(sources, key=lambda each: list(each[0])))
    if everywhere and by_rank == _parts(view, ranks):
        return JointCollective(Collective.ALL_GATHER, (view,) * ranks)
    return None


def _parts(whole: View, ranks: int) -> tuple[View, ...]:
    """The equal parts of the ranks along the first dimension. Empty if the dimension is not
    divisible.
    """
    if not whole.box or (whole.box[0][1] - whole.box[0][0]) % ranks:
        return ()
    return tuple(whole.cut(0, rank, ranks) for rank in range(ranks))
