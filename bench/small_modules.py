"""Compares ark with torch eager for small torch modules on the CPU, in microseconds of wall-clock
and CPU time.

`python -m bench.small_modules [NAME ...]`: the modules run by torch.compile(backend="ark") and,
forward only, by ark.from_torch. Each time is the minimum of 7 readings of 100 calls; CPU time is
that of all threads.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import ark


class Mixer(nn.Module):
    """A block of an MLP mixer: 8 samples of 16 tokens with 64 features."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(64), nn.LayerNorm(64)
        self.tokens = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.channels = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))

    def forward(self, x: Any) -> Any:
        x = x + self.tokens(self.first(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.second(x))


class Autoencoder(nn.Module):
    """A variational autoencoder for 32 rows of 64 features, with fixed noise."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(64, 32), nn.Linear(32, 64)
        self.mean, self.spread, self.back = nn.Linear(32, 8), nn.Linear(32, 8), nn.Linear(8, 32)

    def forward(self, x: Any) -> Any:
        h = F.relu(self.inner(x))
        z = self.mean(h) + torch.exp(0.5 * self.spread(h)) * 0.3
        return torch.sigmoid(self.outer(F.relu(self.back(z))))


class Graph(nn.Module):
    """Two layers of a graph network; each sums messages over 200 edges of 50 nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x: Any, source: Any, target: Any) -> Any:
        def summed(h: Any) -> Any:
            return torch.zeros_like(h).index_add(0, target, h[source])

        return self.second(summed(F.relu(self.first(summed(x)))))


class GraphAttention(nn.Module):
    """One graph attention head over 30 nodes, which computes all pairs at once."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.score = nn.Linear(16, 16, bias=False), nn.Linear(32, 1)

    def forward(self, x: Any, joined: Any) -> Any:
        h = self.project(x)
        n = len(h)
        pairs = torch.cat([h[:, None].expand(n, n, 16), h[None].expand(n, n, 16)], -1)
        score = F.leaky_relu(self.score(pairs)[..., 0], 0.2).masked_fill(joined == 0, -1e9)
        return torch.softmax(score, -1) @ h


class Bag(nn.Module):
    """Means of 10 rows of an embedding with 1,000 rows, for 16 samples; or the same by
    nn.EmbeddingBag.
    """

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.own = own
        self.rows = nn.EmbeddingBag(1000, 32) if own else nn.Embedding(1000, 32)
        self.last = nn.Linear(32, 4)

    def forward(self, places: Any) -> Any:
        rows = self.rows(places)
        return self.last(rows if self.own else rows.mean(1))


def cases() -> dict[str, tuple[nn.Module, tuple[Any, ...]]]:
    """By name: a module and its inputs."""
    edges, places = torch.randint(0, 50, (2, 200)), torch.randint(0, 1000, (16, 10))
    layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return {
        "mixer": (Mixer(), (torch.randn(8, 16, 64),)),
        "vae": (Autoencoder(), (torch.randn(32, 64),)),
        "gnn": (Graph(), (torch.randn(50, 16), *edges)),
        "gat": (GraphAttention(), (torch.randn(30, 16), (torch.rand(30, 30) > 0.5).float())),
        "bag": (Bag(own=False), (places,)),
        "embedding_bag": (Bag(own=True), (places,)),
        "mlp": (layers, (torch.randn(8, 64),)),
    }


def least(call: Callable[[], Any]) -> tuple[float, float]:
    """Microseconds of a call: (wall-clock time, CPU time)."""
    seconds = []
    for _ in range(7):
        clock, used = time.perf_counter(), time.process_time()
        for _ in range(100):
            call()
        seconds.append((time.perf_counter() - clock, time.process_time() - used))
    return min(f[0] for f in seconds) * 1e4, min(f[1] for f in seconds) * 1e4


def main(names: list[str]) -> None:
    ark.init(backend="cpu")
    torch.manual_seed(0)
    print(f"{'':22} {'eager':>15} {'torch.compile':>15} ratios      {'from_torch':>15} ratios")
    for name, (module, inputs) in cases().items():
        if names and name not in names:
            continue
        torch._dynamo.reset()
        compiled: Any = torch.compile(module, backend="ark")
        with torch.no_grad():
            torch.testing.assert_close(compiled(*inputs), module(*inputs))
            eager = least(lambda m=module, x=inputs: m(*x))
            calls = [least(lambda m=compiled, x=inputs: m(*x))]
            if name != "embedding_bag":  # one of its operators stays in torch
                kernel = ark.from_torch(module, inputs)
                calls.append(least(lambda m=kernel, x=inputs: m(*x)))
        show(f"{name}, forward", eager, calls)
        steps = [
            least(lambda m=m, x=inputs: m(*x).square().mean().backward())
            for m in (module, compiled)
        ]
        show(f"{name}, with backward", steps[0], steps[1:])


def show(name: str, eager: tuple[float, float], calls: list[tuple[float, float]]) -> None:
    pairs = [eager, *calls]
    texts = [f"{clock:7.1f} {used:7.1f}" for clock, used in pairs]
    for i, (clock, used) in enumerate(calls, 1):
        texts[i] += f" {clock / eager[0]:5.2f} {used / eager[1]:5.2f}"
    print(f"{name:22}", *texts, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
