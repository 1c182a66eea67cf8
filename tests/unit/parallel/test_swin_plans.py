"""A training step of Swin blocks with shifted windows on several ranks: data parallelism, co-shard
and ZeRO train as torch does, and no rank repeats work of another.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ark
from ark.frontend.model import Model, use_model
from ark.ir.graph import Graph
from ark.parallel import parallelize
from ark.parallel.transform import part_of
from tests.unit.parallel.ranks_in_numpy import Ranks

torch = pytest.importorskip("torch")

IMAGES, SIDE, WINDOW, WIDTH, HEADS, RATE = 4, 8, 4, 8, 2, 0.05
ALONG = SIDE // WINDOW  # windows in a row of the image
SHIFT = WINDOW // 2
SHAPES = {
    f"{block}.{name}": (out, into)
    for block in range(2)
    for name, out, into in (
        ("q", WIDTH, WIDTH),
        ("k", WIDTH, WIDTH),
        ("v", WIDTH, WIDTH),
        ("o", WIDTH, WIDTH),
        ("up", 2 * WIDTH, WIDTH),
        ("down", WIDTH, 2 * WIDTH),
    )
}
RANDOM = np.random.default_rng(6)
GIVEN = {name: RANDOM.standard_normal(s).astype(np.float32) * 0.3 for name, s in SHAPES.items()}
IMAGE = RANDOM.standard_normal((IMAGES, SIDE, SIDE, WIDTH)).astype(np.float32)


class InArk:
    """The ops that the block is written with, in ark."""

    permute = staticmethod(ark.transpose)

    @staticmethod
    def normalised(x: Any) -> Any:
        return ark.layernorm(x)

    @staticmethod
    def joined(parts: list[Any], axis: int) -> Any:
        return ark.concat(parts, axis)

    @staticmethod
    def softmax(x: Any) -> Any:
        return ark.softmax(x)


class InTorch:
    """The same ops in torch."""

    @staticmethod
    def permute(x: Any, order: list[int]) -> Any:
        return x.permute(order)

    @staticmethod
    def normalised(x: Any) -> Any:
        return torch.nn.functional.layer_norm(x, x.shape[-1:], eps=1e-6)

    @staticmethod
    def joined(parts: list[Any], axis: int) -> Any:
        return torch.cat(parts, axis)

    @staticmethod
    def softmax(x: Any) -> Any:
        return torch.softmax(x, -1)


def rolled(form: Any, x: Any, shift: int) -> Any:
    """Returns images x with rows and columns moved cyclically by `shift`."""
    shift %= SIDE
    x = form.joined([x[:, shift:], x[:, :shift]], 1)
    return form.joined([x[:, :, shift:], x[:, :, :shift]], 2)


def swin(form: Any, reshape: Any, relu: Any, x: Any, weights: dict[str, Any]) -> Any:
    """Returns two Swin blocks (Liu et al. 2021), the second with shifted windows."""
    windows, rows = IMAGES * ALONG * ALONG, IMAGES * SIDE * SIDE
    for block in range(2):
        w = {name: weights[f"{block}.{name}"] for name in ("q", "k", "v", "o", "up", "down")}
        h = reshape(form.normalised(reshape(x, (rows, WIDTH))), (IMAGES, SIDE, SIDE, WIDTH))
        h = rolled(form, h, SHIFT) if block else h
        h = reshape(h, (IMAGES, ALONG, WINDOW, ALONG, WINDOW, WIDTH))
        h = reshape(form.permute(h, [0, 1, 3, 2, 4, 5]), (rows, WIDTH))
        heads = (windows, WINDOW * WINDOW, HEADS, WIDTH // HEADS)
        q, k, v = (
            form.permute(reshape(h @ form.permute(w[n], [1, 0]), heads), [0, 2, 1, 3])
            for n in "qkv"
        )
        scores = (q @ form.permute(k, [0, 1, 3, 2])) * (WIDTH // HEADS) ** -0.5
        mixed = form.permute(form.softmax(scores) @ v, [0, 2, 1, 3])
        mixed = reshape(mixed, (rows, WIDTH)) @ form.permute(w["o"], [1, 0])
        mixed = reshape(mixed, (IMAGES, ALONG, ALONG, WINDOW, WINDOW, WIDTH))
        mixed = reshape(form.permute(mixed, [0, 1, 3, 2, 4, 5]), (IMAGES, SIDE, SIDE, WIDTH))
        x = x + (rolled(form, mixed, -SHIFT) if block else mixed)
        h = form.normalised(reshape(x, (rows, WIDTH))) @ form.permute(w["up"], [1, 0])
        h = relu(h) @ form.permute(w["down"], [1, 0])
        x = x + reshape(h, (IMAGES, SIDE, SIDE, WIDTH))
    return x


def in_torch() -> dict[str, np.ndarray]:
    weights = {name: torch.from_numpy(a.copy()).requires_grad_() for name, a in GIVEN.items()}
    y = swin(InTorch, torch.reshape, torch.relu, torch.from_numpy(IMAGE), weights)
    (y * y).sum((1, 2, 3)).mean().backward()
    return {name: (w - RATE * w.grad).detach().numpy() for name, w in weights.items()}


def in_ark() -> tuple[Graph, dict[str, str]]:
    """Returns the training step in ark, and a map from its buffers' names to the tensors' names."""
    model = Model(0, 1)
    with use_model(model):
        x = ark.tensor(IMAGE.shape)
        weights = {name: ark.parameter(shape) for name, shape in SHAPES.items()}
        y = swin(InArk, ark.reshape, ark.relu, x, weights)
        squares = ark.reshape(ark.mul(y, y), (IMAGES, SIDE * SIDE * WIDTH))
        loss = ark.mean(ark.reduce_sum(squares, axis=-1), axis=0)
        every = list(weights.values())
        ark.optim.SGD(every, RATE).step(ark.grad(loss, every))
    return model.graph, {t.ir.buffer.name: n for n, t in {"x": x, **weights}.items()}


@pytest.mark.parametrize("plan", ["data", "co-shard", "zero1", "zero2"])
def test_plans_train_as_torch_does(plan: str) -> None:
    graph, names = in_ark()
    (image,) = (buffer for buffer, name in names.items() if name == "x")
    split = parallelize(graph, 2, plan, cuts={image: 0})
    assert max(split.work) < 0.51
    values = {"x": IMAGE, **GIVEN}
    ranks = Ranks(split.ranks.graphs)
    for rank, held in enumerate(split.ranks.held):
        for buffer, view in held.items():
            if buffer in names:
                ranks.fill(rank, buffer, part_of(values[names[buffer]], view))
    ranks.run()
    want, seen = in_torch(), set()
    for rank, held in enumerate(split.ranks.held):
        for buffer, view in held.items():
            name = names.get(buffer, "x")
            if name != "x":
                seen.add(name)
                trained = ranks.read(rank, buffer)
                np.testing.assert_allclose(trained, part_of(want[name], view), 1e-4, 1e-5, name)
    assert seen == set(SHAPES)


def test_parts_of_a_layer_follow_each_other() -> None:
    """Under co-shard, a rank computes the second half of a layer's windows after the first half has
    ended.
    """
    graph, names = in_ark()
    (image,) = (buffer for buffer, name in names.items() if name == "x")
    split = parallelize(graph, 2, "co-shard", cuts={image: 0})
    order = [p for p in split.plan.in_order() if split.plan.ranks_of(p) == [0]]
    scores = [p for p in order if p.node.type == "softmax"]
    halves = [p.output.box[0] for p in scores]
    assert halves == sorted(halves) and len(set(halves)) == 2
