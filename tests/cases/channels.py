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

INBOX_ELEMENTS = 30_000  # several tiles, on several processors
SUITE_ITERATIONS = 20
Body = Callable[[int], None]


def counting(n: int = INBOX_ELEMENTS) -> ark.Tensor:
    """Returns 0, 1, 2, ... plus the number of the iteration, so that each iteration has other
    values.
    """
    x = ark.tensor([n], int32, name="x")
    return ark.add(x, 1, output=x)


def add_up(arrived: ark.Tensor) -> None:
    """Adds a received tensor to the model's tensor `total`. A stale or incomplete value in any
    iteration makes the sum wrong.
    """
    total = ark.tensor([arrived.shape()[0]], arrived.dtype(), name="total")
    ark.add(total, arrived, output=total)


def put_then_signal(rank: int) -> None:
    """The message-passing litmus test: a put, then a signal; the receiver reads after its wait."""
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
    """A put, a flush that completes it, and then a signal without memory ordering."""
    x, inbox = counting(), ark.comm.symmetric([INBOX_ELEMENTS], int32)
    channel = ark.comm.channel(1 - rank)
    if rank == 0:
        channel.put(x, inbox)
        channel.flush()
        channel.signal(relaxed=True)
    else:
        add_up(*channel.wait(inbox))


def put_odd(rank: int) -> None:
    """Rank 0 puts 4103 elements by a copy engine and waits until they are sent."""
    numbers, inbox = counting(4103), ark.comm.symmetric([4103], int32)
    if rank == 0:
        channel = ark.comm.channel(1, engine="dma")
        channel.put(numbers, inbox)
        channel.flush()
    else:
        ark.mul(numbers, 0, output=inbox)


def parts(rank: int) -> None:
    """Two puts to two parts of one buffer, whose rows are strided, and one signal for both puts."""
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
    """Rank 0 signals that its memory is ready. Rank 1 waits for the signal and gets the memory."""
    x, shared = counting(), ark.comm.symmetric([INBOX_ELEMENTS], int32)
    channel = ark.comm.channel(1 - rank)
    if rank == 0:
        shared = ark.copy(x, output=shared)
        channel.signal(after=[shared])
    else:
        channel.wait()
        add_up(channel.get(shared))


def reduce(rank: int) -> None:
    """Rank 0 adds to rank 1's memory by `reduce`, then signals. Rank 1 reads the sum after its
    wait.
    """
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
    """The same memory receives two puts in an iteration. The second put waits until the receiver
    has read the data of the first.
    """
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
    """Messages in both directions, small ones (sent as packets) and large ones (sent by plain
    memory).
    """
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
# Programs that use a signal after a put (put_then_signal), a signal before a get (get), signals in
# both directions (twice) and packets (messages). On emulated AMD devices `nox` executes these
# programs in test_stored_signals, over links that support only loads and stores, and the other
# programs in test_channels.
BY_STORES = (put_then_signal, get, twice, messages)


def run(
    plans: list[Plan],
    backend: str | Sequence[str],
    opened: list,
    iterations: int = SUITE_ITERATIONS,
    budget_s: float = 30.0,
) -> np.ndarray:
    """Returns rank 1's tensor `total`, to which add_up added what arrived. backend: one name for
    all ranks, or a name for each rank.
    """
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
