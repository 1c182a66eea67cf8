"""The ops matmul and linear, and the reference of the `linear` node into which the planner fuses a
matmul and its neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ark.errors import ModelError
from ark.frontend.tensor import Output, Tensor, TensorLike, as_tensor
from ark.ir.attribute_table import ATTRIBUTES
from ark.ir.attributes import LinearAttributes, MatmulAttributes
from ark.ir.dtype import FLOATS, SMALL_FLOATS, DataType, RowType, bf16, fp32, int32
from ark.ir.epilogues import EPILOGUES
from ark.lower.ops.linear_algebra import lower_linear
from ark.lower.ops.matmul import lower_matmul
from ark.lower.registry import get, register
from ark.ops.base import broadcast, float_dtype, result, same_dtype
from ark.tasks import expression
from ark.tasks.matmul_params import PixelParams, WindowParams
from ark.tasks.matmul_pixels import summed
from ark.tasks.matmul_windows import laid_out


def matmul(
    input: TensorLike,
    other: TensorLike,
    output: Output = None,
    transpose_input: bool = False,
    transpose_other: bool = False,
    name: str = "",
    dtype: DataType | None = None,
    tf32: bool = False,
) -> Tensor:
    """Matrix product of the last two dimensions. Leading dimensions broadcast.

    input: (..., m, k), or if transpose_input is True (..., k, m). other: (..., k, n), or if
    transpose_other is True (..., n, k). The result is (..., m, n). Raises ModelError if the inner
    sizes k differ.

    fp32, fp16, bf16: both inputs have one type; sums are accumulated in fp32. The result has the
    inputs' type, or with dtype=fp32 it is fp32.

    fp8, in any combination of both types: sums are accumulated in fp32, or on matrix units with
    less precision (Hopper: about 14 bits). dtype: the result's type, fp32, fp16 or bf16 (the
    default).

    int8: sums are accumulated in int32, the result's type. If the result is multiplied by scales,
    the multiplication is fused into the product and costs no time.

    tf32: if True, matrix units may read only 10 bits of mantissa of fp32 inputs; the default is
    exact fp32.

    Examples:
        >>> x = torch.arange(6.0).reshape(2, 3)
        >>> ark.matmul(x, torch.ones(3, 2)).eval()
        tensor([[ 3.,  3.],
                [12., 12.]])
    """
    a, b = as_tensor(input), as_tensor(other)
    dtype = _result_type(a, b, dtype, tf32)
    left, right = a.ir.shape, b.ir.shape
    if len(left) < 2 or len(right) < 2:
        raise ModelError(
            f"matmul needs at least 2 dimensions, but the inputs have shapes {list(left)} and "
            f"{list(right)}; use ark.reshape"
        )
    k, m = (left[-2], left[-1]) if transpose_input else (left[-1], left[-2])
    n, inner = (right[-2], right[-1]) if transpose_other else (right[-1], right[-2])
    if k != inner:
        raise ModelError(
            f"matmul: the inner sizes differ, {k} of {list(left)} against {inner} of "
            f"{list(right)} (transpose_input={transpose_input}, transpose_other={transpose_other})"
        )
    shape = (*broadcast(left[:-2], right[:-2], "matmul"), m, n)
    turned = bool(transpose_input), bool(transpose_other)
    attrs = MatmulAttributes(*turned, tf32=bool(tf32)).to_node()
    return result("matmul", [a, b], shape, dtype, output, attrs, name)


def _result_type(a: Tensor, b: Tensor, asked: DataType | None, tf32: bool) -> DataType:
    """The type of the result of matmul(a, b), for which the user requested the type `asked`. Raises
    ModelError for types that are not supported.
    """
    small = {t.name for t in SMALL_FLOATS}
    types = {a.ir.dtype.name, b.ir.dtype.name}
    if tf32 and types != {"fp32"}:
        raise ModelError(f"matmul: tf32 is a precision of fp32 inputs, not of {sorted(types)}")
    if types <= small:
        if asked not in (None, *FLOATS):
            raise ModelError(f"matmul of 8-bit floats gives fp32, fp16 or bf16, not {asked!r}")
        return asked or bf16
    if types == {"int8"}:
        dtype = int32
    else:
        float_dtype("matmul", a)
        dtype = same_dtype("matmul", a, b)
    if asked == fp32 and dtype in FLOATS:
        return fp32
    if asked not in (None, dtype):
        raise ModelError(
            f"matmul of {dtype.name if dtype != int32 else 'int8'} gives {dtype.name}, not "
            f"{asked!r}; use ark.cast"
        )
    return dtype


@runtime_checkable
class LinearWeight(Protocol):
    """A weight for `linear` that consists of several tensors, such as quantised elements and their
    scales.
    """

    def linear(self, input: TensorLike, output: TensorLike | None, name: str) -> Tensor:
        """Called by ark.linear(input, weight) if `weight` is this object; returns the result."""


def linear(
    input: TensorLike,
    weight: TensorLike | LinearWeight,
    output: Output = None,
    name: str = "",
    tf32: bool = False,
) -> Tensor:
    """input @ weight^T of input (rows, k) and weight (n, k), accumulated in fp32.

    The result is (rows, n), of the input's type.

    The weight has the input's type, or any floating-point type if the input is fp32; or it is
    quantised (a RowType), or an object with a method `linear` that computes the result. The default
    name is that of the weight. tf32: as for matmul, for an input and a weight of fp32. Raises
    ModelError for other shapes and types.

    Examples:
        >>> x = torch.arange(6.0).reshape(2, 3)
        >>> ark.linear(x, torch.ones(2, 3)).eval()
        tensor([[ 3.,  3.],
                [12., 12.]])
    """
    if isinstance(weight, LinearWeight):
        return weight.linear(input, output, name)
    x, w = as_tensor(input), as_tensor(weight)
    dtype = float_dtype("linear", x)
    quantised = isinstance(w.ir.dtype, RowType)
    if not quantised:
        float_dtype("linear", w)
    if w.ir.dtype != dtype and dtype != fp32 and not quantised:
        raise ModelError(
            f"linear: the input is {dtype.name} and the weight {w.ir.dtype.name}; ark.cast the "
            "input to fp32"
        )
    left, right = x.ir.shape, w.ir.shape
    if len(left) != 2 or len(right) != 2 or left[1] != right[1]:
        raise ModelError(
            f"linear: the input has shape {list(left)} and the weight {list(right)}; expected "
            "(rows, k) and (n, k)"
        )
    if tf32:
        _result_type(x, w, None, tf32)
    attrs = MatmulAttributes(False, True, tf32=bool(tf32)).to_node()
    label = name or w.ir.name.rpartition(".")[2]
    return result("matmul", [x, w], (left[0], right[0]), dtype, output, attrs, label)


def _matmul_reference(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    a, b, *others = inputs
    given = MatmulAttributes.from_node(attrs)
    if given.pixels is not None:
        sums = summed(a, b, PixelParams.from_plan(given.pixels))
        finish = given.finish or expression.leaf(0)
        return [expression.evaluate(finish, [sums, *others])]
    if given.windows is not None:
        sides = [a, b]
        windows = WindowParams.from_plan(given.windows)
        sides[windows.side] = laid_out(sides[windows.side], windows)
        a, b = sides
    a = np.swapaxes(a, -1, -2) if given.transpose_a else a
    b = np.swapaxes(b, -1, -2) if given.transpose_b else b
    if given.rotary:
        *others, cosines, sines = others
    result = a @ b
    if given.finish is not None:
        result = expression.evaluate(given.finish, [result, *others])
    if given.rotary:
        return [_rotated_halves(result, given.rotary, cosines, sines)]
    if given.finish is not None:
        return [result]
    if given.gated:
        return _defined("swiglu_pairs", [a @ b], {})
    if given.rope_kv is not None:
        return _defined("rope_kv", [a @ b, *others], given.rope_kv.to_node())[:2]
    return [a @ b]


def _rotated_halves(
    rows: np.ndarray, width: int, cosines: np.ndarray, sines: np.ndarray
) -> np.ndarray:
    """Rotates pairs of elements in `rows` (rows, heads * width). A pair is element i and element i
    + width / 2 of a head. cosines, sines: (positions, width / 2). Row r uses their row r modulo the
    number of positions.
    """
    low, high = np.moveaxis(
        rows.reshape(-1, len(cosines), rows.shape[1] // width, 2, width // 2), 3, 0
    )
    cosine, sine = (t[None, :, None] for t in (cosines, sines))
    turned = (low * cosine - high * sine, high * cosine + low * sine)
    return np.concatenate(turned, -1).reshape(rows.shape)


register("matmul", _matmul_reference, lower_matmul, aliasing="none")


def _linear_reference(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    """The NumPy reference of a `linear` node. It applies the references of the prologue (a norm of
    the input), the product and the epilogue in this order.
    """
    x, weight, *others = inputs
    given = LinearAttributes.from_node(attrs)
    if given.prologue != "none":
        x = _defined(given.prologue, [x, others.pop(0)], attrs)[0]
    product = x @ weight.T
    if given.bias:
        product = product + others.pop(0)
    if given.epilogue == "store":
        return [product]
    return _defined(EPILOGUES[given.epilogue].op, [product, *others], attrs)


def _defined(op: str, inputs: list[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    """The result of the NumPy reference of the op named `op`. `attrs` are those of a linear node;
    only the attributes that `op` has are passed on.
    """
    reference, form = get(op).reference, ATTRIBUTES.get(op)
    assert reference is not None
    own = attrs if form is None else {k: v for k, v in attrs.items() if k in form.__struct_fields__}
    return reference(inputs, own)


register("linear", _linear_reference, lower_linear)
