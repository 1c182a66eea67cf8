"""The queue in which a running kernel writes requests for a copy engine (device/transfer.h). Each
executor whose plan uses copy engines has a queue.

The vendor creates the queue (ark.backend.devices.QueuedDevice). This module adds the structure
ArkQueue, by which processors use the queue one after another. If no queue can be created, the proxy
copies. Called by ark.runtime.loaded.
"""

from __future__ import annotations

import numpy as np

from ark import log
from ark.backend.codegen import layout
from ark.backend.devices import Device, Memory, QueuedDevice
from ark.errors import SystemError
from ark.plan.types import Plan

RING_SLOTS = 1024  # number of requests in the ring; a power of two


class CopyQueue:
    """A copy engine's queue for one executor. It must be closed after the kernel has ended, and
    before the memory that it copies is freed.
    """

    def __init__(self, device: QueuedDevice) -> None:
        """Raises SystemError if the device cannot create a queue."""
        self._device = device
        self._queue = device.open_queue(RING_SLOTS)
        # The queue is in uncached memory, because the copy engine writes to it without updating
        # caches.
        self._memory: Memory = device.alloc(layout.dtype("ArkQueue").itemsize, "symmetric")
        self._fill()

    @property
    def address(self) -> int:
        """The address of the ArkQueue."""
        return self._memory.address

    def _fill(self) -> None:
        about = np.zeros(1, layout.dtype("ArkQueue"))
        about["slots"] = RING_SLOTS
        for name in ("ring", "write_pointer", "doorbell"):
            about[name] = getattr(self._queue, name)
        self._device.write(self._memory.address, about.view(np.uint8))

    def restart(self) -> None:
        """Resets the queue. The kernel must not be running. Queue slots that a failed launch had
        reserved become free.
        """
        raw = self._device.read(self._memory.address, self._memory.nbytes)
        about = raw.view(layout.dtype("ArkQueue"))[0]
        if not about["head"] == about["told"] == about["done"]:
            self._device.close_queue(self._queue)
            self._queue = self._device.open_queue(RING_SLOTS)
            self._fill()

    def close(self) -> None:
        self._device.close_queue(self._queue)
        self._device.free(self._memory)


def copy_queue(plan: Plan, device: Device, far: bool) -> CopyQueue | None:
    """A queue for a plan whose tasks use copy engines. None if no task does, the device has no
    queues, or `far` is True: then ranks are on other hosts, to which only the proxy can copy.
    """
    if far or not isinstance(device, QueuedDevice):
        return None
    if not any(op.kind == "transfer" for op in plan.ops):
        return None
    try:
        return CopyQueue(device)
    except SystemError as error:
        log.info(f"copies are started by the host's proxy: {error}")
        return None
