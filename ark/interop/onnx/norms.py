"""Converts ONNX's normalisation operators."""

from __future__ import annotations

import math
from typing import Any

import ark
from ark.interop.onnx.values import Call, Value, axis_of, in_fp32, operator, refuse, shaped


@operator("BatchNormalization")
def _batch_norm(call: Call) -> Value:
    if call.attribute("training_mode", 0) or len(call.outputs) > 1:
        raise refuse("BatchNormalization in training")
    if len({call.dtype(i) for i in range(5)}) > 1:
        raise refuse("BatchNormalization with statistics of another type")
    x, scale, shift, mean, variance = (call.tensor(i) for i in range(5))
    eps = call.attribute("epsilon", 1e-5)
    return shaped(ark.batch_norm(x, scale, shift, mean, variance, eps), call.shape(0))


@operator("InstanceNormalization")
def _instance_norm(call: Call) -> Value:
    x, scale, shift = (call.tensor(i) for i in range(3))
    return shaped(
        ark.instance_norm(x, scale, shift, call.attribute("epsilon", 1e-5)), call.shape(0)
    )


@operator("GroupNormalization")
def _group_norm(call: Call) -> Value:
    """Converts GroupNormalization with a scale and a shift for each channel, as opset 21 defines
    it. Earlier opsets are not supported.
    """
    if call.version < 21:
        raise refuse("GroupNormalization before opset 21")
    groups, eps = call.attribute("num_groups"), call.attribute("epsilon", 1e-5)
    made_of = ark.group_norm(call.tensor(0), groups, call.tensor(1), call.tensor(2), eps)
    return shaped(made_of, call.shape(0))


def _row(call: Call, axis: int) -> Any:
    """The first input as a matrix: the dimensions before `axis` are joined to the dimension of
    rows, and the dimensions from `axis` on to the dimension of columns.
    """
    shape = call.shape(0)
    return ark.reshape(call.tensor(0), [math.prod(shape[:axis]), math.prod(shape[axis:])])


@operator("LayerNormalization")
def _layer_norm(call: Call) -> list[Value]:
    shape, eps = call.shape(0), call.attribute("epsilon", 1e-5)
    axis = axis_of(call.attribute("axis", -1), len(shape))
    rows = _row(call, axis)
    tensor = ark.reshape(ark.layernorm(rows, eps), list(shape))
    tensor = ark.mul(tensor, call.tensor(1))
    tensor = ark.add(tensor, call.tensor(2)) if call.has(2) else tensor
    results = [shaped(tensor, shape)]
    if len(call.outputs) > 1:
        few = (*shape[:axis], *[1] * (len(shape) - axis))
        rows = ark.cast(rows, ark.fp32)  # mean and deviation are fp32 for every input type
        mean = ark.reduce_mean(rows, 1)
        away = ark.sub(rows, mean)
        spread = ark.reduce_mean(ark.mul(away, away), 1)
        results += [shaped(mean, few), shaped(ark.rsqrt(ark.add(spread, eps)), few)]
    return results[: len(call.outputs)]


@operator("LpNormalization")
def _lp_norm(call: Call) -> Value:
    shape, p = call.shape(0), call.attribute("p", 2)
    axis = axis_of(call.attribute("axis", -1), len(shape))

    def normed(x: Any) -> Any:
        powers = ark.abs(x) if p == 1 else ark.mul(x, x)
        size = ark.reduce_sum(powers, [axis])
        size = size if p == 1 else ark.sqrt(size)
        return ark.div(x, ark.where(ark.equal(size, 0.0), 1.0, size))

    return shaped(in_fp32(normed, call.tensor(0)), shape)


@operator("LRN")
def _lrn(call: Call) -> Value:
    """Converts LRN (local response normalisation). The sum of squares over neighbouring channels is
    computed as an average pool along the channels.
    """
    shape, size = call.shape(0), call.attribute("size")
    alpha, beta = call.attribute("alpha", 1e-4), call.attribute("beta", 0.75)
    before = (size - 1) // 2

    def normed(x: Any) -> Any:
        squares = ark.reshape(ark.mul(x, x), [shape[0], shape[1], math.prod(shape[2:])])
        padded = ark.pad(squares, [(0, 0), (before, size - 1 - before), (0, 0)])
        rows = ark.transpose(padded, [0, 2, 1])
        sums = ark.mul(ark.avg_pool(rows, [size], [1]), float(size))
        sums = ark.reshape(ark.transpose(sums, [0, 2, 1]), list(shape))
        scale = ark.add(ark.mul(sums, alpha / size), call.attribute("bias", 1.0))
        return ark.div(x, ark.pow(scale, beta))

    return shaped(in_fp32(normed, call.tensor(0)), shape)


@operator("NegativeLogLikelihoodLoss")
def _nll_loss(call: Call) -> Value:
    """Converts NegativeLogLikelihoodLoss: the loss of an element is -x[n, target, ...] times the
    weight of the target's class. Elements with the target ignore_index contribute nothing.
    """
    shape, target = call.shape(0), call.tensor(1)
    x, ignored = call.tensor(0), call.attribute("ignore_index")
    places = target if ignored is None else ark.where(ark.equal(target, ignored), 0, target)
    wide = ark.reshape(places, [shape[0], 1, *shape[2:]])
    lost = ark.neg(ark.reshape(ark.gather_elements(x, wide, 1), list(call.shape(1))))
    weight = ark.gather(call.tensor(2), places, 0) if call.has(2) else None
    if ignored is not None:
        one = ark.constant(1.0, list(call.shape(1)), x.ir.dtype) if weight is None else weight
        weight = ark.where(ark.equal(target, ignored), 0.0, one)
    lost = lost if weight is None else ark.mul(lost, weight)
    how = call.attribute("reduction", "mean")
    if how == "none":
        return shaped(lost, call.shape(1))
    every = list(range(len(call.shape(1))))
    total = ark.reduce_sum(lost, every)
    if how == "mean" and weight is None:
        total = ark.div(total, float(math.prod(call.shape(1))))
    elif how == "mean" and weight is not None:
        total = ark.div(total, ark.reduce_sum(weight, every))
    return shaped(total, ())
