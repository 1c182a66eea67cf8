"""Sums over ranks that a layer's packets carry straight to all ranks (ark.lower.spread): who takes
part, that the verifier sees what is missing, and that two and three ranks give one rank's tokens.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from ark.backend import registry
from ark.errors import PlanError
from ark.ir.dtype import DataType
from ark.models.build import Shape
from ark.models.checkpoint import Checkpoint
from ark.models.generate import Generator
from ark.models.load import weights
from ark.models.plans import make_plans
from ark.ops.tokens import MAX_STOPS
from ark.plan.kind import signature
from ark.plan.types import Plan
from ark.plan.verify import verify
from ark.runtime.executor import Executor
from ark.tasks.linear import epilogue
from tests.ranks import ThreadRanks, run_ranks
from tests.unit.plan.shapes import decoder_plans, machine

NOAH = Path(__file__).resolve().parents[2] / "examples/noah"


def kinds(plan: Plan, phase: int) -> set[str]:
    """Kinds of a phase's ops; a `combine` that adds is called a sum."""
    ops = {t.op for tasks in plan.phases[phase].processors for t in tasks}
    return {"sum" if "op" in plan.ops[i].params else plan.ops[i].kind for i in ops}


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    return decoder_plans(machine(4, "packets", warps=2), ranks=2)


def test_a_decoded_row_needs_no_sum_and_no_put(plans: list[Plan]) -> None:
    for plan in plans:
        assert "sum" in kinds(plan, 0)  # the prompt's rows are many
        assert "sum" not in kinds(plan, 1)
    names = [b.name for b in plans[0].buffers if b.name.startswith("shares")]
    # Of two layers with two sums each: this rank's buffer and the peer's.
    assert len(names) == 8 and len(set(names)) == 4


def test_only_the_first_rank_adds_the_residual(plans: list[Plan]) -> None:
    """All ranks wait for it, so that their plans are alike."""
    for plan, wanted in zip(plans, (0, 1), strict=True):
        layers = [
            op
            for op in plan.ops
            if op.kind == "linear" and plan.tensors[op.operands[2]].name.startswith("shares")
        ]
        assert {op.params["epilogue"] for op in layers} == {"add"}
        assert {op.params["first"] for op in layers} == {wanted}
        assert all(("ark_awaited" in epilogue(signature(plan, op))) == wanted for op in layers)


def test_without_packets_sums_are_tasks() -> None:
    (plan, _) = decoder_plans(machine(4, warps=2), ranks=2)
    assert "sum" in kinds(plan, 1)


def test_plain_memory_where_a_peer_writes_packets_is_refused(plans: list[Plan]) -> None:
    first = plans[0]
    tensors = [
        dataclasses.replace(t, packet=False) if t.name == "shares.1.0" else t for t in first.tensors
    ]
    with pytest.raises(PlanError, match="mixes packets and plain memory"):
        verify([dataclasses.replace(first, tensors=tuple(tensors)), plans[1]])


def test_a_share_that_nobody_sends_is_missed(plans: list[Plan]) -> None:
    """The layer's second output lies on its own rank once more, not on the peer."""
    first = plans[0]
    number, op = next(
        (i, op)
        for i, op in enumerate(first.ops)
        if op.kind == "linear"
        and len(op.operands) > 4
        and op.params["epilogue"] == "add"
        and first.buffers[first.tensors[op.operands[-1]].buffer].rank == 1
    )
    own = dataclasses.replace(op, operands=(*op.operands[:-1], op.operands[2]))
    ops = tuple(own if i == number else o for i, o in enumerate(first.ops))
    with pytest.raises(PlanError):
        verify([dataclasses.replace(first, ops=ops), plans[1]])


@pytest.mark.parametrize("world", [1, 2])
def test_ranks_give_the_tokens_of_one(world: int) -> None:
    """On the CPU, whose machine model has no packets by itself."""
    backend, _ = registry.choose("cpu")
    model = registry.machine("cpu-1")
    packed = dataclasses.replace(model, capabilities=(*model.capabilities, "packets"))
    checkpoint = Checkpoint.open(NOAH)
    dtype = DataType.from_numpy(checkpoint.dtype)
    config = checkpoint.config
    shapes = [Shape(config, dtype, 64, 0, rank, world) for rank in range(world)]
    made = make_plans(shapes[0], packed)
    assert world == 1 or all("sum" not in kinds(p, 0) for p in made)
    loaded = [list(weights(checkpoint, s, p)) for s, p in zip(shapes, made, strict=True)]

    def work(ranks: ThreadRanks) -> list[list[int]]:
        texts = []
        plan = made[ranks.rank]
        with Executor(plan, backend, backend.open(0), ranks=ranks, budget_s=30.0) as executor:
            for name, array in loaded[ranks.rank]:
                executor.write(name, array)
            for _ in range(2):  # of the first launch nothing may be left
                executor.write("tokens", np.array([5], np.int32))
                executor.write("position", np.zeros(1, np.int32))
                executor.write("settings", np.array([0, 0, 0, 0, 26, 0], np.int32))
                executor.write("stops", np.full(MAX_STOPS, -1, np.int32))
                executor.start(24).wait(60.0)
                texts.append(executor.read("tokens")[1:25].tolist())
        return texts

    with Generator(checkpoint, backend, backend.open(0), context=64, machine=model) as generator:
        expected = list(generator.stream([5], 24, stop_tokens=[]))
    assert run_ranks(world, work) == [[expected] * 2] * world
