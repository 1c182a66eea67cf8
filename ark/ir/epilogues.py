"""The epilogues of linear layers. An epilogue is an operation on the sums of a product before they
are stored, such as an activation. Each has an entry with properties, which passes, lowerings and
the task kind `linear` read. A new epilogue is an entry here and a C++ object `ark_NAME_sums` in
ark/tasks/linear_epilogue.h, or in a header of its own that ark/tasks/linear.py adds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Epilogue = Literal["store", "add", "swiglu", "rope_kv", "sample"]


@dataclass(frozen=True)
class EpilogueForm:
    """The properties of an epilogue.

    extra: the permitted counts of additional operands. early: the indices of those additional
    operands that are loaded while weights are still being copied. op: the separate op that the pass
    fuse_linear replaces by this epilogue; "" if there is no such op. paired: True if the sums of
    two neighbouring rows of the weights are combined, so that both rows must be in one stage of the
    ring in shared memory. gated: True if the first row of such a pair gives a gate that scales the
    sum of the second row; the output then has one column for both rows. spread: True if the output
    can also be stored to peers.
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
"""For each gated activation that can be an epilogue, the op whose input has the gate and the value
in neighbouring columns.
"""
