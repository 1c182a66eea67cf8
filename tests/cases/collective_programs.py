"""Strategies and helpers that several tests of collective programs share."""

from hypothesis import strategies as st

from ark.collective import classics
from ark.collective.programs import Collective


def boxes_for(ranks):
    """Returns the ranks as two boxes if their number is even and above 2, otherwise one box for
    each rank.
    """
    if ranks % 2 == 0 and ranks > 2:
        return [list(range(ranks // 2)), list(range(ranks // 2, ranks))]
    return [[rank] for rank in range(ranks)]


@st.composite
def any_program(draw, most_ranks=9):
    """Draws a program of a known algorithm (such as ring) for any collective, with one of the
    reductions if the collective reduces.
    """
    ranks = draw(st.integers(1, most_ranks))
    collective = draw(st.sampled_from(list(Collective)))
    boxes = boxes_for(ranks)
    name = draw(st.sampled_from(classics.supported(collective, ranks, boxes)))
    reduction = None
    if collective.reduces:
        reduction = draw(st.sampled_from(["sum", "max", "min", "mean"]))
    return classics.build(
        name,
        collective,
        ranks,
        boxes=boxes if draw(st.booleans()) or name == "hierarchical" else None,
        reduction=reduction,
        root=draw(st.integers(0, ranks - 1)) if collective.rooted else None,
        parts=draw(st.integers(1, 3)),
        pieces=draw(st.integers(1, 3)),
    )
