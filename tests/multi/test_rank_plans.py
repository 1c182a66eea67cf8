"""Communication between ranks: plans that are verified together, run as threads, and with
faults.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.frontend.model import Model, use_model
from ark.ir.dtype import fp32
from ark.lower.pipeline import plan as make_plan
from ark.models.build import Shape
from ark.models.config import LlamaConfig
from ark.models.plans import plans as llama_plans
from ark.plan.types import Plan, Task
from ark.plan.verify import verify
from tests.cases.rank_plans import build, execute
from tests.slow import slow

SHAPE = (3, 700)


def reduce_body(world: int, dtype: ark.DataType, whole: bool) -> Callable[[int], None]:
    def body(rank: int) -> None:
        x = ark.tensor(SHAPE, dtype, name="x")
        share = x if whole else ark.mul(x, 1.0)[1:, 3:650]
        total = ark.all_reduce(share, rank, world)
        target = ark.tensor(total.shape(), dtype, name="y")
        ark.mul(total, 2.0, output=target)

    return body


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=slow)])
def test_all_reduce_gives_the_same_bits_everywhere(world: int) -> None:
    for dtype, whole in ((ark.fp32, True), (ark.bf16, False)):
        plans = build(world, reduce_body(world, dtype, whole), f"cpu-{4 // world}")
        verify(plans)
        inputs = [
            {"x": np.random.default_rng(rank).standard_normal(SHAPE).astype(dtype.numpy)}
            for rank in range(world)
        ]
        actual = [f["y"] for f in execute(plans, inputs, [["y"]] * world)]
        shares = [i["x"] if whole else i["x"][1:, 3:650] for i in inputs]
        total = np.float32(0) + shares[0].astype(np.float32)
        for share in shares[1:]:
            total = total + share.astype(np.float32)
        want = (total.astype(dtype.numpy).astype(np.float32) * 2).astype(dtype.numpy)
        for flat in actual:
            np.testing.assert_array_equal(flat.view(np.uint8), actual[0].view(np.uint8))
            got = flat.reshape(want.shape)
            tolerance = 1e-6 if dtype is ark.fp32 else 1e-2
            np.testing.assert_allclose(
                got.astype(np.float64), want.astype(np.float64), rtol=tolerance, atol=tolerance
            )


def test_neighbouring_tiles_go_to_a_peer_as_one_put() -> None:
    """Tiles that are adjacent in memory are sent by one put of at most 128 KB: a row of four tiles
    of 64 KB, of which the last is smaller, takes two puts.
    """
    n, world = 60_001, 3

    def body(rank: int) -> None:
        x = ark.tensor((n,), name="x")
        ark.mul(ark.all_reduce(ark.mul(x, 1.0), rank, world), 2.0, ark.tensor((n,), name="y"))

    plans = build(world, body, "cpu-1")
    verify(plans)
    ops = {op.name: op.id for op in plans[0].ops}
    tasks = [t.op for listed in plans[0].phases[0].processors for t in listed]
    counts = [tasks.count(ops[f"all_reduce{which}"]) for which in (".put+1", ".put+2", "")]
    assert counts == [2, 2, 4]
    x = np.random.default_rng(0).standard_normal((world, n)).astype(np.float32)
    inputs = [{"x": row} for row in x]
    for actual in execute(plans, inputs, [["y"]] * world):
        np.testing.assert_allclose(actual["y"], 2 * x.sum(axis=0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("case", "ops"), [("plain", 1), ("strided", 2), ("broadcast", 2), ("used twice", 3)]
)
def test_residual_is_added_in_the_task_that_adds_the_shares(case: str, ops: int) -> None:
    """A residual is added by the op that sums the ranks' partial results, if this is possible. ops:
    the expected number of ops that sum or follow.
    """

    def body(rank: int) -> None:
        x = ark.mul(ark.tensor(SHAPE, name="x"), 1.0)
        rest = ark.mul(ark.tensor(SHAPE, name="rest"), 1.0)
        if case == "strided":
            x, rest = ark.copy(x[1:, 3:650]), rest[1:, 3:650]
        elif case == "broadcast":
            rest = ark.copy(rest[:1])
        total = ark.all_reduce(x, rank, 2)
        y = ark.tensor(total.shape(), name="y")
        ark.add(total, rest, output=y)
        if case == "used twice":
            ark.mul(total, 3.0, output=ark.tensor(SHAPE, name="z"))

    plans = build(2, body)
    verify(plans)
    sums = [op.kind == "combine" and "order" in op.params for op in plans[0].ops]
    assert len(sums) - sums.index(True) == ops
    random = np.random.default_rng(7)
    inputs = [
        {name: random.standard_normal(SHAPE).astype(np.float32) for name in ("x", "rest")}
        for _ in range(2)
    ]
    total, cut = inputs[0]["x"] + inputs[1]["x"], np.s_[:]
    if case == "strided":
        cut = np.s_[1:, 3:650]
    elif case == "broadcast":
        cut = np.s_[:1]
    for rank, actual in enumerate(execute(plans, inputs, [["y"]] * 2)):
        want = (total[cut] if case == "strided" else total) + inputs[rank]["rest"][cut]
        np.testing.assert_allclose(actual["y"].reshape(want.shape), want, rtol=1e-5, atol=2e-6)


def ring(rank: int) -> None:
    """The model of a rank of three that sends two messages with one tag, and one with another, to
    the next rank.
    """
    x = ark.tensor(SHAPE, name="x")
    ark.send_done(ark.send(x, (rank + 1) % 3, tag=5))
    ark.send(ark.mul(x, 3.0), (rank + 1) % 3, tag=5)
    ark.send(x[:2, 10:20], (rank + 2) % 3, tag=6)
    first = ark.recv(ark.tensor(SHAPE, name="first"), (rank + 2) % 3, tag=5)
    second = ark.recv(ark.tensor(SHAPE, name="second"), (rank + 2) % 3, tag=5)
    part = ark.recv(ark.tensor((2, 10), name="part"), (rank + 1) % 3, tag=6)
    del first, second, part


def test_send_and_recv_pair_up_in_program_order() -> None:
    plans = build(3, ring)
    verify(plans)
    inputs = [{"x": np.full(SHAPE, rank + 1.0) + np.arange(700)} for rank in range(3)]
    actual = execute(plans, inputs, [["first", "second", "part"]] * 3)
    for rank in range(3):
        before = inputs[(rank + 2) % 3]["x"].astype(np.float32)
        np.testing.assert_array_equal(actual[rank]["first"].reshape(SHAPE), before)
        np.testing.assert_array_equal(actual[rank]["second"].reshape(SHAPE), before * 3)
        after = inputs[(rank + 1) % 3]["x"].astype(np.float32)
        np.testing.assert_array_equal(actual[rank]["part"].reshape(2, 10), after[:2, 10:20])


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("machine", ["cpu-1", "cpu-3", "h100"])
def test_llama_on_several_ranks_is_accepted(world: int, fuse: bool, machine: str) -> None:
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        vocab_size=320,
        max_position_embeddings=128,
    )
    shape = Shape(config, fp32, 64, 4, 0, world)
    result = llama_plans(shape, registry.machine(machine), {"fuse": fuse})
    assert [p.rank for p in result] == list(range(world))


def changed(plan: Plan, edit: Callable[[Plan, Task], Task]) -> Plan:
    """Returns the plan with `edit` applied to every task."""
    phases = tuple(
        dataclasses.replace(
            phase,
            processors=tuple(tuple(edit(plan, t) for t in tasks) for tasks in phase.processors),
        )
        for phase in plan.phases
    )
    return dataclasses.replace(plan, phases=phases)


def drop_mail_waits(plan: Plan, task: Task) -> Task:
    kept = tuple((c, t) for c, t in task.waits if not plan.counters[c].system)
    return dataclasses.replace(task, waits=kept)


def lower_mail_waits(plan: Plan, task: Task) -> Task:
    lowered = tuple((c, t - 1 if plan.counters[c].system else t) for c, t in task.waits)
    return dataclasses.replace(task, waits=lowered)


def drop_mail_signals(plan: Plan, task: Task) -> Task:
    kept = tuple(
        c
        for c in task.signals
        if plan.counters[c].rank == plan.rank or plan.counters[c].name == "iteration barrier"
    )
    return dataclasses.replace(task, signals=kept)


def other_receive_buffer(plan: Plan) -> Plan:
    """Plants a fault: the first put writes to a receive buffer of a rank that does not wait
    for it.
    """
    buffers = list(plan.buffers)
    at = next(b.id for b in buffers if b.rank != plan.rank)
    wrong = (buffers[at].rank + 1) % plan.world_size
    wrong = wrong if wrong != plan.rank else (wrong + 1) % plan.world_size
    buffers[at] = dataclasses.replace(buffers[at], rank=wrong)
    return dataclasses.replace(plan, buffers=tuple(buffers))


def shared_receive_buffer(plan: Plan) -> Plan:
    """Plants a fault: two receive buffers have the same memory."""
    buffers = list(plan.buffers)
    mine = [b.id for b in buffers if b.arena == "symmetric" and b.rank == plan.rank]
    first, second = mine[:2]
    buffers[second] = dataclasses.replace(buffers[second], offset=buffers[first].offset)
    return dataclasses.replace(plan, buffers=tuple(buffers))


BREAKS: list[Callable[[Plan], Plan]] = [
    lambda p: changed(p, drop_mail_waits),
    lambda p: changed(p, lower_mail_waits),
    lambda p: changed(p, drop_mail_signals),
    other_receive_buffer,
    shared_receive_buffer,
]


@pytest.mark.parametrize("number", range(len(BREAKS)))
def test_broken_rank_is_refused(number: int) -> None:
    plans = build(4, reduce_body(4, ark.fp32, whole=True))
    verify(plans)
    for rank in (0, 2):
        broken = [BREAKS[number](p) if p.rank == rank else p for p in plans]
        with pytest.raises(ark.PlanError):
            verify(broken)


def test_ranks_that_disagree_are_refused() -> None:
    good = build(2, reduce_body(2, ark.fp32, whole=True))
    other = build(2, reduce_body(2, ark.fp32, whole=False))
    with pytest.raises(ark.PlanError):
        verify([good[0], other[1]])
    with pytest.raises(ark.PlanError):
        verify([good[1], good[0]])


def test_message_without_a_receiver_is_refused() -> None:
    def body(rank: int) -> None:
        x = ark.tensor([8], name="x")
        if rank == 0:
            ark.send(x, 1, tag=0)
        else:
            ark.add(x, 1.0)

    with pytest.raises(ark.PlanError):
        verify(build(2, body))


def test_ranks_must_exist() -> None:
    model = Model(0, 2)
    with use_model(model):
        x = ark.tensor([8])
        with pytest.raises(ark.InvalidUsageError):
            ark.send(x, 2, tag=0)
        with pytest.raises(ark.ModelError):
            ark.all_reduce(x, 1, 2)
        ark.send(x, 0, tag=0)
    with pytest.raises(ark.PlanError, match="itself"):
        make_plan(model.graph, registry.machine("cpu-1"))
