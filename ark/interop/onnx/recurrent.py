"""Converts recurrent layers (RNN, GRU, LSTM) to ops for each step.

One matrix product computes the contribution of the inputs for all steps. Each step adds the
contribution of the hidden state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ark
from ark.interop.onnx.values import Call, Value, operator, refuse, shaped

_DEFAULTS = {
    "RNN": ["Tanh"],
    "GRU": ["Sigmoid", "Tanh"],
    "LSTM": ["Sigmoid", "Tanh", "Tanh"],
}
_GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
_ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "relu": ark.relu,
    "sigmoid": ark.sigmoid,
    "softplus": lambda t: ark.neg(ark.log_sigmoid(ark.neg(t))),
    "softsign": ark.softsign,
    "tanh": ark.tanh,
}


@dataclass(frozen=True)
class _Layer:
    """The parameters of one direction (forward or backward) of a recurrent layer.

    weights: the weights that multiply the hidden state. peepholes: the weights with which the cell
    state enters the input, output and forget gates. activations: in ONNX's order; each clips its
    argument first.
    """

    weights: Any
    bias: Any
    peepholes: Any
    activations: list[Callable[[Any], Any]]
    reset_last: bool  # GRU: the reset gate is applied after the product with the hidden state


def _gate(tensor: ark.Tensor, number: int, width: int) -> ark.Tensor:
    return tensor[:, number * width : (number + 1) * width]


def _rnn(x: Any, h: Any, _: Any, layer: _Layer) -> tuple[Any, Any]:
    (f,) = layer.activations
    return f(ark.add(x, ark.add(ark.linear(h, layer.weights), layer.bias))), None


def _gru(x: Any, h: Any, _: Any, layer: _Layer) -> tuple[Any, Any]:
    """One GRU step. Gates are in the order update, reset, new."""
    n, r, bias = h.ir.shape[1], layer.weights, layer.bias
    f, g = layer.activations
    if layer.reset_last:
        back = ark.add(ark.linear(h, r), bias)
        update = f(ark.add(_gate(x, 0, n), _gate(back, 0, n)))
        reset = f(ark.add(_gate(x, 1, n), _gate(back, 1, n)))
        last = ark.mul(reset, _gate(back, 2, n))
    else:
        back = ark.add(ark.linear(h, r[0 : 2 * n]), bias[:, 0 : 2 * n])
        update = f(ark.add(_gate(x, 0, n), _gate(back, 0, n)))
        reset = f(ark.add(_gate(x, 1, n), _gate(back, 1, n)))
        last = ark.add(ark.linear(ark.mul(reset, h), r[2 * n : 3 * n]), bias[:, 2 * n : 3 * n])
    new = g(ark.add(_gate(x, 2, n), last))
    return ark.add(new, ark.mul(update, ark.sub(h, new))), None


def _lstm(x: Any, h: Any, c: Any, layer: _Layer) -> tuple[Any, Any]:
    """One LSTM step. Gates are in the order input, output, forget, cell."""
    n = h.ir.shape[1]
    f, g, last = layer.activations
    gates = ark.add(x, ark.add(ark.linear(h, layer.weights), layer.bias))

    def gate(number: int, cell: Any) -> Any:
        part = _gate(gates, number, n)
        if layer.peepholes is not None:
            part = ark.add(part, ark.mul(_gate(layer.peepholes, number, n), cell))
        return f(part)

    enter, keep = gate(0, c), gate(2, c)
    cell = ark.add(ark.mul(keep, c), ark.mul(enter, g(_gate(gates, 3, n))))
    return ark.mul(gate(1, cell), last(cell)), cell


_STEPS: dict[str, Callable[..., tuple[Any, Any]]] = {"RNN": _rnn, "GRU": _gru, "LSTM": _lstm}


def _activations(call: Call, direction: int) -> list[Callable[[Any], Any]]:
    """The activations of one direction. Raises UnsupportedError for activations that ark does not
    have.
    """
    wanted = _DEFAULTS[call.op]
    given = [
        a.decode() if isinstance(a, bytes) else a for a in call.attribute("activations", wanted * 2)
    ]
    names = given[direction * len(wanted) : (direction + 1) * len(wanted)]
    odd = [name for name in names if name.lower() not in _ACTIVATIONS]
    if odd or len(names) < len(wanted) or call.attribute("input_forget", 0):
        raise refuse(f"a recurrent layer with the activations {given}, or coupled gates")
    clip = call.attribute("clip")

    def clipped(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        if clip is None:
            return function
        return lambda t: function(ark.minimum(ark.maximum(t, -float(clip)), float(clip)))

    return [clipped(_ACTIVATIONS[name.lower()]) for name in names]


@operator("RNN", "GRU", "LSTM")
def _recurrent(call: Call) -> list[Value]:
    """A whole recurrent layer. The input X is (steps, batch, inputs), or (batch, steps, inputs)
    with layout 1. The results are Y, Y_h, Y_c.
    """
    first = bool(call.attribute("layout", 0))
    x = call.tensor(0)
    if first:
        x = ark.transpose(x, [1, 0, 2])
    steps, batch, inputs = x.ir.shape
    directions, width = call.shape(1)[0], call.shape(2)[2]
    gates = _GATES[call.op] * width
    rows = ark.reshape(x, [steps * batch, inputs])
    lengths = ark.reshape(call.tensor(4), [batch, 1]) if call.has(4) else None
    outputs: list[list[Any]] = [[] for _ in range(steps)]
    ends: list[tuple[Any, Any]] = []
    for d in range(directions):
        weight, back = (ark.reshape(call.tensor(i)[d : d + 1], [gates, -1]) for i in (1, 2))
        parts = ark.linear(rows, weight)
        bias: Any = ark.zeros([1, gates], x.ir.dtype)
        if call.has(3):
            weights = call.tensor(3)[d : d + 1]
            parts, bias = (
                ark.add(parts, weights[:, 0:gates]),
                ark.copy(weights[:, gates : 2 * gates]),
            )
        h, c = (_start(call, place, d, batch, width, first, x) for place in (5, 6))
        peepholes = ark.copy(call.tensor(7)[d : d + 1]) if call.has(7) else None
        reset_last = bool(call.attribute("linear_before_reset", 0))
        layer = _Layer(back, bias, peepholes, _activations(call, d), reset_last)
        backwards = d == 1 or call.attribute("direction", "forward") == "reverse"
        for step in reversed(range(steps)) if backwards else range(steps):
            part = parts[step * batch : (step + 1) * batch]
            new, cell = _STEPS[call.op](part, h, c, layer)
            if lengths is None:
                h, c = new, cell
                shown = h
            else:  # after a sequence's last step its state stays, and its output is 0
                runs = ark.greater(lengths, step)
                h = ark.where(runs, new, h)
                c = ark.where(runs, cell, c) if cell is not None else None
                shown = ark.where(runs, new, 0.0)
            outputs[step].append(ark.reshape(shown, [1, 1, batch, width]))
        ends.append((h, c))
    whole = ark.concat([ark.concat(o, 1) if len(o) > 1 else o[0] for o in outputs], 0)
    made_of = [_ends([h for h, _ in ends], batch, width, first)]
    if call.op == "LSTM":
        made_of.append(_ends([c for _, c in ends], batch, width, first))
    if first:
        whole = ark.transpose(whole, [2, 0, 1, 3])
    return [shaped(whole, whole.ir.shape), *made_of]


def _start(
    call: Call, place: int, direction: int, batch: int, width: int, first: bool, like: ark.Tensor
) -> Any:
    """The initial state of one direction: an input of the node, or zeros if the node does not have
    this input.
    """
    if place >= 6 and call.op != "LSTM":
        return None
    if not call.has(place):
        return ark.zeros([batch, width], like.ir.dtype)
    given = call.tensor(place)
    part = given[:, direction : direction + 1] if first else given[direction : direction + 1]
    return ark.reshape(part, [batch, width])


def _ends(states: list[Any], batch: int, width: int, first: bool) -> Value:
    """The last states of all directions, concatenated in the layout that ONNX requires for Y_h and
    Y_c.
    """
    shape = [batch, 1, width] if first else [1, batch, width]
    wide = [ark.reshape(s, shape) for s in states]
    tensor = ark.concat(wide, 1 if first else 0) if len(wide) > 1 else wide[0]
    return shaped(tensor, tensor.ir.shape)
