"""Channels in custom ops: a user's tasks put their tile to a peer, signal it, and wait for tiles
from peers, on every backend. Plans in which a necessary order is missing are refused.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.errors import InvalidUsageError, ModelError, PlanError, UnsupportedError
from ark.frontend.model import Model, use_model
from ark.ir.dtype import int32
from ark.lower.pipeline import plan as make_plan
from ark.plan.serialize import from_json, to_json
from ark.plan.verify import verify
from ark.runtime.executor import Executor
from examples.ring import ring
from tests.cases.channels import (
    INBOX_ELEMENTS,
    SUITE_ITERATIONS,
    Body,
    add_up,
    counting,
    run,
    wanted,
)
from tests.cases.collectives import CPU_2, build, devices
from tests.ranks import ThreadRanks, run_ranks
from tests.slow import SLOW, few, slow

PAGE = Path(__file__).resolve().parents[2] / "docs/custom-ops.md"
TILE_ELEMENTS = 3000  # of N elements: several tasks on each processor
MOVE = """
// got + by goes on, and to the sum.
template <class Task, class X, class Y>
ARK_DEVICE void move(ArkCtx& c, const Task& task, X x, Y y) {
  for (int m = task.m.begin + ark_tid(); m < task.m.end; m += ARK_THREADS) {
    *ark_address(y, m) = *ark_address(x, m) + Task::by;
  }
}
"""
ADD = """
template <class Task, class X, class Y>
ARK_DEVICE void add_to(ArkCtx& c, const Task& task, X x, Y y) {
  for (int m = task.m.begin + ark_tid(); m < task.m.end; m += ARK_THREADS) {
    *ark_address(y, m) += *ark_address(x, m);
  }
}
"""
FORWARD = """
template <class Task, class X, class T, class S, class Y>
ARK_DEVICE void forward(ArkCtx& c, const Task& task, X got, T total, S sum, Y on) {
  for (int m = task.m.begin + ark_tid(); m < task.m.end; m += ARK_THREADS) {
    const auto v = *ark_address(got, m);
    *ark_address(on, m) = v;
    *ark_address(sum, m) = *ark_address(total, m) + v;
  }
}
"""
move = ark.custom_op("move", MOVE, "x[m] -> y[m]", {"m": TILE_ELEMENTS}, constants={"by": 0})
around = ark.custom_op("move", MOVE, "x[m+-1] -> y[m]", {"m": TILE_ELEMENTS}, constants={"by": 0})
coarse = ark.custom_op("move", MOVE, "x[m] -> y[m]", {"m": 2 * TILE_ELEMENTS}, constants={"by": 0})
add_to = ark.custom_op("add_to", ADD, "x[m], y[m] -> y[m]", {"m": TILE_ELEMENTS})
forward = ark.custom_op(
    "forward", FORWARD, "got[m], total[m] -> sum[m], on[m]", {"m": TILE_ELEMENTS}
)


def put_tiles(rank: int) -> None:
    """A custom op of rank 0 puts each tile when it is computed. An op of rank 1 adds each tile when
    it has arrived. The signals are sent by the tasks of the custom op, so there is no separate op
    for them.
    """
    x, inbox = counting(), ark.comm.symmetric([INBOX_ELEMENTS], int32)
    channel = ark.comm.channel(1 - rank)
    if rank == 0:
        move(x, y=channel.there(inbox), signals=channel)
    else:
        add_to(inbox, ark.tensor([INBOX_ELEMENTS], int32, name="total"), waits=channel)


def put_then_signal(rank: int) -> None:
    """Two custom ops write parts of the peer's memory; one signal follows all of their tiles."""
    x, inbox = counting(), ark.comm.symmetric([INBOX_ELEMENTS], int32)
    channel = ark.comm.channel(1 - rank)
    if rank == 0:
        move(x[: INBOX_ELEMENTS // 2], y=channel.there(inbox[: INBOX_ELEMENTS // 2]))
        move(x[INBOX_ELEMENTS // 2 :], y=channel.there(inbox[INBOX_ELEMENTS // 2 :]))
        channel.signal()
    else:
        add_up(*channel.wait(inbox))


def flush_then_relaxed(rank: int) -> None:
    x, inbox = counting(), ark.comm.symmetric([INBOX_ELEMENTS], int32)
    channel = ark.comm.channel(1 - rank)
    if rank == 0:
        move(x, y=channel.there(inbox))
        channel.flush()
        channel.signal(relaxed=True)
    else:
        add_up(*channel.wait(inbox))


def get_tiles(rank: int) -> None:
    """A custom op of one rank reads each tile of the peer's result as soon as the peer has computed
    it.
    """
    x, shared = counting(), ark.comm.symmetric([INBOX_ELEMENTS], int32)
    channel = ark.comm.channel(1 - rank)
    if rank == 0:
        move(x, y=shared, signals=channel)
    else:
        total = ark.tensor([INBOX_ELEMENTS], int32, name="total")
        add_to(channel.there(shared), total, waits=channel)


def reduce_there(rank: int) -> None:
    """Custom ops add to the peer's memory in place, tile by tile, in both directions."""
    x, sums = counting(), ark.comm.symmetric([INBOX_ELEMENTS], int32)
    channel = ark.comm.channel(1 - rank)
    if rank == 1:
        move(ark.mul(x, 0), y=sums, signals=channel)
        add_to(sums, ark.tensor([INBOX_ELEMENTS], int32, name="total"), waits=channel)
    else:
        add_to(x, channel.there(sums), waits=channel, signals=channel)


def twice(rank: int) -> None:
    """A custom op puts to the same memory twice in an iteration: a tile is put again after the
    first one was read.
    """
    x, inbox = counting(), ark.comm.symmetric([INBOX_ELEMENTS], int32)
    channel = ark.comm.channel(1 - rank)
    if rank == 0:
        there = channel.there(inbox)
        move(ark.mul(x, -2), y=there, signals=channel)
        move(ark.mul(x, 3), y=there, waits=channel, signals=channel)
    else:
        total = ark.tensor([INBOX_ELEMENTS], int32, name="total")
        total = add_to(inbox, total, waits=channel, signals=channel)
        add_to(inbox, total, waits=channel)


PROGRAMS = (put_tiles, put_then_signal, flush_then_relaxed, get_tiles, reduce_there, twice)
BY_DEFAULT = (put_tiles, reduce_there)  # also on the emulator by default


@pytest.mark.parametrize("name", ["cpu", "cuda", "rocm"])
def test_received_data_equals_sent_data(name: str) -> None:
    """The received data is right in every iteration, also after writing the plan as JSON and
    reading it.
    """
    with devices(name, 2) as (opened, machine):
        for body in BY_DEFAULT if name == "rocm" and not SLOW else PROGRAMS:
            plans = [from_json(to_json(p)) for p in build(2, body, machine)]
            verify(plans)
            iterations = 4 if name == "rocm" else SUITE_ITERATIONS
            got = run(plans, name, opened, iterations)
            np.testing.assert_array_equal(got, wanted(INBOX_ELEMENTS, iterations), body.__name__)


@pytest.mark.parametrize("world", few(1, [3, 2, 5]))
def test_ring_all_reduce_of_the_users(world: int) -> None:
    """An all-reduce around a ring of custom ops: the tiles of each rank travel around the ring, are
    added on the way, and wait independently of each other.
    """

    def body(rank: int) -> None:
        x = counting()
        x = ark.mul(x, rank + 1)
        to, before = (ark.comm.channel((rank + d) % world) for d in (1, -1))
        inboxes = [ark.comm.symmetric([INBOX_ELEMENTS], int32) for _ in range(world - 1)]
        move(x, y=to.there(inboxes[0]), signals=to)
        for inbox, following in itertools.pairwise(inboxes):
            x, _ = forward(inbox, x, on=to.there(following), waits=before, signals=to)
        last = ark.copy(x)
        add_to(inboxes[-1], last, waits=before)
        add_up(last)

    with devices("cpu", world) as (opened, machine):
        plans = build(world, body, machine)
        verify(plans)
        assert not any(op.kind == "flag" for op in plans[1].ops)
        total = world * (world + 1) // 2
        np.testing.assert_array_equal(run(plans, "cpu", opened), total * wanted(INBOX_ELEMENTS))


PACKED = FORWARD.replace("*ark_address(got, m)", "ark_load(c, got, m)").replace(
    "*ark_address(on, m) = v;", "ark_store(c, on, v, m);"
)
ADDED = FORWARD.replace("forward", "add_up").replace("S sum, Y on", "S sum")
ADDED = ADDED.replace(", class Y>", ">").replace("    *ark_address(on, m) = v;\n", "")
ADDED = ADDED.replace("*ark_address(got, m)", "ark_load(c, got, m)")
SENT = MOVE.replace(
    "*ark_address(y, m) = *ark_address(x, m) + Task::by", "ark_store(c, y, ark_load(c, x, m), m)"
)


@pytest.mark.parametrize(
    ("name", "world"), [pytest.param("cpu", 2, marks=slow), ("cpu", 3), ("cuda", 2), ("rocm", 2)]
)
def test_packets_need_no_waits_or_signals(name: str, world: int) -> None:
    """A ring of custom ops whose intermediate memory consists of packets needs no signals, because
    the load of a packet is its wait.
    """
    send = ark.custom_op("move", SENT, "x[m] -> y[m]", {"m": TILE_ELEMENTS}, packets=["x", "y"])
    pass_on = ark.custom_op(
        "forward",
        PACKED,
        "got[m], total[m] -> sum[m], on[m]",
        {"m": TILE_ELEMENTS},
        dtypes={"sum": ark.fp32},
        packets=["got", "on"],
    )

    end = ark.custom_op(
        "add_up", ADDED, "got[m], total[m] -> y[m]", {"m": TILE_ELEMENTS}, packets=["got"]
    )

    def body(rank: int) -> None:
        x = ark.mul(ark.cast(counting(), ark.fp32), rank + 1.0)
        to = ark.comm.channel((rank + 1) % world)
        inboxes = [ark.comm.symmetric([INBOX_ELEMENTS]) for _ in range(world - 1)]
        send(x, y=to.there(inboxes[0]))
        for inbox, following in itertools.pairwise(inboxes):
            x, _ = pass_on(inbox, x, on=to.there(following))
        add_up(ark.cast(end(inboxes[-1], x), int32))

    with devices(name, world) as (opened, machine):
        plans = build(world, body, machine)
        verify(plans)
        assert {c.name for c in plans[0].counters if c.system} == {"iteration barrier"}
        total = world * (world + 1) // 2
        np.testing.assert_array_equal(
            run(plans, name, opened, 4), total * wanted(INBOX_ELEMENTS, 4)
        )


@pytest.mark.parametrize("world", few(1, [3, 2]))
def test_ring_of_the_page(world: int) -> None:
    section = PAGE.read_text().split("## Channels")[1].split("\n## ")[0]
    scope: dict[str, Any] = {"ark": ark}
    for block in re.findall(r"```python\n(.*?)```", section, re.S):
        exec(block, scope)

    def body(rank: int) -> None:
        x = ark.tensor([INBOX_ELEMENTS], name="x0")
        ark.copy(scope["mean"](x, rank, world), ark.tensor([INBOX_ELEMENTS], name="found"))

    given = np.random.default_rng(0).standard_normal((world, INBOX_ELEMENTS)).astype(np.float32)
    with devices("cpu", world) as (opened, machine):
        plans = build(world, body, machine)
        verify(plans)

        def work(ranks: ThreadRanks) -> np.ndarray:
            plan, device = plans[ranks.rank], opened[ranks.rank]
            with Executor(plan, registry.get("cpu"), device, ranks=ranks) as executor:
                executor.write("x0", given[ranks.rank])
                executor.start(3).wait(60.0)
                actual = executor.read("found")
                ranks.barrier()
                return actual

        for actual in run_ranks(world, work):
            np.testing.assert_allclose(actual, given.mean(0), rtol=1e-5, atol=1e-6)


def scripts() -> None:
    """The body of each rank: runs the example ring, then launches a custom op whose device code
    differs on rank 1, which must be refused.
    """
    ring.work("cpu", 2500, 2)
    ark.init(backend="cpu")
    text = MOVE + " " * ark.Model.get_rank()
    ark.custom_op("move", text, "x[m] -> y[m]", constants={"by": 0})(ark.tensor([8], int32))
    try:
        with ark.Runtime() as runtime:
            runtime.launch()
    except PlanError as error:
        assert "custom op 'move'" in str(error) and "has another text" in str(error)
        return
    raise AssertionError("ranks with different device code were launched")


def test_example_and_ranks_that_differ_as_processes() -> None:
    assert ark.launch(3, scripts) == 0


def missing_signal(rank: int) -> None:
    x, inbox = counting(), ark.comm.symmetric([INBOX_ELEMENTS], int32)
    channel = ark.comm.channel(1 - rank)
    if rank == 0:
        move(x, y=channel.there(inbox))
    else:
        add_to(inbox, ark.tensor([INBOX_ELEMENTS], int32), waits=channel)


def missing_wait(rank: int) -> None:
    x, inbox = counting(), ark.comm.symmetric([INBOX_ELEMENTS], int32)
    channel = ark.comm.channel(1 - rank)
    if rank == 0:
        move(x, y=channel.there(inbox), signals=channel)
    else:
        add_to(inbox, ark.tensor([INBOX_ELEMENTS], int32))


def other_tiles(rank: int) -> None:
    x, inbox = counting(), ark.comm.symmetric([INBOX_ELEMENTS], int32)
    channel = ark.comm.channel(1 - rank)
    if rank == 0:
        coarse(x, y=channel.there(inbox), signals=channel)
    else:
        add_to(inbox, ark.tensor([INBOX_ELEMENTS], int32), waits=channel)


def reads_beside_its_tile(rank: int) -> None:
    x, inbox = counting(), ark.comm.symmetric([INBOX_ELEMENTS], int32)
    channel = ark.comm.channel(1 - rank)
    if rank == 0:
        move(x, y=channel.there(inbox), signals=channel)
    else:
        around(inbox, waits=channel)


def put_again_too_early(rank: int) -> None:
    x, inbox = counting(), ark.comm.symmetric([INBOX_ELEMENTS], int32)
    channel = ark.comm.channel(1 - rank)
    if rank == 0:
        there = channel.there(inbox)
        move(x, y=there, signals=channel)
        move(x, y=there, signals=channel)
    else:
        total = add_to(inbox, ark.tensor([INBOX_ELEMENTS], int32), waits=channel)
        add_to(inbox, total, waits=channel)


def signal_too_early(rank: int) -> None:
    x, inbox = counting(), ark.comm.symmetric([INBOX_ELEMENTS], int32)
    channel = ark.comm.channel(1 - rank)
    if rank == 0:
        channel.signal()
        move(x, y=channel.there(inbox))
    else:
        add_up(*channel.wait(inbox))


def both_wait_first(rank: int) -> None:
    x, inbox = counting(), ark.comm.symmetric([INBOX_ELEMENTS], int32)
    channel = ark.comm.channel(1 - rank)
    got = move(inbox, waits=channel)
    move(ark.add(x, got), y=channel.there(inbox), signals=channel)


UNORDERED = "nothing makes the second wait for the first"
REFUSED: dict[Callable[[int], None], str] = {
    missing_signal: "has waits but no signals|lacks",
    missing_wait: r"signals 'channel0\.0\.1\.custom\.0\.tile\d+', which rank 1 lacks",
    other_tiles: "has waits but no signals|lacks",
    reads_beside_its_tile: UNORDERED,
    put_again_too_early: UNORDERED,
    signal_too_early: UNORDERED,
    both_wait_first: "its waits deadlock",
}


@pytest.mark.parametrize("body", REFUSED, ids=lambda b: b.__name__)
def test_missing_order_is_refused(body: Body) -> None:
    with pytest.raises(PlanError, match=REFUSED[body]):
        verify(build(2, body))


def test_invalid_channel_programs_are_refused() -> None:
    with use_model(Model(0, 2)) as model:
        channel, inbox = ark.comm.channel(1), ark.comm.symmetric([8], int32)
        x = ark.tensor([8], int32)
        with pytest.raises(ModelError, match="memory of this rank only"):
            channel.there(x)
        with pytest.raises(InvalidUsageError, match="waits and signals are channels"):
            move(x, waits=[1])
        with pytest.raises(ModelError, match="m is 8; in x it is 7"):
            move(x[:7], y=channel.there(inbox))
        with pytest.raises(InvalidUsageError, match=r"waits is already the name of an argument"):
            ark.custom_op("move", MOVE, "x[m] -> waits[m]")
        move(x, y=channel.there(inbox), signals=channel)
        whole = ark.custom_op("move", SENT, "x[m] -> y[m]", packets=["y"])
        with use_model(Model(0, 2)) as other:
            whole(x, y=ark.comm.channel(1).there(ark.comm.symmetric([8], int32)))
            with pytest.raises(UnsupportedError, match=r"cannot be sent as packets.* it is int32"):
                make_plan(other.graph, CPU_2)
        with pytest.raises(UnsupportedError, match="custom ops reach peers on this host only"):
            make_plan(model.graph, CPU_2, {"hosts": (0, 1)})
