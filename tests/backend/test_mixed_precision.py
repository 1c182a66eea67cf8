"""Training in bf16 with fp32 masters: the model reads rounded copies, and AdamW updates the
masters.

Compared with torch, also with fp32 masters and bf16 copies.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ark

torch = pytest.importorskip("torch")

TRAINED_STEPS, RATE = 12, 2e-4
"""The learning rate. A step changes a parameter by 2e-4, which is below bf16's resolution for most
weights.
"""
SHAPES = {"up": (32, 16), "down": (8, 32)}
MAX_MEAN_DIFFERENCE = 0.05
"""The tolerance of the mean difference, as a fraction of the largest change of a parameter, because
sums in bf16 are added in another order.
"""


def _in_torch(given: dict[str, np.ndarray], masters: bool) -> dict[str, np.ndarray]:
    """Returns parameters after training. masters: fp32 copies are updated, otherwise bf16
    parameters.
    """
    kept = torch.float32 if masters else torch.bfloat16
    weights = {n: torch.tensor(given[n], dtype=kept).requires_grad_() for n in SHAPES}
    adam = torch.optim.AdamW(weights.values(), RATE, weight_decay=0.0)
    x, y = torch.tensor(given["x"]).bfloat16(), torch.tensor(given["y"])
    for _ in range(TRAINED_STEPS):
        adam.zero_grad()
        read = {n: w.bfloat16() for n, w in weights.items()}
        error = (torch.relu(x @ read["up"].T) @ read["down"].T).float() - y
        (error * error).sum().backward()
        adam.step()
    return {n: w.detach().float().numpy() for n, w in weights.items()}


def test_fp32_masters_are_updated_as_in_torch(backend: str) -> None:
    """Training with fp32 masters equals torch's. Control: training with parameters in bf16 loses a
    large part of the change in rounding.
    """
    random = np.random.default_rng(3)
    sizes = {**SHAPES, "x": (24, 16), "y": (24, 8)}
    given = {n: random.normal(size=s).astype(np.float32) for n, s in sizes.items()}
    weights: dict[str, Any] = {n: ark.parameter(s) for n, s in SHAPES.items()}
    x, y = ark.tensor([24, 16]), ark.tensor([24, 8])
    read = {n: ark.cast(w, ark.bf16) for n, w in weights.items()}
    hidden = ark.relu(ark.linear(ark.cast(x, ark.bf16), read["up"]))
    error = ark.cast(ark.linear(hidden, read["down"]), ark.fp32) - y
    loss = ark.reduce_sum(ark.reduce_sum(error * error, 1), 0)
    gradients = ark.grad(loss, list(weights.values()))
    assert all(g.dtype() == ark.fp32 for g in gradients)
    ark.optim.AdamW(list(weights.values()), RATE, weight_decay=0.0).step(gradients)
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        for name, tensor in {**weights, "x": x, "y": y}.items():
            tensor.from_numpy(given[name])
        runtime.run(TRAINED_STEPS)
        actual = {n: w.to_numpy() for n, w in weights.items()}
    want, alone = _in_torch(given, True), _in_torch(given, False)
    for name in SHAPES:
        moved = np.abs(want[name] - given[name]).max()
        assert np.abs(actual[name] - want[name]).mean() < MAX_MEAN_DIFFERENCE * moved
        assert np.abs(alone[name] - want[name]).mean() > 2 * MAX_MEAN_DIFFERENCE * moved
