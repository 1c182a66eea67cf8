"""Cases and helpers of tests/multi/test_pipeline.py, which other tests use too."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ark.backend import registry
from ark.backend.devices import Device
from ark.ir.graph import Graph
from ark.lower.ranks import plan_ranks
from ark.machine import Machine
from ark.plan.types import Plan
from ark.runtime.executor import Executor
from tests.ranks import ThreadRanks, run_ranks

WIDTH, ITERATIONS = 3000, 40


def planned(graphs: list[Graph], machine: Machine | str, lockstep: bool = False) -> list[Plan]:
    result = registry.machine(machine) if isinstance(machine, str) else machine
    return list(plan_ranks(graphs, result, {"lockstep": lockstep}))


def run(
    plans: list[Plan],
    iterations: int,
    trace: int = 0,
    width: int = WIDTH,
    name: str = "cpu",
    opened: Sequence[Device] = (),
) -> list[tuple[np.ndarray, list]]:
    """Runs the plans of a pipeline's ranks. Returns, for each rank, its tensor of totals and its
    trace. opened: a device for each rank.
    """
    backend, _ = registry.choose(name)

    def work(ranks: ThreadRanks) -> tuple[np.ndarray, list]:
        plan = plans[ranks.rank]
        device = opened[ranks.rank] if opened else backend.open(0)
        with Executor(
            plan, backend, device, ranks=ranks, budget_s=30.0, trace_records=trace
        ) as executor:
            for tensor in ("batch", "total"):
                executor.write(tensor, np.zeros(width, np.float32))
            executor.start(iterations).wait(120.0)
            actual = executor.read("total"), executor.trace() if trace else []
            ranks.barrier()
            return actual

    return run_ranks(len(plans), work)
