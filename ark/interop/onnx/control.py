"""Control flow and sequences of ONNX models. The graphs within If, Loop and Scan become part of
ark's graph. Sequences become Python lists while the graph is built. The number of iterations of a
loop must be known while the graph is built, because each iteration gets nodes of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

import ark
from ark.errors import ModelError
from ark.interop.onnx import movement
from ark.interop.onnx.values import Call, Value, axis_of, join, operator, refuse

MAX_UNROLLED_ITERATIONS = 1024  # of one loop
# Operators that end the run if an index is out of range. Both branches of an If are computed, so
# they could end the run in the branch that is not taken.
_CHECKED = ("Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND")


@operator("If")
def _if(call: Call) -> list[Value | None]:
    """Converts If. If the condition is known while the graph is built, only the branch that is
    taken is built. Otherwise both branches are built, and each result is selected by the condition.
    In the second case, the results of both branches must have equal shapes and types, and the
    branches must not contain operators that can end the run with an error.
    """
    condition = call.value(0)
    branches = [call.bodies[name] for name in ("then_branch", "else_branch")]
    if condition.array is not None:
        return branches[0 if bool(condition.array.item()) else 1]([])
    if call.decides(0) or any(op in _CHECKED for body in branches for op in body.operators):
        call.array(0)
    pairs = list(zip(*(body([]) for body in branches), strict=True))
    if not all(_selectable(a, b) for a, b in pairs):
        call.array(0)
    chosen: list[Value | None] = []
    for a, b in pairs:
        assert a is not None and b is not None
        tensor = ark.where(call.tensor(0), call.on(a), call.on(b))
        inputs = condition.inputs | a.inputs | b.inputs
        chosen.append(Value(a.shape, tensor, inputs=inputs, kind=a.kind))
    return chosen


def _selectable(a: Value | None, b: Value | None) -> bool:
    if a is None or b is None or a.items is not None or b.items is not None:
        return False
    return a.shape == b.shape and a.dtype == b.dtype and 0 not in a.shape


@operator("Loop")
def _loop(call: Call) -> list[Value | None]:
    most = int(call.array(0).item()) if call.has(0) else None
    goes_on = bool(call.array(1).item()) if call.has(1) else True
    state = list(call.inputs[2:])
    state += [None] * (len(call.bodies["body"].graph.input) - 2 - len(state))
    body = call.bodies["body"]
    columns: list[list[Value]] = [[] for _ in call.outputs[len(state) :]]
    for turn in itertools.count():
        if not goes_on or (most is not None and turn >= most):
            break
        if turn >= MAX_UNROLLED_ITERATIONS:
            raise refuse(f"a loop of more than {MAX_UNROLLED_ITERATIONS} iterations")
        first = [_known(np.array(turn, np.int64)), _known(np.array(True))]
        after, *results = body([*first, *state])
        goes_on = bool(call.known(after).item())
        state = results[: len(state)]
        for column, result in zip(columns, results[len(state) :], strict=False):
            column.append(_tensor(result))
    return [*state, *(_stacked(call, body, column, i) for i, column in enumerate(columns))]


def _stacked(call: Call, body: Any, column: Sequence[Value], place: int) -> Value:
    """One result of a Scan, stacked over all iterations along a new dimension. column: the result
    of each iteration. place: the number of the result.
    """
    if column:
        return join(call, [_reshaped(call, v, (1, *v.shape)) for v in column], 0)
    return Value((0,), array=np.zeros((0,), body.result_type(place - len(call.outputs))))


@operator("Scan")
def _scan(call: Call) -> list[Value | None]:
    if call.version < 9:
        raise refuse("Scan of opset 8")
    count = call.attribute("num_scan_inputs")
    states = len(call.inputs) - count
    scanned = [call.value(i) for i in range(states, len(call.inputs))]
    axes = call.attribute("scan_input_axes", [0] * count)
    backwards = call.attribute("scan_input_directions", [0] * count)
    axes = [axis_of(a, len(v.shape)) for a, v in zip(axes, scanned, strict=True)]
    lengths = {v.shape[a] for v, a in zip(scanned, axes, strict=True)}
    if len(lengths) != 1:
        raise ModelError(
            f"the scanned inputs have the lengths {sorted(lengths)}; they must be equal"
        )
    (length,) = lengths
    if length > MAX_UNROLLED_ITERATIONS:
        raise refuse(f"a Scan of more than {MAX_UNROLLED_ITERATIONS} iterations")
    if not length:
        raise refuse("a Scan without scanned inputs")
    parts = [_parts(call, v, a) for v, a in zip(scanned, axes, strict=True)]
    state = list(call.inputs[:states])
    results = len(call.outputs) - states
    columns: list[list[Value]] = [[] for _ in range(results)]
    for turn in range(length):
        now = [p[-1 - turn if b else turn] for p, b in zip(parts, backwards, strict=True)]
        results_now = call.bodies["body"]([*state, *now])
        state = results_now[:states]
        for column, result in zip(columns, results_now[states:], strict=True):
            column.append(_tensor(result))
    axes = call.attribute("scan_output_axes", [0] * results)
    backwards = call.attribute("scan_output_directions", [0] * results)
    stacked: list[Value | None] = []
    for column, axis, back in zip(columns, axes, backwards, strict=True):
        axis = axis_of(axis, len(column[0].shape) + 1)
        wide = [_reshaped(call, v, (*v.shape[:axis], 1, *v.shape[axis:])) for v in column]
        stacked.append(join(call, wide[::-1] if back else wide, axis))
    return [*state, *stacked]


def _parts(call: Call, value: Value, axis: int) -> list[Value]:
    """The slices of a value along an axis: for each index one slice, from which the axis is
    removed.
    """
    shape = (*value.shape[:axis], *value.shape[axis + 1 :])
    pieces = movement.pieces(call, value, [1] * value.shape[axis], axis)
    return [_reshaped(call, piece, shape) for piece in pieces]


def _reshaped(call: Call, value: Value, shape: tuple[int, ...]) -> Value:
    if value.array is not None:
        return Value(shape, array=value.array.reshape(shape))
    tensor = ark.reshape(call.on(value), list(shape) or [1])
    return Value(shape, tensor, inputs=value.inputs, kind=value.kind)


def _known(array: np.ndarray) -> Value:
    return Value(array.shape, array=array)


def _tensor(value: Value | None) -> Value:
    if value is None or value.items is not None:
        raise ModelError("a tensor is required, but a sequence or no value was given")
    return value


def _items(call: Call, place: int) -> tuple[Value, ...]:
    items = call.value(place).items
    if items is None:
        raise ModelError(f"input {place} is not a sequence")
    return items


def sequence(items: Sequence[Value]) -> Value:
    """A value that holds a sequence of other values, as ONNX's sequence operators use."""
    seen = frozenset[str]().union(*(v.inputs for v in items))
    return Value((len(items),), items=tuple(items), inputs=seen)


@operator("SequenceConstruct")
def _construct(call: Call) -> Value:
    return sequence([call.value(i) for i in range(len(call.inputs))])


@operator("SequenceEmpty")
def _empty(call: Call) -> Value:
    return sequence([])


@operator("SequenceLength")
def _length(call: Call) -> Value:
    return _known(np.array(len(_items(call, 0)), np.int64))


def _place(call: Call, place: int, count: int, default: int) -> int:
    at = int(call.array(place).item()) if call.has(place) else default
    if not -count <= at < max(count, 1):
        raise ModelError(f"position {at} is outside of a sequence of length {count}")
    return at % count if count else 0


@operator("SequenceAt")
def _at(call: Call) -> Value:
    items = _items(call, 0)
    return items[_place(call, 1, len(items), 0)]


@operator("SequenceInsert")
def _insert(call: Call) -> Value:
    items = list(_items(call, 0))
    at = int(call.array(2).item()) if call.has(2) else len(items)
    if not -len(items) <= at <= len(items):
        raise ModelError(f"position {at} is outside of a sequence of length {len(items)}")
    items.insert(at, call.value(1))
    return sequence(items)


@operator("SequenceErase")
def _erase(call: Call) -> Value:
    items = list(_items(call, 0))
    del items[_place(call, 1, len(items), -1)]
    return sequence(items)


@operator("SplitToSequence")
def _split_to_sequence(call: Call) -> Value:
    value = call.value(0)
    axis = axis_of(call.attribute("axis", 0), len(value.shape))
    n = value.shape[axis]
    if not call.has(1):
        parts = movement.pieces(call, value, [1] * n, axis)
        if not call.attribute("keepdims", 1):
            shape = (*value.shape[:axis], *value.shape[axis + 1 :])
            parts = [_reshaped(call, part, shape) for part in parts]
        return sequence(parts)
    if call.shape(1):
        return sequence(movement.pieces(call, value, call.integers(1), axis))
    each = int(call.array(1).item())
    if each < 1:
        raise ModelError(f"the split size is {each}; it must be at least 1")
    sizes = [min(each, n - at) for at in range(0, n, each)]
    return sequence(movement.pieces(call, value, sizes, axis))


@operator("ConcatFromSequence")
def _concat_from_sequence(call: Call) -> Value:
    items = [_tensor(v) for v in _items(call, 0)]
    if not items:
        raise ModelError("the sequence to concatenate is empty")
    new = call.attribute("new_axis", 0)
    axis = axis_of(call.attribute("axis"), len(items[0].shape) + new)
    if new:
        items = [_reshaped(call, v, (*v.shape[:axis], 1, *v.shape[axis:])) for v in items]
    return join(call, items, axis)


@operator("Optional")
def _optional(call: Call) -> Value | None:
    return call.value(0) if call.has(0) else None


@operator("OptionalHasElement")
def _has_element(call: Call) -> Value:
    return _known(np.array(call.has(0)))


@operator("OptionalGetElement")
def _get_element(call: Call) -> Value:
    return call.value(0)
