"""A training step of a small Llama for one device, written with public ops: forward, `ark.grad`,
AdamW.

The layers are divided into blocks. Each micro-batch runs forward and backward through all blocks.
The ops of each block of each micro-batch are in a named scope, by which a parallel plan can place
and order them. `ranks.py` splits the step over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import ark
from ark.frontend.model import Model, use_model
from ark.ir.graph import Graph

IN = "in"  # the name of the embedding's block, if it has one


@dataclass(frozen=True)
class Config:
    """A Llama with tied embeddings, and its training. batch: sequences of a step."""

    vocab: int = 64
    hidden: int = 32
    inner: int = 64
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    rows: int = 16
    batch: int = 4
    eps: float = 1e-5
    theta: float = 10000.0
    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.95)
    decay: float = 0.1

    @property
    def head(self) -> int:
        """Elements of a head."""
        return self.hidden // self.heads


def parameter_shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the parameters, in the order of the model."""
    kv = c.kv_heads * c.head
    shapes: dict[str, tuple[int, ...]] = {"embedding": (c.vocab, c.hidden)}
    square, wide = (c.hidden, c.hidden), (c.inner, c.hidden)
    own = {
        "attention_norm": (c.hidden,),
        "query": square,
        "key": (kv, c.hidden),
        "value": (kv, c.hidden),
        "output": square,
        "mlp_norm": (c.hidden,),
        "gate": wide,
        "up": wide,
        "down": (c.hidden, c.inner),
    }
    for i in range(c.layers):
        shapes.update({f"layers.{i}.{name}": size for name, size in own.items()})
    return {**shapes, "norm": (c.hidden,)}


@dataclass(frozen=True)
class Shape:
    """The form of a step.

    micro_batches: the number of micro-batches in a step. stages: the number of blocks into which
    the layers are cut. apart: True if the embedding is a separate block. passes: the number of
    forward passes; the result of a pass is added to the input of the next one, and the backward
    pass covers only the last (recycling). recomputed: True if a block keeps only its inputs and
    recomputes its activations in the backward pass. gathered: True if parameters are read through a
    copy, as ZeRO 3 does.
    """

    micro_batches: int = 1
    stages: int = 1
    apart: bool = False
    passes: int = 1
    recomputed: bool = False
    gathered: bool = False

    @property
    def blocks(self) -> list[str]:
        """The names of the blocks, in forward order."""
        return [*([IN] if self.apart else []), *map(str, range(self.stages))]


@dataclass
class Step:
    """The graph of a training step. names: the buffer name of each tensor, by the name that this
    module gives it.
    """

    graph: Graph
    names: dict[str, str] = field(default_factory=dict)


class Builder:
    """Builds a step for one device: micro-batches through blocks of layers and back, then AdamW."""

    def __init__(self, c: Config, shape: Shape, steps: int):
        if c.layers % shape.stages or c.batch % shape.micro_batches:
            raise SystemExit(
                f"{c.layers} layers and {c.batch} sequences cannot be {shape.stages} equal stages "
                f"and {shape.micro_batches} micro-batches; choose divisors"
            )
        self.c, self.shape, self.steps = c, shape, steps
        self.rows = c.batch // shape.micro_batches
        self.step = Step(Graph())
        self.weights: dict[str, Any] = {}

    def tensor(self, name: str, size: tuple[int, ...]) -> Any:
        created = ark.tensor(size, name=name)
        self.step.names[name] = created.ir.buffer.name
        return created

    def build(self) -> Step:
        c, model = self.c, Model(0, 1)
        with use_model(model):
            for name, size in parameter_shapes(c).items():
                self.weights[name] = ark.parameter(size, name=name)
                self.step.names[name] = self.weights[name].ir.buffer.name
            self.cos, self.sin = (self.tensor(n, (c.rows, c.head)) for n in ("cos", "sin"))
            self.rotation = self.tensor("rotation", (c.head, c.head))
            self.mask = self.tensor("mask", (c.rows, c.rows))
            gradients: dict[str, list[tuple[str, Any]]] = {name: [] for name in self.weights}
            count = range(self.shape.micro_batches)
            losses = [self.micro_batch(model.graph, m, gradients) for m in count]
            self.update(model.graph, gradients, losses)
        self.step.graph = model.graph
        return self.step

    def micro_batch(self, graph: Graph, m: int, gradients: dict[str, list[tuple[str, Any]]]) -> Any:
        """Adds one micro-batch, forward and backward, and its gradients by parameter. Returns its
        share of the loss.
        """
        c, size = self.c, (self.rows, self.c.rows, self.c.vocab)
        tokens, targets = self.tensor(f"tokens{m}", size), self.tensor(f"targets{m}", size)
        recycled: Any = None
        for way in "ghij"[: self.shape.passes - 1]:
            h = None
            for block in self.shape.blocks:
                with graph.scope(f"{way}{block}-{m}"):
                    h = self.forward(block, h, tokens, recycled, {})
                    if block == self.shape.blocks[-1]:
                        h = ark.detach(ark.rmsnorm(h, self.weight("norm", {}), c.eps))
            recycled = h
        h, inner = None, []
        for block in self.shape.blocks:
            with graph.scope(f"f{block}-{m}"):
                begin, used = h, {}
                h = self.forward(block, begin, tokens, recycled, used)
                if block == self.shape.blocks[-1]:
                    h = self.loss(h, targets, used)
                inner.append((block, begin, h, used))
        loss, given = h, None
        for block, begin, end, used in reversed(inner):
            with graph.scope(f"b{block}-{m}"):
                if self.shape.recomputed:
                    begin, used = None if begin is None else ark.copy(begin), {}
                    end = self.forward(block, begin, tokens, recycled, used)
                    if block == self.shape.blocks[-1]:
                        end = self.loss(end, targets, used)
                wanted = [*([] if begin is None else [begin]), *used.values()]
                block_gradients = ark.grad([end], wanted, None if given is None else [given])
                if begin is not None:
                    given = block_gradients.pop(0)
                for name, gradient in zip(used, block_gradients, strict=True):
                    gradients[name].append((block, gradient))
        return loss

    def forward(self, block: str, h: Any, tokens: Any, recycled: Any, used: dict[str, Any]) -> Any:
        """The result of a block. h: the previous block's result. used: the parameters that were
        read so far, to which the block's parameters are added.
        """
        if h is None:
            h = ark.matmul(tokens, self.weight("embedding", used))
            h = h if recycled is None else ark.add(h, recycled)
        if block != IN:
            per = self.c.layers // self.shape.stages
            for i in range(int(block) * per, (int(block) + 1) * per):
                h = self.layer(h, f"layers.{i}", used)
        return h

    def weight(self, name: str, used: dict[str, Any]) -> Any:
        if name not in used:
            # The first and the last stage both read the embedding, each through a separate copy.
            # Without the copies, the gradient of the last stage's use would pass through all other
            # stages.
            tied = name == "embedding" and len(self.shape.blocks) > 1
            used[name] = ark.copy(self.weights[name]) if tied else self.weights[name]
        return ark.copy(used[name]) if self.shape.gathered else used[name]

    def layer(self, h: Any, name: str, used: dict[str, Any]) -> Any:
        c = self.c

        def product(x: Any, weight: str) -> Any:
            return ark.matmul(x, self.weight(f"{name}.{weight}", used), transpose_other=True)

        def heads(x: Any, group: int) -> Any:
            split = ark.reshape(x, (self.rows, c.rows, c.kv_heads, group, c.head))
            return ark.transpose(split, [0, 2, 3, 1, 4])

        def rotated(x: Any) -> Any:
            return ark.add(ark.mul(x, self.cos), ark.mul(ark.matmul(x, self.rotation), self.sin))

        x = ark.rmsnorm(h, self.weight(f"{name}.attention_norm", used), c.eps)
        query = rotated(heads(product(x, "query"), c.heads // c.kv_heads))
        key, value = rotated(heads(product(x, "key"), 1)), heads(product(x, "value"), 1)
        scores = ark.mul(ark.matmul(query, key, transpose_other=True), c.head**-0.5)
        mixed = ark.matmul(ark.softmax(ark.add(scores, self.mask)), value)
        rows = ark.reshape(ark.transpose(mixed, [0, 3, 1, 2, 4]), (self.rows, c.rows, c.hidden))
        h = ark.add(h, product(rows, "output"))
        x = ark.rmsnorm(h, self.weight(f"{name}.mlp_norm", used), c.eps)
        return ark.add(h, product(ark.swiglu(product(x, "gate"), product(x, "up")), "down"))

    def loss(self, h: Any, targets: Any, used: dict[str, Any]) -> Any:
        """This micro-batch's share of the mean cross entropy, (1,)."""
        c = self.c
        x = ark.rmsnorm(h, self.weight("norm", used), c.eps)
        logits = ark.matmul(x, self.weight("embedding", used), transpose_other=True)
        picked = ark.mul(ark.log_softmax(logits), targets)
        for axis in (2, 1, 0):
            picked = ark.reduce_sum(picked, axis)
        return ark.reshape(ark.mul(picked, -1.0 / (c.batch * c.rows)), (1,))

    def update(
        self, graph: Graph, block_gradients: dict[str, list[tuple[str, Any]]], losses: Sequence[Any]
    ) -> None:
        """Adds AdamW. Each parameter is updated on the first stage that uses it. If the embedding
        has a separate block, it is updated on the last stage. The loss is also on the last stage.
        """
        c, last = self.c, str(self.shape.stages - 1)
        with graph.scope(f"u{last}"):
            total = losses[0]
            for other in losses[1:]:
                total = ark.add(total, other)
            at, curve = ark.tensor([1], ark.int32, name="at"), self.tensor("losses", (self.steps,))
            here = ark.equal(ark.iota([self.steps], 0, ark.int32), at)
            ark.where(here, total, curve, output=curve)
            ark.add(at, 1, output=at)
        order = self.shape.blocks
        for block in order:
            own = [
                n
                for n in self.weights
                if min((b for b, _ in block_gradients[n]), key=order.index) == block
            ]
            with graph.scope(f"u{last if block == IN else block}"):
                gradients = []
                for name in own:
                    total = block_gradients[name][0][1]
                    for _, other in block_gradients[name][1:]:
                        total = ark.add(total, other)
                    gradients.append(total)
                adam = ark.optim.AdamW([self.weights[n] for n in own], c.lr, c.betas, 1e-8, c.decay)
                for name, mean, square in zip(own, adam.means, adam.squares, strict=True):
                    self.step.names[f"{name}.mean"] = mean.ir.buffer.name
                    self.step.names[f"{name}.square"] = square.ir.buffer.name
                adam.step(gradients)


def arrays(c: Config, seed: int, micro_batches: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The arrays that the host writes, by tensor name, and the tokens (batch, rows + 1)."""
    random = np.random.default_rng(seed)
    values = {}
    for name, size in parameter_shapes(c).items():
        norm = name.endswith("norm")
        values[name] = np.ones(size) if norm else random.normal(size=size) * 0.08
    steps = np.arange(0, c.head, 2) / c.head
    angles = np.outer(np.arange(c.rows), c.theta**-steps)
    values["cos"], values["sin"] = (np.tile(f(angles), 2) for f in (np.cos, np.sin))
    half = c.head // 2
    turn = np.zeros((c.head, c.head))
    turn[np.arange(half) + half, np.arange(half)] = -1
    turn[np.arange(half), np.arange(half) + half] = 1
    values["rotation"] = turn
    values["mask"] = np.triu(np.full((c.rows, c.rows), -1e9), 1)
    tokens = random.integers(0, c.vocab, (c.batch, c.rows + 1))
    one_hot = np.eye(c.vocab)[tokens]
    per = c.batch // micro_batches
    for m in range(micro_batches):
        part = one_hot[m * per : (m + 1) * per]
        values[f"tokens{m}"], values[f"targets{m}"] = part[:, :-1], part[:, 1:]
    return {name: a.astype(np.float32) for name, a in values.items()}, tokens
