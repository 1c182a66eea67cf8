"""The gradient rules of index arithmetic (pads, steps, windows of convolutions) and of pooling.

A remap copies the element at source index f(i) to result index i. Its gradient is computed by
another remap, which inverts f, followed by a sum over the result dimensions on which f does not
depend. If an edge mode repeats elements of the source, f has no inverse. Gradients are then added
along the axis by a scatter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from msgspec import structs

from ark.frontend.tensor import Tensor
from ark.ir.attributes import (
    PoolAttributes,
    RemapAttributes,
    WindowAttributes,
)
from ark.ir.pool_attributes import UnpoolAttributes
from ark.ops.base import result
from ark.ops.elementwise import cast, div, mul, ones
from ark.ops.gradients.elementwise import computed
from ark.ops.gradients.movement import along, scattered
from ark.ops.gradients.table import Call, Gradients, refuse, rule
from ark.ops.indexing import Rule, remap, same
from ark.ops.logic import equal
from ark.ops.pools import unpool
from ark.ops.reductions import reduce_sum
from ark.ops.scans import cumsum
from ark.ops.views import reshape
from ark.tasks.expression import index, leaf, number


@rule("remap")
def _remap(call: Call) -> Gradients:
    rules, shape = RemapAttributes.from_node(call.attrs).rules, call.shape(0)
    given = call.gradient()
    if all(r[3] == "exact" or (r[3] == "fill" and r[2] == 1 and r[0]) for r in rules):
        return [undone(given, rules, given.ir.shape, shape)]
    for d, one in enumerate(rules):
        if len(one[0]) > 1 or (one[0] and one[0][0][0] != d) or len(rules) != len(given.ir.shape):
            raise refuse(call, "an input that is read by this index arithmetic")
        if one != same(d):
            given = _along_axis(given, d, one, shape[d])
    return [given]


def _along_axis(given: Tensor, axis: int, one: Rule, size: int) -> Tensor:
    """The gradient of a remap along one axis: for each source element, the sum of the gradients of
    all result elements that are copies of it.
    """
    dims = given.ir.shape
    at, within = along(one, dims[axis], size)
    wide = [dims[axis] if d == axis else 1 for d in range(len(dims))]
    weighted = mul(given, cast(reshape(within, wide), given.ir.dtype))
    shape = [size if d == axis else n for d, n in enumerate(dims)]
    return scattered(shape, reshape(at, wide), weighted, axis, given.ir.dtype)


def undone(
    given: Tensor, rules: Sequence[Rule], spread: Sequence[int], shape: Sequence[int]
) -> Tensor:
    """The gradient of a remap's input, of shape `shape`, from the gradient `given` of its output.
    Only for remaps without an edge mode that repeats elements.

    spread: the shape of the remap's output. In a dimension along which the gradient is constant,
        `given` may have size 1.
    """
    rank = len(shape)
    inverse: dict[int, Rule] = {}
    free: list[int] = []  # output dimensions to sum over
    for source, (terms, shift, divide, _) in enumerate(rules):
        radix = _radix(terms, shift, divide, spread, shape[source])
        if radix is not None:
            high, low, size = radix
            inverse[high] = [[[source, 1]], 0, size, "fill"]
            inverse[low] = [[[source, 1]], 0, 1, "wrap"]
            continue
        chosen = max(terms, key=lambda t: (given.ir.shape[t[0]] == spread[t[0]], spread[t[0]]))
        free += [d for d, _ in terms if d != chosen[0]]
        sign = 1 if chosen[1] > 0 else -1
        others = [[d, -sign * f] for d, f in terms if d != chosen[0]]
        inverse[chosen[0]] = [
            [[source, sign * divide], *others],
            -sign * shift,
            abs(chosen[1]),
            "exact",
        ]
    free += [d for d in range(len(spread)) if d not in inverse and d not in free]
    place = {d: rank + at for at, d in enumerate(free)}
    adjoint_rules: list[Rule] = []
    for d, n in enumerate(spread):
        if given.ir.shape[d] != n:
            adjoint_rules.append([[], 0, 1, "fill"])
        elif d in place:
            adjoint_rules.append(same(place[d]))
        else:
            terms, shift, divide, edge = inverse[d]
            moved = [[t if at == 0 else place[t], f] for at, (t, f) in enumerate(terms)]
            adjoint_rules.append([moved, shift, divide, edge])
    gradient = remap("gradient", given, [*shape, *(spread[d] for d in free)], adjoint_rules)
    if not free:
        return gradient
    return reduce_sum(gradient, list(range(rank, rank + len(free))), keepdims=False)


def _radix(
    terms: Sequence[Any], shift: int, divide: int, spread: Sequence[int], size: int
) -> tuple[int, int, int] | None:
    """Recognises a source index of the form high * n + low, where high and low are indices in two
    result dimensions and n is the size of the second. Returns the dimension of `high`, the
    dimension of `low`, and n. None for other indices.
    """
    if len(terms) != 2 or shift or divide != 1:
        return None
    (high, step), (low, one) = terms
    exact = one == 1 and step == spread[low] and step * spread[high] == size
    return (high, low, spread[low]) if exact else None


def _window_rules(given: WindowAttributes, count: int) -> list[Rule]:
    """The rules of the remap that arranges the windows of a pool in a tensor (n, channels,
    window..., positions...).
    """
    return [
        same(0),
        same(1),
        *(
            [
                [[2 + d, given.dilation[d]], [2 + count + d, given.stride[d]]],
                -given.before[d],
                1,
                "fill",
            ]
            for d in range(count)
        ),
    ]


# For each type of floats, the most elements of a window whose numbers it represents exactly.
MOST_PLACES = {"fp32": 1 << 24, "fp16": 1 << 11, "bf16": 1 << 8}


@rule("pool")
def _pool(call: Call) -> Gradients:
    windows = PoolAttributes.from_node(call.attrs)
    shape, given = call.shape(0), call.gradient()
    count = len(shape) - 2
    sizes, places = windows.size, list(given.ir.shape[2:])
    rules = _window_rules(windows, count)
    spread = [*shape[:2], *sizes, *places]
    wide = [*shape[:2], *[1] * count, *places]
    many = math.prod(sizes)
    if windows.function == "max" and many <= MOST_PLACES[call.input(0).ir.dtype.name]:
        numbers = structs.replace(windows, function="argmax").to_node()
        source = call.input(0)
        first = result("pool", [source], given.ir.shape, given.ir.dtype, attrs=numbers)
        return [unpool(given, first, windows, shape)]
    if windows.function == "max":
        chosen = _first_largest(call, rules, spread, wide)
        return [undone(mul(reshape(given, wide), chosen), rules, spread, shape)]
    if windows.function == "mean" and windows.counted:
        given = mul(given, 1.0 / many)
    elif windows.function == "mean":
        whole = structs.replace(windows, counted=True).to_node()
        share = result(
            "pool", [ones(shape, given.ir.dtype)], given.ir.shape, given.ir.dtype, attrs=whole
        )
        given = div(mul(given, 1.0 / many), share)
    return [undone(reshape(given, wide), rules, spread, shape)]


@rule("unpool")
def _unpool(call: Call) -> Gradients:
    """The gradient of the values: that of the pixel to which the value of a window was added."""
    windows = UnpoolAttributes.from_node(call.attrs)
    given, values, count = call.gradient(), call.shape(0), len(windows.size)
    spread = [*values[:2], *windows.size, *values[2:]]
    many = math.prod(windows.size)
    flat = [*values[:2], many, math.prod(values[2:])]
    seen = reshape(remap("windows", given, spread, _window_rules(windows, count)), flat)
    places = reshape(call.input(1), [*values[:2], 1, flat[3]])
    chosen = ["where", ["equal", leaf(1), index(-2)], leaf(0), number(0.0)]
    return [
        reshape(reduce_sum(computed(chosen, [seen, places], flat, given.ir.dtype), 2), values),
        None,
    ]


def _first_largest(
    call: Call, rules: Sequence[Rule], spread: Sequence[int], wide: Sequence[int]
) -> Tensor:
    """A tensor of shape `spread` with 1 at the largest element of each window (the first, if
    several are equal) and 0 elsewhere.
    """
    source = call.input(0)
    dtype = source.ir.dtype
    least = {"fp32": -3.4e38, "fp16": -65504.0, "bf16": -3.3e38}[dtype.name]
    windows = remap("windows", source, spread, rules, fill=least)
    hits = cast(equal(windows, reshape(call.output(), wide)), dtype)
    many = math.prod(PoolAttributes.from_node(call.attrs).size)
    flat = reshape(hits, [*spread[:2], many, math.prod(wide[2:])])
    order = cumsum(flat, 2)
    first = ["where", ["equal", leaf(1), number(1.0)], leaf(0), number(0.0)]
    return reshape(computed(first, [flat, order], flat.ir.shape, dtype), spread)
