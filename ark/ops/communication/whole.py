"""Reductions that look at whole tensors, composed of other ops: Adasum and the model combiner.

Each rank gathers all tensors and combines them as ark.collective.programs.reductions does, in fp32:
Adasum by pairs of pairs, the combiner in rank order. All ranks do the same to the same numbers, so
they end with the same bits.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

from ark.collective.programs.reductions import require_power_of_two
from ark.errors import ModelError
from ark.frontend.tensor import Tensor
from ark.ir.dtype import FLOATS, fp32
from ark.ops.elementwise import add, cast, div, mul, sub
from ark.ops.logic import greater
from ark.ops.reductions import reduce_sum
from ark.ops.selection import where
from ark.ops.views import reshape


def _product(a: Tensor, b: Tensor) -> Tensor:
    return reduce_sum(mul(a, b), 0)


def _along(dot: Tensor, norm: Tensor) -> Tensor:
    """dot / norm; 0 where the norm vanishes, so that the factor made of it is 1."""
    return where(greater(norm, 0.0), div(dot, norm), mul(norm, 0.0))


def _adasum(a: Tensor, b: Tensor) -> Tensor:
    dot = mul(_product(a, b), 0.5)
    first, second = (mul(x, sub(1.0, _along(dot, _product(x, x)))) for x in (a, b))
    return add(first, second)


def _combiner(a: Tensor, b: Tensor) -> Tensor:
    """What of b is not along a, added to it."""
    return add(b, mul(a, sub(1.0, _along(_product(a, b), _product(a, a)))))


def _by_pairs(parts: list[Tensor]) -> Tensor:
    while len(parts) > 1:
        parts = [_adasum(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


WHOLE = {"adasum": _by_pairs, "combiner": lambda parts: reduce(_combiner, parts)}


def check_whole(tensor: Tensor, reduction: str) -> None:
    """ModelError for integers; InvalidUsageError for ranks that Adasum cannot pair."""
    if tensor.ir.dtype not in FLOATS:
        raise ModelError(
            f"{reduction} scales tensors, so it needs fp32, fp16 or bf16, but the input is "
            f"{tensor.ir.dtype.name}; use ark.cast"
        )
    if reduction == "adasum":
        require_power_of_two(tensor.model.graph.world_size)


def combine(gathered: Tensor, like: Tensor, reduction: str, output: Any, name: str) -> Tensor:
    """gathered: the ranks' tensors one behind the other, of as many elements as `like` each."""
    size = like.ir.elements
    world = gathered.ir.elements // size
    flat = cast(reshape(gathered, [world * size]), fp32)
    parts = [flat[r * size : (r + 1) * size] for r in range(world)]
    made = reshape(WHOLE[reduction](parts), list(like.ir.shape))
    return cast(made, like.ir.dtype, output, name or reduction)
