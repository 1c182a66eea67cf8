"""The engine `dma` on a device that writes its copy engine's queue itself: AMD's SDMA, emulated.
The bytes arrive for odd sizes, and when requests continue at the start of the queue's ring. Without
a queue the host's proxy is used. A fault ends the launch with an error message.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.backend.devices import Device, Queue
from ark.errors import GpuError, SystemError
from ark.ir.dtype import int32
from ark.machine import Machine
from ark.plan.verify import verify
from ark.runtime import copy_queue
from ark.runtime import proxy as proxies
from ark.runtime.copy_queue import CopyQueue
from ark.tasks import transfer
from tests.cases import channels
from tests.cases.collectives import build, devices
from tests.cases.proxy import fetch, put_and_send

emulator = pytest.importorskip("ark_rocm_emulator")
pytest.importorskip("hip")

from ark_rocm import dialect, queues  # noqa: E402

from tests.slow import few  # noqa: E402


class CreatedQueues:
    """Records the queues that were created, and the number of commands that their copy engines have
    executed.
    """

    def __init__(self) -> None:
        self.queues: list[Queue] = []
        self.executed = 0


@pytest.fixture
def created(monkeypatch: pytest.MonkeyPatch) -> CreatedQueues:
    """Makes the start of the host's proxy an error, so that all data must be copied through queues.
    Returns the record of created queues.
    """
    seen, create, destroy = CreatedQueues(), queues.create, queues.destroy

    def creating(hip: Any, index: int, slots: int) -> Queue:
        seen.queues.append(create(hip, index, slots))
        return seen.queues[-1]

    def destroying(queue: Queue) -> None:
        seen.executed += queue.handle.executed  # type: ignore[attr-defined]
        destroy(queue)

    def no_proxy(*_: object) -> None:
        raise AssertionError("the proxy was started")

    monkeypatch.setattr(queues, "create", creating)
    monkeypatch.setattr(queues, "destroy", destroying)
    monkeypatch.setattr(proxies.Proxy, "__init__", no_proxy)
    return seen


@pytest.fixture
def short_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits requests to 256 bytes and the queue's ring to one page of memory (64 requests)."""
    plain = dialect._text

    def shortened(name: str) -> str:
        return plain(name).replace("ARK_REQUEST_MOST = 1u << 22", "ARK_REQUEST_MOST = 256u")

    monkeypatch.setattr(dialect, "_text", shortened)
    monkeypatch.setattr(copy_queue, "RING_SLOTS", 64)


@pytest.fixture
def two() -> Iterator[tuple[list[Device], Machine]]:
    with devices("rocm", 2) as opened:
        yield opened


@pytest.mark.parametrize("body", [put_and_send, fetch], ids=["put", "get"])
def test_copies_go_through_the_queue(
    body: channels.Body, created: CreatedQueues, two: tuple
) -> None:
    opened, machine = two
    plans = build(2, body, machine)
    verify(plans)
    got = channels.run(plans, "rocm", opened, 3)
    np.testing.assert_array_equal(got, channels.wanted(channels.INBOX_ELEMENTS, 3))
    assert created.executed >= 3 * 3  # a copy, a fence and a NOP in each iteration


@pytest.mark.parametrize("seed", few(1, range(2)))
def test_copy_engine_reads_written_back_values(created: CreatedQueues, seed: int) -> None:
    """Copies by a copy engine are right although the emulated caches return old values wherever the
    memory model permits it: the source is written back before the engine reads it, and a `get`
    writes to memory that is not cached.
    """
    with emulator.emulated("gfx942", 2, stale=1, seed=seed, compute_units=3):
        backend = registry.get("rocm")
        opened = [backend.open(rank) for rank in range(2)]
        for body in (put_and_send, fetch):
            plans = build(2, body, opened[0].machine)
            verify(plans)
            got = channels.run(plans, "rocm", opened, 3)
            np.testing.assert_array_equal(got, channels.wanted(channels.INBOX_ELEMENTS, 3))
        for device in opened:
            device.close()
    assert created.executed


def odd_sizes(rank: int) -> None:
    """Rank 0 sends 1, 3 and 4099 neighbouring elements of one tensor."""
    x, inbox = channels.counting(4103), ark.comm.symmetric([4103], int32)
    channel = ark.comm.channel(1 - rank, engine="dma")
    if rank == 0:
        for begin, end in ((0, 1), (1, 4), (4, 4103)):
            channel.put(x[begin:end], inbox[begin:end])
        channel.signal()
    else:
        (arrived,) = channel.wait(inbox)
        channels.add_up(arrived)


def test_requests_fill_the_ring_and_go_round_it(
    created: CreatedQueues, short_requests: None, two: tuple
) -> None:
    """An iteration has 67 requests, some of only 4 bytes, more than the 64 slots of the queue's
    ring.
    """
    opened, machine = two
    plans = build(2, odd_sizes, machine)
    verify(plans)
    got = channels.run(plans, "rocm", opened, 3)
    np.testing.assert_array_equal(got, channels.wanted(4103, 3))
    assert created.executed >= 3 * 3 * 67


def test_full_ring_is_waited_for_no_longer_than_the_budget(
    monkeypatch: pytest.MonkeyPatch, short_requests: None, two: tuple
) -> None:
    """If the copy engine never serves a request, the queue's ring is full after 64 requests, and
    the next one ends the launch with a timeout.
    """
    opened, machine = two
    create, held = queues.create, []

    def deaf(hip: Any, index: int, slots: int) -> Queue:
        queue = create(hip, index, slots)
        held.append(opened[index].alloc(8, "symmetric"))
        return Queue(queue.ring, queue.write_pointer, held[-1].address, queue.handle)

    monkeypatch.setattr(queues, "create", deaf)
    plans = build(2, channels.put_odd, machine)
    with pytest.raises(
        GpuError, match=r"transfer .* waited for a copy engine .* expected 1, seen 0"
    ):
        channels.run(plans, "rocm", opened, 1, budget_s=1.0)


def test_invalid_packet_stops_the_engine(monkeypatch: pytest.MonkeyPatch, two: tuple) -> None:
    opened, machine = two
    plain = dialect._text
    wrong = {"1ull << 32,": "99ull << 32,"}

    def garbled(name: str) -> str:
        text = plain(name)
        for old, new in wrong.items():
            text = text.replace(old, new)
        return text

    monkeypatch.setattr(dialect, "_text", garbled)
    emulator.set_option("report", 0)
    plans = build(2, odd_sizes, machine)
    with pytest.raises(GpuError):
        channels.run(plans, "rocm", opened, 1, budget_s=1.0)
    assert "is not one that is modelled" in emulator.failures()[0].message


@pytest.mark.parametrize(
    ("file", "old", "new", "expected_words"),
    [
        # The task notifies the engine without having written the data back from the cache.
        ("queue.h", "  ark_release_to_system();\n", "", "the engine reads what workgroup"),
        # The task ends without waiting for the copy.
        (
            "transfer.h",
            "return ark_wait(c, &queue->done, behind, true",
            "return true; (void)(true",
            "a DMA engine",
        ),
    ],
)
def test_missing_order_is_found(
    monkeypatch: pytest.MonkeyPatch, two: tuple, file: str, old: str, new: str, expected_words: str
) -> None:
    """The emulator reports a missing release before the doorbell and a missing wait after the
    engine's fence. The engine sees only writes that were released before the doorbell, and
    processors see its writes only after it has executed its fence command.
    """
    opened, machine = two
    plain, headers = dialect._text, transfer.Transfer.headers
    if file == "transfer.h":
        assert any(old in text for text in headers)
        changed = tuple(text.replace(old, new) for text in headers)
        monkeypatch.setattr(transfer.Transfer, "headers", changed)
    else:
        assert old in plain(file)
        monkeypatch.setattr(
            dialect,
            "_text",
            lambda name: plain(name).replace(old, new) if name == file else plain(name),
        )
    emulator.set_option("report", 0)
    plans = build(2, put_and_send, machine)
    with pytest.raises(GpuError):
        channels.run(plans, "rocm", opened, 2, budget_s=2.0)
    message = emulator.failures()[0].message
    assert "Race" in message or "race" in message
    assert expected_words in message


def test_without_a_queue_the_proxy_copies(monkeypatch: pytest.MonkeyPatch, two: tuple) -> None:
    def refused(*_: object) -> Queue:
        raise SystemError("/dev/kfd cannot be opened (No such file or directory)")

    monkeypatch.setattr(queues, "create", refused)
    opened, machine = two
    plans = build(2, put_and_send, machine)
    got = channels.run(plans, "rocm", opened, 2)
    np.testing.assert_array_equal(got, channels.wanted(channels.INBOX_ELEMENTS, 2))


def test_queue_with_pending_requests_is_replaced(created: CreatedQueues, two: tuple) -> None:
    opened, _ = two
    queue = CopyQueue(opened[0])
    queue.restart()
    assert len(created.queues) == 1
    opened[0].write(queue.address, np.array([1], np.uint32).view(np.uint8))  # a ticket was taken
    queue.restart()
    assert len(created.queues) == 2
    queue.restart()
    assert len(created.queues) == 2
    queue.close()
