"""The reference result of tests/multi/test_adasum.py, which other tests use too."""

from __future__ import annotations

from typing import Any

import numpy as np

from examples.adasum import adasum as example


def torch_weights(
    data: dict[str, np.ndarray],
    world: int,
    method: str,
    optimizer: Any,
    steps: int,
    batch: int,
    nudge: float = 0.0,
) -> list[np.ndarray]:
    """Returns the weights after the given steps of `world` ranks, computed in float64 in this
    process. nudge: the relative perturbation of the initial weights.
    """
    import torch

    torch.manual_seed(0)
    random = np.random.default_rng(2)
    shapes = ([example.HIDDEN, example.PIXELS], [example.CLASSES, example.HIDDEN])
    start = [random.normal(size=s) * (2 / s[1]) ** 0.5 for s in shapes]
    start = [torch.tensor(w.astype(np.float32), dtype=torch.float64) for w in start]
    start = [w * (1 + nudge * torch.sign(torch.randn_like(w))) for w in start]
    ranks = [[w.clone().requires_grad_() for w in start] for _ in range(world)]
    result = [optimizer(weights) for weights in ranks]
    count = len(data["x"])
    picks = [np.random.default_rng([1, r]).integers(0, count, (steps, batch)) for r in range(world)]
    x, y = torch.tensor(data["x"], dtype=torch.float64), torch.tensor(data["y"]).long()
    for step in range(steps):
        old = [w.detach().clone() for w in ranks[0]]
        for weights, own, drawn in zip(ranks, result, picks, strict=True):
            at = torch.tensor(drawn[step])
            logits = torch.relu(x[at] @ weights[0].T) @ weights[1].T
            own.zero_grad()
            torch.nn.functional.cross_entropy(logits, y[at]).backward()
            own.step()
        for layer, before in enumerate(old):
            moved = [weights[layer].detach() - before for weights in ranks]
            while len(moved) > 1 and method in ("tree", "halving"):
                pairs = zip(moved[::2], moved[1::2], strict=True)
                moved = [_blend(a, b, method == "halving") for a, b in pairs]
            total = sum(moved) / (world if method == "average" else 1)
            for weights in ranks:
                weights[layer].data.copy_(before + total)
    return [w.detach().numpy() for w in ranks[0]]


def _blend(a: Any, b: Any, halves: bool) -> Any:
    def dot(x: Any, y: Any) -> Any:
        parts = (x * y).flatten().chunk(2 if halves else 1)
        return sum(part.sum() for part in parts)

    inner = dot(a, b)
    return (1 - inner / (2 * dot(a, a))) * a + (1 - inner / (2 * dot(b, b))) * b


def small_data() -> dict[str, np.ndarray]:
    random = np.random.default_rng(3)
    x = random.normal(size=(60, example.PIXELS)).astype(np.float32)
    y = random.integers(0, example.CLASSES, 60).astype(np.int32)
    return {"x": x[:40], "y": y[:40], "test x": x[40:], "test y": y[40:]}
