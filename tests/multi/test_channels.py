"""Channels in models: the received data equal the sent data, in every iteration, on every backend.
A plan in which a necessary order is missing is refused before it runs.
"""

from __future__ import annotations

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.errors import InvalidUsageError, ModelError, PlanError, UnsupportedError
from ark.frontend.model import Model, use_model
from ark.ir.dtype import bf16, fp16, fp32, int8, int32
from ark.lower.pipeline import plan as make_plan
from ark.plan.verify import verify
from ark.runtime.executor import Executor
from tests.cases.channels import (
    BY_STORES,
    INBOX_ELEMENTS,
    PROGRAMS,
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

OTHERS = tuple(body for body in PROGRAMS if body not in BY_STORES)


@pytest.mark.parametrize("name", ["cpu", "cuda", "rocm"])
def test_received_data_equals_sent_data(name: str) -> None:
    """The data sent by puts, gets, reductions and messages arrives unchanged in every iteration."""
    with devices(name, 2) as (opened, machine):
        for body in OTHERS if name == "rocm" and not SLOW else PROGRAMS:
            plans = build(2, body, machine)
            verify(plans)
            iterations = 4 if name == "rocm" else SUITE_ITERATIONS
            got = run(plans, name, opened, iterations)
            np.testing.assert_array_equal(got, wanted(len(got), iterations), body.__name__)
            assert len(got)


@pytest.mark.parametrize("world", [3, pytest.param(8, marks=slow)])
def test_ring_of_channels(world: int) -> None:
    """Each rank puts to the next rank what it received from the previous one, so that x comes back
    to rank 1.
    """

    def body(rank: int) -> None:
        x, inbox = counting(), ark.comm.symmetric([INBOX_ELEMENTS], int32)
        to = ark.comm.channel((rank + 1) % world)
        before = ark.comm.channel((rank - 1) % world)
        if rank == 1:
            to.put(x, inbox, signal=True)
            add_up(*before.wait(inbox))
        else:
            (arrived,) = before.wait(inbox)
            to.put(arrived, inbox, signal=True)

    with devices("cpu", world) as (opened, machine):
        plans = build(world, body, machine)
        verify(plans)
        np.testing.assert_array_equal(run(plans, "cpu", opened), wanted(INBOX_ELEMENTS))


@pytest.mark.parametrize(
    ("engine", "dtype"),
    few(3, [(e, d) for e in ("packet", "threads") for d in (fp32, fp16, bf16, int8)]),
    ids=lambda word: getattr(word, "name", word),
)
def test_messages_of_any_size_and_type(engine: str, dtype: ark.DataType) -> None:
    sizes = (1, 3, 4099)

    def body(rank: int) -> None:
        channel = ark.comm.channel(1 - rank, engine=engine)
        for n in sizes:
            kept = ark.tensor([n], dtype, name=f"kept{n}")
            if rank == 0:
                channel.send(kept)
            else:
                channel.recv(kept)

    plans = build(2, body)
    verify(plans)
    random = np.random.default_rng(5)
    sent = {n: random.integers(-99, 99, n).astype(dtype.numpy) for n in sizes}
    backend = registry.get("cpu")

    def work(ranks: ThreadRanks) -> list[np.ndarray]:
        plan = plans[ranks.rank]
        with Executor(plan, backend, backend.open(0), ranks=ranks, budget_s=30.0) as executor:
            names = {t.name.split(".")[0]: t.name for t in plan.tensors}
            if ranks.rank == 0:
                for n in sizes:
                    executor.write(names[f"kept{n}"], sent[n])
            executor.start(2).wait(60.0)
            actual = [executor.read(names[f"kept{n}"]) for n in sizes]
            ranks.barrier()
            return actual

    for n, got in zip(sizes, run_ranks(2, work)[1], strict=True):
        np.testing.assert_array_equal(got.view(np.uint8), sent[n].view(np.uint8))


def relaxed_too_early(rank: int) -> None:
    x, inbox = counting(), ark.comm.symmetric([INBOX_ELEMENTS], int32)
    channel = ark.comm.channel(1 - rank)
    if rank == 0:
        channel.put(x, inbox)
        channel.signal(relaxed=True)
        counting(8)  # adds an op after all others
    else:
        add_up(*channel.wait(inbox))


def signal_before_put(rank: int) -> None:
    x, inbox = counting(), ark.comm.symmetric([INBOX_ELEMENTS], int32)
    channel = ark.comm.channel(1 - rank)
    if rank == 0:
        channel.signal()
        channel.put(x, inbox)
    else:
        add_up(*channel.wait(inbox))


def read_without_waiting(rank: int) -> None:
    x, inbox = counting(), ark.comm.symmetric([INBOX_ELEMENTS], int32)
    channel = ark.comm.channel(1 - rank)
    if rank == 0:
        channel.put(x, inbox, signal=True)
    else:
        channel.wait(inbox)
        add_up(inbox)


def get_without_waiting(rank: int) -> None:
    x, shared = counting(), ark.comm.symmetric([INBOX_ELEMENTS], int32)
    if rank == 0:
        ark.copy(x, output=shared)
    else:
        add_up(ark.comm.channel(0).get(shared))


def get_unwritten_data(rank: int) -> None:
    x, shared = counting(), ark.comm.symmetric([INBOX_ELEMENTS], int32)
    channel = ark.comm.channel(1 - rank)
    if rank == 0:
        half = ark.copy(x[: INBOX_ELEMENTS // 2], output=shared[: INBOX_ELEMENTS // 2])
        channel.signal(after=[half])
    else:
        channel.wait()
        add_up(channel.get(shared))


def overwrite_read_data(rank: int) -> None:
    x, inbox = counting(), ark.comm.symmetric([INBOX_ELEMENTS], int32)
    channel = ark.comm.channel(1 - rank)
    if rank == 0:
        channel.put(x, inbox, signal=True)
        channel.put(ark.mul(x, 3), inbox, signal=True)
    else:
        (first,) = channel.wait(inbox)
        kept = ark.copy(first, output=ark.tensor([INBOX_ELEMENTS], int32))
        (second,) = channel.wait(inbox)
        add_up(ark.add(kept, second))


def two_reduce_at_once(rank: int) -> None:
    x, sums = counting(), ark.comm.symmetric([INBOX_ELEMENTS], int32)
    if rank == 1:
        sums = ark.mul(x, 0, output=sums)
        channels = [ark.comm.channel(0), ark.comm.channel(2)]
        for channel in channels:
            channel.signal(after=[sums])
        for channel in channels:
            (sums,) = channel.wait(sums)
        add_up(sums)
    else:
        channel = ark.comm.channel(1)
        channel.wait()
        channel.reduce(x, sums)
        channel.signal()


def never_signalled(rank: int) -> None:
    x, inbox = counting(), ark.comm.symmetric([INBOX_ELEMENTS], int32)
    channel = ark.comm.channel(1 - rank)
    if rank == 0:
        channel.put(x, inbox)
    else:
        add_up(*channel.wait(inbox))


def both_wait_first(rank: int) -> None:
    x, inbox = counting(), ark.comm.symmetric([INBOX_ELEMENTS], int32)
    channel = ark.comm.channel(1 - rank)
    (arrived,) = channel.wait(inbox)
    add_up(arrived)
    channel.put(x, inbox, signal=True)


REFUSED = {
    relaxed_too_early: "nothing makes the second wait for the first",
    signal_before_put: "nothing makes the second wait for the first",
    read_without_waiting: "nothing makes the second wait for the first",
    get_without_waiting: "nothing makes the second wait for the first",
    get_unwritten_data: "that no earlier task writes",
    overwrite_read_data: "nothing makes the second wait for the first",
    two_reduce_at_once: "nothing makes the second wait for the first",
    never_signalled: "has waits but no signals|lacks",
    both_wait_first: "its waits deadlock",
}


@pytest.mark.parametrize("body", REFUSED, ids=lambda b: b.__name__)
def test_missing_order_is_refused(body: Body) -> None:
    """Plans that lack a necessary order are refused, on machines with several processors. With one
    processor its task list orders the tasks.
    """
    world = 3 if body is two_reduce_at_once else 2
    with pytest.raises(PlanError, match=REFUSED[body]):
        verify(build(world, body))


def test_invalid_channel_programs_are_refused() -> None:
    with use_model(Model(0, 2)):
        inbox = ark.comm.symmetric([8], name="inbox")
        with pytest.raises(InvalidUsageError, match="already"):
            ark.comm.symmetric([8], name="inbox")
        with pytest.raises(InvalidUsageError, match="this is rank 0 of 2"):
            ark.comm.channel(0)
        channel = ark.comm.channel(1)
        with pytest.raises(ModelError, match="memory of this rank only"):
            channel.put(ark.tensor([8]), ark.tensor([8]))
        with pytest.raises(ModelError, match=r"fp32\[7\], the peer's memory fp32\[8\]"):
            channel.put(ark.tensor([7]), inbox)
        with pytest.raises(InvalidUsageError, match="'xor' is not a reduction"):
            channel.reduce(ark.tensor([8]), inbox, op="xor")
        ark.comm.channel(1, engine="carrier pigeon").put(ark.tensor([8]), inbox)
        with pytest.raises(UnsupportedError, match=r"carrier pigeon.*it has threads"):
            make_plan(Model.get_model().graph, CPU_2)
