"""Determines which symbolic dimensions of a model may be padded in a call. Padded sizes are rounded
up, so that calls with different sizes can share a kernel.

The graph is built twice, with the size of the call and with the rounded size, and the two graphs
are compared node by node. Padding is permitted if every value of the first graph equals the leading
part of the corresponding value of the second graph. Then no result depends on the contents of the
padding. The table PERMITTED has, for each operator, a rule that states which dimensions may differ;
an operator without an entry permits no difference. If a call has several such sizes, they are
rounded one after the other. Called by ark.interop.onnx.model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ark.errors import BaseError
from ark.interop.kernels import bucket
from ark.interop.onnx.convert import Built
from ark.interop.onnx.elementwise import ELEMENTWISE
from ark.interop.onnx.values import Call, Shape, Step, Value, axis_of

Shapes = Mapping[str, Shape]
Dims = set[int]


class _Pair:
    """One node in two graphs: the graph that is built for the exact sizes, and the graph for the
    rounded sizes. zeros: ids of the values of the rounded graph whose padding is known to be zero.
    """

    def __init__(self, exact: Step, wide: Step, zeros: set[int]) -> None:
        self.exact, self.wide = exact, wide
        self.call: Call = exact.call
        self._zeros = zeros

    def dims(self, place: int = 0) -> Dims:
        """The dimensions of an input that differ between the two graphs."""
        if not self.call.has(place):
            return set()
        return differing(self.exact.call.shape(place), self.wide.call.shape(place))

    def in_range(self, place: int, size: int) -> bool:
        """True if all values in the padding of input number `place`, which holds indices, are valid
        indices of a dimension of `size` elements.
        """
        value = self.wide.call.value(place)
        if value.array is None:
            return id(value) in self._zeros
        return bool(np.all((value.array >= -size) & (value.array < size)))

    def rank(self, place: int = 0) -> int:
        return len(self.call.shape(place))

    def same(self, first: int = 0) -> bool:
        """True if the inputs with number `first` and above have equal shapes in both graphs."""
        return not any(self.dims(i) for i in range(first, len(self.call.inputs)))

    def axis(self, default: int | None, place: int | None = None) -> Dims:
        """The axis along which the operator works, as a set of one element. It is given by the
        attribute `axis` or, if `place` is given, by the only element of input number `place`.
        """
        if place is None:
            axis = self.call.attribute("axis", default)
        else:
            axis = int(self.call.array(place).item())
        return {axis_of(axis, self.rank())}


def differing(exact: Shape, wide: Shape) -> Dims:
    """The dimensions in which two shapes of the same rank differ."""
    return {d for d, (n, m) in enumerate(zip(exact, wide, strict=True)) if n != m}


Rule = Callable[[_Pair], bool]


def _any(pair: _Pair) -> bool:
    return True


def _axis(default: int | None = None, place: int | None = None) -> Rule:
    """The rule for an operator that works along one axis of its first input: this axis must not be
    padded.
    """
    return lambda p: p.same(1) and not p.dims() & p.axis(default, place)


def _only(*dims: int) -> Rule:
    """The rule that only these dimensions of the first input, and no other inputs, may be
    padded.
    """
    return lambda p: p.same(1) and p.dims() <= set(dims)


def _matmul(p: _Pair) -> bool:
    return p.rank() - 1 not in p.dims() and max(p.rank(1) - 2, 0) not in p.dims(1)


def _gemm(p: _Pair) -> bool:
    left = 0 if p.call.attribute("transA", 0) else 1
    right = 1 if p.call.attribute("transB", 0) else 0
    return left not in p.dims() and right not in p.dims(1)


def _reduced(p: _Pair) -> bool:
    call = p.call
    axes = call.integers(1) if call.has(1) else list(call.attribute("axes", []))
    if not axes and call.attribute("noop_with_empty_axes", 0):
        return p.same(1)
    removed = {axis_of(a, p.rank()) for a in axes} or set(range(p.rank()))
    return p.same(1) and not p.dims() & removed


def _normed(p: _Pair) -> bool:
    """The rule for layer and RMS norms. They reduce all dimensions from the axis on, so only
    dimensions before the axis may be padded.
    """
    (axis,) = p.axis(-1)
    return p.same(1) and all(d < axis for d in p.dims())


def _reshaped(p: _Pair) -> bool:
    """The rule for a reshape: the padding must be at the end of a dimension of the result, too.
    This holds if the product of the sizes before the padded dimension is the same in input and
    result.
    """
    results = [s.results[0].shape for s in (p.exact, p.wide) if s.results[0] is not None]
    before, after = p.dims(), differing(*results)
    if len(before) != 1 or len(after) != 1:
        return not before and not after
    (d,), (e,) = before, after
    return math.prod(p.call.shape(0)[:d]) == math.prod(results[0][:e])


def _sliced(p: _Pair) -> bool:
    axes = p.call.integers(3) if p.call.has(3) else list(range(p.call.shape(1)[0]))
    arrays = [(s.call.integers(i)) for i in range(1, len(p.call.inputs)) for s in (p.exact, p.wide)]
    equal = all(a == b for a, b in zip(arrays[::2], arrays[1::2], strict=True))
    return equal and not p.dims() & {axis_of(a, p.rank()) for a in axes}


def _gathered(p: _Pair) -> bool:
    """The rule for Gather: the axis from which elements are gathered must not be padded. An index
    out of range would end the run, so indices in the padding must be known to be in range.
    """
    (axis,) = p.axis(0)
    return axis not in p.dims() and (not p.dims(1) or p.in_range(1, p.call.shape(0)[axis]))


def _joined(p: _Pair) -> bool:
    return not any(p.dims(i) & p.axis(None) for i in range(len(p.call.inputs)))


def _padded(p: _Pair) -> bool:
    pads = [s.call.integers(1) for s in (p.exact, p.wide)]
    axes = p.call.integers(3) if p.call.has(3) else list(range(p.rank()))
    axes = [axis_of(a, p.rank()) for a in axes]
    here = {a for i, a in enumerate(axes) if pads[0][i] or pads[0][i + len(axes)]}
    return pads[0] == pads[1] and not p.dims() & here


def _running(p: _Pair) -> bool:
    ahead = not p.call.attribute("reverse", 0)
    return p.same(1) and (ahead or not p.dims() & p.axis(None, 1))


def _recurrent(p: _Pair) -> bool:
    batch = {0 if p.call.attribute("layout", 0) else 1}
    states = all(p.dims(i) <= batch for i in (0, 5, 6))
    return states and not any(p.dims(i) for i in (1, 2, 3, 4, 7))


_REDUCTIONS = ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "SumSquare", "LogSum", "LogSumExp")
_POOLS = ("MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool")
PERMITTED: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, _any),
    **dict.fromkeys(
        ("Transpose", "Unsqueeze", "Expand", "Trilu", "ConstantOfShape", "Range"), _any
    ),
    **dict.fromkeys(("Reshape", "Flatten"), _reshaped),
    "Squeeze": lambda p: p.call.has(1),
    "MatMul": _matmul,
    "Gemm": _gemm,
    **dict.fromkeys([f"Reduce{name}" for name in _REDUCTIONS], _reduced),
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax", "TopK", "LpNormalization"), _axis(-1)),
    **dict.fromkeys(("ArgMax", "ArgMin", "Split"), _axis(0)),
    **dict.fromkeys(("CumSum", "CumProd"), _running),
    "LayerNormalization": _normed,
    "BatchNormalization": lambda p: p.same(1) and 1 not in p.dims(),
    **dict.fromkeys(("InstanceNormalization", "GroupNormalization", "LRN"), _only(0)),
    **dict.fromkeys(("Conv", "ConvTranspose", "DepthToSpace", "SpaceToDepth"), _only(0)),
    **dict.fromkeys(("TreeEnsemble", "TreeEnsembleRegressor"), _only(0)),
    "Resize": lambda p: p.dims() <= {0},
    **dict.fromkeys(_POOLS, _only(0, 1)),
    "Slice": _sliced,
    "Gather": _gathered,
    "Concat": _joined,
    "Pad": _padded,
    "OneHot": lambda p: p.same(1),
    **dict.fromkeys(("RNN", "GRU", "LSTM"), _recurrent),
}
_KEEPS_ZEROS = {"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
# For each operator, the indices of the inputs whose contents are sizes. The contents may differ
# between the graph of the exact size and the graph of the rounded size, because the shapes of the
# operator's results are compared instead.
_SIZES = {
    "ConstantOfShape": {0},
    "Expand": {1},
    "Pad": {1, 3},
    "Range": {1},
    "Reshape": {1},
    "Resize": {3},
    "Slice": {1, 2, 3, 4},
}


def _leads(exact: Value, wide: Value) -> bool:
    """True if the value of the exact graph is, as far as shapes and known contents show, the
    leading part of the value of the rounded graph.
    """
    if len(exact.shape) != len(wide.shape):
        return False
    if any(exact.shape[d] < 2 for d in differing(exact.shape, wide.shape)):
        return False  # a size of 1 could broadcast, and there are no tensors of size 0
    if exact.array is None or wide.array is None:
        return exact.array is wide.array
    box = tuple(slice(0, n) for n in exact.shape)
    return exact.array is wide.array or np.array_equal(
        exact.array, wide.array[box], equal_nan=exact.array.dtype.kind == "f"
    )


def refusal(exact: Built, wide: Built) -> str | None:
    """The reason why the model must not run with rounded sizes; None if it may. exact, wide: the
    graphs for the exact and for the rounded sizes.
    """
    if [s.call.op for s in exact.steps] != [s.call.op for s in wide.steps]:
        return "the size decides which operators run"
    zeros = {id(value) for value in wide.inputs.values()}
    for one, other in zip(exact.steps, wide.steps, strict=True):
        if other.call.op in _KEEPS_ZEROS and id(other.call.inputs[0]) in zeros:
            zeros |= {id(value) for value in other.results}
        every = (*one.results, *other.results, *one.call.inputs)
        if any(v is not None and v.items is not None for v in every):
            return "a sequence may depend on the size"
        results = [(a, b) for a, b in zip(one.results, other.results, strict=True) if a and b]
        if all(a.array is not None and b.array is not None for a, b in results):
            continue  # contents that are known in both graphs are compared by their readers
        sizes = _SIZES.get(one.call.op, set())
        given = zip(one.call.inputs, other.call.inputs, strict=True)
        for place, (a, b) in enumerate(given):
            if a is not None and b is not None and place not in sizes and not _leads(a, b):
                return f"{one.call.op} computes with the size"
        pair = _Pair(one, other, zeros)
        if any(pair.dims(i) for i in range(len(one.call.inputs))) or any(
            a.shape != b.shape for a, b in results
        ):
            rule = PERMITTED.get(one.call.op)
            if rule is None:
                return f"{one.call.op} does not permit it"
            if not rule(pair) or not all(_leads(a, b) for a, b in results):
                return f"{one.call.op} works along it"
    if not all(_leads(value, wide.results[n]) for n, value in exact.results.items()):
        return "a result is known beforehand and depends on it"
    return None


def rounded(
    shapes: Shapes, symbols: Mapping[str, Sequence[str]], build: Callable[[Shapes], Built]
) -> tuple[Shapes, Shapes]:
    """Returns the inputs' shapes with sizes rounded up where that is permitted, and the results'
    exact shapes.

    symbols: for each input, the names of its dimensions; an empty sequence if the input must not be
    padded. build: a function that returns the graph for given shapes, or raises BaseError if the
    shapes are not possible.
    """
    now = dict(shapes)
    last = exact = build(now)
    for name in sorted({s for dims in symbols.values() for s in dims if s}):
        places = [(i, d) for i, dims in symbols.items() for d, s in enumerate(dims) if s == name]
        size = shapes[places[0][0]][places[0][1]]
        if size < 2 or bucket(size, None) == size:
            continue
        wide = {i: list(shape) for i, shape in now.items()}
        for i, d in places:
            wide[i][d] = bucket(size, None)
        tried = {i: tuple(shape) for i, shape in wide.items()}
        try:
            other = build(tried)
        except BaseError:  # a constant in the graph fits the exact size only
            continue
        if refusal(last, other) is None:
            now, last = tried, other
    return now, {n: value.shape for n, value in exact.results.items()}


def padded(array: np.ndarray, shape: Shape) -> np.ndarray:
    """The array, padded with zeros at the end of each dimension to this shape."""
    if array.shape == shape:
        return array
    wide = np.zeros(shape, array.dtype)
    wide[tuple(slice(0, n) for n in array.shape)] = array
    return wide
