"""Counter-based random numbers, computed on the device: Philox4x32-10 (Salmon et al., SC 2011).

The number of an element depends only on its index, the seed and the step. It is therefore the same
on every backend and for every tiling and sharding. To get other numbers in each iteration of a
launch, pass a tensor as the step and increment it in the graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ark.errors import InvalidUsageError, ModelError
from ark.frontend.tensor import Tensor, TensorLike, as_tensor
from ark.ir.dtype import FLOATS, INTEGERS, DataType, fp32, uint32
from ark.ops.base import check_dims, float_dtype, result
from ark.ops.elementwise import composed, mul, scalar
from ark.ops.views import reshape
from ark.tasks.expression import Tree, index, leaf, number

_INT64_END = 1 << 63


class _Numbers:
    """Builds the node of a random op: its inputs, and expressions of random numbers per element."""

    def __init__(self, op: str, shape: Sequence[int], seed: Any, step: Any) -> None:
        self.shape = check_dims(op, shape)
        self.inputs: list[Tensor] = []
        self._key, self._stream = (
            self._given(op, name, value) for name, value in (("seed", seed), ("step", step))
        )

    def _given(self, op: str, name: str, value: Any) -> Tree:
        if type(value) is int:
            if not -_INT64_END <= value < _INT64_END:
                raise InvalidUsageError(f"{op}: the {name} {value} has more than 64 bits")
            return number(value)
        tensor = as_tensor(value)
        if tensor.ir.dtype not in INTEGERS or tensor.ir.elements != 1:
            raise ModelError(
                f"{op}: the {name} is {tensor.ir.dtype.name} {list(tensor.ir.shape)}; expected "
                "an int, or integers of shape [1]"
            )
        self.inputs.append(tensor)
        return leaf(len(self.inputs) - 1)

    def word(self, words: int = 1, which: int = 0) -> Tree:
        """The expression of one of the random 32-bit words of an element. words: the number of
        words per element. which: the index of the word.
        """
        at: Tree = ["cast", "int64", index(-1)]
        if words > 1:
            at = ["add", ["mul", at, number(words)], number(which)]
        return ["philox", at, *(["cast", "int64", t] for t in (self._key, self._stream))]

    def uniform(self, words: int = 1, which: int = 0) -> Tree:
        """The expression of a random number in [0, 1), from 24 bits of the random word number
        `which` of an element. words: the number of words per element.
        """
        bits: Tree = ["shift_right", self.word(words, which), number(8)]
        return ["mul", ["cast", "fp32", bits], number(2.0**-24)]

    def flat(self, op: str, tree: Tree, dtype: DataType, name: str) -> Tensor:
        """Adds the node with a one-dimensional result, because an element's random numbers depend
        on its index in the flattened tensor.
        """
        dims = check_dims(op, [math.prod(self.shape)])
        attrs = {"expr": tree, "shape": dims}
        return result(op, self.inputs, dims, dtype, attrs=attrs, name=name)

    def tensor(self, op: str, tree: Tree, dtype: DataType, name: str) -> Tensor:
        """Adds the node and returns its result, viewed in the shape that the user requested."""
        return reshape(self.flat(op, tree, dtype, name), self.shape)


def _scaled(tree: Tree, by: float, offset: float) -> Tree:
    """The expression `tree * by + offset`, without operations that have no effect."""
    if (by, offset) == (1.0, 0.0):
        return tree
    return ["add", ["mul", tree, number(float(by))], number(float(offset))]


def _floating(op: str, dtype: DataType) -> None:
    if dtype not in FLOATS:
        raise ModelError(f"{op}: the type is {dtype.name}; expected floating point")


def random_bits(
    shape: Sequence[int], seed: TensorLike | int, step: TensorLike | int = 0, name: str = ""
) -> Tensor:
    """A uint32 tensor of 32 random bits per element.

    Element i is word i % 4 of the Philox block whose counter is i // 4 (low half) and the step
    (high half), under the seed as key.

    seed, step: ints of 64 bits, or integer tensors of shape [1].

    Examples:
        >>> ark.random_bits([2], seed=1).eval()
        tensor([3823634032, 3842641596], dtype=torch.uint32)
    """
    numbers = _Numbers("random_bits", shape, seed, step)
    tree: Tree = ["cast", "uint32", numbers.word()]
    return numbers.tensor("random_bits", tree, uint32, name)


def random_uniform(
    shape: Sequence[int],
    seed: TensorLike | int,
    step: TensorLike | int = 0,
    low: float = 0.0,
    high: float = 1.0,
    dtype: DataType = fp32,
    name: str = "",
) -> Tensor:
    """Random numbers with uniform distribution in [low, high).

    They are computed from the upper 24 bits of random_bits with the same shape, seed and step.
    Rounding to fp16 or bf16 may give `high` itself. dtype: fp32, fp16 or bf16. seed, step: as for
    random_bits.

    Examples:
        >>> ark.random_uniform([4], seed=1).eval()
        tensor([0.8903, 0.8947, 0.5857, 0.7113])
    """
    _floating("random_uniform", dtype)
    low, high = (scalar("random_uniform", v, dtype) for v in (low, high))
    numbers = _Numbers("random_uniform", shape, seed, step)
    tree = _scaled(numbers.uniform(), high - low, low)
    return numbers.tensor("random_uniform", tree, dtype, name)


def random_normal(
    shape: Sequence[int],
    seed: TensorLike | int,
    step: TensorLike | int = 0,
    mean: float = 0.0,
    std: float = 1.0,
    dtype: DataType = fp32,
    name: str = "",
) -> Tensor:
    """Random numbers with normal distribution, by the Box-Muller method.

    They are within 5.8 standard deviations of the mean, because each is computed from two words of
    24 bits. dtype, seed and step: as for random_uniform.

    Examples:
        >>> ark.random_normal([4], seed=1).eval()
        tensor([ 1.6585, -0.3199,  1.0499, -0.6321])
    """
    _floating("random_normal", dtype)
    mean, std = (scalar("random_normal", v, dtype) for v in (mean, std))
    numbers = _Numbers("random_normal", shape, seed, step)
    first: Tree = ["sub", number(1.0), numbers.uniform(2, 0)]  # in (0, 1]
    angle: Tree = ["mul", numbers.uniform(2, 1), number(2.0 * math.pi)]
    radius: Tree = ["sqrt", ["mul", ["log", first], number(-2.0)]]
    tree = _scaled(["mul", radius, ["cos", angle]], std, mean)
    return numbers.tensor("random_normal", tree, dtype, name)


def dropout(
    input: TensorLike,
    rate: float,
    seed: TensorLike | int,
    step: TensorLike | int = 0,
    name: str = "",
) -> Tensor:
    """Sets each element to 0 with probability `rate` and divides the others by 1 - rate.

    The gradient computes the same random numbers again, so it selects the same elements. Any shape;
    fp32, fp16, bf16. seed, step: as for random_bits. Raises InvalidUsageError unless `rate` is from
    0 to below 1.

    Examples:
        >>> ark.dropout(torch.ones(6), rate=0.5, seed=3).eval()
        tensor([2., 0., 2., 2., 0., 2.])
    """
    tensor = as_tensor(input)
    float_dtype("dropout", tensor)
    if not 0.0 <= rate < 1.0:
        raise InvalidUsageError(f"dropout: the rate is {rate}; expected a number from 0 to below 1")
    numbers = _Numbers("dropout", tensor.ir.shape, seed, step)
    kept: Tree = ["greater_equal", numbers.uniform(), number(float(rate))]
    tree: Tree = ["where", kept, number(1.0 / (1.0 - rate)), number(0.0)]
    mask = numbers.flat("dropout", tree, tensor.ir.dtype, name and f"{name}.mask")
    return reshape(mul(reshape(tensor, mask.shape()), mask, name=name), numbers.shape)


for _name in ("random_bits", "random_uniform", "random_normal", "dropout"):
    composed(_name)
