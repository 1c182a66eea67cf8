"""The static parameters of the task kind `matmul`, of an operand that is a matrix of convolution
windows, and of products that sum over pixels. ark.tasks.matmul, matmul_windows and matmul_pixels
describe them, lowering sets them, and the writers of device functions read them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from ark.plan.params import INT_MAX, Few, Params, PartialParams, Size
from ark.tasks.windows import Margins, Sizes, Steps

Padding = Annotated[int, msgspec.Meta(ge=0, le=INT_MAX)]


class WindowParams(Params, frozen=True):
    size: Steps
    sizes: Sizes
    stride: Steps
    dilation: Steps
    before: Margins
    side: Literal[0, 1]


class PixelParams(Params, frozen=True):
    rows: Size
    stride: Size
    dilation: Size
    before: Padding
    pitch: Size
    chunk: Size


class FinishParams(PartialParams, frozen=True):
    """The parameters of products and convolutions that describe their epilogue: the expression
    whose value they store, and the width of heads that products rotate by halves.
    """

    expr: list[Any] | None = None
    rotary: Few = 0


class MatmulParams(Params, frozen=True):
    transpose_a: bool
    transpose_b: bool
    tile: tuple[Size, Size]
    expr: list[Any] | None = None
    tasks: Annotated[int, msgspec.Meta(ge=0, le=INT_MAX)] = 0
    group: Size = 1
    splits: Size = 1
    gated: bool = False
    heads: Few = 0
    kv_heads: Few = 0
    head_dim: Few = 0
    rotary: Few = 0
    tf32: bool = False
    windows: WindowParams | None = None
    pixels: PixelParams | None = None

    @property
    def reads_images(self) -> bool:
        """True if an operand is an image instead of a matrix."""
        return self.windows is not None or self.pixels is not None
