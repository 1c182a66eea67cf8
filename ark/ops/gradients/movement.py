"""The gradient rules of ops that move elements.

The gradient of a result element is added to the gradient of the input element from which it was
copied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ark.frontend.tensor import Tensor
from ark.ir.attributes import (
    AxisAttributes,
    RowsAttributes,
    ScanAttributes,
    ScatterAttributes,
    TransposeAttributes,
)
from ark.ir.dtype import DataType, fp32, int32, int64
from ark.ops.elementwise import add, cast, div, mul, sub, zeros
from ark.ops.gradients.chosen import placed
from ark.ops.gradients.elementwise import computed, unbroadcast
from ark.ops.gradients.table import Call, Gradients, refuse, rule
from ark.ops.logic import less, mod
from ark.ops.lookup import gather, gather_elements, scatter_elements
from ark.ops.movement import rope, transpose
from ark.ops.reductions import reduce_sum
from ark.ops.scans import cumprod, cumsum
from ark.ops.selection import clip, iota, where
from ark.ops.views import reshape
from ark.tasks.expression import Tree, index, leaf, number

MAX_SUMMED_ROWS = 8  # most rows of a table each of which sums its updates among all updates


@rule("reshape")
def _reshape(call: Call) -> Gradients:
    return [reshape(call.gradient(), call.shape(0))]


@rule("transpose")
def _transpose(call: Call) -> Gradients:
    order = TransposeAttributes.from_node(call.attrs).perm
    return [transpose(call.gradient(), [order.index(d) for d in range(len(order))])]


@rule("concat")
def _concat(call: Call) -> Gradients:
    axis, at, gradients = AxisAttributes.from_node(call.attrs).axis, 0, []
    for tensor in call.node.inputs:
        whole = [slice(None)] * len(tensor.shape)
        whole[axis] = slice(at, at + tensor.shape[axis])
        gradients.append(call.gradient()[tuple(whole)])
        at += tensor.shape[axis]
    return gradients


def scattered(
    shape: Sequence[int], ids: Tensor, updates: Tensor, axis: int, dtype: DataType
) -> Tensor:
    """A tensor of zeros to which updates are added at the given indices along an axis. Sums are
    computed in fp32.
    """
    wide = updates if updates.ir.dtype == fp32 else cast(updates, fp32)
    summed = scatter_elements(zeros(shape, fp32), ids, wide, axis, "add")
    return summed if dtype == fp32 else cast(summed, dtype)


@rule("embedding")
def _embedding(call: Call) -> Gradients:
    table = call.node.inputs[1]
    return [None, rows_added(table.shape, call.input(0), call.gradient(), table.dtype)]


def rows_added(shape: Sequence[int], ids: Tensor, updates: Tensor, dtype: DataType) -> Tensor:
    """The gradient of a table whose rows were looked up. ids (...): the numbers of the rows that
    were read. updates (..., dim): the gradients of these rows, which are added. For a table of few
    rows, each row sums its own updates among all, because a scatter would add the updates of a row
    one after another.
    """
    many = ids.ir.elements
    flat = reshape(updates, [many, shape[1]])
    if shape[0] <= MAX_SUMMED_ROWS < many:
        numbers = reshape(ids, [1, many, 1])
        numbers = cast(where(less(numbers, 0), add(numbers, shape[0]), numbers), int32)
        tree = ["where", ["equal", index(-3), leaf(0)], leaf(1), number(0.0)]
        own = computed(tree, [numbers, flat], [shape[0], many, shape[1]], flat.ir.dtype)
        summed = reshape(reduce_sum(own, 1), shape)
        return summed if summed.ir.dtype == dtype else cast(summed, dtype)
    return scattered(shape, reshape(ids, [many, 1]), flat, 0, dtype)


@rule("gather")
def _gather(call: Call) -> Gradients:
    shape, axis, ids = call.shape(0), call.node.read(AxisAttributes).axis, call.input(1)
    outer, inner = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
    many = ids.ir.elements
    flat = reshape(call.gradient(), [outer, many, inner])
    places = reshape(ids, [1, many, 1])
    summed = scattered([outer, shape[axis], inner], places, flat, 1, call.node.inputs[0].dtype)
    return [reshape(summed, shape), None]


@rule("gather_elements")
def _gather_elements(call: Call) -> Gradients:
    source, axis = call.node.inputs[0], call.node.read(AxisAttributes).axis
    given = placed(source.shape, call.input(1), call.gradient(), axis)
    if given is not None:
        return [call.fitted(given, 0), None]
    return [scattered(source.shape, call.input(1), call.gradient(), axis, source.dtype), None]


@rule("scatter_elements")
def _scatter_elements(call: Call) -> Gradients:
    """The gradients of a scatter. Each update gets the gradient of the element to which it was
    written. If several updates have the same target element, each of them gets this gradient, as in
    torch.
    """
    how = call.node.read(ScatterAttributes)
    axis, function = how.axis, how.function
    if function not in ("set", "add"):
        raise refuse(call, f"the inputs of a scatter that reduces by {function!r}")
    given, ids = call.gradient(), call.input(1)
    shape = call.shape(2)
    wide = computed(leaf(0), [ids], shape, ids.ir.dtype) if ids.ir.shape != shape else ids
    before = after = None
    if call.wanted[0]:
        nothing = zeros(shape, given.ir.dtype)
        before = given if function == "add" else scatter_elements(given, ids, nothing, axis)
    if call.wanted[2]:
        box = tuple(slice(None) if d == axis else slice(0, n) for d, n in enumerate(shape))
        after = gather_elements(given[box], wide, axis)
    return [before, None, after]


@rule("scan")
def _scan(call: Call) -> Gradients:
    """The gradient of a running sum or product.

    The gradient of a running sum is the running sum of the result's gradients, from the last
    element to the first.

    The gradient of a running product depends on the first 0 along the axis. For an element before
    this 0, it is the running sum (from the last element) of gradient times result, divided by the
    element. For the 0 itself, it is the sum over all results of the gradient times the running
    product in which the 0 is replaced by 1. For an element after the 0, it is 0.
    """
    how, given = call.node.read(ScanAttributes), call.gradient()
    axis, exclusive, backward = how.axis, how.exclusive, how.reverse
    if how.function == "linear":
        raise refuse(call, "the inputs of a linear recurrence")
    if how.function == "add":
        return [cumsum(given, axis, exclusive, not backward)]
    source = call.input(0)
    shape, dtype = source.ir.shape, source.ir.dtype
    nought: Tree = ["equal", leaf(0), number(0.0)]
    nothing = computed(["cast", "fp32", nought], [source], shape, fp32)
    zeros_so_far = cumsum(nothing, axis, False, backward)
    first: Tree = ["logical_and", nought, ["equal", leaf(1), number(1.0)]]
    others = computed(["where", first, number(1.0), leaf(0)], [source, zeros_so_far], shape, dtype)
    weighted = cumsum(mul(given, call.output()), axis, exclusive, not backward)
    without = cumprod(others, axis, exclusive, backward)
    at_first = cumsum(mul(given, without), axis, exclusive, not backward)
    before: Tree = ["equal", leaf(1), number(0.0)]
    slope: Tree = ["div", leaf(2), ["where", before, leaf(0), number(1.0)]]
    slope = ["where", before, slope, ["where", first, leaf(3), number(0.0)]]
    return [computed(slope, [source, zeros_so_far, weighted, at_first], shape, dtype)]


@rule("rope")
def _rope(call: Call) -> Gradients:
    """The gradients of a product of complex numbers: the given gradient times the conjugate of the
    other operand.
    """
    gradients: list[Tensor | None] = []
    for place in (0, 1):
        tensor = call.node.inputs[place]
        if not call.wanted[place]:
            gradients.append(None)
            continue
        odd = ["equal", ["mod", index(-1), number(2)], number(1)]
        negated: Tree = ["where", odd, ["neg", leaf(0)], leaf(0)]
        other = call.input(1 - place)
        conjugate = computed(negated, [other], other.ir.shape, other.ir.dtype)
        gradients.append(unbroadcast(rope(call.gradient(), conjugate), tensor.shape, tensor.dtype))
    return gradients


@rule("topk")
def _topk(call: Call) -> Gradients:
    source = call.node.inputs[0]
    return [scattered(source.shape, call.output(1), call.gradient(0), 1, source.dtype)]


def places_of(count: int, start: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """The indices start, start + 1, ..., and a mask of those that are below a limit.

    The indices are (count,) int64; those beyond the limit are clamped to the last valid one. The
    mask (fp32) is 1 below the limit, otherwise 0.
    """
    at = add(iota([count], 0, int64), cast(start, int64))
    within: Tree = [
        "cast",
        "fp32",
        ["logical_and", ["less", leaf(0), number(limit)], ["greater_equal", leaf(0), number(0)]],
    ]
    return clip(at, 0, limit - 1), computed(within, [at], [count], fp32)


@rule("embed")
def _embed(call: Call) -> Gradients:
    """The gradient of an embedding's table. For result rows beyond the end of the text, the op
    copies row 0 of the table. So the gradients of these result rows are added to the gradient of
    row 0.
    """
    table, rows, text = call.node.inputs[1], call.node.read(RowsAttributes).rows, call.input(0)
    at, within = places_of(rows, call.input(2), text.ir.shape[0])
    ids = gather(text, at)
    chosen = computed(
        ["cast", "int32", ["mul", ["cast", "fp32", leaf(0)], leaf(1)]],
        [ids, within],
        [rows],
        ids.ir.dtype,
    )
    return [None, rows_added(table.shape, chosen, call.gradient(), table.dtype), None]


@rule("kv_append")
def _kv_append(call: Call) -> Gradients:
    rows, heads, context, width = call.shape(0)[0], *call.shape(2)
    given, position = call.gradient(), call.input(1)
    fresh = before = None
    if call.wanted[0]:
        at, within = places_of(rows, position, context)
        taken = mul(cast(gather(given, at, 1), fp32), reshape(within, [rows, 1]))
        fresh = reshape(transpose(taken, [1, 0, 2]), [rows, heads * width])
        fresh = call.fitted(fresh, 0)
    if call.wanted[2]:
        age = ["sub", index(-2), leaf(1)]
        new = ["logical_and", ["greater_equal", age, number(0)], ["less", age, number(rows)]]
        tree: Tree = ["where", new, number(0.0), leaf(0)]
        before = computed(tree, [given, position], given.ir.shape, given.ir.dtype)
    return [fresh, None, before]


@rule("kv_cache_slot")
def _kv_cache_slot(call: Call) -> Gradients:
    shape, position = call.shape(2), call.input(1)
    token = before = None
    if call.wanted[0]:
        token = call.gradient(1)
        if call.given[0] is not None:
            at, within = places_of(1, position, shape[0])
            slot = reshape(gather(call.gradient(0), at), shape[1:])
            token = add(token, mul(slot, call.fitted(within, 0)))
    if call.wanted[2] and call.given[0] is not None:
        given = call.gradient(0)
        new = ["equal", index(-len(shape)), leaf(1)]
        tree: Tree = ["where", new, number(0.0), leaf(0)]
        before = computed(tree, [given, position], shape, given.ir.dtype)
    return [token, None, before]


def along(rule_of_axis: Sequence[Any], size: int, limit: int) -> tuple[Tensor, Tensor]:
    """For each element along an axis of a remap's result: the index of the source element, as an
    int64 tensor (size,), and a mask that is 1 if this index is valid.
    """
    terms, shift, divide, edge = rule_of_axis
    factor = terms[0][1] if terms else 0
    at = add(mul(iota([size], 0, int64), factor), shift)
    rest = mod(at, divide)
    at = div(sub(at, rest), divide)
    inside: Tree = ["greater_equal", leaf(0), number(0)]
    inside = ["logical_and", inside, ["less", leaf(0), number(limit)]]
    if edge == "exact":
        inside = ["logical_and", inside, ["equal", leaf(1), number(0)]]
    if edge not in ("fill", "exact"):
        inside = ["less_equal", number(0), number(0)]
    within = computed(["cast", "fp32", inside], [at, rest], [size], fp32)
    if edge == "wrap":
        at = mod(at, limit)
    elif edge == "reflect":
        wrapped = mod(add(at, limit - 1), max(1, 2 * limit - 2))
        at = computed(["abs", ["sub", leaf(0), number(limit - 1)]], [wrapped], [size], int64)
    return clip(at, 0, limit - 1), within
