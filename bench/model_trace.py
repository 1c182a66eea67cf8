"""Prints where a whole model's kernel spends its time on a GPU, op by op, beside the prediction.

`python bench/model_trace.py convnext-tiny-8x224 [--lines 60]` compiles a model of `ark bench
models` by torch.compile and records the tasks of a few calls (of a few training steps with
--train). It prints a table of all ops of the model's kernels, the longest first. It has one row for
each kind of op, then one row for each group of equal ops with the name of their device function
("common" for the vendor-independent function of ark.tasks). The columns are:

- the microseconds by which the ops prolong the call, measured and predicted (an op prolongs the
  call by the time from the end of all ops that end before it to its own end);
- the numbers of ops and of their tasks;
- the mean microseconds of a task, measured and predicted.

Recording the tasks slows the kernel down a little.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

import ark.interop.torch.program as program_module
from ark.backend import registry
from ark.backend.protocol import KernelBackend
from ark.cli.measure.networks import network
from ark.cli.measure.training_step import LEARNING_RATE, with_loss
from ark.interop.torch import training_model
from ark.interop.torch.compile import backend
from ark.interop.torch.program import PROGRAMS
from ark.plan import kind as kinds
from ark.plan.cost import predict
from ark.plan.serialize import machine_of
from ark.plan.types import Plan
from ark.runtime.executor import Executor
from ark.runtime.session import backend as session_backend
from ark.runtime.session import device

TRACE_RECORDS = 1 << 14  # per processor
TRACED_CALLS = 4


HEAD = "      us predicted ops  tasks  a task predicted"


class Row(NamedTuple):
    """The figures of one op or of several equal ops; the module's docstring describes the columns.
    busy: microseconds of all tasks.
    """

    us: float
    predicted: float
    tasks: int
    busy: float
    predicted_busy: float


def ends(tasks: Iterable[tuple[Any, float, float]]) -> dict[Any, tuple[float, int, float]]:
    """For each op: by how many microseconds it ends later than all ops that end before it, the
    number of its tasks and the microseconds of all of them. tasks: (op, begin, end).
    """
    last: dict[Any, float] = defaultdict(float)
    lengths: dict[Any, list[float]] = defaultdict(list)
    for op, begin, end in tasks:
        last[op] = max(last[op], end)
        lengths[op].append(end - begin)
    rows, before = {}, 0.0
    for op in sorted(last, key=last.__getitem__):
        rows[op] = last[op] - before, len(lengths[op]), sum(lengths[op])
        before = last[op]
    return rows


def measured(executor: Executor) -> dict[int, tuple[float, int, float]]:
    """The result of `ends` for the last recorded iteration, by the number of the op."""
    rows = executor.trace()
    last = max(int(row["iteration"].max()) for row in rows if len(row))
    tasks = [
        (executor.tables.listing[int(r["task"])][2].op, int(r["begin"]), int(r["end"]))
        for row in rows
        for r in row[row["iteration"] == last]
    ]
    start = min(begin for _, begin, _ in tasks)
    return ends((op, (begin - start) / 1e3, (end - start) / 1e3) for op, begin, end in tasks)


def described(plan: Plan, op: int) -> str:
    """A text of an op's kind, shapes and device function. Ops with the same text count as equal."""
    signature = kinds.signature(plan, plan.ops[op])
    sizes = " ".join("x".join(map(str, o.shape)) for o in signature.operands[:4])
    used = session_backend()
    own = None
    if isinstance(used, KernelBackend):
        own = used.dialect(device().arch).body(signature, machine_of(plan))
    return f"{plan.ops[op].kind} {type(own).__name__ if own else 'common'} {sizes}"


def gathered(rows: Iterable[tuple[str, Row]]) -> list[tuple[str, int, Row]]:
    """Adds up the rows that have equal texts. Returns (text, number of rows, sum) for each text,
    the longest time first.
    """
    groups: dict[str, list[Row]] = defaultdict(list)
    for text, row in rows:
        groups[text].append(row)
    added = [(t, len(g), Row(*map(sum, zip(*g, strict=True)))) for t, g in groups.items()]
    return sorted(added, key=lambda one: -one[2].us)


def rows_of(executor: Executor) -> list[tuple[int, Row]]:
    """The figures of each op of one kernel."""
    plan = executor.plan
    predicted = ends((s.task.op, s.begin, s.end) for s in predict(plan, 0))
    rows = []
    for op, (us, tasks, busy) in measured(executor).items():
        wanted = predicted.get(op, (0.0, 0, 0.0))
        rows.append((op, Row(us, wanted[0], tasks, busy, wanted[2])))
    return rows


def show(executors: Sequence[Executor], lines: int) -> None:
    """Prints a table of at most this many lines for the kernels of one model."""
    each = [(e.plan, rows_of(e)) for e in executors]
    whole = [(plan.ops[op].kind, row) for plan, rows in each for op, row in rows]
    ops = [(described(plan, op), row) for plan, rows in each for op, row in rows]
    processors = machine_of(each[0][0]).processors
    for plan, rows in each:
        total = Row(*map(sum, zip(*(row for _, row in rows), strict=True)))
        share = total.busy / processors / total.us
        print(
            f"{plan.variant_of(0)}: {len(rows)} ops, {total.us:.0f} us, predicted "
            f"{total.predicted:.0f}; processors busy {share:.0%}"
        )
    kinds_of = gathered(whole)
    print(HEAD)
    for text, many, row in (kinds_of + gathered(ops))[: lines - len(each) - 1]:
        begun = row.busy / row.tasks, row.predicted_busy / row.tasks
        print(
            f"{row.us:8.1f} {row.predicted:8.1f} {many:4} {row.tasks:6} "
            f"{begun[0]:7.2f} {begun[1]:7.2f}  {text}"
        )


def infer(name: str, place: str) -> object:
    """Compiles a model and calls it a few times. Returns what keeps its kernels loaded."""
    module, examples = network(name)
    module, examples = module.to(place), tuple(t.to(place) for t in examples)
    torch._dynamo.reset()
    with torch.no_grad():
        call = torch.compile(module, backend=backend)
        for _ in range(TRACED_CALLS):
            call(*examples)
    return call


def train(name: str, place: str) -> object:
    """Makes a few training steps of a model. Returns what keeps its kernels loaded."""
    module, examples = with_loss(name, place)
    step = training_model(module, None, torch.optim.AdamW(module.parameters(), LEARNING_RATE))
    for _ in range(TRACED_CALLS):
        step(*examples)
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", help="models of `ark bench models`")
    parser.add_argument("--lines", type=int, default=60, help="lines to print for a model")
    parser.add_argument("--train", action="store_true", help="trace training steps")
    parser.add_argument("--backend", help="backend (default: the first with a device)")
    args = parser.parse_args()
    place = "cpu" if registry.choose(args.backend)[0].name == "cpu" else "cuda"
    program_module.load = partial(program_module.load, trace_records=TRACE_RECORDS)
    for name in args.names:
        known = set(PROGRAMS)
        kept = (train if args.train else infer)(name, place)
        print(name)
        show([p._executor for p in set(PROGRAMS) - known], args.lines)
        del kept


if __name__ == "__main__":
    main()
