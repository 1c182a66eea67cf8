"""The queue of a copy engine that a kernel writes itself, one per executor (device/transfer.h).

The vendor makes the queue (ark.backend.devices.QueuedDevice); this module adds the ArkQueue by
which processors take turns. Called by ark.runtime.loaded. Where no queue can be made, the proxy
copies.
"""

from __future__ import annotations

import numpy as np

from ark import log
from ark.backend.devices import Device, Memory, QueuedDevice
from ark.codegen import layout
from ark.errors import SystemError
from ark.plan.types import Plan

RING_SLOTS = 1024  # requests that the ring holds; a power of two


class CopyQueue:
    """A device-side copy queue. Close it after the kernel has ended and before the memory it copies
    is freed.
    """

    def __init__(self, device: QueuedDevice) -> None:
        """Raises SystemError if the device cannot make one."""
        self._device = device
        self._queue = device.open_queue(RING_SLOTS)
        # Uncached, because the engine writes into it past the caches.
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
        """Resets the queue while nothing runs; requests that a failed launch left are given back
        with it.
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
    """A queue for a plan whose tasks ask copy engines to copy; None if no task does or the device
    has none. far: ranks are on other hosts, which only the proxy reaches.
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
