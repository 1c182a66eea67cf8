"""Cases and helpers of tests/multi/test_channels.py, which other tests use too."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

import ark
from ark.backend import registry
from ark.ir.dtype import int32
from ark.plan.types import Plan
from ark.runtime.executor import Executor
from tests.ranks import ThreadRanks, run_ranks

INBOX_ELEMENTS = 30_000  # elements: several tiles on several processors
SUITE_ITERATIONS = 20
Body = Callable[[int], None]


def counting(n: int = INBOX_ELEMENTS) -> ark.Tensor:
    """0, 1, 2, ... plus how many iterations there were; another number in each."""
    x = ark.tensor([n], int32, name="x")
    return ark.add(x, 1, output=x)


def add_up(arrived: ark.Tensor) -> None:
    """Adds what has arrived to `total`: something old or unfinished in any iteration would show."""
    total = ark.tensor([arrived.shape()[0]], arrived.dtype(), name="total")
    ark.add(total, arrived, output=total)


def put_then_signal(rank: int) -> None:
    """The message-passing litmus test."""
    x, inbox = counting(), ark.comm.symmetric([INBOX_ELEMENTS], int32, name="inbox")
    channel = ark.comm.channel(1 - rank)
    if rank == 0:
        channel.put(x, inbox)
        channel.signal()
    else:
        (inbox,) = channel.wait(inbox)
        add_up(inbox)


def signal_with_put(rank: int) -> None:
    x, inbox = counting(7), ark.comm.symmetric([7], int32)
    channel = ark.comm.channel(1 - rank, tag=3)
    if rank == 0:
        channel.put(x, inbox, signal=True)
    else:
        add_up(*channel.wait(inbox))


def flush_then_relaxed(rank: int) -> None:
    """A flush completes what was put, so that a signal without order may follow."""
    x, inbox = counting(), ark.comm.symmetric([INBOX_ELEMENTS], int32)
    channel = ark.comm.channel(1 - rank)
    if rank == 0:
        channel.put(x, inbox)
        channel.flush()
        channel.signal(relaxed=True)
    else:
        add_up(*channel.wait(inbox))


def parts(rank: int) -> None:
    """Two puts into parts of one memory, one of them strided, and one signal."""
    x = ark.reshape(counting(600), [20, 30])
    inbox = ark.comm.symmetric([20, 40], int32)
    channel = ark.comm.channel(1 - rank)
    if rank == 0:
        channel.put(x, inbox[:, 10:])
        channel.put(x[:, :10], inbox[:, :10])
        channel.signal()
    else:
        (inbox,) = channel.wait(inbox)
        add_up(ark.reshape(ark.copy(inbox[:, 10:]), [600]))


def get(rank: int) -> None:
    """The peer says that it is there; then it is fetched."""
    x, shared = counting(), ark.comm.symmetric([INBOX_ELEMENTS], int32)
    channel = ark.comm.channel(1 - rank)
    if rank == 0:
        shared = ark.copy(x, output=shared)
        channel.signal(after=[shared])
    else:
        channel.wait()
        add_up(channel.get(shared))


def reduce(rank: int) -> None:
    """Added to what the peer has there; it looks at the sum when it is told."""
    x, sums = counting(), ark.comm.symmetric([INBOX_ELEMENTS], int32)
    channel = ark.comm.channel(1 - rank)
    if rank == 1:
        sums = ark.mul(x, 0, output=sums)
        channel.signal(after=[sums])
        add_up(*channel.wait(sums))
    else:
        channel.wait()
        channel.reduce(x, sums)
        channel.signal()


def twice(rank: int) -> None:
    """One memory used twice in an iteration: the second put waits until the first was read."""
    x, inbox = counting(), ark.comm.symmetric([INBOX_ELEMENTS], int32)
    channel = ark.comm.channel(1 - rank)
    if rank == 0:
        channel.put(ark.mul(x, -2), inbox, signal=True)
        channel.wait()
        channel.put(ark.mul(x, 3), inbox, signal=True)
    else:
        (first,) = channel.wait(inbox)
        kept = ark.copy(first)
        channel.signal(after=[kept])
        (second,) = channel.wait(inbox)
        add_up(ark.add(kept, second))


def messages(rank: int) -> None:
    """There and back, small and large, by packets and by plain memory."""
    channel = ark.comm.channel(1 - rank, tag=8)
    x = counting()
    if rank == 0:
        channel.send(x)
        channel.send(x[:99])
        channel.recv(ark.tensor([3], int32))
    else:
        all_of_it = channel.recv(ark.tensor([INBOX_ELEMENTS], int32))
        channel.recv(ark.tensor([99], int32))
        channel.send(all_of_it[:3])
        add_up(all_of_it)


PROGRAMS = (
    put_then_signal,
    signal_with_put,
    flush_then_relaxed,
    parts,
    get,
    reduce,
    twice,
    messages,
)
# Which the default run leaves to emulated links that support stores only (test_stored_signals): a
# signal behind a put, before a get, both ways in turn, and behind packets.
BY_STORES = (put_then_signal, get, twice, messages)


def run(
    plans: list[Plan],
    backend: str | Sequence[str],
    opened: list,
    iterations: int = SUITE_ITERATIONS,
    budget_s: float = 30.0,
) -> np.ndarray:
    """What rank 1 has added up; backend: of all ranks, or each one's."""
    names = [backend] * len(plans) if isinstance(backend, str) else backend

    def work(ranks: ThreadRanks) -> np.ndarray:
        plan, device = plans[ranks.rank], opened[ranks.rank]
        named = {t.name for t in plan.tensors}
        chosen = registry.get(names[ranks.rank])
        with Executor(plan, chosen, device, ranks=ranks, budget_s=budget_s) as executor:
            if "x" in named:
                x = executor.find("x")
                executor.write("x", np.arange(x.shape[0], dtype=np.int32))
            executor.start(iterations).wait(60.0)
            result = executor.read("total") if "total" in named else np.zeros(0)
            ranks.barrier()
            return result

    return run_ranks(len(plans), work)[1]


def wanted(n: int, iterations: int = SUITE_ITERATIONS) -> np.ndarray:
    return sum((np.arange(n) + i for i in range(1, iterations + 1)), np.zeros(n)).astype(np.int32)
