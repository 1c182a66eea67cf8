"""Convolutions of (n, channels, spatial...) tensors: conv, conv_transpose.

A convolution is a matmul of its weights and a matrix whose columns are the windows of the input
(im2col, Chellapilla et al. 2006), so that it runs on matrix units. A `remap` node (ark.tasks.remap)
gathers the windows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import structs

from ark.errors import InvalidUsageError, ModelError
from ark.frontend.tensor import Tensor, TensorLike, as_tensor
from ark.ir.attributes import ConvolutionAttributes, GroupedAttributes
from ark.ir.values import whole
from ark.lower.ops.windows import lower_convolution, lower_depthwise, lower_grouped
from ark.lower.registry import register
from ark.ops.base import float_dtype, same_dtype
from ark.ops.elementwise import add
from ark.ops.indexing import Rule, remap, same
from ark.ops.linear_algebra import matmul
from ark.ops.movement import transpose
from ark.ops.views import reshape
from ark.tasks import expression

Numbers = int | Sequence[int]
Padding = int | Sequence[int | tuple[int, int]]
MIN_VECTOR_CHANNELS = 8  # channels that are a multiple of this are loaded as vectors


def numbers(op: str, name: str, value: Numbers, count: int, least: int) -> list[int]:
    """The parameter `name`, such as a stride, as one number per spatial dimension. A single number
    applies to all dimensions. Raises InvalidUsageError unless there are `count` numbers of at least
    `least`.
    """
    values = [value] * count if isinstance(value, int) else [whole(op, v) for v in value]
    if len(values) != count or any(v < least for v in values):
        raise InvalidUsageError(
            f"{op}: {name} is {value!r}; expected {count} numbers of at least {least}"
        )
    return values


def padding_pairs(op: str, padding: Any, count: int) -> list[tuple[int, int]]:
    """The padding (before, after) of each of `count` spatial dimensions. `padding` is one number,
    or a number or a pair per dimension.
    """
    given = [padding] * count if isinstance(padding, int) else list(padding)
    pairs = [(p, p) if isinstance(p, int) else (int(p[0]), int(p[1])) for p in given]
    if len(pairs) != count or any(min(p) < 0 for p in pairs):
        raise InvalidUsageError(
            f"{op}: padding is {padding!r}; expected a number, one for each of {count} "
            "dimensions, or a pair for each, none negative"
        )
    return pairs


def spatial(op: str, tensor: Tensor) -> int:
    """The number of spatial dimensions; raises ModelError unless it is one to three."""
    count = len(tensor.ir.shape) - 2
    if not 1 <= count <= 3:
        raise ModelError(
            f"{op}: the input has shape {list(tensor.ir.shape)}; expected (n, channels, spatial "
            "...) with one to three spatial dimensions"
        )
    return count


def window_matrix(
    source: Tensor, groups: int, kernel: Sequence[int], rules: Sequence[Rule], sizes: Sequence[int]
) -> Tensor:
    """Adds the node that gathers the windows of `source` into a matrix; each column is a window.

    Returns (n, groups, channels of a group * elements of the kernel, windows). rules: those of
    `remap` for the spatial dimensions. sizes: the number of windows per spatial dimension.
    """
    n, channels = source.ir.shape[:2]
    each = channels // groups
    if math.prod(kernel) == 1 and all(
        rule[0][1][1] == rule[2] == 1 and not rule[1] for rule in rules
    ):
        return reshape(source, [n, groups, each, math.prod(sizes)])
    shape = [n, groups, each, *kernel, *sizes]
    if len(shape) > 8:  # join the group and its channels into one dimension
        shape = [n, channels, *kernel, *sizes]
        first: list[Rule] = [same(0), same(1)]
    else:
        first = [same(0), [[[1, each], [2, 1]], 0, 1, "fill"]]
    columns = remap("windows", source, shape, [*first, *rules])
    return reshape(columns, [n, groups, each * math.prod(kernel), math.prod(sizes)])


def multiplied(
    weight: Tensor,
    windows: Tensor,
    groups: int,
    sizes: Sequence[int],
    bias: Any,
    name: str,
    tf32: bool,
) -> Tensor:
    """Adds the matmul of weights and windows and, if there is a bias, its addition. Returns the
    result in the shape (n, outputs, *sizes).
    """
    n = windows.ir.shape[0]
    outputs = weight.ir.shape[0]
    depth = windows.ir.shape[2]
    table = reshape(weight, [1, groups, outputs // groups, depth])
    product = reshape(matmul(table, windows, name=name, tf32=tf32), [n, outputs, *sizes])
    if bias is None:
        return product
    return add(product, reshape(as_tensor(bias), [1, outputs, *[1] * len(sizes)]))


def _patches(
    x: Tensor, weight: Tensor, bias: Any, sizes: Sequence[int], name: str, tf32: bool
) -> Tensor:
    """A convolution whose windows do not overlap and cover the whole input, such as the patch
    embedding of a vision transformer. Each window is a row of a matmul.
    """
    n, channels = x.ir.shape[:2]
    outputs, kernel = weight.ir.shape[0], weight.ir.shape[2:]
    count, depth = len(kernel), channels * math.prod(kernel)
    split = [length for pair in zip(sizes, kernel, strict=True) for length in pair]
    places = [2 + 2 * d for d in range(count)]
    rows = transpose(
        reshape(x, [n, channels, *split]), [0, *places, 1, *(place + 1 for place in places)]
    )
    table = reshape(weight, [outputs, depth])
    product = matmul(
        reshape(rows, [n * math.prod(sizes), depth]),
        table,
        transpose_other=True,
        name=name,
        tf32=tf32,
    )
    if bias is not None:
        product = add(product, reshape(as_tensor(bias), [1, outputs]))
    turned = transpose(reshape(product, [n, math.prod(sizes), outputs]), [0, 2, 1])
    return reshape(turned, [n, outputs, *sizes])


def conv(
    input: TensorLike,
    weight: TensorLike,
    bias: TensorLike | None = None,
    stride: Numbers = 1,
    padding: Padding = 0,
    dilation: Numbers = 1,
    groups: int = 1,
    name: str = "",
    tf32: bool = False,
) -> Tensor:
    """Convolution (cross-correlation) over one to three spatial dimensions, as in torch.

    input: (n, channels, spatial...). weight: (outputs, channels / groups, kernel...). bias:
    (outputs,). All have one type: fp32, fp16 or bf16; sums are accumulated in fp32. The result is
    (n, outputs, spatial...).

    padding: the number of zeros around the input: one number, one per spatial dimension, or a pair
    (before, after) per spatial dimension. tf32: if True, matrix units may read only 10 bits of
    mantissa of fp32 inputs, which is torch's default; ark's default is exact fp32. Raises
    ModelError for other shapes or types, InvalidUsageError for strides below 1.

    Examples:
        >>> x = torch.arange(9.0).reshape(1, 1, 3, 3)
        >>> ark.conv(x, torch.ones(1, 1, 2, 2)).eval()
        tensor([[[[ 8., 12.],
                  [20., 24.]]]])
    """
    x, w = as_tensor(input), as_tensor(weight)
    float_dtype("conv", x)
    same_dtype("conv", x, w)
    count = spatial("conv", x)
    steps = numbers("conv", "stride", stride, count, 1)
    spread = numbers("conv", "dilation", dilation, count, 1)
    pads = padding_pairs("conv", padding, count)
    channels, outputs, kernel = x.ir.shape[1], w.ir.shape[0], w.ir.shape[2:]
    if (
        groups < 1
        or len(w.ir.shape) != count + 2
        or channels != w.ir.shape[1] * groups
        or outputs % groups
    ):
        raise ModelError(
            f"conv: the input has shape {list(x.ir.shape)} and the weight {list(w.ir.shape)}, in "
            f"{groups} groups; expected a weight (outputs, {channels} / groups, kernel...)"
        )
    sizes = [
        (n + a + b - (k - 1) * d - 1) // s + 1
        for n, (a, b), k, s, d in zip(x.ir.shape[2:], pads, kernel, steps, spread, strict=True)
    ]
    if min(sizes) < 1:
        raise ModelError(
            f"conv: a kernel of {list(kernel)} is larger than the padded input {list(x.ir.shape)}"
        )
    apart = steps == list(kernel) and not any(map(any, pads)) and set(spread) == {1}
    covered = all(n == s * k for n, s, k in zip(x.ir.shape[2:], sizes, kernel, strict=True))
    if (
        apart
        and covered
        and groups == 1
        and channels % MIN_VECTOR_CHANNELS
        and math.prod(kernel) > 1
    ):
        return _patches(x, w, bias, sizes, name or "conv", tf32)
    lead = 3 if 3 + 2 * count <= 8 else 2
    rules: list[Rule] = [
        [[[lead + d, spread[d]], [lead + count + d, steps[d]]], -pads[d][0], 1, "fill"]
        for d in range(count)
    ]
    windows = window_matrix(x, groups, kernel, rules, sizes)
    return multiplied(w, windows, groups, sizes, bias, name or "conv", tf32)


def conv_transpose(
    input: TensorLike,
    weight: TensorLike,
    bias: TensorLike | None = None,
    stride: Numbers = 1,
    padding: Padding = 0,
    output_padding: Numbers = 0,
    dilation: Numbers = 1,
    groups: int = 1,
    name: str = "",
    tf32: bool = False,
) -> Tensor:
    """Transposed convolution: the gradient of conv with respect to its input, as in torch.

    input: (n, channels, spatial...). weight: (channels, outputs / groups, kernel...).
    output_padding: elements that are added to the end of each spatial dimension of the result.
    Other arguments as for conv. Raises ModelError for other shapes.

    Examples:
        >>> x = torch.ones(1, 1, 2)
        >>> ark.conv_transpose(x, torch.ones(1, 1, 2)).eval()
        tensor([[[1., 2., 1.]]])
    """
    x, w = as_tensor(input), as_tensor(weight)
    float_dtype("conv_transpose", x)
    same_dtype("conv_transpose", x, w)
    count = spatial("conv_transpose", x)
    steps = numbers("conv_transpose", "stride", stride, count, 1)
    spread = numbers("conv_transpose", "dilation", dilation, count, 1)
    more = numbers("conv_transpose", "output_padding", output_padding, count, 0)
    pads = padding_pairs("conv_transpose", padding, count)
    channels, kernel = x.ir.shape[1], w.ir.shape[2:]
    if len(w.ir.shape) != count + 2 or w.ir.shape[0] != channels or channels % groups:
        raise ModelError(
            f"conv_transpose: the input has shape {list(x.ir.shape)} and the weight "
            f"{list(w.ir.shape)}, in {groups} groups; expected a weight ({channels}, outputs / "
            "groups, kernel...)"
        )
    sizes = [
        (n - 1) * s - a - b + (k - 1) * d + 1 + o
        for n, (a, b), k, s, d, o in zip(
            x.ir.shape[2:], pads, kernel, steps, spread, more, strict=True
        )
    ]
    # Input element i contributes, by element k of the kernel, to output element i * stride + k *
    # dilation - padding before.
    lead = 3 if 3 + 2 * count <= 8 else 2
    rules: list[Rule] = [
        [[[lead + d, -spread[d]], [lead + count + d, 1]], pads[d][0], steps[d], "exact"]
        for d in range(count)
    ]
    windows = window_matrix(x, groups, kernel, rules, sizes)
    each, outputs = channels // groups, w.ir.shape[1]
    transposed = transpose(reshape(w, [groups, each, outputs, math.prod(kernel)]), [0, 2, 1, 3])
    table = reshape(transposed, [groups * outputs, each, *kernel])
    return multiplied(table, windows, groups, sizes, bias, name or "conv_transpose", tf32)


def _convolution(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    """The NumPy reference of the node `convolution`: the sum over the kernel's elements, then the
    epilogue's expression.
    """
    weight, source, *others = inputs
    given = ConvolutionAttributes.from_node(attrs)
    n, groups, places = source.shape[0], weight.shape[1], math.prod(given.sizes)
    parts = source.reshape(n, groups, -1, *source.shape[2:])
    taps = weight.reshape(*weight.shape[1:3], parts.shape[2], *given.size)
    sums = np.zeros((n, groups, weight.shape[2], places))
    for tap in np.ndindex(*given.size):
        seen = parts
        for d, (k, count) in enumerate(zip(tap, given.sizes, strict=True)):
            at = np.arange(count) * given.stride[d] - given.before[d]
            at = at + k * given.dilation[d]
            inside = (at >= 0) & (at < source.shape[2 + d])
            taken = np.take(seen, at.clip(0, source.shape[2 + d] - 1), axis=3 + d)
            wide = [1] * taken.ndim
            wide[3 + d] = count
            seen = taken * inside.reshape(wide)
        flat = seen.reshape(n, groups, parts.shape[2], places)
        sums += np.einsum("gmc,ngcp->ngmp", taps[(slice(None),) * 3 + tap], flat)
    if given.finish is not None:
        return [expression.evaluate(given.finish, [sums, *others])]
    return [sums]


register("convolution", _convolution, lower_convolution, aliasing="none")


def _channels_last(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    """The NumPy reference of a grouped convolution of an image with channels last. The weights have
    the shape (elements of the window * channels of a group, outputs). ark.tasks.grouped describes
    the variant for an image with channels first.
    """
    weight, source, *others = inputs
    given = GroupedAttributes.from_node(attrs)
    taps, outputs = math.prod(given.size), weight.shape[1]
    each = weight.shape[0] // taps
    first = source if given.channels_first else np.moveaxis(source, -1, 1)
    groups = first.shape[1] // each
    rows = outputs // groups
    if given.channels_first:
        table = weight.reshape(each, taps, groups, rows).transpose(2, 3, 0, 1)
    else:
        table = weight.reshape(taps, each, groups, rows).transpose(2, 3, 1, 0)
    plain = structs.replace(given, finish=None, channels_first=False).to_node()
    (sums,) = _convolution([table.reshape(1, groups, rows, -1), first], plain)
    last = np.moveaxis(sums.reshape(len(source), outputs, *given.sizes), 1, -1)
    if given.finish is not None:
        return [expression.evaluate(given.finish, [last, *others])]
    return [last]


register("depthwise", _channels_last, lower_depthwise, aliasing="none")
register("grouped_convolution", _channels_last, lower_grouped, aliasing="none")
