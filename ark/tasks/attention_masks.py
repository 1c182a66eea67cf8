"""The mask operand of attention: the check of its shape and type, and its text as an argument of
device functions. Called by ark.tasks.attention_tiles and ark.tasks.attention_gradient.
"""

from __future__ import annotations

import math

from ark.ir.attributes import MaskForm
from ark.plan.kind import Signature
from ark.plan.params import FLOAT_NAMES, need, typed
from ark.tasks import text

LEAST_SCORE = -1e28  # replaces a lower `fill`; above the initial running maximum


def check_mask(sig: Signature, index: int, form: MaskForm, full: tuple[int, ...]) -> None:
    """Raises PlanError unless operand `index` is a mask of this form. full: the sizes (batch,
    heads, rows, keys) of the scores.
    """
    kinds = FLOAT_NAMES if form == "added" else ("bool",)
    mask = typed(sig, index, *kinds)
    fits = len(mask.shape) == 4 and full[0] % mask.shape[0] == 0
    fits = fits and all(n in (1, size) for n, size in zip(mask.shape[1:], full[1:], strict=True))
    need(
        fits,
        f"the mask has shape {list(mask.shape)}; each size must be 1 or that of the scores "
        f"{list(full)}, and the first may be a divisor of {full[0]}",
    )


def mask_of(sig: Signature, index: int, form: MaskForm, fill: float, batch: int) -> str:
    """The text of the mask argument of an attention call. index: of the mask operand. batch: the
    number of sequences. If there are fewer masks, they repeat from sequence to sequence.
    """
    if not form:
        return "ArkNoOperand{}"
    operand, count = text.given(sig, index), sig.operands[index].shape[0]
    fill = fill if fill == -math.inf else max(fill, LEAST_SCORE)
    repeats = f", {count}" if 1 < count < batch else ""
    named = f"ARK_MASK_{form.upper()}"
    return f"ark_attention_mask_of<{named}{repeats}>({operand}, {text.literal(fill)})"
