"""Training steps of torch.nn.MultiheadAttention, which transposes its rows before and behind both
of its projections, compared with torch.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

import ark

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402


class Layer(nn.Module):
    """A residual layer of attention over sequences, and the loss of its mean rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.ends = nn.LayerNorm(16), nn.Linear(16, 5)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Any, classes: Any) -> Any:
        y = self.norm(x)
        y, _ = self.attention(y, y, y, need_weights=False)
        return nn.functional.cross_entropy(self.ends((x + y).mean(1)), classes)


def test_training_steps_equal_torch() -> None:
    torch.manual_seed(0)
    ark.init(backend="cpu")
    layer = Layer().train()
    wanted, x, classes = copy.deepcopy(layer).double(), torch.randn(3, 7, 16), torch.arange(3)
    optimizer = torch.optim.SGD(wanted.parameters(), 0.5)
    step = ark.training_model(layer, None, torch.optim.SGD(layer.parameters(), 0.5))
    for _ in range(3):
        optimizer.zero_grad()
        loss = wanted(x.double(), classes)
        loss.backward()
        optimizer.step()
        assert float(step(x, classes)) == pytest.approx(float(loss), rel=1e-5)
    step.close()
    for name, parameter in wanted.named_parameters():
        got = layer.get_parameter(name).detach().double()
        assert torch.allclose(got, parameter.detach(), rtol=1e-4, atol=1e-5), name
