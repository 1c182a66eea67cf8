"""Recomputed activations: the same results in less memory, compared with torch."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import ark
from ark.backend import registry
from ark.errors import InvalidUsageError, PlanError
from ark.frontend.model import Model, use_model
from ark.lower.pipeline import plan
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.recompute import recompute
from ark.parallel import parallelize
from ark.parallel.transform import parts_of
from ark.plan import memory
from ark.plan.types import Plan
from ark.plan.verify import verify
from ark.runtime.executor import Executor
from tests.cases.training_models import TRAINED_STEPS, Step, in_torch, step_of, values
from tests.slow import slow
from tests.unit.parallel.ranks_in_numpy import Ranks

MACHINE = registry.machine("cpu-1")
MODEL_LAYERS = 4
SHARES = {"Swin": 0.5, "convolution": 0.6, "Llama": 0.85, "experts": 0.6, "encoder-decoder": 0.92}
"""For each kind of model, the limit `activation_bytes` as a fraction of the bytes of activations
that are live at once in a step of two layers.
"""
KINDS = ("Swin", "convolution", "Llama")


@pytest.fixture(autouse=True)
def _shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MAX_UNSHARED_BYTES", 0)  # so that small buffers also share memory


def _least(nodes: Any) -> int:
    """Returns the peak: the largest number of bytes of activations that are live at once in a list
    of nodes.
    """
    alive: dict[int, tuple[int, int, int]] = {}
    for place, node in enumerate(n for n in nodes if not n.virtual):
        for tensor in (*node.inputs, *node.outputs):
            if tensor.buffer.arena == "activation":
                first, _, _ = alive.get(tensor.buffer.id, (place, 0, 0))
                alive[tensor.buffer.id] = (first, place, tensor.buffer.nbytes)
    return max(
        sum(size for first, last, size in alive.values() if first <= place <= last)
        for place in range(len(nodes))
    )


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k == "Swin" else slow) for k in SHARES]
)
def test_step_in_less_memory_trains_as_torch_does(kind: str) -> None:
    """A training step whose activations are recomputed trains as torch does, if its graph is run in
    NumPy in float64.
    """
    step = step_of(kind, 2)
    ranks = parallelize(step.graph, 1, "replicated").ranks
    (graph,), (held,) = ranks.graphs, ranks.held
    whole = _least(graph.nodes)
    limit = int(SHARES[kind] * whole)
    graph = recompute(graph, Context(MACHINE, {"activation_bytes": limit}))
    assert _least(graph.nodes) <= limit
    given, want, run = values(kind, 2), in_torch(kind, 2), Ranks([graph])
    for buffer, part in parts_of(held, step.names, given).items():
        run.fill(0, buffer, part)
    for _ in range(TRAINED_STEPS):
        run.run()
    for buffer in held:
        name = step.names.get(buffer)
        if name in step.results:
            error = np.abs(run.read(0, buffer).reshape(want[name].shape) - want[name]).max()
            assert error <= 1e-11 * np.abs(want[name]).max()


def _run(step: Step, plan: Plan, kind: str) -> dict[str, np.ndarray]:
    backend, _ = registry.choose("cpu")
    given = values(kind, MODEL_LAYERS)
    with Executor(plan, backend, backend.open(0)) as executor:
        for buffer, name in step.names.items():
            if name in given:
                executor.write(buffer, given[name])
        executor.start(TRAINED_STEPS).wait(600.0)
        return {n: executor.read(b).copy() for b, n in step.names.items() if n in step.results}


@slow
@pytest.mark.parametrize("kind", KINDS)
def test_kernel_that_recomputes_gives_the_same_bits(kind: str) -> None:
    """On a CPU, a plan with at most 60% of the memory for activations gives the same bits of
    parameters and moments after two steps.
    """
    step = step_of(kind, MODEL_LAYERS)
    whole = plan(step.graph, MACHINE)
    limit = int(0.6 * whole.arenas["activation"])
    less = plan(step.graph, MACHINE, {"activation_bytes": limit})
    verify([less])
    assert less.arenas["activation"] <= limit
    assert len(less.ops) > len(whole.ops)
    want, actual = _run(step, whole, kind), _run(step, less, kind)
    for name, value in want.items():
        np.testing.assert_array_equal(actual[name], value)


def test_cheapest_bytes_are_computed_again() -> None:
    """Of a sum and a product of equal size, the sum is recomputed, because it takes fewer
    operations.
    """
    with use_model(Model(0, 1)) as model:
        x, w = ark.tensor([512, 512]), ark.parameter([512, 512])
        total, product = ark.add(x, 1.0), ark.matmul(x, w)
        small = ark.reduce_sum(ark.mul(total, product), 0)
        large = ark.mul(x, ark.reshape(small, [1, 512]))
        sums = [ark.reduce_sum(t, 0) for t in (ark.exp(large), total, product)]
        ark.add(ark.add(sums[0], sums[1]), sums[2])
    graph = model.graph
    machine = dataclasses.replace(MACHINE, tflops=0.001)
    size = _least(graph.nodes)
    less = recompute(graph, Context(machine, {"activation_bytes": size - 1}))
    added = [n for n in less.nodes if n not in graph.nodes and n.name.endswith(".again")]
    assert [n.type for n in added] == ["add"]


def test_too_few_bytes_are_refused() -> None:
    step = step_of("Swin", 1)
    with pytest.raises(PlanError, match="is too small for this program: recomputation reaches"):
        plan(step.graph, MACHINE, {"activation_bytes": 256})
    for wrong in (0, -1, 1.5, True, "1"):
        with pytest.raises(InvalidUsageError, match="is not valid; give a whole number of bytes"):
            plan(step.graph, MACHINE, {"activation_bytes": wrong})
