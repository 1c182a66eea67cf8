"""The gradient rules of reductions and of norms over rows."""

from __future__ import annotations

import math

from ark.frontend.tensor import Tensor
from ark.ir.attributes import NormAttributes, ReduceAttributes
from ark.ir.dtype import fp32
from ark.ops.activations import exp, rsqrt
from ark.ops.elementwise import add, cast, div, mul, sub
from ark.ops.gradients.chosen import row_sums
from ark.ops.gradients.elementwise import computed
from ark.ops.gradients.products import wide
from ark.ops.gradients.table import Call, Gradients, constant, rule
from ark.ops.indexing import expand
from ark.ops.logic import equal
from ark.ops.reductions import reduce_mean, reduce_sum
from ark.ops.scans import cumprod
from ark.ops.views import reshape
from ark.tasks.expression import Tree, leaf

constant("argmax", "sample", "sample_adjusted", "sample_each", "advance", "noop")


def _axis(call: Call) -> int:
    return ReduceAttributes.from_node(call.attrs).axis


def _kept(call: Call, tensor: Tensor) -> Tensor:
    """The result of a reduction (or its gradient), reshaped to have size 1 at the reduced axis."""
    shape = list(call.shape(0))
    shape[_axis(call)] = 1
    return reshape(tensor, shape)


def _as(tensor: Tensor, other: Tensor) -> Tensor:
    """The tensor, cast to the type of `other`. This is needed because a reduction's result may have
    a wider type than its input.
    """
    return tensor if tensor.ir.dtype == other.ir.dtype else cast(tensor, other.ir.dtype)


@rule("reduce_sum")
def _sum(call: Call) -> Gradients:
    return [call.fitted(expand(_kept(call, call.gradient()), call.shape(0)), 0)]


@rule("reduce_mean")
def _mean(call: Call) -> Gradients:
    share = mul(_kept(call, call.gradient()), 1.0 / call.shape(0)[_axis(call)])
    return [call.fitted(expand(share, call.shape(0)), 0)]


@rule("reduce_max", "reduce_min")
def _extreme(call: Call) -> Gradients:
    """The gradient of a reduction by maximum or minimum. If several elements equal the result, the
    result's gradient is divided equally among them, as in torch.amax.
    """
    extreme = call.output()
    source = _as(call.input(0), extreme)
    hits = cast(equal(source, _kept(call, extreme)), extreme.ir.dtype)
    share = div(_kept(call, call.gradient()), reduce_sum(hits, _axis(call)))
    return [call.fitted(mul(hits, share), 0)]


@rule("reduce_prod")
def _product(call: Call) -> Gradients:
    """The gradient of a product over an axis. The gradient of an element is that of the result
    times the product of all other elements, which is computed as the product of the elements before
    it times the product of the elements after it.
    """
    source, axis = _as(call.input(0), call.output()), _axis(call)
    before = cumprod(source, axis, exclusive=True)
    behind = cumprod(source, axis, exclusive=True, reverse=True)
    return [call.fitted(mul(mul(before, behind), _kept(call, call.gradient())), 0)]


@rule("reduce_squares")
def _squares(call: Call) -> Gradients:
    """The gradient of a sum of squared differences from the mean. The mean also depends on the
    input, but the derivative through the mean is zero, so no term is added for it.
    """
    source = _as(call.input(0), call.output())
    centred = sub(source, reduce_mean(source, _axis(call)))
    return [call.fitted(mul(mul(centred, 2.0), _kept(call, call.gradient())), 0)]


@rule("softmax", "safe_softmax")
def _softmax(call: Call) -> Gradients:
    """The gradient of a softmax, computed by two ops. Both read the result and the gradient in
    their own types and cast them to fp32 themselves. A separate cast would be read by both ops, and
    so it would be stored in memory.
    """
    given, shape = [call.output(), call.gradient()], call.shape(0)
    result, gradient = (
        leaf(i) if t.ir.dtype == fp32 else ["cast", "fp32", leaf(i)] for i, t in enumerate(given)
    )
    sums = reduce_sum(computed(["mul", result, gradient], given, shape, fp32), -1)
    tree = ["mul", result, ["sub", gradient, leaf(2)]]
    return [call.fitted(computed(tree, [*given, sums], shape, fp32), 0)]


@rule("log_softmax")
def _log_softmax(call: Call) -> Gradients:
    result, given = wide(call.output()), wide(call.gradient())
    return [call.fitted(sub(given, mul(exp(result), row_sums(given))), 0)]


@rule("layernorm")
def _layernorm(call: Call) -> Gradients:
    """The gradient of a layer norm, computed from the input alone: its result need not be read."""
    source, given = wide(call.input(0)), wide(call.gradient())
    centred = sub(source, reduce_mean(source, -1))
    variance = reduce_mean(mul(centred, centred), -1)
    scale = rsqrt(add(variance, NormAttributes.from_node(call.attrs).eps))
    share = mul(reduce_mean(mul(given, centred), -1), mul(scale, scale))
    back = mul(scale, sub(sub(given, reduce_mean(given, -1)), mul(centred, share)))
    return [call.fitted(back, 0)]


@rule("rmsnorm")
def _rmsnorm(call: Call) -> Gradients:
    source, weight, given = (wide(t) for t in (call.input(0), call.input(1), call.gradient()))
    scale = rsqrt(
        add(reduce_mean(mul(source, source), -1), NormAttributes.from_node(call.attrs).eps)
    )
    normed = mul(source, scale)
    back = slope = None
    if call.wanted[0]:
        weighted = mul(given, weight)
        along = mul(normed, reduce_mean(mul(weighted, normed), -1))
        back = call.fitted(mul(scale, sub(weighted, along)), 0)
    if call.wanted[1]:
        rows = list(range(len(call.shape(0)) - 1))
        total = reduce_sum(mul(given, normed), rows) if rows else mul(given, normed)
        slope = call.fitted(reshape(total, call.shape(1)), 1)
    return [back, slope]


@rule("norm_of_batch")
def _norm_of_batch(call: Call) -> Gradients:
    """The gradients of batch normalisation (Ioffe and Szegedy 2015). The gradient of the input
    depends on the gradient of the result by two sums for each channel, which are also the gradients
    of the shift and of the scale.
    """
    x, scale, _, mean, factor = (call.input(i) for i in range(5))
    given, shape = call.gradient(), call.shape(0)
    rows = [*shape[:2], math.prod(shape[2:])]
    apart = reshape(sub(x, mean), rows)
    flat = reshape(given, rows)
    kept = [1, shape[1], *[1] * (len(shape) - 2)]
    count = shape[0] * rows[2]

    def total(terms: Tensor) -> Tensor:
        return reshape(reduce_sum(reduce_sum(terms, 2), 0), kept)

    shifts = total(flat)
    slopes = mul(total(mul(flat, apart)), factor)
    back = None
    if call.wanted[0]:
        first = mul(factor, scale)
        along = mul(mul(first, mul(factor, slopes)), 1.0 / count)
        less = mul(mul(first, shifts), 1.0 / count)
        tree: Tree = [
            "sub",
            ["mul", leaf(0), leaf(2)],
            ["add", ["mul", ["sub", leaf(1), leaf(3)], leaf(4)], leaf(5)],
        ]
        back = computed(tree, [given, x, first, mean, along, less], shape, x.ir.dtype)
    sides = [
        reshape(total, call.shape(i)) if call.wanted[i] else None
        for i, total in ((1, slopes), (2, shifts))
    ]
    return [back, *sides, None, None]
