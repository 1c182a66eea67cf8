"""LAMB for torch, which has no such optimizer. Tests compare ark.optim.LAMB with it."""

from __future__ import annotations

from typing import Any

import torch


class Lamb(torch.optim.Optimizer):
    """You et al. 2020, algorithm 2, with phi(x) = x."""

    def __init__(self, parameters: Any, lr: float, betas: tuple[float, float], decay: float):
        super().__init__(parameters, {"lr": lr, "betas": betas, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            one, two = group["betas"]
            for x in group["params"]:
                held = self.state.setdefault(x, {"m": 0.0, "v": 0.0, "t": 0})
                held["t"] += 1
                held["m"] = one * held["m"] + (1 - one) * x.grad
                held["v"] = two * held["v"] + (1 - two) * x.grad**2
                m, v = held["m"] / (1 - one ** held["t"]), held["v"] / (1 - two ** held["t"])
                u = m / (v.sqrt() + 1e-8) + group["decay"] * x
                trust = x.norm() / u.norm() if x.norm() > 0 and u.norm() > 0 else 1.0
                x -= group["lr"] * trust * u
