"""Cases and helpers of tests/multi/test_rank_plans.py, which other tests use too."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ark.backend import registry
from ark.frontend.model import Model, use_model
from ark.lower.pipeline import plan as make_plan
from ark.plan.types import Plan
from ark.runtime.executor import Executor
from tests.ranks import ThreadRanks, run_ranks


def build(world: int, body: Callable[[int], None], machine: str = "cpu-2") -> list[Plan]:
    """Returns the plans of all ranks of a model. body: builds the graph of a rank."""
    results = []
    for rank in range(world):
        model = Model(rank, world)
        with use_model(model):
            body(rank)
        results.append(make_plan(model.graph, registry.machine(machine)))
    return results


def execute(
    plans: list[Plan],
    inputs: list[dict[str, np.ndarray]],
    outputs: list[list[str]],
    iterations: int = 2,
) -> list[dict[str, np.ndarray]]:
    """Runs the iterations on all ranks concurrently. Returns each rank's outputs by name."""
    backend, _ = registry.choose("cpu")

    def work(ranks: ThreadRanks) -> dict[str, np.ndarray]:
        plan = plans[ranks.rank]
        with Executor(plan, backend, backend.open(0), ranks=ranks, budget_s=20.0) as executor:
            for name, array in inputs[ranks.rank].items():
                executor.write(name, array)
            executor.start(iterations).wait(60.0)
            actual = {name: executor.read(name) for name in outputs[ranks.rank]}
            ranks.barrier()
            return actual

    return run_ranks(len(plans), work)
