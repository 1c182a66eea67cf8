"""The logarithm of a sum of exponentials, composed of other ops."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ark.frontend.tensor import Output, Tensor, TensorLike, as_tensor
from ark.ir.dtype import fp32
from ark.ops.activations import exp
from ark.ops.base import float_dtype, positive_axis
from ark.ops.elementwise import add, cast, copy, sub
from ark.ops.math import isinf, ln
from ark.ops.reductions import reduce_max, reduce_sum
from ark.ops.selection import where
from ark.ops.views import detach, reshape


def logsumexp(
    input: TensorLike,
    axis: int | Sequence[int],
    keepdims: bool = True,
    output: Output = None,
    name: str = "",
) -> Tensor:
    """log(sum(e^input)) over one axis or several, computed in fp32; fp32, fp16, bf16.

    The largest element is subtracted before the exponential and added at the end, so that nothing
    overflows. The result is inf if an element is inf, and -inf if all elements are -inf.

    Examples:
        >>> x = torch.arange(6.0).reshape(2, 3)
        >>> ark.logsumexp(x, axis=1).eval()
        tensor([[2.4076],
                [5.4076]])
    """
    tensor = as_tensor(input)
    dtype = float_dtype("logsumexp", tensor)
    wide = tensor if dtype == fp32 else cast(tensor, fp32)
    most = detach(reduce_max(wide, axis))
    shift = where(isinf(most), 0.0, most)
    total = add(ln(reduce_sum(exp(sub(wide, shift)), axis)), shift)
    if not keepdims:
        axes = axis if isinstance(axis, Iterable) else [axis]
        reduced = {positive_axis("logsumexp", a, len(tensor.ir.shape)) for a in axes}
        kept = [n for d, n in enumerate(tensor.ir.shape) if d not in reduced]
        total = reshape(total, kept or [1])
    if dtype != fp32:
        return cast(total, dtype, output, name)
    return total if output is None else copy(total, output, name)
