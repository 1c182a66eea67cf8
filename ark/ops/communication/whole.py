"""Reductions of whole tensors, composed of other ops: Adasum and the model combiner.

Each rank gathers the tensors of all ranks and combines them in fp32, as defined by
ark.collective.programs.reductions: Adasum in a binary tree of ranks, the combiner in rank order.
All ranks compute the same from the same numbers, so their results have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

from ark.collective.programs.reductions import require_power_of_two
from ark.errors import ModelError
from ark.frontend.tensor import Tensor
from ark.ir.dtype import FLOATS, fp32
from ark.ops.elementwise import add, cast, div, mul, sub
from ark.ops.logic import greater
from ark.ops.math import abs as magnitude
from ark.ops.reductions import reduce_max, reduce_sum
from ark.ops.selection import where
from ark.ops.views import reshape


def _scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (largest magnitude of x, x divided by it). The division prevents overflow and
    underflow of squares.
    """
    largest = reduce_max(magnitude(x), 0)
    return largest, div(x, where(greater(largest, 0.0), largest, 1.0))


def _removed(x: Tensor, other: Tensor, share: float) -> Tensor:
    """x - share * (projection of `other` onto x). If x is zero, the result is x."""
    (_, unit), (largest, direction) = _scaled(x), _scaled(other)
    norm = reduce_sum(mul(unit, unit), 0)
    along = mul(reduce_sum(mul(unit, direction), 0), share)
    ratio = where(greater(norm, 0.0), div(along, norm), mul(norm, 0.0))
    return sub(x, mul(unit, mul(ratio, largest)))


def _adasum(a: Tensor, b: Tensor) -> Tensor:
    """The Adasum of two tensors: (1 - a.b / (2 a.a)) a + (1 - a.b / (2 b.b)) b."""
    return add(_removed(a, b, 0.5), _removed(b, a, 0.5))


def _combiner(a: Tensor, b: Tensor) -> Tensor:
    """The model combiner's result for two tensors: b plus the part of a that is orthogonal to b."""
    return add(b, _removed(a, b, 1.0))


def _by_pairs(parts: list[Tensor]) -> Tensor:
    while len(parts) > 1:
        parts = [_adasum(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


WHOLE: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "adasum": _by_pairs,
    "combiner": lambda parts: reduce(_combiner, parts),
}


def check_whole(tensor: Tensor, reduction: str) -> None:
    """Raises ModelError for integers, and InvalidUsageError for a number of ranks that Adasum
    cannot pair.
    """
    if tensor.ir.dtype not in FLOATS:
        raise ModelError(
            f"{reduction} scales tensors, so it needs fp32, fp16 or bf16, but the input is "
            f"{tensor.ir.dtype.name}; use ark.cast"
        )
    if reduction == "adasum":
        require_power_of_two(tensor.model.graph.world_size)


def combine(gathered: Tensor, like: Tensor, reduction: str, output: Any, name: str) -> Tensor:
    """Combines the tensors of all ranks by `reduction`. gathered: these tensors concatenated, each
    of as many elements as `like`. The result has the shape and type of `like`.
    """
    size = like.ir.elements
    world = gathered.ir.elements // size
    flat = cast(reshape(gathered, [world * size]), fp32)
    parts = [flat[r * size : (r + 1) * size] for r in range(world)]
    combined = reshape(WHOLE[reduction](parts), list(like.ir.shape))
    return cast(combined, like.ir.dtype, output, name or reduction)
