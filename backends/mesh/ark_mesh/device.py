"""A simulated mesh as a device. The host addresses only its own memory; ark_mesh.executor manages
the cores' private memories.
"""

from __future__ import annotations

import os
import re

import numpy as np
from ark_cpu.device import CpuDevice

from ark.backend.devices import Memory, MemoryKind
from ark.errors import InvalidUsageError, SystemError
from ark_mesh import machines

DEFAULT_CORES = 16


def wanted_cores() -> int:
    """The number of cores of the mesh: $ARK_MESH_CORES, or 16 if it is not set."""
    text = os.environ.get("ARK_MESH_CORES", str(DEFAULT_CORES))
    if not re.fullmatch(r"[1-9]\d?", text) or int(text) > machines.MOST_CORES:
        raise InvalidUsageError(
            f"ARK_MESH_CORES is {text!r}; set it to a number of cores from 1 to "
            f"{machines.MOST_CORES}, or unset it"
        )
    return int(text)


class MeshDevice:
    """The mesh. Memory that is allocated here is host memory; a launch copies it to the cores and
    back.
    """

    def __init__(self, index: int) -> None:
        if index != 0:
            raise SystemError(f"mesh {index} does not exist; the only one is 0")
        self.machine = machines.model(wanted_cores())
        self.arch = self.machine.arch
        self.host = CpuDevice(0)
        self.dlpack = self.host.dlpack

    def alloc(self, nbytes: int, kind: MemoryKind) -> Memory:
        return self.host.alloc(nbytes, kind)

    def free(self, memory: Memory) -> None:
        self.host.free(memory)

    def write(self, address: int, data: np.ndarray) -> None:
        self.host.write(address, data)

    def read(self, address: int, nbytes: int) -> np.ndarray:
        return self.host.read(address, nbytes)

    def zero(self, address: int, nbytes: int) -> None:
        self.host.zero(address, nbytes)

    def free_bytes(self) -> int:
        return self.host.free_bytes()

    def close(self) -> None:
        self.host.close()
