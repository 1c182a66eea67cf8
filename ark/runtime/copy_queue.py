"""A copy engine's queue that a kernel writes itself, for one executor (device/transfer.h).

The vendor makes the queue (ark.backend.devices.QueuedDevice); here lies the ArkQueue by which
processors take turns. Called by ark.runtime.loaded; where no queue can be made, the proxy copies.
"""

from __future__ import annotations

import numpy as np

from ark import log
from ark.backend.devices import Device, Memory, QueuedDevice
from ark.codegen import layout
from ark.errors import SystemError
from ark.plan.types import Plan

SLOTS = 1024  # requests that the ring holds; a power of two


class CopyQueue:
    """Close it before what it copies is freed, and after the kernel has ended."""

    def __init__(self, device: QueuedDevice) -> None:
        """SystemError if the device cannot have one."""
        self._device = device
        self._queue = device.open_queue(SLOTS)
        # Past the caches: the engine writes into it.
        self._memory: Memory = device.alloc(layout.dtype("ArkQueue").itemsize, "symmetric")
        self._fill()

    @property
    def address(self) -> int:
        """Of the ArkQueue."""
        return self._memory.address

    def _fill(self) -> None:
        about = np.zeros(1, layout.dtype("ArkQueue"))
        about["slots"] = SLOTS
        for name in ("ring", "write_pointer", "doorbell"):
            about[name] = getattr(self._queue, name)
        self._device.write(self._memory.address, about.view(np.uint8))

    def restart(self) -> None:
        """Nothing is running. What a launch that failed has left is given back with the queue."""
        raw = self._device.read(self._memory.address, self._memory.nbytes)
        about = raw.view(layout.dtype("ArkQueue"))[0]
        if not about["head"] == about["told"] == about["done"]:
            self._device.close_queue(self._queue)
            self._queue = self._device.open_queue(SLOTS)
            self._fill()

    def close(self) -> None:
        self._device.close_queue(self._queue)
        self._device.free(self._memory)


def copy_queue(plan: Plan, device: Device, far: bool) -> CopyQueue | None:
    """The queue of a plan whose tasks ask copy engines to copy; None where there is none, or the
    device's cannot be had. far: ranks are on other hosts, which the proxy reaches.
    """
    if far or not isinstance(device, QueuedDevice):
        return None
    if not any(op.kind == "transfer" for op in plan.ops):
        return None
    try:
        return CopyQueue(device)
    except SystemError as error:
        log.info(f"the host's proxy starts copies: {error}")
        return None
