"""The side of a product that is the matrix of an input's windows (ark.tasks.matmul_windows): its
boxes are taken out of the input itself by tensor maps in im2col mode, which count places and leave
out what lies between them; what lies outside of the input arrives as zeros.

Called by ark_cuda.tasks.products.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ark.codegen.dialect import BoxMap
from ark.plan.kind import OperandType
from ark.tasks.matmul_params import WindowParams
from ark.tasks.matmul_windows import LINE, boxable


def _plane(numbers: Sequence[int], fill: int) -> tuple[int, int]:
    """A number a dimension, down and across; one dimension is a single row."""
    down, across = (fill, *numbers)[-2:]
    return down, across


def serves(operand: OperandType, p: WindowParams) -> bool:
    """Can a description hold these windows?"""
    rows = all(s * operand.itemsize % 16 == 0 for s in operand.strides[:-1])
    return rows and boxable(operand.shape, operand.itemsize, p)


def window_map(operand: OperandType, index: int, rows: int, p: WindowParams) -> BoxMap:
    """The map whose boxes are `rows` places under one tap, of one line of channels."""
    n, *plane, channels = operand.shape
    high, wide = (1, *plane)[-2:]
    first, *down, across, _ = operand.strides
    rows_apart = down[0] if down else wide * across
    steps = tuple(s * operand.itemsize for s in (across, rows_apart, first))
    stride = _plane(p.stride, 1)
    before, sizes = _plane(p.before, 0), _plane(p.sizes, 1)
    # Of the places under the first tap the first one, and what lies behind the last, as seen from
    # the input's end.
    ends = [
        (many - 1) * step - margin + 1 - extent
        for many, step, margin, extent in zip(sizes, stride, before, (high, wide), strict=True)
    ]
    return BoxMap(
        index,
        operand.dtype,
        (channels, wide, high, n),
        steps,
        (LINE // operand.itemsize, rows),
        lower=(-before[1], -before[0]),
        upper=(ends[1], ends[0]),
        steps=(1, stride[1], stride[0], 1),
    )


def window_type(operand: OperandType, p: WindowParams) -> str:
    """The type that tells the loading half where a tile's places and a stage's channels are."""
    pairs = [_plane(n, fill) for n, fill in ((p.stride, 1), (p.before, 0), (p.dilation, 1))]
    numbers = (
        math.prod(p.sizes),
        p.sizes[-1],
        operand.shape[-1],
        p.size[-1],
        *(n for pair in pairs for n in pair),
    )
    return f"ArkWindows<{str(p.side == 0).lower()}, {', '.join(map(str, numbers))}>"
