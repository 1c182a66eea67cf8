"""Small networks, exported to ONNX by torch, and torch's results for them."""

from __future__ import annotations

import io
import warnings
from pathlib import Path

import torch
from torch import nn


class Attention(nn.Module):
    """A transformer block as in BERT: attention, norms and a feed-forward part."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, rows, width = x.shape
        parts = self.qkv(self.first(x)).reshape(batch, rows, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q @ k.transpose(-1, -2)) * (width // self.heads) ** -0.5
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, rows, width)
        x = x + self.out(mixed)
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


def networks() -> dict[str, tuple[nn.Module, torch.Tensor]]:
    """Returns networks with weights from a seed, and an input for each."""
    torch.manual_seed(1)
    convolutions = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.Hardswish(),
        nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
        nn.LogSoftmax(-1),
    )
    return {
        "mlp": (nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)), torch.randn(3, 16)),
        "convolutions": (convolutions, torch.randn(2, 3, 16, 16)),
        "attention": (Attention(), torch.randn(2, 6, 32)),
    }


def export(module: nn.Module, example: torch.Tensor, path: Path) -> None:
    """Writes the module in eval mode as ONNX, by torch's older exporter, which needs no other
    package.
    """
    result = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module.eval(), (example,), result, dynamo=False, opset_version=17)
    path.write_bytes(result.getvalue())
