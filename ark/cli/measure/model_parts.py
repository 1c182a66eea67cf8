"""Torch modules from which ark.cli.measure.whole_models builds models: wrappers of modules of other
packages, and models written here. It is imported only when a model is built, because it imports
torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class FirstTensor(nn.Module):
    """A model of transformers or diffusers whose call returns only the first tensor of its results.
    more: fixed arguments of each call.
    """

    def __init__(self, model: nn.Module, **more: Any) -> None:
        super().__init__()
        self.model, self.more = model, more

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.model(*inputs, return_dict=False, **self.more)[0]


def _layers(sizes: Sequence[int]) -> nn.Sequential:
    pairs = itertools.pairwise(sizes)
    return nn.Sequential(*(m for a, b in pairs for m in (nn.Linear(a, b), nn.ReLU())))


class Recommender(nn.Module):
    """DLRM (Naumov et al. 2019). One perceptron computes a vector from the dense inputs, and each
    category has an embedding. A second perceptron reads the computed vector and the inner products
    of all pairs of these vectors.
    """

    def __init__(self, tables: int = 26, rows: int = 10000, width: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(rows, width) for _ in range(tables)])
        self.bottom = _layers((13, 512, 256, width))
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(_layers((width + pairs, 512, 256)), nn.Linear(256, 1))
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1))

    def forward(self, dense: torch.Tensor, categories: torch.Tensor) -> torch.Tensor:
        first = self.bottom(dense)
        each = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        vectors = torch.stack([first, *each], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        rows, columns = self.get_buffer("pairs")
        return torch.sigmoid(self.top(torch.cat([first, products[:, rows, columns]], 1)))


class GraphAttention(nn.Module):
    """Layers of a graph attention network (Velickovic et al. 2018) over a dense graph."""

    def __init__(self, inputs: int, width: int, heads: int, classes: int) -> None:
        super().__init__()
        self.heads = heads
        self.maps = nn.ModuleList(
            [nn.Linear(inputs, heads * width), nn.Linear(heads * width, heads * classes)]
        )
        ends = [nn.Parameter(torch.randn(2, heads, n) * 0.1) for n in (width, classes)]
        self.ends = nn.ParameterList(ends)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        for place, (linear, ends) in enumerate(zip(self.maps, self.ends, strict=True)):
            given = linear(nodes).unflatten(-1, (self.heads, -1)).transpose(0, 1)
            source, target = ((given * end[:, None]).sum(-1) for end in ends)
            scores = nn.functional.leaky_relu(source[:, :, None] + target[:, None], 0.2)
            weights = torch.softmax(scores.masked_fill(~edges, -torch.inf), -1)
            mixed = weights @ given
            last = place == len(self.maps) - 1
            nodes = mixed.mean(0) if last else nn.functional.elu(mixed.transpose(0, 1).flatten(1))
        return nodes


class WithLoss(nn.Module):
    """A module whose result is the cross-entropy of another module's result. The last input is the
    classes, one for each vector of the result's last dimension. A vector of one element scores the
    second of two classes.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        *inputs, classes = given
        scores = self.module(*inputs)
        rows = scores.reshape(-1, scores.shape[-1]).float()
        if scores.shape[-1] == 1:
            return nn.functional.binary_cross_entropy_with_logits(
                rows[:, 0], classes.reshape(-1).float()
            )
        return nn.functional.cross_entropy(rows, classes.reshape(-1))
