"""Plans of any number of phases: each runs the requested number of times, in order."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.frontend.model import Model, use_model
from ark.lower.pipeline import plan as make_plan
from ark.plan.serialize import from_json, to_json
from ark.plan.types import Plan
from ark.plan.verify import verify
from ark.runtime.executor import Executor
from tests.emulated import few_emulated

VECTOR_SIZE = 3000
MORE = ([0, 2, 0], [3, 0, 1], [0, 0, 2], 4, [1] * 20)


def steps(count: int) -> Model:
    """Builds a model with `count` phases; phase p changes x to 2 x + p."""
    with use_model(Model()) as model:
        x = ark.tensor((VECTOR_SIZE,), name="x")
        x.rename("x")
        for number in range(count):
            with model.graph.entry(f"step{number}"):
                ark.add(ark.mul(x, 2.0), float(number), output=x)
    return model


def planned(model: Model, backend: str) -> Plan:
    which, _ = registry.choose(backend)
    with contextlib.closing(which.open(0)) as device:
        task_plan = make_plan(model.graph, device.machine)
    verify([task_plan])
    return task_plan


@pytest.mark.parametrize(
    "iterations",
    few_emulated([[1, 2, 3], *MORE], *MORE),
)
def test_each_phase_runs_as_often_as_asked(backend: str, iterations: list[int] | int) -> None:
    phases = 3 if isinstance(iterations, int) else len(iterations)
    task_plan = from_json(to_json(planned(steps(phases), backend)))
    assert [p.name for p in task_plan.phases] == [f"step{i}" for i in range(phases)]
    which, _ = registry.choose(backend)
    begin = np.arange(VECTOR_SIZE, dtype=np.float32)
    with (
        contextlib.closing(which.open(0)) as device,
        Executor(task_plan, which, device) as executor,
    ):
        executor.write("x", begin)
        executor.start(iterations).wait(60)
        got = executor.read("x")
    each = [0, 0, iterations] if isinstance(iterations, int) else iterations
    for number, count in enumerate(each):
        for _ in range(count):
            begin = 2 * begin + number
    np.testing.assert_array_equal(got.ravel(), begin)


@pytest.mark.parametrize("iterations", [[1], [1, 2, 3, 4], [1, -1, 2]])
def test_iterations_that_do_not_fit_are_refused(iterations: list[int]) -> None:
    task_plan = planned(steps(3), "cpu")
    which, _ = registry.choose("cpu")
    with (
        contextlib.closing(which.open(0)) as device,
        Executor(task_plan, which, device) as executor,
        pytest.raises(ark.InvalidUsageError, match="each of the 3 phases"),
    ):
        executor.start(iterations)


def test_entries_have_names_of_their_own() -> None:
    model = steps(2)
    with pytest.raises(ark.ModelError, match="already"), model.graph.entry("step1"):
        pass
    with (
        pytest.raises(ark.ModelError, match="within"),
        model.graph.entry("outer"),
        model.graph.entry("inner"),
    ):
        pass
