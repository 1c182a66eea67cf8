"""Training steps as one kernel, beside torch: the loss of every step, on the device and there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import ark


class Curve:
    """Keeps a number of every iteration on the device."""

    def __init__(self, steps: int) -> None:
        self.at = ark.tensor([1], ark.int32, name="step")
        self.values = ark.tensor([steps], name="losses")

    def record(self, value: ark.Tensor) -> None:
        """Writes it in the place of this iteration and moves on."""
        here = ark.equal(ark.iota([self.values.shape()[0]], 0, ark.int32), self.at)
        ark.where(here, value, self.values, output=self.values)
        ark.add(self.at, 1, output=self.at)


def perceptron(optimizer: Callable[[list[Any]], Any], steps: int) -> tuple[Any, list[Any], Curve]:
    """(the module, its inputs, the curve) of a perceptron that learns a fixed batch."""

    class Perceptron(ark.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = ark.parameter([16, 8])
            self.bias = ark.parameter([16])
            self.second = ark.parameter([4, 16])

        def forward(self, x: ark.Tensor, y: ark.Tensor) -> ark.Tensor:
            hidden = ark.silu(ark.linear(x, self.first) + self.bias)
            return ark.cross_entropy(ark.linear(hidden, self.second), y)

    module, curve = Perceptron(), Curve(steps)
    given = [ark.tensor([12, 8]), ark.tensor([12], ark.int32)]
    loss = module(*given)
    module.backward()
    curve.record(loss)
    optimizer(list(module.params_dict().values())).step()
    return module, given, curve


def torch_perceptron(
    weights: dict[str, np.ndarray], given: list[np.ndarray], optimizer: Any, steps: int
) -> list[float]:
    """The same in torch, in float64."""
    import torch

    wide = {n: torch.tensor(w, dtype=torch.float64).requires_grad_() for n, w in weights.items()}
    x, y = torch.tensor(given[0], dtype=torch.float64), torch.tensor(given[1], dtype=torch.int64)
    made = optimizer(list(wide.values()))
    losses = []
    for _ in range(steps):
        hidden = torch.nn.functional.silu(x @ wide["first"].T + wide["bias"])
        loss = torch.nn.functional.cross_entropy(hidden @ wide["second"].T, y)
        made.zero_grad()
        loss.backward()
        made.step()
        losses.append(loss.item())
    return losses
