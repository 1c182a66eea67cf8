"""The emulator's model of DMA queues (SDMA): packets that the host or a kernel writes, copies
between two devices, and invalid use.
"""

from __future__ import annotations

import ctypes
import time

import numpy as np
import pytest
from ark_rocm_emulator import emulated, failures
from ark_rocm_emulator.sdma import SdmaQueue, atomic_add_64, copy_linear, fence, poll_at_least
from hip import hip
from hip_runner import Arguments, Buffers, check, code_object, download, launch

from ark.errors import InvalidUsageError

ERROR = hip.hipError_t
UNCACHED_FLAG = 3


def _function(name: str, arch: str):
    module = check(hip.hipModuleLoadData(code_object("sdma.hip", arch, ("-O3",))))
    return check(hip.hipModuleGetFunction(module, name.encode()))


def _queue_argument(queue: SdmaQueue):
    """Returns the kernels' argument of type struct Queue: four addresses of the DMA queue and the
    size of its ring.
    """
    words = [queue.ring, queue.write_pointer, queue.read_pointer, queue.doorbell]
    return (ctypes.c_uint64 * 5)(*words, queue.ring_bytes)


def _wait_for(condition, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_packets_run_in_order_and_polls_wait() -> None:
    data = np.arange(5000, dtype=np.uint8)
    with emulated("gfx942"), Buffers() as buffers:
        source, target = buffers.upload(data), buffers.empty(5000)
        counter = buffers.upload(np.array([40], np.uint64), UNCACHED_FLAG)
        gate = buffers.upload(np.zeros(2, np.uint32), UNCACHED_FLAG)
        queue = SdmaQueue.create()
        queue.submit(
            copy_linear(int(source), int(target), 2500)
            + poll_at_least(int(gate), 3)
            + copy_linear(int(source) + 2500, int(target) + 2500, 2500)
            + atomic_add_64(int(counter), 2)
            + fence(int(gate) + 4, 77)
        )
        _wait_for(lambda: queue.executed == 1)
        time.sleep(0.02)
        assert queue.executed == 1  # the poll delays all packets after it
        assert download(counter, (1,), np.uint64)[0] == 40
        check(hip.hipMemcpyHtoD(gate, np.array([3], np.uint32), 4))
        _wait_for(lambda: queue.executed == 5)
        np.testing.assert_array_equal(download(target, data.shape, data.dtype), data)
        assert download(counter, (1,), np.uint64)[0] == 42
        assert download(gate, (2,), np.uint32)[1] == 77
        queue.destroy()


def test_ring_wraps() -> None:
    with emulated("gfx942"), Buffers() as buffers:
        counter = buffers.upload(np.zeros(1, np.uint64), UNCACHED_FLAG)
        queue = SdmaQueue.create(ring_bytes=4096)
        for sent in range(300):  # 128 packets of 32 bytes fit in the ring
            _wait_for(lambda s=sent: queue.executed > s - 100)
            queue.submit(atomic_add_64(int(counter), 1))
        _wait_for(lambda: queue.executed == 300)
        assert download(counter, (1,), np.uint64)[0] == 300


@pytest.mark.parametrize("arch", ["gfx942", "gfx1100"])
@pytest.mark.parametrize("seed", range(2))
def test_kernels_of_two_devices_ring_their_own_engines(arch: str, seed: int) -> None:
    threads, rounds = 64, 80  # 80 rounds of 60 bytes wrap a ring of 4096
    with emulated(arch, 2, seed=seed):
        rows, inboxes, signals, sums, queues, functions = [], [], [], [], [], []
        for rank in range(2):
            check(hip.hipSetDevice(rank))
            check(hip.hipDeviceEnablePeerAccess(1 - rank, 0))
            held = Buffers()
            rows.append(held.empty(rounds * threads * 4, UNCACHED_FLAG))
            inboxes.append(held.empty(rounds * threads * 4, UNCACHED_FLAG))
            signals.append(held.upload(np.zeros(1, np.uint64), UNCACHED_FLAG))
            sums.append(held.empty(threads * 4))
            queues.append(SdmaQueue.create(rank))
            functions.append(_function("dma_exchange", arch))
        for rank in range(2):
            check(hip.hipSetDevice(rank))
            peer = 1 - rank
            pointers = rows[rank], inboxes[peer], signals[peer], inboxes[rank], signals[rank]
            arguments = Arguments(
                _queue_argument(queues[rank]),
                *pointers,
                sums[rank],
                np.int32(rank),
                np.int32(rounds),
            )
            launch(functions[rank], 1, threads, arguments)
        for rank in range(2):
            check(hip.hipSetDevice(rank))
            check(hip.hipDeviceSynchronize())
            r, t = np.arange(rounds)[:, None], np.arange(threads)
            expected = (((1 - rank) * 1000 + r * 100 + t) * (r + 1)).sum(0)
            np.testing.assert_array_equal(download(sums[rank], (threads,), np.int32), expected)
        # A kernel waits only for packets that its peer's DMA queue copies, so the packets of its
        # own queue may be executed after its end.
        _wait_for(lambda: [queue.executed for queue in queues] == [2 * rounds] * 2)


def test_doorbell_comes_last() -> None:
    with emulated("gfx942", report=0):
        queue = SdmaQueue.create()
        launch(_function("doorbell_first", "gfx942"), 1, 64, Arguments(_queue_argument(queue)))
        hip.hipDeviceSynchronize()
        _wait_for(lambda: bool(failures()))
        assert "write pointer first" in failures()[0].message
        assert queue.executed == 0


def test_engines_reach_the_memory_of_their_device() -> None:
    with emulated("gfx942", 2, report=0), Buffers() as buffers:
        here = buffers.upload(np.zeros(64, np.uint8))
        check(hip.hipSetDevice(1))
        there = buffers.upload(np.ones(64, np.uint8))
        queue = SdmaQueue.create(0)
        queue.submit(copy_linear(int(there), int(here), 64))
        _wait_for(lambda: bool(failures()))
        assert "was not opened to it" in failures()[0].message
        check(hip.hipSetDevice(0))
        assert hip.hipDeviceSynchronize() == (ERROR.hipErrorIllegalAddress,)


def test_packets_past_an_allocation_are_reported() -> None:
    with emulated("gfx942", report=0), Buffers() as buffers:
        here = buffers.upload(np.zeros(64, np.uint8))
        queue = SdmaQueue.create()
        queue.submit(copy_linear(int(here), int(here) + 32, 64))
        _wait_for(lambda: bool(failures()))
        assert "in no allocation" in failures()[0].message


def test_queues_need_a_device_and_whole_pages() -> None:
    with emulated("gfx942"):
        for device, size in ((1, 4096), (0, 100), (0, 0)):
            with pytest.raises(InvalidUsageError, match="multiple of 4096"):
                SdmaQueue.create(device, size)
