"""Elementwise ops: exp, sqrt, rsqrt, relu, gelu, sigmoid, silu, swiglu, add, sub, mul, div,
copy, cast, constants. The functions themselves are in ark.tasks.functions; broadcasting is NumPy's.
`output` names a tensor to write into; what returns is a new tensor on its memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ark.errors import InvalidUsageError, ModelError, UnsupportedError
from ark.frontend.tensor import NullTensor, Tensor, as_tensor
from ark.ir.dtype import FLOATS, DataType, fp32, int32
from ark.ir.graph import Node
from ark.lower.chains import expression_of
from ark.lower.context import Lowering
from ark.lower.registry import register
from ark.lower.tiling import box_coords, box_tile, swept
from ark.ops.base import broadcast, check_dims, float_dtype, result, same_dtype
from ark.tasks import expression
from ark.tasks.functions import FUNCTIONS

Number = (int, float)


def _lower(lowering: Lowering, node: Node) -> None:
    """Tiles over the output; when nothing is broadcast or strided, over one flat dimension."""
    tensors = [*node.inputs, *node.outputs]
    plain = node.hints is None or not node.hints.cuts
    if plain and all(t.dense and t.shape == node.outputs[0].shape for t in tensors):
        tensors = [lowering.flat(t) for t in tensors]
    out = tensors[-1]
    shape = (1,) * (4 - len(out.shape)) + out.shape
    asked, itemsize = lowering.tile(shape), max(t.dtype.itemsize for t in tensors)
    tile = asked or box_tile(shape, lowering.machine, itemsize=itemsize)
    coords = box_coords(shape, tile)
    params = {"expr": expression_of(node), "tile": tile}
    lowering.emit(
        "pointwise", params, tensors, coords if asked else swept(coords, lowering.machine)
    )


def _reference(name: str) -> Any:
    function = FUNCTIONS[name].reference

    def run(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
        scalar = attrs.get("scalar")
        values = [*inputs] if scalar is None else [*inputs, np.asarray(scalar)]
        if all(v.dtype.kind == "i" for v in inputs) and name in ("div", "rdiv"):
            top, bottom = values if name == "div" else values[::-1]
            safe = np.where(bottom == 0, 1, bottom)
            return [np.where(bottom == 0, 0, np.trunc(top / safe))]
        return [function(*values)]

    return run


for _name in FUNCTIONS:
    register(_name, _reference(_name), _lower, aliasing="exact")
register(
    "pointwise",
    lambda inputs, attrs: [expression.evaluate(attrs["expr"], inputs)],
    _lower,
    aliasing="exact",
)
register("cast", lambda inputs, attrs: [inputs[0]], _lower, aliasing="exact")
register("constant", lambda inputs, attrs: [np.full(attrs["shape"], attrs["scalar"])], _lower)


def _unary(name: str, input: Any, output: Any, label: str) -> Tensor:
    tensor = as_tensor(input)
    dtype = float_dtype(name, tensor)
    return result(name, [tensor], tensor.ir.shape, dtype, output, name=label)


def exp(input: Any, output: Any = NullTensor, name: str = "") -> Tensor:
    """e to the input, elementwise; any shape, fp32/fp16/bf16."""
    return _unary("exp", input, output, name)


def sqrt(input: Any, output: Any = NullTensor, name: str = "") -> Tensor:
    """Square root, elementwise; any shape, fp32/fp16/bf16."""
    return _unary("sqrt", input, output, name)


def rsqrt(input: Any, output: Any = NullTensor, name: str = "") -> Tensor:
    """One over the square root, elementwise; any shape, fp32/fp16/bf16."""
    return _unary("rsqrt", input, output, name)


def relu(input: Any, output: Any = NullTensor, name: str = "") -> Tensor:
    """max(input, 0), elementwise; any shape, fp32/fp16/bf16."""
    return _unary("relu", input, output, name)


def gelu(input: Any, output: Any = NullTensor, name: str = "") -> Tensor:
    """GELU in its tanh approximation (Hendrycks and Gimpel 2016), elementwise."""
    return _unary("gelu", input, output, name)


def sigmoid(input: Any, output: Any = NullTensor, name: str = "") -> Tensor:
    """1 / (1 + exp(-input)), elementwise; any shape, fp32/fp16/bf16."""
    return _unary("sigmoid", input, output, name)


def silu(input: Any, output: Any = NullTensor, name: str = "") -> Tensor:
    """input * sigmoid(input), elementwise; any shape, fp32/fp16/bf16."""
    return _unary("silu", input, output, name)


def _scalar(what: str, value: float, dtype: DataType) -> float:
    if dtype not in FLOATS and not float(value).is_integer():
        raise ModelError(
            f"{what}: {value} is no integer, but the tensor is {dtype.name}; ark.cast it"
        )
    return float(value)


def _arithmetic(what: str, tensor: Tensor) -> DataType:
    if tensor.ir.dtype not in (*FLOATS, int32):
        raise UnsupportedError(
            f"{what} of {tensor.ir.dtype.name} is not built; ark.cast to fp32, fp16, bf16 or int32"
        )
    return tensor.ir.dtype


def _binary(name: str, input: Any, other: Any, output: Any, label: str) -> Any:
    if isinstance(input, Number) and isinstance(other, Number):
        value = float(FUNCTIONS[name].reference(np.float64(input), np.float64(other)))
        return value if output is NullTensor or output is None else copy(value, output, label)
    if isinstance(input, Number):
        name, input, other = _SWAPPED[name], other, input
    left = as_tensor(input)
    dtype = _arithmetic(name, left)
    if isinstance(other, Number):
        attrs = {"scalar": _scalar(name, other, dtype)}
        return result(name, [left], left.ir.shape, dtype, output, attrs, label)
    right = as_tensor(other)
    same_dtype(name, left, right)
    shape = broadcast(left.ir.shape, right.ir.shape, name)
    return result(name, [left, right], shape, dtype, output, name=label)


_SWAPPED = {"add": "add", "mul": "mul", "sub": "rsub", "div": "rdiv"}


def add(input: Any, other: Any, output: Any = NullTensor, name: str = "") -> Any:
    """input + other with broadcasting; either may be a number; two numbers give a number.

    fp32, fp16, bf16, int32 (wrapping). ModelError if shapes do not broadcast or types differ.
    """
    return _binary("add", input, other, output, name)


def sub(input: Any, other: Any, output: Any = NullTensor, name: str = "") -> Any:
    """input - other with broadcasting; either may be a number. As add otherwise."""
    return _binary("sub", input, other, output, name)


def mul(input: Any, other: Any, output: Any = NullTensor, name: str = "") -> Any:
    """input * other with broadcasting; either may be a number. As add otherwise."""
    return _binary("mul", input, other, output, name)


def div(input: Any, other: Any, output: Any = NullTensor, name: str = "") -> Any:
    """input / other with broadcasting; either may be a number. As add otherwise.

    Integers divide towards zero, and by zero to 0.
    """
    return _binary("div", input, other, output, name)


def swiglu(gate: Any, up: Any, output: Any = NullTensor, name: str = "") -> Tensor:
    """silu(gate) * up, the gated activation of Shazeer 2020; fp32, fp16, bf16, broadcasting."""
    left, right = as_tensor(gate), as_tensor(up)
    float_dtype("swiglu", left)
    dtype = same_dtype("swiglu", left, right)
    shape = broadcast(left.ir.shape, right.ir.shape, "swiglu")
    return result("swiglu", [left, right], shape, dtype, output, name=name)


def cast(input: Any, dtype: DataType, output: Any = NullTensor, name: str = "") -> Tensor:
    """Converts to `dtype`, round to nearest even; to integers towards zero."""
    tensor = as_tensor(input)
    if not isinstance(dtype, DataType):
        raise InvalidUsageError(f"cast: {dtype!r} is no data type; pass for example ark.fp16")
    return result("cast", [tensor], tensor.ir.shape, dtype, output, name=name)


def copy(input: Any, output: Any = NullTensor, name: str = "") -> Tensor:
    """Copies a tensor, broadcast to `output` where that is larger, or fills `output` with a number
    (a new fp32 tensor of shape [1] if none).
    """
    if isinstance(input, Number):
        target = None if output is NullTensor or output is None else as_tensor(output)
        shape = target.ir.shape if target else (1,)
        dtype = target.ir.dtype if target else fp32
        return _fill("copy", input, shape, dtype, output, name)
    tensor = as_tensor(input)
    shape = tensor.ir.shape
    if output is not NullTensor and output is not None:
        shape = broadcast(shape, as_tensor(output).ir.shape, "copy")
    return result("copy", [tensor], shape, tensor.ir.dtype, output, name=name)


def _fill(
    what: str, value: float, shape: Sequence[int], dtype: DataType, output: Any, name: str
) -> Tensor:
    dims = check_dims(what, shape)
    attrs = {"scalar": _scalar(what, value, dtype), "shape": dims}
    return result("constant", [], dims, dtype, output, attrs, name)


def constant(value: float, shape: Sequence[int], dtype: DataType = fp32, name: str = "") -> Tensor:
    """A tensor filled with `value` in every iteration; any type."""
    return _fill("constant", value, shape, dtype, NullTensor, name)


def ones(shape: Sequence[int], dtype: DataType = fp32, name: str = "") -> Tensor:
    """A tensor of ones."""
    return constant(1.0, shape, dtype, name)


def zeros(shape: Sequence[int], dtype: DataType = fp32, name: str = "") -> Tensor:
    """A tensor of zeros."""
    return constant(0.0, shape, dtype, name)
