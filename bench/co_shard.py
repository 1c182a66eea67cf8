"""Measures the memory of the activations and the time of a training step under the parallel plan
co-shard and, for comparison, under data parallelism. The models are Swin blocks with shifted
windows and Evoformer blocks (tests/cases/training_blocks.py), on CPU ranks:

    python -m bench.co_shard --kinds Swin Evoformer --ranks 2

Each plan is made twice: without recomputation of activations, and with the smallest limit on their
memory (ark.Planner(activation_bytes=)) with which planning succeeds. `bytes` is the memory of the
activations of one rank, `ms` the time of a step, the least of the runs.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np

from ark.backend import registry
from ark.errors import PlanError
from ark.lower.ranks import plan_ranks
from ark.parallel import parallelize
from ark.parallel.transform import parts_of
from ark.plan import memory
from ark.plan.types import Plan
from ark.plan.verify import verify
from ark.runtime.executor import Executor
from tests.cases.training_blocks import BLOCKS
from tests.cases.training_models import Step, step_of, values
from tests.ranks import run_ranks

PLANS = ("data", "co-shard")
SHARES = [share / 20 for share in range(19, 1, -1)]
"""The limits that are tried, as shares of the activations of data parallelism."""


def plans_of(graphs: Any, limit: int) -> list[Plan]:
    return plan_ranks(graphs, registry.machine("cpu-1"), {"activation_bytes": limit})


def least(graphs: Any, whole: int) -> list[Plan]:
    """Returns the plans with the smallest limit of activation bytes with which planning
    succeeds.
    """
    best = plans_of(graphs, 2 * whole)
    for share in SHARES:
        try:
            best = plans_of(graphs, int(share * whole))
        except PlanError:
            break
    return best


def milliseconds(step: Step, result: Any, plans: list[Plan], given: Any, runs: int) -> float:
    """Returns the time of a step on the slowest rank, the least of the runs."""
    backend, _ = registry.choose("cpu")
    verify(plans)

    def work(own: Any) -> list[float]:
        with Executor(
            plans[own.rank], backend, backend.open(0), ranks=own, budget_s=60.0
        ) as executor:
            for buffer, part in parts_of(result.held[own.rank], step.names, given).items():
                executor.write(buffer, part)
            times = []
            for _ in range(runs + 1):
                own.barrier()
                begun = time.perf_counter()
                executor.start(5).wait(600.0)
                times.append((time.perf_counter() - begun) / 5)
            own.barrier()
            return times[1:]

    return 1e3 * float(np.min(np.max(run_ranks(len(plans), work), axis=0)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kinds", nargs="+", choices=list(BLOCKS), default=["Swin", "Evoformer"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    memory.MAX_UNSHARED_BYTES = 0
    for kind in args.kinds:
        step = step_of(kind, args.layers, args.batch)
        given, whole = values(kind, args.layers, args.batch), 0
        for name in PLANS:
            result = parallelize(step.graph, args.ranks, name, cuts=step.cuts).ranks
            free = plans_of(result.graphs, 1 << 40)
            whole = whole or free[0].arenas["activation"]
            tight = least(result.graphs, whole)
            for how, plans in (("all kept", free), ("recomputed", tight)):
                ms = milliseconds(step, result, plans, given, args.runs)
                line = {"kind": kind, "plan": name, "how": how, "ranks": args.ranks,
                        "bytes": plans[0].arenas["activation"], "ops": len(plans[0].ops),
                        "ms": round(ms, 2)}  # fmt: skip
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
