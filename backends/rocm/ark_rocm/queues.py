"""Creates queues of SDMA engines (copy engines), to which kernels write copy requests. The Linux
driver creates the queues, or the emulator if it replaces HIP. Called by ark_rocm.device;
docs/channels.md describes their use.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from ark.backend.devices import Queue
from ark.errors import SystemError
from ark_rocm import kfd
from ark_rocm.driver import device_properties

REQUEST_BYTES = 64  # ARK_REQUEST_BYTES of queue.h
_descriptors: list[int] = []  # kept open: closing the last descriptor destroys the process's queues


def create(hip: Any, index: int, slots: int) -> Queue:
    """Creates a queue of device `index` with room for `slots` requests. Raises SystemError with the
    reason if that fails.
    """
    ring_bytes = max(slots * REQUEST_BYTES, kfd.PAGE_BYTES)
    emulator = sys.modules.get("ark_rocm_emulator")
    queue: Any
    if emulator is not None and emulator.active():
        queue = importlib.import_module("ark_rocm_emulator.sdma").SdmaQueue.create(
            index, ring_bytes
        )
    else:
        properties = device_properties(hip, index)
        place = (properties.pciDomainID, properties.pciBusID, properties.pciDeviceID)
        gpu = kfd.gpu_id((int(place[0]), int(place[1]), int(place[2])))
        if not _descriptors:
            _descriptors.append(kfd.open_driver())
        try:
            queue = kfd.KfdQueue.create(kfd.driver_ioctl(_descriptors[0]), gpu, ring_bytes)
        except OSError as error:
            raise SystemError(
                f"the driver could not create a queue of AMD GPU {index}'s SDMA engines "
                f"({error.strerror})"
            ) from error
    return Queue(queue.ring, queue.write_pointer, queue.doorbell, queue)


def destroy(queue: Queue) -> None:
    """Destroys a queue that `create` returned."""
    handle: Any = queue.handle
    handle.destroy()
