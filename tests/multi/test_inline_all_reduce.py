"""All-reduces of the results of a linear layer of one row, without a separate op: each task of the
layer sends its partial sums as packets directly to all ranks, which add them
(ark.lower.rewrite.inline_all_reduce). Tests which ranks add what, that the verifier refuses plans
with missing packets, and that one, two and three ranks generate equal tokens.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.backend.codegen.writer import write
from ark.errors import PlanError
from ark.frontend.model import Model, use_model
from ark.ir.dtype import DataType, by_name
from ark.lower.prepare import prepare
from ark.machine.capability import Capability
from ark.models.build import Shape
from ark.models.checkpoint import Checkpoint
from ark.models.generate import Generator
from ark.models.load import weights
from ark.models.plans import make_plans
from ark.ops.tokens import MAX_STOPS
from ark.plan import kind as task_kinds
from ark.plan.kind import signature
from ark.plan.types import Plan
from ark.plan.verify import verify
from ark.runtime.executor import Executor
from ark.tasks.linear import epilogue
from tests.cases.rank_plans import build
from tests.ranks import ThreadRanks, run_ranks
from tests.unit.plan.shapes import CONFIG, decoder_plans, machine

linear = task_kinds.get("linear")
NOAH = Path(__file__).resolve().parents[2] / "examples/noah"


def kinds(plan: Plan, phase: int) -> set[str]:
    """Returns the kinds of a phase's ops. A `combine` op that adds is listed as `sum`."""
    ops = {t.op for tasks in plan.phases[phase].processors for t in tasks}
    return {"sum" if "order" in plan.ops[i].params else plan.ops[i].kind for i in ops}


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    return decoder_plans(machine(4, Capability.PACKETS, warps=2), ranks=2)


def test_decoded_row_needs_no_sum_and_no_put(plans: list[Plan]) -> None:
    for plan in plans:
        assert "sum" in kinds(plan, 0)  # the prompt has many rows
        assert "sum" not in kinds(plan, 1)
    names = [b.name for b in plans[0].buffers if b.name.startswith("shares")]
    # Each of two layers has two all-reduces, each with a receive buffer on this rank and one on the
    # peer.
    assert len(names) == 8 and len(set(names)) == 4


@pytest.mark.parametrize("other", ["", "view", "write"])
def test_sum_that_other_ops_access_is_not_inlined(other: str) -> None:
    """other: an op that reads the sum in another shape, or writes a part of it."""
    model = Model(rank=0, world_size=2)
    with use_model(model):
        x, norm = ark.tensor([1, 512]), ark.parameter([512], name="norm")
        w, v = (ark.parameter([512, 512], name=name) for name in ("w", "v"))
        total = ark.all_reduce(ark.linear(x, w), 0, 2)
        if other == "write":
            ark.copy(0.5, output=total[:, :8])
        ark.linear(ark.rmsnorm(total, norm), v)
        if other == "view":
            ark.exp(ark.reshape(total, [8, 64]))
    nodes = prepare(model.graph, registry.machine("h200")).graph.nodes
    assert ("all_reduce" in {n.type for n in nodes}) == bool(other)


def test_only_the_first_rank_adds_the_residual(plans: list[Plan]) -> None:
    """Only the first rank adds the residual to its partial sum. The other ranks wait for it as
    well, so that all plans are alike.
    """
    for plan, wanted in zip(plans, (0, 1), strict=True):
        layers = [
            op
            for op in plan.ops
            if op.kind == "linear" and plan.tensors[op.operands[2]].name.startswith("shares")
        ]
        assert {op.params["epilogue"] for op in layers} == {"add"}
        assert {op.params.get("first", 0) for op in layers} == {wanted}
        signatures = [signature(plan, op) for op in layers]
        assert {linear.own(sig)[0] for sig in signatures} == {wanted}
        assert all(text.startswith("ark_add_sums(") for text in map(epilogue, signatures))
        assert all(", ark_own<0>(t) == 0)" in text for text in map(epilogue, signatures))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("backend", ["cpu", "rocm"])
def test_ranks_that_do_the_same_share_a_kernel(backend: str, ranks: int) -> None:
    """Ranks with equal plans use one kernel. The tasks' records contain the numbers that differ:
    the rank whose partial sum is added first, the rank that adds the residual, and the first row of
    the logits.
    """
    model = registry.machine("cpu-2" if backend == "cpu" else "mi300x")
    packed = model.with_capabilities(Capability.PACKETS)
    config = dataclasses.replace(CONFIG, num_key_value_heads=4, num_attention_heads=4)
    shape = Shape(config, by_name("fp32"), 64, 4 if ranks == 2 else 0, 0, ranks)
    dialect = registry.get(backend).dialect(packed.arch)
    result = make_plans(shape, packed)
    sources = {write(plan, packed, dialect).source.text for plan in result}
    assert len(result) == ranks and len(sources) == 1
    own = [
        {(op.kind, linear.own(signature(p, op))) for op in p.ops if op.kind == "linear"}
        for p in result
    ]
    assert len({frozenset(o) for o in own}) == ranks


def test_two_ranks_that_sum_share_a_kernel() -> None:
    def body(rank: int) -> None:
        x = ark.tensor((3, 700), name="x")
        y = ark.all_reduce(x, rank, 2)
        ark.copy(y, ark.tensor((3, 700), name="y"))

    model = registry.machine("cpu-2")
    dialect = registry.get("cpu").dialect(model.arch)
    assert len({write(p, model, dialect).source.text for p in build(2, body)}) == 1


def test_without_packets_sums_are_tasks() -> None:
    (plan, _) = decoder_plans(machine(4, warps=2), ranks=2)
    assert "sum" in kinds(plan, 1)


def test_plain_memory_where_a_peer_writes_packets_is_refused(plans: list[Plan]) -> None:
    first = plans[0]
    tensors = [
        dataclasses.replace(t, packet=False) if t.name == "shares.1.0" else t for t in first.tensors
    ]
    with pytest.raises(PlanError, match="a buffer holds packets or plain memory"):
        verify([dataclasses.replace(first, tensors=tuple(tensors)), plans[1]])


def test_missing_share_is_detected(plans: list[Plan]) -> None:
    """The verifier refuses a plan in which a layer writes its partial sums, which the peer must
    get, to its own rank.
    """
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
    """Two and three CPU ranks generate the same tokens as one rank, on a CPU machine model to which
    packets are added.
    """
    backend, _ = registry.choose("cpu")
    model = registry.machine("cpu-1")
    packed = model.with_capabilities(Capability.PACKETS)
    checkpoint = Checkpoint.open(NOAH)
    dtype = DataType.from_numpy(checkpoint.dtype)
    config = checkpoint.config
    shapes = [Shape(config, dtype, 64, 0, rank, world) for rank in range(world)]
    result = make_plans(shapes[0], packed)
    assert world == 1 or all("sum" not in kinds(p, 0) for p in result)
    loaded = [list(weights(checkpoint, s, p)) for s, p in zip(shapes, result, strict=True)]

    def work(ranks: ThreadRanks) -> list[list[int]]:
        texts = []
        plan = result[ranks.rank]
        with Executor(plan, backend, backend.open(0), ranks=ranks, budget_s=30.0) as executor:
            for name, array in loaded[ranks.rank]:
                executor.write(name, array)
            for _ in range(2):  # nothing of the first launch may remain
                executor.write("tokens", np.array([5], np.int32))
                executor.write("position", np.zeros(1, np.int32))
                executor.write("settings", np.array([0, 0, 0, 0, 26, 0, 0], np.int32))
                executor.write("stops", np.full(MAX_STOPS, -1, np.int32))
                executor.start(24).wait(60.0)
                texts.append(executor.read("tokens")[1:25].tolist())
        return texts

    with Generator(checkpoint, backend, backend.open(0), context=64, machine=model) as generator:
        expected = list(generator.stream([5], 24, stop_tokens=[]))
    assert run_ranks(world, work) == [[expected] * 2] * world
