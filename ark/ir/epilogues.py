"""The epilogues of linear layers: what may be applied to the sums of a product by weights, as
properties that passes, lowerings and the task kind `linear` ask. A new epilogue is an entry here
and a C++ object `ark_NAME_sums` in ark/tasks/linear_epilogue.h, or in a header of its own that
ark/tasks/linear.py adds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Epilogue = Literal["store", "add", "swiglu", "rope_kv", "sample"]


@dataclass(frozen=True)
class EpilogueForm:
    """extra: how many operands the epilogue may have. early: those among them that are loaded while
    weights are still being copied. op: the op that computes the same, and that fuse_linear makes
    the epilogue of a product; "" if there is none. paired: it needs two neighbouring rows of the
    weights in one stage. gated: the first of such a pair is a gate; the output has one column for
    both. spread: the output can also be stored to peers.
    """

    extra: tuple[int, ...] = (0,)
    early: tuple[int, ...] = ()
    op: str = ""
    paired: bool = False
    gated: bool = False
    spread: bool = False


EPILOGUES: dict[Epilogue, EpilogueForm] = {
    "store": EpilogueForm(spread=True),
    "add": EpilogueForm((1,), (0,), op="add", spread=True),
    "swiglu": EpilogueForm(op="swiglu_pairs", paired=True, gated=True),
    "rope_kv": EpilogueForm((4, 5, 6), (0, 1), op="rope_kv", paired=True),
    "sample": EpilogueForm((3,), (0, 1)),
}
GATED_PAIRS: dict[str, str] = {name: form.op for name, form in EPILOGUES.items() if form.gated}
"""For each gated activation that can be an epilogue, the op that reads pairs of neighbours."""
