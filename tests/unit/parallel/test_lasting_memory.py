"""Parameters that a graph reads in another shape: every plan trains them as one device does, and
memory that outlives an iteration is identified by its name.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.errors import PlanError
from ark.frontend.model import Model, use_model
from ark.ir.dtype import fp32
from ark.ir.graph import Graph
from ark.lower.pipeline import plan as make_plan
from ark.lower.ranks import plan_ranks
from ark.parallel import parallelize
from ark.parallel.plans.parallelize import Parallelized
from ark.parallel.transform import part_of
from ark.plan.types import Plan
from ark.plan.verify import verify
from ark.runtime.executor import Executor
from tests.ranks import ThreadRanks, run_ranks
from tests.slow import few, in_turns
from tests.unit.parallel.ranks_in_numpy import Ranks

torch = pytest.importorskip("torch")

STEPS, RATE, RANKS = 3, 0.01, 2
SHAPES = {"x": (4, 6), "a": (6, 6), "c": (6, 6)}
MIDDLES: dict[str, tuple[int, ...]] = {
    "reshape": (2, 3, 6),
    "flat": (36,),
    "two shapes": (2, 3, 6),
    "conv": (2, 1, 3, 3),
    "transposed": (2, 3, 6),
    "read twice": (2, 3, 6),
}
PIPELINES = ("gpipe", "1f1b", "zero-bubble", "interlaced", "interleaved")
COPIES = ("data", "zero1", "zero2", "zero3", "co-shard")
PLANS = [
    *((name, False) for name in (*PIPELINES, "data", "column", "row", "sequence", "auto")),
    *((name, True) for name in COPIES),
]


def middle_in(front: Any, kind: str, h: Any, b: Any, conv: Any) -> Any:
    """Returns the result of the layer that reads b, in ark or torch."""
    if kind == "conv":
        return front.reshape(conv(front.reshape(h, (1, 1, 4, 6)), b, padding=1), (8, 6))
    square = front.reshape(b, (6, 6))
    if kind == "transposed":
        return front.matmul(h, ark.transpose(square, [1, 0]) if front is ark else square.T)
    h = front.matmul(h, square)
    if kind == "read twice":
        return front.matmul(front.relu(h), square) * front.reshape(b, (36,))[0:6]
    return h + square[0:1] if kind == "two shapes" else h


def net(kind: str) -> tuple[Graph, dict[str, str]]:
    """Returns a training step, and a map from its buffers' names to the tensors' names."""
    model = Model(0, 1)
    with use_model(model):
        x = ark.tensor(SHAPES["x"])
        a, b, c = (ark.parameter(s) for s in (SHAPES["a"], MIDDLES[kind], SHAPES["c"]))
        h = ark.relu(ark.matmul(x, a))
        h = middle_in(ark, kind, h, b, ark.conv)
        y = ark.matmul(ark.relu(h), c)
        loss = ark.mean(ark.reduce_sum(ark.mul(y, y), axis=-1), axis=0)
        parameters = [a, b, c]
        ark.optim.SGD(parameters, RATE).step(ark.grad(loss, parameters))
    named = zip((x, a, b, c), "xabc", strict=True)
    return model.graph, {each.ir.buffer.name: name for each, name in named}


def given(kind: str) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    shapes = {**SHAPES, "b": MIDDLES[kind]}
    return {n: random.standard_normal(s).astype(np.float32) for n, s in shapes.items()}


def in_torch(kind: str) -> dict[str, np.ndarray]:
    """Returns the parameters after STEPS steps of torch."""
    at = {n: torch.tensor(v, dtype=torch.float64) for n, v in given(kind).items()}
    a, b, c = (at[n].requires_grad_() for n in "abc")
    optimizer = torch.optim.SGD([a, b, c], RATE)
    for _ in range(STEPS):
        h = torch.relu(at["x"] @ a)
        h = middle_in(torch, kind, h, b, torch.nn.functional.conv2d)
        y = torch.relu(h) @ c
        optimizer.zero_grad()
        (y * y).sum(-1).mean().backward()
        optimizer.step()
    return {n: at[n].detach().numpy() for n in "abc"}


def split(kind: str, plan: str, cut: bool) -> tuple[Parallelized, dict[str, str]]:
    graph, names = net(kind)
    (x,) = (buffer for buffer, name in names.items() if name == "x")
    return parallelize(graph, RANKS, plan, cuts={x: 0} if cut else None), names


@pytest.mark.parametrize(("kind", "plan", "cut"), in_turns(list(MIDDLES), PLANS))
def test_every_plan_trains_a_parameter_that_is_read_in_another_shape(
    kind: str, plan: str, cut: bool
) -> None:
    """Every plan trains a parameter that is read in another shape as torch does, if the ranks'
    graphs run in NumPy. The verifier accepts each plan.
    """
    result, names = split(kind, plan, cut)
    values, want = given(kind), in_torch(kind)
    ranks, held = Ranks(result.ranks.graphs), result.ranks.held
    for rank, own in enumerate(held):
        for name, view in own.items():
            if name in names:
                ranks.fill(rank, name, part_of(values[names[name]], view))
    for _ in range(STEPS):
        ranks.run()
    seen = set()
    for rank, own in enumerate(held):
        for name, view in own.items():
            if names.get(name, "x") != "x":
                seen.add(names[name])
                np.testing.assert_allclose(
                    ranks.read(rank, name), part_of(want[names[name]], view), rtol=1e-5, atol=1e-6
                )
    assert seen == set("abc")
    verify(plan_ranks(result.ranks.graphs, registry.machine("cpu-1")))


@pytest.mark.parametrize(
    ("kind", "plan"),
    few(2, [(kind, plan) for kind in ("reshape", "conv", "two shapes") for plan in PIPELINES]),
)
def test_pipelines_train_it_on_cpu_ranks(kind: str, plan: str) -> None:
    result, names = split(kind, plan, False)
    values, want = given(kind), in_torch(kind)
    plans = plan_ranks(result.ranks.graphs, registry.machine("cpu-1"))
    backend, _ = registry.choose("cpu")

    def work(own: ThreadRanks) -> None:
        held = result.ranks.held[own.rank]
        with Executor(plans[own.rank], backend, backend.open(0), ranks=own) as executor:
            for name, view in held.items():
                if name in names:
                    executor.write(name, part_of(values[names[name]], view))
            executor.start(STEPS).wait(60.0)
            for name, view in held.items():
                if names.get(name, "x") != "x":
                    got = executor.read(name).reshape(view.shape)
                    np.testing.assert_allclose(
                        got, part_of(want[names[name]], view), rtol=1e-4, atol=1e-5
                    )
            own.barrier()

    run_ranks(RANKS, work)


def test_persistent_memory_keeps_the_callers_shape() -> None:
    """A parameter that a pipeline stage reads in two shapes and does not update is held in the
    caller's shape.
    """
    model = Model(0, 1)
    with use_model(model):
        x, b = ark.tensor((4, 6)), ark.parameter((2, 3, 6))
        h = ark.relu(ark.matmul(x, ark.reshape(b, (6, 6))))
        y = ark.reduce_sum(ark.add(b, 1.0), axis=0)
        ark.add(ark.matmul(h, ark.transpose(y, [0, 2, 1])), 0.0)
    split = parallelize(model.graph, RANKS, "gpipe")
    views = [held[b.ir.buffer.name] for held in split.ranks.held if b.ir.buffer.name in held]
    assert views and all(view.box == ((0, 2), (0, 3), (0, 6)) for view in views)


def plans_of(kind: str = "reshape") -> list[Plan]:
    result, _ = split(kind, "1f1b", False)
    return list(plan_ranks(result.ranks.graphs, registry.machine("cpu-1")))


@pytest.mark.parametrize("shared", ["buffer", "tensor"])
def test_plan_whose_lasting_memory_shares_its_name_is_refused(shared: str) -> None:
    """The verifier refuses a plan in which two buffers that keep their contents have the same name.
    Only one of them would be filled.
    """
    plans = plans_of()
    verify(plans)
    refused = 0
    for rank, plan in enumerate(plans):
        kept = [b for b in plan.buffers if b.initial and b.rank == rank]
        for lasting, other in itertools.permutations(kept, 2):
            items: list[Any] = list(plan.buffers if shared == "buffer" else plan.tensors)
            owners = [b.id for b in items] if shared == "buffer" else [t.buffer for t in items]
            at = owners.index(other.id)
            items[at] = dataclasses.replace(items[at], name=lasting.name)
            mutated = dataclasses.replace(plan, **{f"{shared}s": tuple(items)})
            with pytest.raises(PlanError, match="that keep their contents are called"):
                verify([mutated if r == rank else p for r, p in enumerate(plans)])
            refused += 1
    assert refused >= 6


def test_value_named_like_persistent_memory_is_separate() -> None:
    graph = Graph()
    value = graph.tensor((4,), fp32, name="x")  # precedes the state tensor `x`
    x, y, w = (graph.tensor((4,), fp32, arena="state", name=name) for name in "xyw")
    graph.add("add", [w, w], [value], {})
    graph.add("add", [value, x], [y], {})
    backend, _ = registry.choose("cpu")
    with Executor(
        make_plan(graph, registry.machine("cpu-1"), {"fuse": False}), backend, backend.open(0)
    ) as run:
        run.write("x", np.arange(4))
        run.write("w", np.ones(4))
        run.start(1).wait(60.0)
        assert run.read("y").tolist() == [2.0, 3.0, 4.0, 5.0]
        assert run.read("x").tolist() == [0.0, 1.0, 2.0, 3.0]
