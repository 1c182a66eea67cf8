"""Makes memory of one rank visible to another: by CUDA IPC between processes, by peer access within
one.

A handle contains the identity of the memory's device, so that an unreachable peer gives an error
with a reason instead of a fault in the kernel. Called by device.py with the device's context
current.
"""

from __future__ import annotations

import os
import struct
import time
from dataclasses import dataclass
from typing import Any

from ark.errors import SystemError
from ark_cuda.driver import check, cu, fill_struct, struct_bytes, words

PAGE_BYTES = 2 << 20
# The fields of an exported memory handle: magic, process, device number, device UUID, address,
# bytes, IPC handle.
_LAYOUT = struct.Struct("<8s16sI16sQQ64s")
_UUID_BYTES, _IPC_BYTES = 16, 64
_MAGIC = b"arkcuda1"
# Identifies this process in a handle. A process id alone would not do, because it is not unique
# across containers.
_PROCESS = struct.pack("<QQ", os.getpid(), time.time_ns())


@dataclass(frozen=True)
class Mapped:
    """A peer's memory that is mapped in this process. imported: True if this process must close the
    mapping.
    """

    address: int
    nbytes: int
    imported: bool


def export(device: Any, index: int, address: int, nbytes: int) -> bytes:
    """The handle of an allocation that begins at `address` on `device`."""
    doing = f"exporting {nbytes} bytes of GPU {index}"
    uuid = check(cu.cuDeviceGetUuid(device), doing)
    handle = check(cu.cuIpcGetMemHandle(address), doing)
    return _LAYOUT.pack(
        _MAGIC,
        _PROCESS,
        index,
        struct_bytes(uuid, _UUID_BYTES),
        address,
        nbytes,
        struct_bytes(handle, _IPC_BYTES),
    )


def open_handle(device: Any, label: str, handle: bytes) -> Mapped:
    """Maps a handle for the current context of `device`.

    Raises SystemError if the peer cannot be reached or the bytes are not a handle of ark.
    """
    if len(handle) != _LAYOUT.size or not handle.startswith(_MAGIC):
        raise SystemError(
            f"{label} cannot map a peer's memory: the handle is not one of the cuda backend; all "
            "ranks of a plan must run the same backend and version"
        )
    _, process, index, uuid, address, nbytes, raw = _LAYOUT.unpack(handle)
    there = f"the memory of a peer on GPU {index}"
    peer = _visible(uuid)
    if peer is not None and int(peer) != int(device):
        reachable = check(cu.cuDeviceCanAccessPeer(device, peer), f"asking {label} for its peers")
        if not reachable:
            raise SystemError(
                f"{label} cannot reach {there}: the two GPUs have no peer access (neither NVLink "
                "nor a shared PCIe root); run on GPUs that have it (`nvidia-smi topo -p2p r`)"
            )
    if process == _PROCESS:
        if peer is not None and int(peer) != int(device):
            _enable(peer, label, there)
        return Mapped(address, nbytes, imported=False)
    ipc = cu.CUipcMemHandle()
    fill_struct(ipc, raw)
    flags = int(cu.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
    code, mapped = cu.cuIpcOpenMemHandle(ipc, flags)
    if code != cu.CUresult.CUDA_SUCCESS:
        hidden = "" if peer is not None else " That GPU is not visible in this process."
        raise SystemError(
            f"{label} cannot map {there}: {words(code)}.{hidden} Every rank must see all GPUs of "
            "the group (leave CUDA_VISIBLE_DEVICES the same in all), on one machine, with a shared "
            "/dev/shm and process namespace where ranks run in containers"
        )
    return Mapped(int(mapped), nbytes, imported=True)


def _visible(uuid: bytes) -> Any:
    """The device with the given UUID in this process, or None."""
    for index in range(check(cu.cuDeviceGetCount(), "counting GPUs")):
        device = check(cu.cuDeviceGet(index), f"asking for GPU {index}")
        identity = check(cu.cuDeviceGetUuid(device), f"asking for GPU {index}")
        if struct_bytes(identity, _UUID_BYTES) == uuid:
            return device
    return None


def _enable(peer: Any, label: str, there: str) -> None:
    doing = f"{label} opens a way to {there}"
    context = check(cu.cuDevicePrimaryCtxRetain(peer), doing)
    (code,) = cu.cuCtxEnablePeerAccess(context, 0)
    if code != cu.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED:
        check((code,), doing)
