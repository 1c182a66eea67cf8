"""Losses, composed of other ops: cross_entropy."""

from __future__ import annotations

from ark.errors import ModelError
from ark.frontend.tensor import Output, Tensor, TensorLike, as_tensor
from ark.ir.dtype import fp32
from ark.ops.base import float_dtype, index_dtype
from ark.ops.elementwise import cast, div, mul
from ark.ops.logic import equal, not_equal
from ark.ops.lookup import gather_elements
from ark.ops.math import neg
from ark.ops.norms import log_softmax
from ark.ops.reductions import reduce_sum
from ark.ops.selection import where
from ark.ops.views import reshape


def cross_entropy(
    input: TensorLike,
    target: TensorLike,
    ignore_index: int = -100,
    output: Output = None,
    name: str = "",
) -> Tensor:
    """The mean over rows of -log(softmax(input)[target]), as torch.nn.functional.cross_entropy.

    input: (rows, classes), fp32, fp16 or bf16. target: (rows,) int32 or int64, the class of each
    row. Rows whose target is `ignore_index` do not count; if no row counts, the result is NaN. A
    target out of range ends the run with a GpuError that names it. The result is (1,) fp32.

    Examples:
        >>> logits = torch.tensor([[2.0, 0.0], [0.0, 2.0]])
        >>> ark.cross_entropy(logits, torch.tensor([0, 0])).eval()
        tensor([1.1269])
    """
    logits, ids = as_tensor(input), as_tensor(target)
    float_dtype("cross_entropy", logits)
    index_dtype("cross_entropy", ids)
    shape = logits.ir.shape
    if len(shape) != 2 or ids.ir.shape != shape[:1]:
        raise ModelError(
            f"cross_entropy: the input has shape {list(shape)} and the target "
            f"{list(ids.ir.shape)}; expected (rows, classes) and (rows,)"
        )
    wide = logits if logits.ir.dtype == fp32 else cast(logits, fp32)
    column = reshape(ids, [shape[0], 1])
    safe = where(equal(column, ignore_index), 0, column)
    counted = cast(not_equal(column, ignore_index), fp32)
    picked = mul(gather_elements(log_softmax(wide), safe, 1), counted)
    total = div(reduce_sum(picked, 0), reduce_sum(counted, 0))
    return neg(reshape(total, [1]), output, name or "cross_entropy")
