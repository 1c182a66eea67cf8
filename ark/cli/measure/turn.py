"""A lock by which bench processes take turns on one device: one process uses the device while the
others plan and compile. Called by the benches of the command line, for ci/figures.py.
"""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO

from ark.backend.devices import Device, KernelDevice
from ark.backend.protocol import Backend, KernelBackend
from ark.errors import SystemError
from ark.plan.serialize import machine_of
from ark.plan.types import Plan
from ark.runtime import program


class Turn:
    """A context in which no other process that uses the same lock file uses the device. The file is
    locked while the context is open. Without a file the context has no effect.
    """

    def __init__(self, path: str | None = None) -> None:
        self.path = path
        self._file: IO[bytes] | None = None

    def __enter__(self) -> None:
        if not self.path:
            return
        try:
            self._file = Path(self.path).open("ab")
            fcntl.flock(self._file, fcntl.LOCK_EX)
        except OSError as error:
            raise SystemError(f"--turn {self.path}: the file cannot be locked: {error}") from error

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def compile(self, plan: Plan, backend: Backend, device: Device) -> bool:
        """If benches share the device by a lock file, compiles the plan's kernels into the cache
        before this bench's turn, so that the device is not idle meanwhile. Returns True if it
        compiled them.
        """
        if not (
            self.path and isinstance(backend, KernelBackend) and isinstance(device, KernelDevice)
        ):
            return False
        built = [
            program.build(plan, machine_of(plan, phases[0]), backend, device.arch, phases)
            for phases in plan.kernels
        ]
        return not built[-1].cached
