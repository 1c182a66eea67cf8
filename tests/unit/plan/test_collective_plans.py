"""Classic programs as tasks: the verifier accepts the plans, and results are right in every order
that they permit.

NumPy interprets the plans task by task in random orders. Without a compiler, many programs can be
tested.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import ark
from ark.collective.programs import Collective, CollectiveProgram
from ark.frontend.model import Model, use_model
from ark.lower.pipeline import plan as make_plan
from ark.plan.types import Plan, Task
from ark.plan.verify import verify
from ark.plan.verify.rank_set import RankSet
from ark.plan.verify.symmetry import alone
from ark.tasks.elementwise import COPY
from tests.cases.collective_programs import any_program
from tests.unit.plan.shapes import machine

CALLS: dict[Collective, Any] = {
    Collective.ALL_GATHER: ark.all_gather,
    Collective.ALL_REDUCE: ark.all_reduce,
    Collective.ALL_TO_ALL: ark.all_to_all,
    Collective.BROADCAST: ark.broadcast,
    Collective.REDUCE_SCATTER: ark.reduce_scatter,
}


class Interpreter:
    """Executes one iteration of the plans of all ranks. Buffers start as NaN, inputs as given."""

    def __init__(self, plans: list[Plan], inputs: list[np.ndarray]) -> None:
        self.rank_set = RankSet(plans, alone(len(plans)))
        self.counts: Counter[tuple[int, int]] = Counter()
        self.memory = {
            (p.rank, b.id): np.full(b.nbytes // 4, np.nan, np.float32)
            for p in plans
            for b in p.buffers
            if b.rank == p.rank
        }
        for rank, array in enumerate(inputs):
            for held in self.named(rank, "x"):  # in a broadcast only the root has an input
                held[:] = array

    def named(self, rank: int, name: str) -> list[np.ndarray]:
        """Returns the memory of the model's tensors of that name. Buffer names have a number
        appended.
        """
        buffers = self.rank_set.plans[rank].buffers
        return [self.memory[rank, b.id] for b in buffers if b.name.split(".")[0] == name]

    def box(self, rank: int, tensor: int, lo: tuple[int, ...], hi: tuple[int, ...]) -> np.ndarray:
        entry = self.rank_set.plans[rank].tensors[tensor]
        flat = self.memory[self.rank_set.buffer_of(rank, entry.buffer)]
        places = zip(entry.offsets, lo, hi, strict=True)
        return flat.reshape(entry.extents)[tuple(slice(o + a, o + b) for o, a, b in places)]

    def run(self, rng: random.Random) -> None:
        """Runs a random task that may run, until none is left."""
        task_lists = [
            (plan.rank, list(tasks))
            for plan in self.rank_set.plans
            for tasks in plan.phases[0].processors
        ]
        while task_lists := [processor for processor in task_lists if processor[1]]:
            able = [
                processor for processor in task_lists if self.met(processor[0], processor[1][0])
            ]
            assert able, "no task can run"
            rank, tasks = rng.choice(able)
            self.execute(rank, tasks.pop(0))

    def met(self, rank: int, task: Task) -> bool:
        return all(self.counts[rank, counter] >= least for counter, least in task.waits)

    def execute(self, rank: int, task: Task) -> None:
        op = self.rank_set.plans[rank].ops[task.op]
        boxes = {
            a.operand: self.box(rank, op.operands[a.operand], a.lo, a.hi)
            for a in self.rank_set.accesses(rank, task)
        }
        if op.kind != "iteration_end":
            *sources, target = (boxes[i] for i in sorted(boxes))
            assert op.kind == "combine" or op.params["expr"] == COPY
            target[...] = sum(sources[1:], start=sources[0])
        for counter in task.signals:
            self.counts[self.rank_set.counter_of(rank, counter)] += 1


def call(program: CollectiveProgram, rank: int, rows: int) -> None:
    x = ark.tensor([rows, 1], name="x")
    more = {"root": program.root} if program.collective.rooted else {}
    result = CALLS[program.collective](x, rank, program.ranks, algorithm=program, **more)
    ark.copy(result, ark.tensor(result.shape(), name="y"))


@settings(max_examples=40, deadline=None)
@given(
    program=any_program(most_ranks=6),
    share=st.sampled_from([1, 2, 7, 64, 2500]),
    processors=st.integers(1, 4),
    seed=st.integers(0, 9),
)
def test_any_program_is_right_in_any_order(
    program: CollectiveProgram, share: int, processors: int, seed: int
) -> None:
    assume(program.collective in CALLS and program.ranks > 1)
    assume(program.reduction in (None, "sum"))
    dealt = program.collective in (Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL)
    rows = share * program.ranks if dealt else share
    plans = []
    for rank in range(program.ranks):
        model = Model(rank, program.ranks)
        with use_model(model):
            call(program, rank, rows)
        plans.append(make_plan(model.graph, machine(processors)))
    verify(plans)
    data = np.random.default_rng(seed)
    inputs = [data.integers(-999, 999, rows).astype(np.float32) for _ in range(program.ranks)]
    ranks = Interpreter(plans, inputs)
    ranks.run(random.Random(seed))
    for rank in range(program.ranks):
        np.testing.assert_array_equal(ranks.named(rank, "y")[0], wanted(program, inputs, rank))


def wanted(program: CollectiveProgram, inputs: list[np.ndarray], rank: int) -> np.ndarray:
    return {
        Collective.ALL_GATHER: lambda: np.concatenate(inputs),
        Collective.ALL_REDUCE: lambda: sum(inputs[1:], start=inputs[0]),
        Collective.ALL_TO_ALL: lambda: np.concatenate(
            [np.split(each, program.ranks)[rank] for each in inputs]
        ),
        Collective.BROADCAST: lambda: inputs[program.root or 0],
        Collective.REDUCE_SCATTER: lambda: np.split(
            sum(inputs[1:], start=inputs[0]), program.ranks
        )[rank],
    }[program.collective]()


def test_interpreter_detects_unwritten_data() -> None:
    model = Model(0, 1)
    with use_model(model):
        x = ark.tensor([4, 1], name="x")
        ark.copy(x[:2], ark.tensor([4, 1], name="y")[:2])
    lone = Interpreter([make_plan(model.graph, machine(1))], [np.arange(4.0)])
    lone.run(random.Random(0))
    np.testing.assert_array_equal(lone.named(0, "y")[0], [0, 1, np.nan, np.nan])
