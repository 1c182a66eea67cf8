"""Elementwise ops: arithmetic, activations, copy, cast and constants.

The functions themselves are in ark.tasks.functions; broadcasting is NumPy's. `output` is a tensor
to write into; the returned tensor is a new one on its memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ark.errors import InvalidUsageError, ModelError, UnsupportedError
from ark.frontend.tensor import Operand, Output, Tensor, TensorLike, as_tensor
from ark.ir.attribute_forms import ElementwiseAttributes
from ark.ir.dtype import FLOATS, INTEGERS, DataType, byte, fp32
from ark.lower.ops.elementwise import lower_elementwise
from ark.lower.registry import register
from ark.ops.base import broadcast, check_dims, float_dtype, result, same_dtype
from ark.ops.views import reinterpret
from ark.tasks import expression
from ark.tasks.expression import Tree
from ark.tasks.functions import FUNCTIONS

Number: Any = (int, float, np.integer, np.floating)


def _evaluated(
    inputs: Sequence[np.ndarray], tree: Tree, shape: Sequence[int] | None
) -> list[np.ndarray]:
    values = expression.evaluate(tree, inputs, shape)
    return [values if shape is None else np.broadcast_to(values, shape)]


def _reference(name: str) -> Any:
    arity = FUNCTIONS[name].arity

    def run(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
        given = ElementwiseAttributes.of(attrs)
        if given.expr is not None:
            return _evaluated(inputs, given.expr, given.shape)
        arguments: list[Tree] = [expression.leaf(i) for i in range(len(inputs))]
        if len(inputs) < arity and given.scalar is not None:
            arguments.append(expression.number(given.scalar))
        return _evaluated(inputs, [name, *arguments], given.shape)

    return run


def _composed(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    given = ElementwiseAttributes.of(attrs)
    return _evaluated(inputs, given.expr or (), given.shape)


def _constant(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    given = ElementwiseAttributes.of(attrs)
    return [np.full(given.shape or (), given.scalar)]


def composed(name: str) -> None:
    """Registers an elementwise op that has no function of its own: each of its nodes contains an
    expression of several functions.
    """
    register(
        name,
        _composed,
        lower_elementwise,
        aliasing="exact",
    )


for _name in FUNCTIONS:
    register(_name, _reference(_name), lower_elementwise, aliasing="exact")
composed("elementwise")
register("cast", lambda inputs, attrs: [inputs[0]], lower_elementwise, aliasing="exact")
register("constant", _constant, lower_elementwise)


def unary(
    name: str,
    input: Any,
    output: Any,
    label: str,
    integers: bool = False,
    dtype: DataType | None = None,
) -> Tensor:
    """Adds an elementwise op of one input tensor and returns the result. integers: True if the op
    supports integer types besides floating point. dtype: the result's type, by default the input's.
    """
    tensor = as_tensor(input)
    if not integers or tensor.ir.dtype not in INTEGERS:
        float_dtype(name, tensor)
    return result(name, [tensor], tensor.ir.shape, dtype or tensor.ir.dtype, output, name=label)


def _unary(name: str, input: Any, output: Any, label: str) -> Tensor:
    return unary(name, input, output, label)


def scalar(op: str, value: float, dtype: DataType) -> float:
    """Converts the number `value` to a scalar operand for a tensor of type `dtype`: a float, or an
    int if `dtype` is an integer type.

    Raises ModelError if `dtype` cannot represent the number.
    """
    try:
        float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ModelError(
            f"{op}: {value!r:.60} is not a number; pass a number or a tensor"
        ) from error
    if dtype in FLOATS or dtype.name == "fp4":
        return float(value)
    if not float(value).is_integer():
        raise ModelError(
            f"{op}: {value} is not an integer, but the tensor is {dtype.name}; ark.cast it"
        )
    low, high = limits(dtype)
    if not low <= int(value) <= high:
        raise ModelError(f"{op}: {value} is out of range for {dtype.name} ({low} to {high})")
    return int(value)


def limits(dtype: DataType) -> tuple[int, int]:
    """The smallest and the largest value of an integer type, or of bool."""
    if dtype.name == "bool":
        return 0, 1
    signed = dtype.name.startswith("int")
    return (
        (-(1 << dtype.bits - 1), (1 << dtype.bits - 1) - 1)
        if signed
        else (0, (1 << dtype.bits) - 1)
    )


def arithmetic(op: str, tensor: Tensor) -> DataType:
    """The tensor's type; raises ModelError unless arithmetic supports it."""
    if tensor.ir.dtype not in (*FLOATS, *INTEGERS):
        raise UnsupportedError(
            f"{op} of {tensor.ir.dtype.name} is not supported; ark.cast to a floating-point or "
            "integer type"
        )
    return tensor.ir.dtype


def binary(
    name: str,
    input: Any,
    other: Any,
    output: Any,
    label: str,
    dtype: DataType | None = None,
    swapped: str = "",
) -> Tensor:
    """Adds an elementwise op of two tensors, or of a tensor and a number; returns the result.

    dtype: the result's type, by default that of the inputs. swapped: the name of the op that takes
    the same arguments in reverse order (`rsub` for `sub`); it is used if the first argument is a
    number.
    """
    if isinstance(input, Number) and isinstance(other, Number):
        value = FUNCTIONS[name].reference(np.float64(input), np.float64(other)).item()
        return value if output is None else copy(value, output, label)
    if isinstance(input, Number):
        tensor = as_tensor(other)
        kind = _kind(name, tensor)
        number = scalar(name, input, kind)
        attrs: dict[str, Any] = {"scalar": number}
        if swapped:
            name = swapped
        else:
            attrs = {"expr": [name, expression.number(number), expression.leaf(0)]}
        return result(name, [tensor], tensor.ir.shape, dtype or kind, output, attrs, label)
    left = as_tensor(input)
    kind = _kind(name, left)
    if isinstance(other, Number):
        attrs = {"scalar": scalar(name, other, kind)}
        return result(name, [left], left.ir.shape, dtype or kind, output, attrs, label)
    right = as_tensor(other)
    same_dtype(name, left, right)
    shape = broadcast(left.ir.shape, right.ir.shape, name)
    return result(name, [left, right], shape, dtype or kind, output, name=label)


def _kind(name: str, tensor: Tensor) -> DataType:
    """The tensor's type; raises ModelError unless the function supports it."""
    function, dtype = FUNCTIONS[name], tensor.ir.dtype
    if function.logical:
        if dtype.name != "bool":
            raise ModelError(f"{name} needs bool, but the input is {dtype.name}; compare it first")
        return dtype
    if dtype.name == "bool" and name in ("equal", "not_equal"):
        return dtype
    arithmetic(name, tensor)
    if dtype in INTEGERS and function.integer is None:
        raise ModelError(f"{name} needs fp32, fp16 or bf16, not {dtype.name}; use ark.cast")
    if dtype in FLOATS and not function.floating:
        raise ModelError(f"{name} needs integers, but the input is {dtype.name}; use ark.cast")
    return dtype


def _binary(name: str, input: Any, other: Any, output: Any, label: str) -> Tensor:
    return binary(name, input, other, output, label, swapped=_SWAPPED[name])


_SWAPPED = {"add": "add", "mul": "mul", "sub": "rsub", "div": "rdiv"}


def add(input: Operand, other: Operand, output: Output = None, name: str = "") -> Tensor:
    """input + other with broadcasting; either may be a number. Two numbers give a number.

    Both tensors have one type, floating point or integer; integers wrap on overflow. Raises
    ModelError if the shapes do not broadcast or the types differ.

    Examples:
        >>> ark.add(torch.tensor([5.0, -5.0, 2.0]), torch.tensor([3.0, 3.0, 2.0])).eval()
        tensor([ 8., -2.,  4.])
    """
    return _binary("add", input, other, output, name)


def sub(input: Operand, other: Operand, output: Output = None, name: str = "") -> Tensor:
    """input - other with broadcasting; either may be a number. Types and errors as for `add`.

    Examples:
        >>> ark.sub(torch.tensor([5.0, -5.0, 2.0]), torch.tensor([3.0, 3.0, 2.0])).eval()
        tensor([ 2., -8.,  0.])
    """
    return _binary("sub", input, other, output, name)


def mul(input: Operand, other: Operand, output: Output = None, name: str = "") -> Tensor:
    """input * other with broadcasting; either may be a number. Types and errors as for `add`.

    Examples:
        >>> ark.mul(torch.tensor([5.0, -5.0, 2.0]), torch.tensor([3.0, 3.0, 2.0])).eval()
        tensor([ 15., -15.,   4.])
    """
    return _binary("mul", input, other, output, name)


def div(input: Operand, other: Operand, output: Output = None, name: str = "") -> Tensor:
    """input / other with broadcasting; either may be a number. Types and errors as for `add`.

    The quotient of integers is rounded towards zero; division of an integer by 0 gives 0.

    Examples:
        >>> ark.div(torch.tensor([5.0, -5.0, 2.0]), torch.tensor([3.0, 3.0, 2.0])).eval()
        tensor([ 1.6667, -1.6667,  1.0000])
    """
    return _binary("div", input, other, output, name)


def cast(input: TensorLike, dtype: DataType, output: Output = None, name: str = "") -> Tensor:
    """Converts each element to `dtype`. Floating-point results are rounded to nearest even.

    Floats become integers by rounding towards zero, and bool by comparison with 0 (True if not 0).
    Integers that exceed the range of `dtype` wrap. fp4 gets the nearest value that it can
    represent. A cast to or from `byte` reinterprets the input's bytes; without an output it returns
    a view of the input's memory. Raises InvalidUsageError if `dtype` is not a data type of ark.

    Examples:
        >>> ark.cast(torch.tensor([1.7, -1.7]), ark.int32).eval()
        tensor([ 1, -1], dtype=torch.int32)
    """
    tensor = as_tensor(input)
    if not isinstance(dtype, DataType):
        raise InvalidUsageError(f"cast: {dtype!r} is not a data type; pass for example ark.fp16")
    if (tensor.ir.dtype == byte) != (dtype == byte):
        bits = reinterpret(tensor, dtype, name)
        return bits if output is None else copy(bits, output, name)
    return result("cast", [tensor], tensor.ir.shape, dtype, output, name=name)


def copy(input: Operand, output: Output = None, name: str = "") -> Tensor:
    """Copies a tensor of any type into `output`, with broadcasting, or into a new tensor.

    A number as input fills `output`; without an output it fills a new fp32 tensor of shape [1].

    Examples:
        >>> ark.copy(torch.tensor([-1.0, 0.0, 2.0])).eval()
        tensor([-1.,  0.,  2.])
    """
    if isinstance(input, Number):
        target = None if output is None else as_tensor(output)
        shape = target.ir.shape if target else (1,)
        dtype = target.ir.dtype if target else fp32
        return _fill("copy", input, shape, dtype, output, name)
    tensor = as_tensor(input)
    shape = tensor.ir.shape
    if output is not None:
        shape = broadcast(shape, as_tensor(output).ir.shape, "copy")
    return result("copy", [tensor], shape, tensor.ir.dtype, output, name=name)


def _fill(
    op: str, value: float, shape: Sequence[int], dtype: DataType, output: Any, name: str
) -> Tensor:
    dims = check_dims(op, shape)
    attrs = {"scalar": scalar(op, value, dtype), "shape": dims}
    return result("constant", [], dims, dtype, output, attrs, name)


def constant(value: float, shape: Sequence[int], dtype: DataType = fp32, name: str = "") -> Tensor:
    """A tensor of any type, filled with `value`. It is filled again in each iteration.

    Examples:
        >>> ark.constant(2.5, [2, 2]).eval()
        tensor([[2.5000, 2.5000],
                [2.5000, 2.5000]])
    """
    return _fill("constant", value, shape, dtype, None, name)


def ones(shape: Sequence[int], dtype: DataType = fp32, name: str = "") -> Tensor:
    """A tensor of any type, filled with ones in each iteration; at most 8 dimensions.

    Examples:
        >>> ark.ones([2, 3]).eval()
        tensor([[1., 1., 1.],
                [1., 1., 1.]])
    """
    return constant(1.0, shape, dtype, name)


def zeros(shape: Sequence[int], dtype: DataType = fp32, name: str = "") -> Tensor:
    """A tensor of any type, filled with zeros in each iteration; at most 8 dimensions.

    Examples:
        >>> ark.zeros([2, 3]).eval()
        tensor([[0., 0., 0.],
                [0., 0., 0.]])
    """
    return constant(0.0, shape, dtype, name)
