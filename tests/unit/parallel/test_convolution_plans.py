"""Plans of a convolution net: each rank does its share of the work, and results equal torch's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ark
from ark.frontend.model import Model, use_model
from ark.ir.graph import Graph
from ark.parallel import parallelize
from ark.parallel.transform import whole_of
from tests.cases.transform import on_cpu_ranks, on_ranks_in_numpy, traced

torch = pytest.importorskip("torch")
functional = torch.nn.functional

SHAPES = {
    "x": (4, 3, 10, 10),
    "stem": (8, 3, 3, 3),
    "bias": (8,),
    "point": (8, 8, 1, 1),
    "deep": (16, 16, 3, 3),
    "head": (10, 16),
}
GIVEN = {
    name: np.random.default_rng(number).standard_normal(shape).astype(np.float32)
    for number, (name, shape) in enumerate(SHAPES.items())
}


def in_ark() -> Any:
    """Builds a net with convolutions, pooling, concatenation and padding."""
    x, *others = (
        ark.tensor(s, name=n) if n == "x" else ark.parameter(s, name=n) for n, s in SHAPES.items()
    )
    stem, bias, point, deep, head = others
    h = ark.max_pool(ark.relu(ark.conv(x, stem, bias, padding=1)), 2)
    h = ark.concat([h, ark.conv(h, point)], axis=1)
    h = ark.pad(h, [(0, 0), (0, 0), (1, 1), (1, 1)])
    h = ark.relu(ark.conv(h, deep, stride=2))
    return ark.linear(ark.reshape(ark.global_avg_pool(h), [4, 16]), head)


def in_torch() -> np.ndarray:
    x, stem, bias, point, deep, head = (torch.from_numpy(a) for a in GIVEN.values())
    h = functional.max_pool2d(torch.relu(functional.conv2d(x, stem, bias, padding=1)), 2)
    h = torch.cat([h, functional.conv2d(h, point)], 1)
    h = torch.relu(functional.conv2d(functional.pad(h, (1, 1, 1, 1)), deep, stride=2))
    return (h.mean((2, 3)) @ head.T).numpy()


NET: Graph = traced(in_ark)


def by_buffer(graph: Graph, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the arrays by the names of the graph's buffers."""
    first = {t.buffer.name: t.name for t in reversed(graph.tensors)}
    return {buffer: arrays[name] for buffer, name in first.items() if name in arrays}


INPUTS = by_buffer(NET, GIVEN)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("plan", ["data", "megatron", "column", "row", "sequence", "auto"])
def test_plans_give_torchs_result(plan: str, ranks: int) -> None:
    split = parallelize(NET, ranks, plan)
    np.testing.assert_allclose(
        on_ranks_in_numpy(split.plan, INPUTS), in_torch(), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("plan", ["data", "megatron"])
def test_each_rank_does_half_of_the_work(plan: str) -> None:
    split = parallelize(NET, 2, plan)
    assert max(split.work) < 0.52
    assert abs(sum(split.work) - 1 - sum(op.share for op in split.whole)) < 1e-9
    held = {n.partition(".")[0]: v.shape for n, v in split.ranks.held[0].items()}
    parts = [np.prod(held[n]) / np.prod(SHAPES[n]) for n in ("stem", "deep", "head")]
    assert parts == [1.0 if plan == "data" else 0.5] * 3


def test_replicated_work_is_said() -> None:
    """If every rank repeats some work, the printed plan lists these ops by name, with their share
    of the total work.
    """
    split = parallelize(NET, 2, "replicated")
    assert split.work == (1.0, 1.0)
    assert abs(sum(op.share for op in split.whole) - 1) < 1e-9
    assert (split.whole[0].name, split.whole[0].type) == ("conv", "matmul")
    assert split.whole[0].reason == "the plan leaves it whole"


def test_sizes_that_the_ranks_do_not_divide_are_the_reason() -> None:
    with use_model(Model(0, 1)) as model:
        product = ark.linear(ark.tensor((8, 16)), ark.parameter((32, 16)))
        ark.relu(product)
    split = parallelize(model.graph, 3, "data")
    assert split.work == (1.0, 1.0, 1.0)
    reason = "it can be cut along sizes 8, 16, 32, none divisible by 3"
    assert split.whole[0].reason == reason
    assert parallelize(model.graph, (3, 2), ("data", "replicated")).whole[0].reason != reason


@pytest.mark.parametrize("plan", ["data", "megatron"])
def test_plans_run_on_cpu_ranks(plan: str) -> None:
    split = parallelize(NET, 2, plan)
    parts = on_cpu_ranks(split.ranks, INPUTS, {NET.nodes[-1].outputs[0].buffer.id})
    np.testing.assert_allclose(whole_of(NET, parts), in_torch(), rtol=1e-4, atol=1e-4)


def test_batch_that_is_first_read_in_another_shape_is_cut() -> None:
    """The cut refers to the dimensions of the tensor itself, not to those of its first view."""

    def net() -> Any:
        x = ark.tensor((2, 4, 6), name="x")
        rows = ark.linear(ark.reshape(x, [8, 6]), ark.parameter((6, 6), name="w"))
        return ark.mul(ark.reshape(rows, [2, 4, 6]), x)

    graph = traced(net)
    (buffer,) = by_buffer(graph, {"x": np.zeros(1)})
    random = np.random.default_rng(2)
    x, w = random.standard_normal((2, 4, 6)), random.standard_normal((6, 6))
    for dimension in (0, 1):
        split = parallelize(graph, 2, "data", cuts={buffer: dimension})
        given = by_buffer(graph, {"x": x.astype(np.float32), "w": w.astype(np.float32)})
        np.testing.assert_allclose(on_ranks_in_numpy(split.plan, given), (x @ w.T) * x, atol=1e-4)
