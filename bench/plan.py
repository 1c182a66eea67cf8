"""Measures how planning and verification scale: one row for each of four sizes of each workload.

`python bench/plan.py [WORKLOAD ...]` plans for the h100 machine model without a device. Every case
runs in a separate process. Times are that process's CPU time; memory is its peak above the amount
before planning began.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from ark.backend import registry
from ark.ir.dtype import by_name
from ark.ir.graph import Graph

MACHINE = "h100"
# By workload: four sizes. The last one is the size for which docs/ state a goal.
SIZES: dict[str, tuple[tuple[int, ...], ...]] = {
    "matmul": ((1024,), (2048,), (4096,), (8192,)),
    "lstm": ((2, 10), (5, 25), (10, 40), (10, 100)),
    "lstm-unfused": ((2, 10), (5, 25), (10, 40), (10, 100)),
    "llama-1b": ((1,), (2,), (4,), (8,)),
    "llama-8b": ((1,), (2,), (4,), (8,)),
}
# The planner's options. With several ranks, an option makes all ranks begin each iteration at the
# same time, as in ark.models.plans.
OPTIONS: dict[str, dict[str, Any]] = {"lstm-unfused": {"fuse": False}}
HEADS = ("workload", "size", "ops", "tasks", "plan s", "verify s", "us a task", "MB")


def matmul(n: int) -> list[Graph]:
    """One product of n x n matrices in bf16."""
    import ark
    from ark.frontend.model import Model, use_model

    model = Model(0, 1)
    with use_model(model):
        a, b = (ark.tensor([n, n], ark.bf16, name=name) for name in "ab")
        ark.matmul(a, b)
    return [model.graph]


def lstm(layers: int, steps: int, hidden: int = 256) -> list[Graph]:
    """An LSTM of plain ops with batch 1: 19 ops and 81 tasks per cell, and a mean at the end."""
    import ark
    from ark.frontend.model import Model, use_model

    def tanh(x: Any) -> Any:
        return ark.sub(ark.mul(ark.sigmoid(ark.mul(x, 2.0)), 2.0), 1.0)

    model = Model(0, 1)
    with use_model(model):
        wide = 4 * hidden
        weights = [
            (
                ark.tensor([hidden, wide], name=f"input{i}"),
                ark.tensor([hidden, wide], name=f"hidden{i}"),
                ark.tensor([1, wide], name=f"bias_input{i}"),
            )
            for i in range(layers)
        ]
        state = [
            tuple(ark.tensor([1, hidden], name=f"{n}{i}") for n in "hc") for i in range(layers)
        ]
        inputs = ark.tensor([steps, hidden], name="x")
        outputs = ark.tensor([steps, hidden], name="y")
        for step in range(steps):
            x = inputs[step : step + 1]
            for i, (input_weight, hidden_weight, bias) in enumerate(weights):
                h, c = state[i]
                given = ark.add(ark.matmul(x, input_weight), bias)
                gates = ark.add(given, ark.matmul(h, hidden_weight))
                gate = [gates[:, g * hidden : (g + 1) * hidden] for g in range(4)]
                enter, forget, leave = (ark.sigmoid(g) for g in gate[:3])
                c = ark.add(ark.mul(forget, c), ark.mul(enter, tanh(gate[3])))
                h = x = ark.mul(leave, tanh(c))
                state[i] = (h, c)
            ark.copy(x, outputs[step : step + 1])
        ark.reduce_mean(x, axis=1)
    return [model.graph]


def llama(name: str, ranks: int) -> list[Graph]:
    """A decoder and its prompt phase with 16 tokens per iteration, in bf16, on several ranks."""
    from ark.models.build import Shape, build
    from ark.models.config import builtin_config

    config = builtin_config(name)
    return [
        build(Shape(config, by_name("bf16"), 1024, 16, rank, ranks)).graph for rank in range(ranks)
    ]


WORKLOADS: dict[str, Callable[..., list[Graph]]] = {
    "matmul": matmul,
    "lstm": lstm,
    "lstm-unfused": lstm,
    "llama-1b": lambda ranks: llama("llama-3.2-1b", ranks),
    "llama-8b": lambda ranks: llama("llama-3.1-8b", ranks),
}


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def measure(workload: str, size: tuple[int, ...]) -> dict[str, Any]:
    """Plans and verifies one case in this process."""
    from ark.lower.ranks import plan_ranks
    from ark.plan.verify import verify

    graphs = WORKLOADS[workload](*size)
    machine = registry.machine(MACHINE)
    before = _peak()
    start = time.process_time()
    plans = plan_ranks(graphs, machine, {"lockstep": True, **OPTIONS.get(workload, {})})
    planned = time.process_time()
    verify(plans)
    verified = time.process_time()
    memory = _peak() - before
    tasks = sum(len(t) for p in plans for phase in p.phases for t in phase.processors)
    return {
        "ops": sum(len(p.ops) for p in plans),
        "tasks": tasks,
        "plan": planned - start,
        "verify": verified - planned,
        "memory": memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="*", default=list(SIZES))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        workload, size = json.loads(args.one)
        print(json.dumps(measure(workload, tuple(size))))
        return
    print("| " + " | ".join(HEADS) + " |")
    print("|" + "---|" * len(HEADS))
    for workload in args.workloads:
        for size in SIZES[workload]:
            case = json.dumps([workload, size])
            command = [sys.executable, __file__, "--one", case]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
            m = json.loads(done.stdout)
            each = (m["plan"] + m["verify"]) / m["tasks"] * 1e6
            print(
                f"| {workload} | {' x '.join(map(str, size))} | {m['ops']:,} | {m['tasks']:,} | "
                f"{m['plan']:.2f} | {m['verify']:.2f} | {each:.0f} | {m['memory']:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
