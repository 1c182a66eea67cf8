"""Makes memory of one rank visible to another: by HIP IPC between processes, by peer access within
one.

Called by device.py with the device selected.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
from dataclasses import dataclass
from typing import Any

from ark.errors import SystemError
from ark_rocm import driver
from ark_rocm.driver import call

_IPC_BYTES = 64


@dataclass(frozen=True)
class Mapped:
    """A peer's memory that is mapped in this process. imported: True if this process must close the
    mapping.
    """

    address: int
    nbytes: int
    imported: bool


def export(hip: Any, index: int, address: int, nbytes: int) -> bytes:
    """A handle by which other ranks can map the allocation that begins at `address` on device
    `index`.
    """
    handle = call("hipIpcGetMemHandle", hip.hipIpcGetMemHandle, address)
    raw = ctypes.string_at(int(handle), _IPC_BYTES)
    about = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "device": index,
        "address": address,
        "nbytes": nbytes,
    }
    return raw + json.dumps(about).encode()


def open_handle(hip: Any, index: int, handle: bytes) -> Mapped:
    """Makes the memory that a handle of `export` describes accessible to device `index`. Raises
    SystemError if the peer cannot be reached.
    """
    raw, about = handle[:_IPC_BYTES], json.loads(handle[_IPC_BYTES:])
    if about["host"] != socket.gethostname():
        raise SystemError(
            f"memory of a peer on the machine {about['host']} cannot be mapped on "
            f"{socket.gethostname()}, where this rank runs; run both ranks on one machine"
        )
    if about["pid"] == os.getpid():
        _reach(hip, index, int(about["device"]))
        return Mapped(about["address"], about["nbytes"], imported=False)
    theirs = hip.hipIpcMemHandle_st()
    ctypes.memmove(int(theirs), raw, _IPC_BYTES)
    address = call(
        "hipIpcOpenMemHandle",
        hip.hipIpcOpenMemHandle,
        theirs,
        driver.IPC_LAZY_PEER_ACCESS,
        doing=f"mapping the memory of process {about['pid']} on AMD GPU {about['device']}",
    )
    return Mapped(int(address), about["nbytes"], imported=True)


def _reach(hip: Any, index: int, peer: int) -> None:
    """Lets kernels on device `index` use the memory of device `peer`, within one process."""
    if peer == index:
        return
    if not int(call("hipDeviceCanAccessPeer", hip.hipDeviceCanAccessPeer, index, peer)):
        raise SystemError(
            f"AMD GPU {index} cannot reach the memory of AMD GPU {peer}; use GPUs that "
            f"`rocm-smi --showtopo` shows as linked"
        )
    result = hip.hipDeviceEnablePeerAccess(peer, 0)
    code = result[0] if isinstance(result, tuple) else result
    if int(code) != 0 and "AlreadyEnabled" not in getattr(code, "name", ""):
        raise driver.failure("hipDeviceEnablePeerAccess", code, f"reaching AMD GPU {peer}")
