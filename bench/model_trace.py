"""Prints where a whole model's kernel spends its time on a GPU, op by op, beside the prediction.

`python bench/model_trace.py convnext-tiny-8x224 [--top 30]` compiles a model of `ark bench models`
by torch.compile, records the tasks of a few calls, and prints for each kind of op, and for the ops
that take longest, the microseconds by which the op ends later than all ops before it (measured and
predicted), and the time of its tasks. Recording the tasks slows the kernel down a little.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

import ark.interop.torch.program as program_module
from ark.backend import registry
from ark.bench.networks import network
from ark.interop.torch.compile import backend
from ark.interop.torch.program import PROGRAMS
from ark.plan import kind as kinds
from ark.plan.cost import predict
from ark.plan.types import Plan
from ark.runtime.executor import Executor

TRACE_RECORDS = 1 << 14  # per processor
TRACED_CALLS = 4


def ends(tasks: Iterable[tuple[Any, float, float]]) -> dict[Any, tuple[float, float]]:
    """For each op: by how many microseconds it ends later than all ops that end before it, and the
    mean microseconds of its tasks. tasks: (op, begin, end).
    """
    last: dict[Any, float] = defaultdict(float)
    lengths: dict[Any, list[float]] = defaultdict(list)
    for op, begin, end in tasks:
        last[op] = max(last[op], end)
        lengths[op].append(end - begin)
    rows, before = {}, 0.0
    for op in sorted(last, key=last.__getitem__):
        rows[op] = last[op] - before, sum(lengths[op]) / len(lengths[op])
        before = last[op]
    return rows


def measured(executor: Executor) -> dict[int, tuple[float, float]]:
    """`ends` of the last recorded iteration, by the number of the op."""
    rows = executor.trace()
    last = max(int(row["iteration"].max()) for row in rows if len(row))
    tasks = [
        (executor.tables.listing[int(r["task"])][2].op, int(r["begin"]), int(r["end"]))
        for row in rows
        for r in row[row["iteration"] == last]
    ]
    start = min(begin for _, begin, _ in tasks)
    return ends((op, (begin - start) / 1e3, (end - start) / 1e3) for op, begin, end in tasks)


def shapes(plan: Plan, op: int) -> str:
    signature = kinds.signature(plan, plan.ops[op])
    return " ".join("x".join(map(str, o.shape)) for o in signature.operands[:4])


def show(executor: Executor, top: int) -> None:
    plan = executor.plan
    measured_us = measured(executor)
    predicted_us = ends((s.task.op, s.begin, s.end) for s in predict(plan, 0))
    by_kind: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for op, (us, _) in measured_us.items():
        row = by_kind[plan.ops[op].kind]
        row[0] += 1
        row[1] += us
        row[2] += predicted_us.get(op, (0.0, 0.0))[0]
    print(f"{plan.variant_of(0)}: {sum(r[1] for r in by_kind.values()):.0f} us, predicted", end=" ")
    print(f"{sum(us for us, _ in predicted_us.values()):.0f} us")
    for kind, (many, us, wanted) in sorted(by_kind.items(), key=lambda i: -i[1][1]):
        print(f"  {kind:20} {many:4} ops {us:9.1f} us, predicted {wanted:9.1f}")
    for op, (us, each) in sorted(measured_us.items(), key=lambda i: -i[1][0])[:top]:
        wanted = predicted_us.get(op, (0.0, 0.0))[0]
        line = f"{plan.ops[op].kind} {shapes(plan, op)}"
        print(f"  {us:8.1f} us, predicted {wanted:8.1f}, a task {each:7.2f}  {line}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", help="models of `ark bench models`")
    parser.add_argument("--top", type=int, default=25, help="ops to print")
    parser.add_argument("--backend", help="backend (default: the first with a device)")
    args = parser.parse_args()
    place = "cpu" if registry.choose(args.backend)[0].name == "cpu" else "cuda"
    program_module.load = partial(program_module.load, trace_records=TRACE_RECORDS)
    for name in args.names:
        module, examples = network(name)
        module, examples = module.to(place), tuple(t.to(place) for t in examples)
        known = set(PROGRAMS)
        torch._dynamo.reset()
        with torch.no_grad():
            call = torch.compile(module, backend=backend)
            for _ in range(TRACED_CALLS):
                call(*examples)
        for program in set(PROGRAMS) - known:
            print(name)
            show(program._executor, args.top)


if __name__ == "__main__":
    main()
