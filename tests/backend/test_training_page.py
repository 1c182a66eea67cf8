"""docs/training.md: its example trains, and its loss after 100 steps equals torch's."""

from __future__ import annotations

import numpy as np
import pytest

import ark
from tests.pages import python_blocks

torch = pytest.importorskip("torch")


def test_example_trains_as_torch_does(backend: str) -> None:
    random = np.random.default_rng(1)
    data, weight = random.random((8, 4), np.float32), random.random((3, 4), np.float32)
    wanted = np.arange(8) % 3
    x, y, w = ark.tensor([8, 4]), ark.tensor([8], ark.int32), ark.parameter([3, 4])
    (example,) = python_blocks("training.md")
    space = {"ark": ark, "model": lambda x: ark.linear(x, w), "x": x, "y": y, "parameters": [w]}
    exec(example, space)
    with ark.Runtime() as runtime:
        runtime.launch()
        for tensor, values in ((x, data), (y, wanted), (w, weight)):
            tensor.from_numpy(values)
        runtime.run(100)
        got = space["loss"].to_numpy()
    kept = torch.nn.Parameter(torch.tensor(weight))
    steps = torch.optim.AdamW([kept], lr=1e-3)
    for _ in range(100):
        loss = torch.nn.functional.cross_entropy(torch.tensor(data) @ kept.T, torch.tensor(wanted))
        steps.zero_grad()
        loss.backward()
        steps.step()
    np.testing.assert_allclose(got.item(), loss.item(), rtol=1e-5)
