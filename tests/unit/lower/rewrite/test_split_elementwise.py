"""Elementwise results of which other ops read boxes (ranges in each dimension) are computed in the
same boxes, with the same values.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.cli.measure.cases import lstm
from ark.cli.measure.ops import planned
from ark.frontend.model import Model, use_model
from ark.frontend.tensor import Tensor
from ark.ir.dtype import fp32
from ark.lower.pipeline import plan
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.split_elementwise import split_elementwise
from ark.runtime.executor import Executor
from tests.programs import build, contents, reference

H100 = registry.get("cuda").machine("h100")
CPU = registry.machine("cpu-2")


@pytest.mark.parametrize("seed", range(40))
def test_random_programs_and_gates_compute_the_same(seed: int) -> None:
    """Random programs in which several ops read boxes of an elementwise result. The pass does not
    change their results.
    """
    rng = np.random.default_rng(seed)
    model = Model()
    with use_model(model):
        inputs, held = build(seed, 6)
        wide = ark.tensor([2, 24])
        tensors = [*inputs, wide]
        row = ark.sigmoid(ark.mul(ark.add(wide, ark.tensor([1, 24])), wide))
        cuts = [0, *sorted(rng.choice(np.arange(1, 24), 3, replace=False).tolist()), 24]
        parts = [row[:, a:b] for a, b in itertools.pairwise(cuts) if rng.random() < 0.9]
        if rng.random() < 0.5:
            wide = ark.relu(ark.add(wide, 1.0), output=wide)
        results = [ark.tanh(ark.mul(p, p)) for p in parts]
        if rng.random() < 0.3:
            results.append(ark.reduce_sum(row[:, 0:8], 1))
    graph, first = model.graph, contents(tensors, seed)
    kept = frozenset(t.ir.buffer.id for t in (*held, *results))
    want, got = (
        reference(graph, first),
        reference(split_elementwise(graph, Context(CPU, kept=kept)), first),
    )
    for key in kept:
        np.testing.assert_array_equal(got[key], want[key])


def test_gates_without_other_readers_are_split() -> None:
    model = Model()
    with use_model(model):
        row = ark.add(ark.tensor([1, 64]), ark.tensor([1, 64]))
        ark.add(ark.sigmoid(row[:, :32]), ark.tanh(row[:, 32:]))
    computed = [n for n in split_elementwise(model.graph, Context(CPU)).nodes if not n.virtual]
    assert [n.outputs[0].shape for n in computed] == [(1, 32)] * 5
    shared = split_elementwise(model.graph, Context(CPU, kept=frozenset([row.ir.buffer.id])))
    assert shared.nodes == model.graph.nodes


def test_cell_is_products_and_one_task_kind() -> None:
    plan, _ = planned(lstm(4, 6, 64), H100)
    kinds = [op.kind for op in plan.ops]
    assert kinds.count("matmul") == 2 * 24 - 4
    assert len(kinds) - kinds.count("matmul") == 24


def test_inputs_of_which_a_plan_has_parts_are_written_by_name() -> None:
    model = Model()
    with use_model(model):
        x, b = (
            Tensor(model.graph.tensor([1, 64], fp32, arena="state", name=n), model) for n in "xb"
        )
        row = ark.add(x, b)
        ark.add(ark.sigmoid(row[:, :32]), ark.tanh(row[:, 32:]), name="y")
    backend, _ = registry.choose("cpu")
    device = backend.open(0)
    task_plan = plan(model.graph, device.machine)
    assert {t.name for t in task_plan.tensors}.isdisjoint("xb")
    values = [np.random.default_rng(i).uniform(-1, 1, 64).astype(np.float32) for i in range(2)]
    with Executor(task_plan, backend, device) as executor:
        for name, array in zip("xb", values, strict=True):
            executor.write(name, array)
            np.testing.assert_array_equal(executor.read(name).ravel(), array)
        executor.start(1).wait()
        got = executor.read(task_plan.tensors[task_plan.ops[-1].operands[-1]].name).ravel()
    first, last = np.split(values[0].astype(np.float64) + values[1], 2)
    np.testing.assert_allclose(got, 1 / (1 + np.exp(-first)) + np.tanh(last), rtol=1e-5)
