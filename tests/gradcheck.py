"""Compares the gradients of many small graphs in one launch with torch.autograd in float64. On the
CPU it also tests the gradient rules alone: the same graphs are interpreted in float64 and compared
with torch.autograd and with finite differences of the forward graph (as torch.autograd.gradcheck
does in its fast mode).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import ark
from ark.runtime import session
from tests.interpreter import Interpreter


@dataclass
class Case:
    """inputs: arrays of integers or of floats. Floats are differentiated unless their index is in
    `fixed`. Both functions take one tensor for each input and return one. smooth: False if finite
    differences are not the gradient, because elements are equal (as in a maximum) or the op passes
    no gradient.
    """

    name: str
    inputs: Sequence[np.ndarray]
    build: Callable[..., Any]
    torch: Callable[..., Any]
    tolerance: float = 2e-5
    dtype: ark.DataType = ark.fp32
    fixed: Sequence[int] = ()
    smooth: bool = True
    tensors: list[Any] = field(default_factory=list)
    weight: Any = None
    gradients: list[Any] = field(default_factory=list)


def values(*shape: int, low: float = -2.0, high: float = 2.0, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).uniform(low, high, shape)


def varied(case: Case) -> list[int]:
    """The indices of the inputs that are differentiated."""
    return [i for i, a in enumerate(case.inputs) if a.dtype.kind == "f" and i not in case.fixed]


DIFFERENCE_STEP = 1e-6  # of the differences
EXACT, DIFFERENCE = 1e-6, 1e-5  # relative; references of a few functions have constants in fp32


def check(cases: Sequence[Case]) -> None:
    """Runs all cases in one model and one launch."""
    if session.backend().name == "cpu":
        for case in cases:
            check_rule(case)
    for case in cases:
        case.tensors = [
            ark.tensor(list(a.shape), case.dtype if a.dtype.kind == "f" else ark.int32)
            for a in case.inputs
        ]
        out = case.build(*case.tensors)
        case.weight = ark.tensor(out.shape(), case.dtype)
        case.gradients = ark.grad(out, [case.tensors[i] for i in varied(case)], case.weight)
    weights = {c.name: values(*c.weight.shape(), seed=7) for c in cases}
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        for case in cases:
            for tensor, array in zip(case.tensors, case.inputs, strict=True):
                tensor.from_numpy(array)
            case.weight.from_numpy(weights[case.name])
        runtime.run()
        for case in cases:
            _compare(case, weights[case.name])


def check_rule(case: Case) -> None:
    """Evaluates a case's graph in NumPy in float64. Asserts that its gradients equal torch's and,
    for a small change of the inputs, predict the change of the result.
    """
    model = ark.Model(0, 1)
    with ark.use_model(model):
        inputs = [
            ark.tensor(list(a.shape), case.dtype if a.dtype.kind == "f" else ark.int32)
            for a in case.inputs
        ]
        out = case.build(*inputs)
        weight = ark.tensor(out.shape(), case.dtype)
        gradients = ark.grad(out, [inputs[i] for i in varied(case)], weight)
    weights = values(*out.shape(), seed=7)
    seen = [_rounded(a, case) for a in case.inputs]

    def run(arrays: Sequence[np.ndarray]) -> Interpreter:
        result = Interpreter()
        for tensor, array in zip((*inputs, weight), (*arrays, weights), strict=True):
            result.view(tensor.ir)[...] = array
        result.run(model.graph, 0)
        return result

    memory = run(seen)
    actual = [memory.view(g.ir).copy() for g in gradients]
    for got, want in zip(actual, _by_torch(case, seen, weights), strict=True):
        np.testing.assert_allclose(
            got, want.reshape(got.shape), EXACT, EXACT, err_msg=f"{case.name} in float64"
        )
    random = np.random.default_rng(3)
    for place, gradient in zip(varied(case), actual, strict=True) if case.smooth else ():
        along = random.uniform(-1, 1, seen[place].shape)
        ends = []
        for step in (DIFFERENCE_STEP, -DIFFERENCE_STEP):
            moved = [a + step * along if i == place else a for i, a in enumerate(seen)]
            ends.append(float((run(moved).view(out.ir) * weights).sum()))
        slope, size = (
            (ends[0] - ends[1]) / (2 * DIFFERENCE_STEP),
            float(np.abs(gradient * along).sum()),
        )
        derivative = float((gradient * along).sum())
        assert abs(slope - derivative) <= DIFFERENCE * (1 + size), (
            case.name,
            place,
            slope,
            derivative,
        )


def _rounded(array: np.ndarray, case: Case) -> np.ndarray:
    if array.dtype.kind != "f":
        return array
    return array.astype(case.dtype.numpy).astype(np.float64)


def _by_torch(case: Case, arrays: Sequence[np.ndarray], weights: np.ndarray) -> list[np.ndarray]:
    import torch

    def seen(array: np.ndarray) -> Any:
        if array.dtype.kind != "f":
            return torch.from_numpy(array.astype(np.int64))
        return torch.from_numpy(array.copy()).requires_grad_()

    inputs = [seen(a) for a in arrays]
    out = case.torch(*inputs)
    out.backward(torch.from_numpy(weights).reshape(out.shape))
    each = [inputs[i] for i in varied(case)]
    return [np.zeros(t.shape) if t.grad is None else t.grad.numpy() for t in each]


def _compare(case: Case, weight: np.ndarray) -> None:
    import torch

    def seen(array: np.ndarray) -> Any:
        if array.dtype.kind != "f":
            return torch.from_numpy(array.astype(np.int64))
        rounded = array.astype(case.dtype.numpy).astype(np.float64)
        return torch.from_numpy(rounded).requires_grad_()

    inputs = [seen(a) for a in case.inputs]
    out = case.torch(*inputs)
    out.backward(seen(weight).detach().reshape(out.shape))
    for place, got in zip(varied(case), case.gradients, strict=True):
        tensor = inputs[place]
        want = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        np.testing.assert_allclose(
            got.to_numpy().astype(np.float64),
            want.numpy(),
            rtol=case.tolerance,
            atol=case.tolerance,
            err_msg=f"{case.name}, input {place}",
        )
