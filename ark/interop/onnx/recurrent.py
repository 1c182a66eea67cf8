"""Recurrent layers, step by step: RNN, GRU and LSTM with their default activations.

One product makes the inputs' part of all steps; each step adds that of the hidden state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ark
from ark.interop.onnx.values import Call, Value, made, operator, refuse

_DEFAULTS = {
    "RNN": ["Tanh"],
    "GRU": ["Sigmoid", "Tanh"],
    "LSTM": ["Sigmoid", "Tanh", "Tanh"],
}
_GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


def _gate(tensor: ark.Tensor, number: int, width: int) -> ark.Tensor:
    return tensor[:, number * width : (number + 1) * width]


def _rnn(x: Any, h: Any, _: Any, r: Any, bias: Any, call: Call) -> tuple[Any, Any]:
    return ark.tanh(ark.add(x, ark.add(ark.linear(h, r), bias))), None


def _gru(x: Any, h: Any, _: Any, r: Any, bias: Any, call: Call) -> tuple[Any, Any]:
    """Gates: update, reset, new."""
    n = h.ir.shape[1]
    if call.attribute("linear_before_reset", 0):
        back = ark.add(ark.linear(h, r), bias)
        update = ark.sigmoid(ark.add(_gate(x, 0, n), _gate(back, 0, n)))
        reset = ark.sigmoid(ark.add(_gate(x, 1, n), _gate(back, 1, n)))
        last = ark.mul(reset, _gate(back, 2, n))
    else:
        back = ark.add(ark.linear(h, r[0 : 2 * n]), bias[:, 0 : 2 * n])
        update = ark.sigmoid(ark.add(_gate(x, 0, n), _gate(back, 0, n)))
        reset = ark.sigmoid(ark.add(_gate(x, 1, n), _gate(back, 1, n)))
        last = ark.add(ark.linear(ark.mul(reset, h), r[2 * n : 3 * n]), bias[:, 2 * n : 3 * n])
    new = ark.tanh(ark.add(_gate(x, 2, n), last))
    return ark.add(new, ark.mul(update, ark.sub(h, new))), None


def _lstm(x: Any, h: Any, c: Any, r: Any, bias: Any, call: Call) -> tuple[Any, Any]:
    """Gates: input, output, forget, cell."""
    n = h.ir.shape[1]
    gates = ark.add(x, ark.add(ark.linear(h, r), bias))
    enter, leave, keep = (ark.sigmoid(_gate(gates, i, n)) for i in range(3))
    cell = ark.add(ark.mul(keep, c), ark.mul(enter, ark.tanh(_gate(gates, 3, n))))
    return ark.mul(leave, ark.tanh(cell)), cell


_STEPS: dict[str, Callable[..., tuple[Any, Any]]] = {"RNN": _rnn, "GRU": _gru, "LSTM": _lstm}


def _refused(call: Call) -> None:
    """UnsupportedError for forms that are not built."""
    directions = 2 if call.attribute("direction", "forward") == "bidirectional" else 1
    wanted = _DEFAULTS[call.op] * directions
    if call.attribute("activations", wanted) not in (wanted, [w.encode() for w in wanted]):
        raise refuse("a recurrent layer with activations of its own")
    if call.attribute("clip") is not None or call.attribute("input_forget", 0):
        raise refuse("a recurrent layer that clips or couples its gates")
    if call.has(4):
        raise refuse("a recurrent layer with lengths by sequence")
    if call.has(7):
        raise refuse("an LSTM with peepholes")


@operator("RNN", "GRU", "LSTM")
def _recurrent(call: Call) -> list[Value]:
    """X (steps, batch, inputs), or (batch, steps, inputs) with layout 1; results Y, Y_h, Y_c."""
    _refused(call)
    first = bool(call.attribute("layout", 0))
    x = call.tensor(0)
    if first:
        x = ark.transpose(x, [1, 0, 2])
    steps, batch, inputs = x.ir.shape
    directions, width = call.shape(1)[0], call.shape(2)[2]
    gates = _GATES[call.op] * width
    rows = ark.reshape(x, [steps * batch, inputs])
    outputs: list[list[Any]] = [[] for _ in range(steps)]
    ends: list[tuple[Any, Any]] = []
    for d in range(directions):
        weight, back = (ark.reshape(call.tensor(i)[d : d + 1], [gates, -1]) for i in (1, 2))
        parts = ark.linear(rows, weight)
        bias: Any = ark.zeros([1, gates], x.ir.dtype)
        if call.has(3):
            both = call.tensor(3)[d : d + 1]
            parts, bias = ark.add(parts, both[:, 0:gates]), ark.copy(both[:, gates : 2 * gates])
        h, c = (_start(call, place, d, batch, width, first, x) for place in (5, 6))
        backwards = d == 1 or call.attribute("direction", "forward") == "reverse"
        for step in reversed(range(steps)) if backwards else range(steps):
            part = parts[step * batch : (step + 1) * batch]
            h, c = _STEPS[call.op](part, h, c, back, bias, call)
            outputs[step].append(ark.reshape(h, [1, 1, batch, width]))
        ends.append((h, c))
    whole = ark.concat([ark.concat(o, 1) if len(o) > 1 else o[0] for o in outputs], 0)
    made_of = [_ends([h for h, _ in ends], batch, width, first)]
    if call.op == "LSTM":
        made_of.append(_ends([c for _, c in ends], batch, width, first))
    if first:
        whole = ark.transpose(whole, [2, 0, 1, 3])
    return [made(whole, whole.ir.shape), *made_of]


def _start(
    call: Call, place: int, direction: int, batch: int, width: int, first: bool, like: ark.Tensor
) -> Any:
    """A state before the first step."""
    if place >= 6 and call.op != "LSTM":
        return None
    if not call.has(place):
        return ark.zeros([batch, width], like.ir.dtype)
    given = call.tensor(place)
    part = given[:, direction : direction + 1] if first else given[direction : direction + 1]
    return ark.reshape(part, [batch, width])


def _ends(states: list[Any], batch: int, width: int, first: bool) -> Value:
    """The directions' last states one behind the other."""
    shape = [batch, 1, width] if first else [1, batch, width]
    wide = [ark.reshape(s, shape) for s in states]
    tensor = ark.concat(wide, 1 if first else 0) if len(wide) > 1 else wide[0]
    return made(tensor, tensor.ir.shape)
