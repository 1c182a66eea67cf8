"""ATen operators that reduce dimensions, scan along an axis, or normalise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import ark
from ark.interop.torch.values import Call, Value, axes_of, axis_of, cast, operator, refuse
from ark.ops.gradients.products import wide
from ark.ops.images import norm_of_batch
from ark.ops.reductions import squared_differences
from ark.ops.scans import recurrence, sums_from

MAX_SORTED_ELEMENTS = 8192  # a longer row is not sorted as a whole
# The smallest k of a topk for which a long row is divided into parts that are sorted separately.
# For a smaller k, the k elements are found one after another in the whole row.
MIN_SORTED_RESULTS = 5
MAX_ROW_PARTS = 1024  # limit of the parts of all rows together
MIN_SPLIT_ROW_ELEMENTS = 1 << 19  # smaller inputs (all rows together) are not divided
MAX_PARTS, MIN_PARTS_PER_ROW = 512, 8  # most parts of all rows together, fewest parts of one row


def _reduced(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(call: Call, x: Value, dims: Any = None, keepdim: bool = False, **_: Any) -> Any:
        return function(cast(x, call.dtype), axes_of(dims, len(x.shape)))

    return run


operator("sum.default", "sum.dim_IntList")(_reduced(ark.reduce_sum))
operator("mean.default", "mean.dim")(_reduced(ark.reduce_mean))
operator("amax.default", "max.default")(_reduced(ark.reduce_max))
operator("amin.default", "min.default")(_reduced(ark.reduce_min))
operator("prod.default", "prod.dim_int")(_reduced(ark.reduce_prod))


@operator("any.default", "any.dim", "any.dims")
def _any(call: Call, x: Value, dims: Any = None, keepdim: bool = False) -> Any:
    flags = ark.cast(cast(x, ark.bool), ark.uint8)
    return ark.cast(ark.reduce_max(flags, axes_of(dims, len(x.shape))), ark.bool)


@operator("all.default", "all.dim", "all.dims")
def _all(call: Call, x: Value, dims: Any = None, keepdim: bool = False) -> Any:
    flags = ark.cast(cast(x, ark.bool), ark.uint8)
    return ark.cast(ark.reduce_min(flags, axes_of(dims, len(x.shape))), ark.bool)


def _extreme(reduce: Callable[..., Any], place: Callable[..., Any]) -> Callable[..., Any]:
    def run(call: Call, x: Value, dim: int, keepdim: bool = False) -> list[Any]:
        axis = axis_of(dim, len(x.shape))
        values = reduce(x.tensor, axis) if call.wants(0) else None
        return [values, place(x.tensor, axis=axis, dtype=ark.int64) if call.wants(1) else None]

    return run


operator("max.dim")(_extreme(ark.reduce_max, ark.argmax))
operator("min.dim")(_extreme(ark.reduce_min, ark.argmin))


def _arg(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(call: Call, x: Value, dim: int | None = None, keepdim: bool = False) -> Any:
        tensor = x.tensor
        if dim is None:
            tensor = ark.reshape(tensor, [math.prod(x.shape)])
        return function(tensor, axis=axis_of(dim or 0, len(tensor.ir.shape)), dtype=ark.int64)

    return run


operator("argmax.default")(_arg(ark.argmax))
operator("argmin.default")(_arg(ark.argmin))


def _centred(tensor: ark.Tensor, axes: int | Sequence[int]) -> tuple[ark.Tensor, ark.Tensor]:
    """Returns (tensor - mean, mean) over axes, in fp32. The tensor is cast twice, so that each cast
    is fused with its reader and no fp32 copy is written.
    """
    mean = ark.reduce_mean(wide(tensor), axes)
    return ark.sub(wide(tensor), mean), mean


def _moments(x: Value, axes: Sequence[int], correction: Any) -> tuple[Any, Any]:
    """Returns (variance, mean) over axes, which remain as dimensions of size 1. Both are computed
    in fp32, as in torch, because squares overflow fp16.
    """
    count = math.prod(x.tensor.ir.shape[a] for a in axes)
    centred, mean = _centred(x.tensor, axes)
    less = 1 if correction is None else correction
    if count - less <= 0:
        raise refuse(f"a variance of {count} elements with a correction of {less}")
    return ark.mul(ark.reduce_sum(ark.mul(centred, centred), axes), 1.0 / (count - less)), mean


def _variance(x: Value, axes: Sequence[int], correction: Any) -> Any:
    """The variance over axes. If the axes are adjacent, the elements are read once; otherwise the
    variance of _moments is returned.
    """
    less = 1 if correction is None else correction
    count = math.prod(x.tensor.ir.shape[a] for a in axes)
    squares = squared_differences(wide(x.tensor), axes) if count > less else None
    if squares is None:
        return _moments(x, axes, correction)[0]
    return ark.mul(squares, 1.0 / (count - less))


@operator("var.correction", "var.dim", "var.default")
def _var(
    call: Call, x: Value, dims: Any = None, *, correction: Any = None, keepdim: bool = False
) -> Any:
    return _variance(x, axes_of(dims, len(x.shape)), correction)


@operator("std.correction")
def _std(
    call: Call, x: Value, dims: Any = None, *, correction: Any = None, keepdim: bool = False
) -> Any:
    return ark.sqrt(_variance(x, axes_of(dims, len(x.shape)), correction))


@operator("var_mean.correction")
def _var_mean(
    call: Call, x: Value, dims: Any = None, *, correction: Any = None, keepdim: bool = False
) -> list[Any]:
    return list(_moments(x, axes_of(dims, len(x.shape)), correction))


@operator("cumsum.default")
def _cumsum(call: Call, x: Value, dim: int, **_: Any) -> Any:
    tensor, axis = cast(x, call.dtype), axis_of(dim, len(x.shape))
    shape = tensor.ir.shape
    n, total = shape[axis], math.prod(shape)
    most = MAX_PARTS * n // total
    parts = next((p for p in range(most, most // 2, -1) if n % p == 0), 1)
    if (
        axis != len(shape) - 1
        or total < MIN_SPLIT_ROW_ELEMENTS
        or most < MIN_PARTS_PER_ROW
        or parts == 1
    ):
        return ark.cumsum(tensor, axis)
    # If a scan has few long rows, each row is divided into parts that are scanned in parallel. The
    # scan of a part begins with the total of the parts before it.
    narrow = call.dtype in (ark.fp16, ark.bf16)
    cut = ark.reshape(tensor, [total // n, parts, n // parts])
    totals = ark.reduce_sum(ark.cast(cut, ark.fp32) if narrow else cut, 2)
    sums = sums_from(cut, 2, ark.cumsum(totals, 1, exclusive=True))
    return ark.reshape(sums, list(shape))


@operator("cumprod.default")
def _cumprod(call: Call, x: Value, dim: int, **_: Any) -> Any:
    return ark.cumprod(cast(x, call.dtype), axis_of(dim, len(x.shape)))


@operator("ark.recurrence.default")
def _recurrence(call: Call, factors: Value, terms: Value, dim: int) -> Any:
    axis = axis_of(dim, len(terms.shape))
    return recurrence(cast(factors, call.dtype), cast(terms, call.dtype), axis)


def _largest(rows: ark.Tensor, k: int, placed: bool, largest: bool) -> tuple[Any, Any]:
    """ark.topk of rows. If there are few long rows, they are first divided into parts, so that all
    processors have work. placed: True if the indices of the elements are needed too.
    """
    many, n = rows.shape()
    parts = -(-n // MAX_SORTED_ELEMENTS)
    parts = next((p for p in range(parts, 4 * parts) if n % p == 0 and k <= n // p), 1)
    if parts == 1 or many * parts > MAX_ROW_PARTS or k < MIN_SORTED_RESULTS:
        return ark.topk(rows, k, largest=largest)
    first, inside = ark.topk(ark.reshape(rows, [many * parts, n // parts]), k, largest=largest)
    values, among = ark.topk(ark.reshape(first, [many, parts * k]), k, largest=largest)
    if not placed:
        return values, None
    begins = ark.mul(ark.iota([1, parts, 1], 1, ark.int32), n // parts)
    places = ark.add(ark.reshape(inside, [many, parts, k]), begins)
    return values, ark.gather_elements(ark.reshape(places, [many, parts * k]), among, 1)


@operator("topk.default")
def _topk(
    call: Call, x: Value, k: int, dim: int = -1, largest: bool = True, ordered: bool = True
) -> list[Any]:
    axis = axis_of(dim, len(x.shape))
    if axis != max(len(x.shape), 1) - 1 or not x.dtype.is_floating_point:
        raise refuse("topk of another dimension than the last, or of integers")
    rows = ark.reshape(x.tensor, [-1, x.tensor.ir.shape[-1]])
    values, places = _largest(rows, k, call.wants(1), largest)
    return [
        values if call.wants(0) else None,
        ark.cast(places, ark.int64) if call.wants(1) else None,
    ]


def _scaled(tensor: Any, weight: Value | None, bias: Value | None, shape: Sequence[int]) -> Any:
    """tensor * weight + bias. weight and bias are first reshaped to `shape`, which broadcasts to
    that of the tensor.
    """
    dtype = tensor.ir.dtype
    if weight is not None:
        tensor = ark.mul(tensor, ark.reshape(cast(weight, dtype), list(shape)))
    return tensor if bias is None else ark.add(tensor, ark.reshape(cast(bias, dtype), list(shape)))


def _in_one_type(x: Value, *others: Value | None) -> Any:
    """The tensor of x, cast to fp32 if one of `others` has another type than x. (With autocast, the
    parameters of 16-bit norms are in fp32.)
    """
    mixed = any(v is not None and v.dtype != x.dtype for v in others)
    return cast(x, ark.fp32) if mixed else x.tensor


@operator("native_layer_norm.default")
def _layer_norm(
    call: Call, x: Value, sizes: Sequence[int], weight: Value | None, bias: Value | None, eps: float
) -> list[Any]:
    if eps < 0:
        raise refuse(f"a norm with eps {eps}")
    columns = math.prod(sizes)
    rows = ark.reshape(_in_one_type(x, weight, bias), [-1, columns])
    out = _scaled(ark.layernorm(rows, eps), weight, bias, [1, columns])
    mean = scale = None
    if call.wants(1) or call.wants(2):
        centred, mean = _centred(ark.reshape(x.tensor, [-1, columns]), 1)
        scale = ark.rsqrt(ark.add(ark.reduce_mean(ark.mul(centred, centred), 1), eps))
    return [out, mean, scale]


@operator("_fused_rms_norm.default")
def _rms_norm(
    call: Call, x: Value, sizes: Sequence[int], weight: Value | None, eps: float | None
) -> list[Any]:
    columns = math.prod(sizes)
    eps = 1.1920928955078125e-07 if eps is None else eps
    if not call.wants(1):
        rows = ark.reshape(_in_one_type(x, weight), [-1, columns])
        by = ark.ones([columns]) if weight is None else ark.reshape(weight.tensor, [columns])
        return [ark.rmsnorm(rows, by, eps), None]
    rows = ark.reshape(x.tensor, [-1, columns])
    squares = ark.mul(wide(rows), wide(rows))
    scale = ark.rsqrt(ark.add(ark.reduce_mean(squares, 1), eps))
    return [_scaled(ark.mul(wide(rows), scale), weight, None, [1, columns]), scale]


@operator("native_group_norm.default")
def _group_norm(
    call: Call,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    n: int,
    channels: int,
    places: int,
    groups: int,
    eps: float,
) -> list[Any]:
    if call.wants(1) or call.wants(2) or eps < 0:
        raise refuse("a group norm that returns statistics, or that has a negative eps,")
    tensor = _in_one_type(x, weight, bias)
    scale, shift = (None if v is None else cast(v, tensor.ir.dtype) for v in (weight, bias))
    return [ark.group_norm(tensor, groups, scale, shift, eps), None, None]


@operator("_native_batch_norm_legit_no_training.default")
def _batch_norm(
    call: Call,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value,
    variance: Value,
    momentum: float,
    eps: float,
) -> list[Any]:
    shape = [x.shape[1]]
    ones = ark.ones(shape, call.dtype) if weight is None else weight.tensor
    zeros = ark.zeros(shape, call.dtype) if bias is None else bias.tensor
    middle, spread = (cast(v, call.dtype) for v in (mean, variance))
    return [ark.batch_norm(x.tensor, ones, zeros, middle, spread, eps), None, None]


def _moments_of_channels(x: Value) -> tuple[Any, Any]:
    """Variances and means of the channels of images, with the same result as _moments. Both are
    first computed for each image and then combined over images, so that the large reductions do not
    depend on each other.
    """
    images, channels, *places = x.shape
    axes = [d for d in range(len(x.shape)) if d != 1]
    each = math.prod(places)
    rows = ark.reshape(x.tensor, [images, channels, each])
    squares = squared_differences(wide(rows), [2])
    if squares is None:
        return _moments(x, axes, 0)
    means = ark.reduce_mean(wide(rows), 2)
    mean = ark.reduce_mean(means, 0)
    apart = ark.sub(means, mean)
    total = ark.reduce_sum(ark.add(squares, ark.mul(ark.mul(apart, apart), float(each))), 0)
    kept = [channels if d == 1 else 1 for d in range(len(x.shape))]
    return (ark.reshape(ark.mul(total, 1.0 / (images * each)), kept), ark.reshape(mean, kept))


@operator("_native_batch_norm_legit.no_stats")
def _norm_of_batch(
    call: Call,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    training: bool,
    momentum: float,
    eps: float,
) -> list[Any]:
    """Normalises channels over the batch. For a single image it normalises over the positions, as
    instance_norm does.
    """
    if call.wants(1) or call.wants(2):
        raise refuse("a batch norm that returns statistics")
    shape = list(x.shape)
    if shape[0] == 1:
        scale, shift = (None if v is None else v.tensor for v in (weight, bias))
        return [ark.instance_norm(x.tensor, scale, shift, eps), None, None]
    variance, mean = _moments_of_channels(x)
    factor = ark.rsqrt(ark.add(variance, eps))
    normed = ark.mul(ark.sub(cast(x, ark.fp32), mean), factor)
    return [_scaled(normed, weight, bias, [-1, *[1] * (len(shape) - 2)]), None, None]


@operator("_native_batch_norm_legit_functional.default")
def _norm_in_training(
    call: Call,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value,
    variance: Value,
    training: bool,
    momentum: float,
    eps: float,
) -> list[Any]:
    """A batch norm that also returns the new running statistics. Their variance is that of the
    whole population, which is estimated from the batch (Bessel's correction).
    """
    if not training:
        results = _batch_norm(call, x, weight, bias, mean, variance, momentum, eps)
        return [*results, mean.tensor, variance.tensor]
    if call.wants(1) or call.wants(2):
        raise refuse("a batch norm that returns statistics")
    shape = [1, x.shape[1], *[1] * (len(x.shape) - 2)]
    spread, middle = _moments(x, [d for d in range(len(x.shape)) if d != 1], 0)
    ones = ark.ones(shape) if weight is None else ark.reshape(wide(weight.tensor), shape)
    zeros = ark.zeros(shape) if bias is None else ark.reshape(wide(bias.tensor), shape)
    factor = ark.rsqrt(ark.add(spread, eps))
    normed = norm_of_batch(wide(x.tensor), ones, zeros, middle, factor)
    count = math.prod(x.shape) // x.shape[1]
    batch = [middle, ark.mul(spread, count / max(1, count - 1))]
    averages = [
        ark.add(ark.mul(wide(old.tensor), 1.0 - momentum), ark.mul(new, float(momentum)))
        for old, new in zip((mean, variance), (ark.reshape(t, [-1]) for t in batch), strict=True)
    ]
    return [normed, None, None, *averages]


@operator("native_batch_norm.default")
def _native_batch_norm(
    call: Call,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value | None,
    variance: Value | None,
    training: bool,
    momentum: float,
    eps: float,
) -> list[Any]:
    if training or mean is None or variance is None:
        raise refuse("a batch norm in training")
    return _batch_norm(call, x, weight, bias, mean, variance, momentum, eps)
