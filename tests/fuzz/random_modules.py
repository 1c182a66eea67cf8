"""Random torch.fx graphs (operators, shapes, types) for tests.fuzz.modules. Operators that are not
continuous (a comparison, a floor, an argmax) get only values that are exact in float32, so that
rounding cannot change their results.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

MAX_ELEMENTS = 4096  # of a tensor
MAX_VALUE = 1e4  # largest absolute value of an element
SIZES = (1, 1, 2, 3, 4, 5, 7, 8, 16, 33)


@dataclass
class TracedValue:
    """A node and torch's value for it. exact: no rounding in float32 has changed the value."""

    node: fx.Node
    value: torch.Tensor
    exact: bool


class UnfitModuleError(Exception):
    """Raised if an operator cannot be applied to any of the values that the graph has so far."""


class Maker:
    """Builds a graph node by node. It holds the graph, its inputs and all values so far."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.dtype = rng.choices((torch.float32, torch.bfloat16, torch.float16), (8, 1, 1))[0]
        self.odd = rng.random() < 0.2  # with NaN, infinities and zeros of both signs
        self.graph = fx.Graph()
        self.inputs: list[torch.Tensor] = []
        self.values: list[TracedValue] = []
        self.largest = 1.0
        self.last: fx.Node | None = None

    def shape(self, least: int = 0, most: int = 4) -> list[int]:
        """Returns the random shape of a new tensor."""
        while True:
            sizes = [self.rng.choice(SIZES) for _ in range(self.rng.randint(least, most))]
            if torch.Size(sizes).numel() <= MAX_ELEMENTS:
                return sizes

    def tensor(
        self, shape: Sequence[int], dtype: torch.dtype | None = None, top: int = 5
    ) -> TracedValue:
        """Adds a new input. Floats are multiples of 1/8; integers are below `top` and not
        negative.
        """
        dtype = dtype or self.dtype
        source = torch.Generator().manual_seed(self.rng.randrange(1 << 30))
        if dtype.is_floating_point:
            value = torch.randint(-24, 25, tuple(shape), generator=source).to(dtype) / 8
            if self.odd:
                place = torch.randint(0, 12, tuple(shape), generator=source)
                for number, odd in enumerate((float("nan"), float("inf"), -float("inf"), -0.0)):
                    value = torch.where(place == number, torch.tensor(odd, dtype=dtype), value)
        else:
            value = torch.randint(0, top, tuple(shape), generator=source).to(dtype)
        if len(shape) == 2 and self.rng.random() < 0.1:
            value = value.T.contiguous().T
        with self.graph.inserting_after(self.last):
            node = self.last = self.graph.placeholder(f"x{len(self.inputs)}")
        self.inputs.append(value)
        created = TracedValue(node, value, True)
        self.values.append(created)
        return created

    def pick(self, fits: Callable[[torch.Tensor], bool], exact: bool = False) -> TracedValue:
        """Picks a value for which `fits` holds. Raises UnfitModuleError if there is none."""
        candidates = [m for m in self.values if fits(m.value) and (m.exact or not exact)]
        if not candidates:
            raise UnfitModuleError
        return self.rng.choice(candidates[-4:] if self.rng.random() < 0.7 else candidates)

    def real(self, least: int = 0, exact: bool = False) -> TracedValue:
        """Picks a value of a float type with at least `least` dimensions."""
        return self.pick(lambda v: v.is_floating_point() and v.dim() >= least, exact)

    def axis(self, value: TracedValue) -> int:
        """Returns one of a value's dimensions, counted from the front or the back (negative)."""
        rank = value.value.dim()
        if not rank:
            raise UnfitModuleError
        return self.rng.randrange(-rank, rank)

    def call(self, function: Any, *given: Any, exact: bool = False, **named: Any) -> TracedValue:
        """Adds a call whose result is a tensor. Arguments may be values, numbers, and lists of
        these. exact: the function does not round if its operands are exact.
        """
        tensors: list[TracedValue] = []

        def seen(part: Any) -> Any:
            if isinstance(part, TracedValue):
                tensors.append(part)
                return part.value
            return part

        plain: Any = fx.node.map_aggregate((given, named), seen)
        nodes: Any = fx.node.map_aggregate(
            (given, named), lambda a: a.node if isinstance(a, TracedValue) else a
        )
        try:
            value = function(*plain[0], **plain[1])
        except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError) as error:
            raise UnfitModuleError from error
        if isinstance(value, tuple | list):
            place = self.rng.randrange(len(value))
            node = self.graph.call_function(function, *nodes)
            value = value[place]
            node = self.graph.call_function(operator.getitem, (node, place))
        else:
            node = self.graph.call_function(function, *nodes)
        if not isinstance(value, torch.Tensor) or not 0 < value.numel() <= MAX_ELEMENTS:
            raise UnfitModuleError
        if value.is_floating_point():
            finite = torch.where(value.isfinite(), value, 0.0).abs().max()
            if (not self.odd and not value.isfinite().all()) or finite > MAX_VALUE:
                raise UnfitModuleError
            self.largest = max(self.largest, float(finite))
        created = TracedValue(node, value, exact and all(m.exact for m in tensors))
        self.values.append(created)
        return created


UNARY = [
    *(torch.exp, torch.tanh, torch.sigmoid, torch.sin, torch.cos, torch.erf, torch.atan),
    *(torch.expm1, torch.sinh, torch.rsqrt, torch.log, torch.sqrt, torch.reciprocal),
    *(F.silu, F.gelu, F.softplus, F.elu, F.hardswish, F.mish, F.selu, F.logsigmoid, F.celu),
    *(F.hardsigmoid, F.softsign, F.tanhshrink, torch.square, torch.log1p, torch.asinh, torch.log2),
]
UNARY_EXACT = [torch.neg, torch.abs, F.relu, F.relu6, torch.clone, F.hardtanh, torch.positive]
JUMPS = [torch.floor, torch.ceil, torch.round, torch.trunc, torch.sign, torch.frac]
BINARY = [torch.atan2, torch.div, torch.hypot, torch.logaddexp]
BINARY_EXACT = [torch.add, torch.sub, torch.mul, torch.maximum, torch.minimum, torch.rsub]
COMPARE = [torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge]
REDUCE = [torch.mean, torch.var, torch.std, torch.logsumexp, torch.softmax, torch.log_softmax]
REDUCE_EXACT = [torch.sum, torch.amax, torch.amin, torch.cumsum]


def partner(m: Maker, of: TracedValue) -> TracedValue:
    """Returns a value that broadcasts with another: of the same shape, or with sizes of 1 or fewer
    dimensions.
    """
    if m.rng.random() < 0.3:
        same = [v for v in m.values if v.value.shape == of.value.shape]
        return m.rng.choice([v for v in same if v.value.dtype == of.value.dtype] or [of])
    shape = [n if m.rng.random() < 0.7 else 1 for n in of.value.shape]
    return m.tensor(shape[m.rng.randrange(len(shape) + 1) :], of.value.dtype)


def elementwise(m: Maker) -> None:
    x = m.real()
    kind = m.rng.randrange(8)
    if kind == 0:
        m.call(m.rng.choice(UNARY), x)
    elif kind == 1:
        m.call(m.rng.choice(UNARY_EXACT), x, exact=True)
    elif kind == 2:
        m.call(m.rng.choice(JUMPS), m.real(exact=True), exact=True)
    elif kind == 3:
        m.call(m.rng.choice(BINARY), x, partner(m, x))
    elif kind == 4:
        m.call(m.rng.choice(BINARY_EXACT), *m.rng.sample([x, partner(m, x)], 2), exact=True)
    elif kind == 5:
        x = m.real(exact=True)
        other = m.rng.choice([partner(m, x), 0.5, -1, 0])
        m.call(m.rng.choice(COMPARE), x, other, exact=True)
    elif kind == 6:
        number = m.rng.choice((2, -1, 0.5, 3.25, 0, True))
        m.call(m.rng.choice((operator.add, operator.mul, operator.sub)), x, number, exact=True)
    else:
        m.call(torch.clamp, x, *m.rng.choice(((-1, 1), (None, 0.5), (-0.25, None))), exact=True)


def chosen(m: Maker) -> None:
    """Adds an operator that selects elements by a mask."""
    mask = m.pick(lambda v: v.dtype == torch.bool)
    x = m.tensor(mask.value.shape) if m.rng.random() < 0.5 else m.real()
    kind = m.rng.randrange(4)
    if kind == 0:
        m.call(torch.where, mask, x, partner(m, x), exact=True)
    elif kind == 1:
        m.call(torch.Tensor.masked_fill, x, mask, m.rng.choice((0.0, -1.5, 2)), exact=True)
    elif kind == 2:
        m.call(m.rng.choice((torch.logical_not, torch.any, torch.all)), mask, exact=True)
    else:
        m.call(m.rng.choice((torch.sum, torch.cumsum)), mask, m.axis(mask), exact=True)


def moved(m: Maker) -> None:
    """Adds an operator that only moves elements."""
    x, rng = m.pick(lambda v: v.dim() > 0), m.rng
    rank, sizes = x.value.dim(), list(x.value.shape)
    at = m.axis(x)
    length = sizes[at]
    first = rng.randrange(length)
    order = rng.sample(range(rank), rank)
    doubled = [x, x if rng.random() < 0.5 else partner(m, x)]
    ways: list[tuple[Any, ...]] = [
        (torch.reshape, x, rng.choice([[-1], [1, *sizes], [*sizes, 1], sizes[::-1]])),
        (torch.permute, x, order),
        (torch.transpose, x, at, m.axis(x)),
        (torch.unsqueeze, x, at),
        (torch.squeeze, x, *([at] if rng.random() < 0.5 else [])),
        (torch.flatten, x, *([at] if rng.random() < 0.5 else [])),
        (torch.Tensor.expand, x, [2, *sizes]),
        (torch.Tensor.repeat, x, [rng.randint(1, 2) for _ in sizes]),
        (torch.flip, x, rng.sample(range(rank), rng.randint(1, rank))),
        (torch.roll, x, rng.randint(-3, 3), at),
        (torch.narrow, x, at, first, rng.randint(1, length - first)),
        (torch.select, x, at, first),
        (operator.getitem, x, (..., slice(None, None, rng.randint(1, 3)))),
        (operator.getitem, x, (slice(first % sizes[0], None), None)),
        (torch.cat, doubled, at),
        (torch.stack, doubled, at),
        (torch.split, x, rng.randint(1, length), at),
        (torch.chunk, x, rng.randint(1, 3), at),
        (torch.unbind, x, at),
        (F.pad, x, [rng.randint(-1, 2) for _ in range(2 * rng.randint(1, rank))]),
        (F.pad, x, [1, 1], rng.choice(("reflect", "replicate", "circular"))),
        (rng.choice((torch.tril, torch.triu)), x, rng.randint(-2, 2)),
        (torch.movedim, x, at, m.axis(x)),
        (torch.diagonal, x, rng.randint(-1, 1)),
        (torch.Tensor.unfold, x, at, rng.randint(1, length), rng.randint(1, 2)),
        (torch.repeat_interleave, x, 2, at),
        (torch.Tensor.contiguous, x),
        (torch.rot90, x),
        (F.pixel_shuffle, x, 2),
        (F.glu, x, at),
    ]
    function, *given = rng.choice(ways)
    m.call(function, *given, exact=function is not F.glu)


def reduced(m: Maker) -> None:
    x, rng = m.real(1), m.rng
    at, kept = m.axis(x), rng.random() < 0.5
    kind = rng.randrange(6)
    if kind == 0:
        m.call(rng.choice(REDUCE), x, at)
    elif kind == 1:
        m.call(rng.choice(REDUCE_EXACT), x, at, exact=True)
    elif kind == 2:
        axes = rng.sample(range(x.value.dim()), rng.randint(1, x.value.dim()))
        m.call(rng.choice((torch.sum, torch.mean, torch.amax)), x, axes, kept)
    elif kind == 3:
        m.call(rng.choice((torch.sum, torch.mean, torch.max, torch.var)), x)
    elif kind == 4:
        function = rng.choice((torch.argmax, torch.argmin, torch.sort, torch.max, torch.median))
        m.call(function, m.real(1, exact=True), at, exact=True)
    else:
        m.call(torch.linalg.vector_norm, x, rng.choice((1, 2, float("inf"))), at, kept)


def multiplied(m: Maker) -> None:
    """Adds a matrix product or an operator that contains one."""
    x, rng = m.real(1), m.rng
    sizes, last = list(x.value.shape), x.value.shape[-1]
    wide = rng.choice((1, 3, 8, 17))
    kind = rng.randrange(7)
    if kind == 0:
        bias = [m.tensor([wide])] if rng.random() < 0.5 else []
        m.call(F.linear, x, m.tensor([wide, last]), *bias)
    elif kind == 1:
        m.call(torch.matmul, x, m.tensor([*sizes[:-2][: rng.randint(0, 2)], last, wide]))
    elif kind == 2:
        m.call(torch.matmul, x, m.tensor([last]))
    elif kind == 3 and len(sizes) == 2:
        added = m.tensor([rng.choice((1, sizes[0])), wide])
        m.call(torch.addmm, added, x, m.tensor([last, wide]), beta=rng.choice((1, 0.5)))
    elif kind == 4 and len(sizes) >= 2:
        letters = "abcd"[: len(sizes)]
        m.call(
            torch.einsum, f"{letters},{letters[-1]}x->{letters[:-1]}x", x, m.tensor([last, wide])
        )
    elif kind == 5 and not m.odd:  # without NaN, for which torch's own kernels differ
        heads = m.tensor([rng.choice((1, 2)), rng.choice((1, 2)), rng.choice((3, 8)), 8])
        causal = rng.random() < 0.5
        m.call(F.scaled_dot_product_attention, heads, heads, heads, is_causal=causal)
    else:
        m.call(torch.outer, m.tensor([wide]), m.tensor([3]), exact=True)


def windows(m: Maker) -> None:
    """Adds a convolution or a pool. If NaN or infinities are in use, convolutions are left out,
    because padding multiplies zeros by infinite weights.
    """
    rng, plane = m.rng, rng_shape(m)
    x = m.tensor([rng.choice((1, 2)), *plane])
    channels, rank = plane[0], len(plane) - 1
    size, stride, padding = rng.randint(1, 3), rng.randint(1, 2), rng.randint(0, 1)
    kind = rng.randrange(3, 5) if m.odd else rng.randrange(5)
    if kind < 2:
        groups = rng.choice((1, channels))
        weight = m.tensor([channels * rng.choice((1, 2)), channels // groups, *[size] * rank])
        function = (F.conv1d, F.conv2d)[rank - 1]
        dilation = rng.choice((1, 1, 2))
        m.call(function, x, weight, None, stride, padding, dilation, groups)
    elif kind == 2:
        weight = m.tensor([channels, 3, *[size] * rank])
        m.call((F.conv_transpose1d, F.conv_transpose2d)[rank - 1], x, weight, None, stride, padding)
    elif kind == 3:
        m.call((F.max_pool1d, F.max_pool2d)[rank - 1], x, size, stride, exact=True)
    else:
        m.call((F.avg_pool1d, F.avg_pool2d)[rank - 1], x, size, stride)


def rng_shape(m: Maker) -> list[int]:
    """Returns a random number of channels and one or two random spatial sizes."""
    return [m.rng.choice((1, 2, 4)), *(m.rng.choice((4, 5, 8)) for _ in range(m.rng.randint(1, 2)))]


def normed(m: Maker) -> None:
    rng, x = m.rng, m.real(2)
    sizes = list(x.value.shape)
    kind = rng.randrange(4)
    if kind == 0:
        words = [m.tensor(sizes[-1:]), m.tensor(sizes[-1:])] if rng.random() < 0.5 else []
        m.call(F.layer_norm, x, sizes[-1:], *words)
    elif kind == 1:
        m.call(F.rms_norm, x, sizes[-1:])
    elif kind == 2:
        mean, rows = m.tensor([sizes[1]]), m.tensor([sizes[1]])
        m.call(F.batch_norm, x, mean, m.call(torch.abs, rows, exact=True))
    else:
        m.call(F.group_norm, x, rng.choice((1, sizes[1])))


def indexed(m: Maker) -> None:
    """Adds an operator with integer operands, as numbers or as indices."""
    rng = m.rng
    kind = rng.randrange(7)
    x = m.real(1)
    at = m.axis(x)
    length = x.value.shape[at]
    if kind == 0:
        ids = m.tensor(m.shape(1, 2), torch.int64, 6)
        m.call(F.embedding, ids, m.tensor([6, rng.choice((1, 4, 9))]), exact=True)
    elif kind == 1:
        m.call(
            torch.index_select,
            x,
            at,
            m.tensor([rng.randint(1, 5)], torch.int64, length),
            exact=True,
        )
    elif kind == 2:
        m.call(torch.gather, x, at, m.tensor(x.value.shape, torch.int64, length), exact=True)
    elif kind == 3:
        m.call(F.one_hot, m.tensor([rng.randint(1, 5)], torch.int64, 4), 4, exact=True)
    elif kind == 4:
        i = m.pick(lambda v: v.dtype in (torch.int32, torch.int64) and v.dim() > 0)
        functions = (torch.add, torch.mul, torch.bitwise_and, torch.bitwise_xor, torch.sub)
        m.call(rng.choice(functions), i, m.tensor(i.value.shape, i.value.dtype), exact=True)
    elif kind == 5:
        i = m.tensor(m.shape(1, 3), rng.choice((torch.int32, torch.int64)), 50)
        function = rng.choice((torch.remainder, torch.floor_divide, operator.floordiv))
        m.call(function, i, rng.choice((2, 3, 7, -3)), exact=True)
    else:
        m.call(operator.getitem, x, m.tensor([3], torch.int64, x.value.shape[0]), exact=True)


def typed(m: Maker) -> None:
    """Adds a cast to another type."""
    x = m.real(exact=True) if m.rng.random() < 0.5 else m.pick(lambda v: not v.is_complex())
    wanted = [torch.float32, m.dtype, torch.bool]
    if x.exact:
        wanted += [torch.int32, torch.int64]
    m.call(torch.Tensor.to, x, m.rng.choice(wanted), exact=True)


STEPS = {
    elementwise: 8,
    chosen: 2,
    moved: 8,
    reduced: 4,
    multiplied: 4,
    windows: 2,
    normed: 2,
    indexed: 3,
    typed: 1,
}


def random_module(rng: random.Random) -> tuple[fx.GraphModule, Maker]:
    """Returns a random module, and its maker with the inputs and all values."""
    m = Maker(rng)
    m.tensor(m.shape(), rng.choice((None, None, None, torch.int64, torch.bool)), 2)
    m.tensor(m.shape(1))
    wanted = rng.randint(1, 3 if m.dtype != torch.float32 else 9)
    for _ in range(4 * wanted):
        try:
            rng.choices(list(STEPS), list(STEPS.values()))[0](m)
        except UnfitModuleError:
            continue
        wanted -= 1
        if not wanted:
            break
    ends = [m.values[-1], *(rng.choice(m.values) for _ in range(rng.choice((0, 0, 1, 2))))]
    m.graph.output(tuple(e.node for e in ends))
    m.graph.eliminate_dead_code()
    m.graph.lint()
    return fx.GraphModule(torch.nn.Module(), m.graph), m
