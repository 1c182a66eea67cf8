"""Resizing and normalising (n, channels, spatial...) tensors, composed of other ops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from ark.errors import InvalidUsageError, ModelError
from ark.frontend.tensor import Tensor, TensorLike, as_tensor
from ark.ops.base import float_dtype, result
from ark.ops.elementwise import add, composed, mul
from ark.ops.indexing import Rule, remap, same
from ark.ops.norms import layernorm
from ark.ops.views import reshape
from ark.ops.windows import numbers, spatial
from ark.tasks.expression import Tree, index, leaf, number

COORDINATES = ("half_pixel", "asymmetric", "align_corners")


def resize(
    input: TensorLike,
    sizes: Sequence[int],
    mode: str = "nearest",
    coordinates: str = "half_pixel",
    name: str = "",
) -> Tensor:
    """Resizes the spatial dimensions: (n, channels, spatial...) to (n, channels, sizes...).

    mode: nearest (ties go to the lower index) or linear. coordinates: how index i of the result is
    mapped to a position in the input. half_pixel is (i + 0.5) * scale - 0.5, and asymmetric is i *
    scale, where scale is input size / result size. align_corners maps indices linearly, so that the
    first and the last elements of input and result coincide. Positions outside of the input take
    the input's nearest element. Types of 8 bits or more. Raises InvalidUsageError for another mode
    or other coordinates.

    Examples:
        >>> x = torch.arange(3.0).reshape(1, 1, 3)
        >>> ark.resize(x, [6]).eval()
        tensor([[[0., 0., 1., 1., 2., 2.]]])
    """
    tensor = as_tensor(input)
    count = spatial("resize", tensor)
    wanted = numbers("resize", "sizes", sizes, count, 1)
    if mode not in ("nearest", "linear") or coordinates not in COORDINATES:
        raise InvalidUsageError(
            f"resize: the mode is {mode!r} and coordinates are {coordinates!r}; expected the mode "
            f"nearest or linear, and coordinates of {', '.join(COORDINATES)}"
        )
    axes = {2 + d: n for d, n in enumerate(wanted) if n != tensor.ir.shape[2 + d]}
    if mode == "nearest":
        rules, shape = _all(tensor), tensor.ir.shape
        for axis, size in axes.items():
            rules[axis] = _nearest(axis, *_line(shape[axis], size, coordinates))
        sizes = [axes.get(d, n) for d, n in enumerate(shape)]
        return remap("resize", tensor, sizes, rules, name=name)
    if axes:
        float_dtype("resize", tensor)
    resized = tensor
    for axis, size in axes.items():
        resized = _blended(resized, axis, size, coordinates)
    return (
        resized if resized is not tensor else remap("resize", tensor, tensor.ir.shape, _all(tensor))
    )


def _all(tensor: Tensor) -> list[Rule]:
    return [same(d) for d in range(len(tensor.ir.shape))]


def _line(n: int, size: int, coordinates: str) -> tuple[Fraction, Fraction]:
    """(slope, shift) of a resize from n to `size` elements: result i is read at position
    i * slope + shift of the input.

    Both are fractions, so that indices are exact.
    """
    slope, shift = Fraction(n, size), Fraction(0)
    if coordinates == "half_pixel":
        shift = slope / 2 - Fraction(1, 2)
    if coordinates == "align_corners":
        slope = Fraction(n - 1, size - 1) if size > 1 else Fraction(0)
    return slope, shift


def _below(axis: int, slope: Fraction, shift: Fraction) -> Rule:
    """The rule of `remap` by which result i reads the element at floor(i * slope + shift)."""
    divide = math.lcm(slope.denominator, shift.denominator)
    terms = [[axis, int(slope * divide)]] if slope else []
    return [terms, int(shift * divide), divide, "edge"]


def _nearest(axis: int, slope: Fraction, shift: Fraction) -> Rule:
    """The rule of `remap` by which result i reads the element nearest to i * slope + shift; ties
    go to the lower index.
    """
    divide = math.lcm(slope.denominator, shift.denominator, 2)
    return _below(axis, slope, shift + Fraction(1, 2) - Fraction(1, divide))


def _blended(tensor: Tensor, axis: int, size: int, coordinates: str) -> Tensor:
    """Resizes one axis to `size` by linear interpolation between neighbouring elements."""
    n = tensor.ir.shape[axis]
    slope, shift = _line(n, size, coordinates)
    shape = [size if d == axis else m for d, m in enumerate(tensor.ir.shape)]

    def at(offset: int) -> Tensor:
        rules = _all(tensor)
        rules[axis] = _below(axis, slope, shift + offset)
        return remap("resize", tensor, shape, rules)

    d = axis - len(shape)
    place: Tree = ["add", ["mul", index(d), number(float(slope))], number(float(shift))]
    inside = ["minimum", ["maximum", place, number(0.0)], number(float(n - 1))]
    share: Tree = ["sub", inside, ["floor", inside]]
    tree = ["add", leaf(0), ["mul", ["sub", leaf(1), leaf(0)], share]]
    attrs = {"expr": tree, "shape": tuple(shape)}
    return result("blend", [at(0), at(1)], shape, tensor.ir.dtype, attrs=attrs)


def batch_norm(
    input: TensorLike,
    scale: TensorLike,
    shift: TensorLike,
    mean: TensorLike,
    variance: TensorLike,
    eps: float = 1e-5,
    name: str = "",
) -> Tensor:
    """(input - mean) / sqrt(variance + eps) * scale + shift, with given values for each channel.

    Batch normalisation in inference (Ioffe and Szegedy 2015). input: (n, channels, ...); the other
    tensors: (channels,). All have one type. Raises ModelError for other shapes.

    Examples:
        >>> x = torch.arange(4.0).reshape(2, 2)
        >>> one, zero = torch.ones(2), torch.zeros(2)
        >>> ark.batch_norm(x, one, zero, mean=one, variance=one).eval()
        tensor([[-1.0000,  0.0000],
                [ 1.0000,  2.0000]])
    """
    x = as_tensor(input)
    dtype = float_dtype("batch_norm", x)
    channels = x.ir.shape[1] if len(x.ir.shape) > 1 else 0
    others = [as_tensor(t) for t in (scale, shift, mean, variance)]
    if any(t.ir.shape != (channels,) for t in others):
        raise ModelError(
            f"batch_norm: the input has shape {list(x.ir.shape)}, and scale, shift, mean and "
            f"variance have shapes {[list(t.ir.shape) for t in others]}; expected [{channels}] "
            "for each of the four"
        )
    wide = [reshape(t, [channels, *[1] * (len(x.ir.shape) - 2)]) for t in others]
    factor = ["mul", ["rsqrt", ["add", leaf(4), number(float(eps))]], leaf(1)]
    tree = ["add", ["mul", leaf(0), factor], ["sub", leaf(2), ["mul", leaf(3), factor]]]
    return result("batch_norm", [x, *wide], x.ir.shape, dtype, attrs={"expr": tree}, name=name)


def norm_of_batch(x: Tensor, scale: Tensor, shift: Tensor, mean: Tensor, factor: Tensor) -> Tensor:
    """Batch normalisation in training: (x - mean) * factor * scale + shift.

    x: (n, channels, ...). The other tensors have a value for each channel, in dimension 1 of as
    many as x has. mean, factor: the mean and 1 / the standard deviation of each channel of x. No
    gradient passes through these two, because the gradient of x includes it.
    """
    normed = ["mul", ["sub", leaf(0), leaf(3)], leaf(4)]
    tree = ["add", ["mul", normed, leaf(1)], leaf(2)]
    inputs = [x, scale, shift, mean, factor]
    return result("norm_of_batch", inputs, x.ir.shape, x.ir.dtype, attrs={"expr": tree})


def group_norm(
    input: TensorLike,
    groups: int,
    scale: TensorLike | None = None,
    shift: TensorLike | None = None,
    eps: float = 1e-5,
    name: str = "",
) -> Tensor:
    """Normalises each group of channels to mean 0 and variance 1, then scales and shifts channels.

    Wu and He 2018. input: (n, channels, spatial...), fp32, fp16 or bf16; the channels are divided
    into `groups` equal groups. scale, shift: (channels,), by default none. With one group per
    channel this is instance normalisation (Ulyanov et al. 2016). Raises ModelError if `groups` does
    not divide the channels.

    Examples:
        >>> x = torch.arange(8.0).reshape(1, 4, 2)
        >>> ark.group_norm(x, groups=2).eval()
        tensor([[[-1.3416, -0.4472],
                 [ 0.4472,  1.3416],
                 [-1.3416, -0.4472],
                 [ 0.4472,  1.3416]]])
    """
    x = as_tensor(input)
    float_dtype("group_norm", x)
    shape = x.ir.shape
    if len(shape) < 2 or groups < 1 or shape[1] % groups:
        raise ModelError(f"group_norm: {groups} groups do not divide the channels of {list(shape)}")
    rows = reshape(x, [shape[0] * groups, math.prod(shape[1:]) // groups])
    normed = reshape(layernorm(rows, eps, name=name or "group_norm"), shape)
    for given, op in ((scale, mul), (shift, add)):
        if given is not None:
            normed = op(normed, reshape(as_tensor(given), [shape[1], *[1] * (len(shape) - 2)]))
    return normed


def instance_norm(
    input: TensorLike,
    scale: TensorLike | None = None,
    shift: TensorLike | None = None,
    eps: float = 1e-5,
    name: str = "",
) -> Tensor:
    """Instance normalisation: group_norm with one group per channel. Shapes and types as there.

    Examples:
        >>> x = torch.arange(6.0).reshape(1, 2, 3)
        >>> ark.instance_norm(x).eval()
        tensor([[[-1.2247,  0.0000,  1.2247],
                 [-1.2247,  0.0000,  1.2247]]])
    """
    return group_norm(input, as_tensor(input).ir.shape[1], scale, shift, eps, name)


composed("blend")
composed("batch_norm")
composed("norm_of_batch")
