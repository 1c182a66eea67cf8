"""An engine on a device that orders launches and copies (OrderedDevice): everything that a launch
needs is enqueued before it, and the host waits for no copy.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from ark_cpu.device import CpuDevice

from ark.backend import registry
from ark.backend.devices import OrderedDevice
from ark.models.checkpoint import Checkpoint
from ark.serving.engine import Engine
from tests.checkpoints import make_checkpoint
from tests.serving.requests import MAX_POSITIONS, Listener, random_requests, solo_texts


class Ordered(CpuDevice):
    """A device that executes enqueued work only when the next launch begins, as a queue may."""

    def __init__(self) -> None:
        super().__init__(0)
        self._enqueued: list[Callable[[], None]] = []
        self.launches = self.waits = 0

    def enqueue_write(self, address: int, data: np.ndarray) -> None:
        kept = data.copy()
        self._enqueued.append(lambda: CpuDevice.write(self, address, kept))

    def enqueue_zero(self, address: int, nbytes: int) -> None:
        self._enqueued.append(lambda: CpuDevice.zero(self, address, nbytes))

    def write(self, address: int, data: np.ndarray) -> None:
        self.waits += 1
        super().write(address, data)

    def zero(self, address: int, nbytes: int) -> None:
        self.waits += 1
        super().zero(address, nbytes)

    def read(self, address: int, nbytes: int) -> np.ndarray:
        self.waits += 1
        return super().read(address, nbytes)

    def launch(self, *given: Any, **named: Any) -> Any:
        for step in self._enqueued:
            step()
        self._enqueued.clear()
        self.launches += 1
        return super().launch(*given, **named)


def test_engine_waits_for_no_copy(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_checkpoint(tmp_path, layers=1, hidden=32, intermediate=48))
    given, listener = random_requests(8), Listener()
    chosen, _ = registry.choose("cpu")
    with closing(Ordered()) as device:
        assert isinstance(device, OrderedDevice)
        asked = {"slots": 2, "context": MAX_POSITIONS, "chunk": 16, "sampling": "full"}
        with Engine.open(checkpoint, chosen, device, **asked) as engine:
            device.waits = 0
            for request in given:
                engine.submit(request, listener)
            listener.wait(*(request.id for request in given))
            assert device.launches > len(given)
            assert device.waits == 0
    assert listener.tokens == solo_texts(checkpoint, given)
