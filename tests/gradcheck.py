"""Gradients of many small graphs in one launch, each compared with torch.autograd in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import ark


@dataclass
class Case:
    """inputs: arrays of integers, or of numbers, which are differentiated unless their place is
    among `fixed`. Both functions take one tensor for each and give one.
    """

    name: str
    inputs: Sequence[np.ndarray]
    build: Callable[..., Any]
    torch: Callable[..., Any]
    tolerance: float = 2e-5
    dtype: ark.DataType = ark.fp32
    fixed: Sequence[int] = ()
    made: list[Any] = field(default_factory=list)
    weight: Any = None
    found: list[Any] = field(default_factory=list)


def values(*shape: int, low: float = -2.0, high: float = 2.0, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).uniform(low, high, shape)


def varied(case: Case) -> list[int]:
    """The places of the inputs that are differentiated."""
    return [i for i, a in enumerate(case.inputs) if a.dtype.kind == "f" and i not in case.fixed]


def check(cases: Sequence[Case]) -> None:
    """All cases in one model and one launch."""
    for case in cases:
        case.made = [
            ark.tensor(list(a.shape), case.dtype if a.dtype.kind == "f" else ark.int32)
            for a in case.inputs
        ]
        out = case.build(*case.made)
        case.weight = ark.tensor(out.shape(), case.dtype)
        case.found = ark.grad(out, [case.made[i] for i in varied(case)], case.weight)
    weights = {c.name: values(*c.weight.shape(), seed=7) for c in cases}
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        for case in cases:
            for tensor, array in zip(case.made, case.inputs, strict=True):
                tensor.from_numpy(array)
            case.weight.from_numpy(weights[case.name])
        runtime.run()
        for case in cases:
            _compare(case, weights[case.name])


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
    for place, got in zip(varied(case), case.found, strict=True):
        tensor = inputs[place]
        want = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        np.testing.assert_allclose(
            got.to_numpy().astype(np.float64),
            want.numpy(),
            rtol=case.tolerance,
            atol=case.tolerance,
            err_msg=f"{case.name}, input {place}",
        )
