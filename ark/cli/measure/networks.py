"""Five small networks in plain torch, with the shapes of ResNet-18, MobileNet, an LSTM, BERT-tiny
and GPT-2, and a lookup of these and of whole models by name. Called by ark.cli.measure.modules, and
by tests.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ark.cli.measure.whole_models import MODELS


class Block(nn.Module):
    """A residual block of two convolutions (He et al. 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.short: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            conv = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.short = nn.Sequential(conv, nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.short(x))


class Inverted(nn.Module):
    """An inverted residual with a depthwise convolution (Sandler et al. 2018)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        wide = 4 * inputs
        self.body = nn.Sequential(
            nn.Conv2d(inputs, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(),
            nn.Conv2d(wide, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.same = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.body(x)
        return x + result if self.same else result


class Recurrent(nn.Module):
    """An LSTM of two layers over a sequence. The result is that of the last step."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(12, 16, 2, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.lstm(x)[0][:, -1])
        return result


class Layer(nn.Module):
    """A transformer layer. first: True if norms precede the sublayers (GPT-2), False if they follow
    (BERT).
    """

    def __init__(self, width: int, heads: int, inner: int, first: bool) -> None:
        super().__init__()
        self.heads, self.first = heads, first
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.first)
        result: torch.Tensor = self.out(attended.transpose(1, 2).reshape(rows, length, width))
        return result

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        kind = "tanh" if self.first else "none"
        result: torch.Tensor = self.down(nn.functional.gelu(self.up(x), approximate=kind))
        return result

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            x = x + self.attend(self.norms[0](x))
            return x + self.feed(self.norms[1](x))
        x = self.norms[0](x + self.attend(x))
        x = self.norms[1](x + self.feed(x))
        return x


class Transformer(nn.Module):
    """Embeddings and two layers. If `first` is True, GPT-2's head follows, which uses the
    embedding's weight.
    """

    def __init__(self, first: bool, width: int = 32, heads: int = 2, inner: int = 64) -> None:
        super().__init__()
        self.first = first
        self.tokens, self.places = nn.Embedding(100, width), nn.Embedding(32, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList([Layer(width, heads, inner, first) for _ in range(2)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.places(places)
        x = x if self.first else self.norm(x)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.linear(self.norm(x), self.tokens.weight) if self.first else x


def resnet() -> tuple[nn.Module, torch.Tensor]:
    """A small network with the structure of ResNet-18: four stages of two blocks."""
    widths, layers = (8, 16, 24, 32), []
    before = 8
    for stage, width in enumerate(widths):
        layers += [Block(before, width, 2 if stage else 1), Block(width, width, 1)]
        before = width
    stem = [nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    ends = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)]
    return nn.Sequential(*stem, nn.MaxPool2d(3, 2, 1), *layers, *ends), torch.randn(1, 3, 64, 64)


def mobilenet() -> tuple[nn.Module, torch.Tensor]:
    """MobileNet's shape."""
    layers = [Inverted(8, 8, 1), Inverted(8, 12, 2), Inverted(12, 12, 1), Inverted(12, 16, 2)]
    stem = [nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6()]
    ends = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)]
    return nn.Sequential(*stem, *layers, *ends), torch.randn(1, 3, 32, 32)


def lstm() -> tuple[nn.Module, torch.Tensor]:
    """An LSTM's last step."""
    return Recurrent(), torch.randn(1, 8, 12)


def bert() -> tuple[nn.Module, torch.Tensor]:
    """BERT-tiny's shape."""
    return Transformer(first=False), torch.randint(0, 100, (1, 12))


def gpt2() -> tuple[nn.Module, torch.Tensor]:
    """GPT-2's shape, tiny."""
    return Transformer(first=True, inner=128), torch.randint(0, 100, (1, 12))


NETWORKS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "resnet": resnet,
    "mobilenet": mobilenet,
    "lstm": lstm,
    "bert": bert,
    "gpt2": gpt2,
}


def seasoned(module: nn.Module) -> nn.Module:
    """The module in eval mode, after its batch norms have collected statistics from some
    batches.
    """
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            assert part.running_mean is not None and part.running_var is not None
            part.running_mean.normal_(std=0.2)
            part.running_var.uniform_(0.5, 1.5)
    return module.eval()


def network(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A network of NETWORKS with an input of batch 1, or a model of MODELS with its inputs. Random
    values come from a fixed seed.
    """
    torch.manual_seed(3)
    if name in MODELS:
        module, examples = MODELS[name]()
        return seasoned(module), examples
    module, example = NETWORKS[name]()
    return seasoned(module), (example,)
