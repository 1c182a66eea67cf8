"""Exports tensors by DLPack, with which other libraries view a tensor's memory without a copy
(https://dmlc.github.io/dlpack, version 0.8).

Written with ctypes, because the memory may be a device's and NumPy's export covers only the host's.
Called by ark.frontend.tensor.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from ark.errors import UnsupportedError
from ark.frontend.storage import Storage
from ark.ir import values as ir


class SupportsDLPack(Protocol):
    """An object whose memory other libraries can view by DLPack."""

    def __dlpack__(self) -> object: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...


HOST = (1, 0)  # (type, index) of the host's memory
CODES = {
    "int64": 0,
    "int32": 0,
    "int8": 0,
    "uint32": 1,
    "uint8": 1,
    "byte": 1,
    "fp32": 2,
    "fp16": 2,
    "bf16": 4,
    "bool": 6,
}


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class _Type(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]


# The objects that must stay alive until an importer frees an exported tensor. Keys are the
# addresses of the exported DLPack structs.
_alive: dict[int, tuple[Any, ...]] = {}


def _forget(managed: int) -> None:
    _alive.pop(managed, None)


_delete = _Deleter(_forget)


# The type of the capsule's destructor. Its argument is declared as an address instead of a Python
# object, so that the call does not change the capsule's reference count.
_Destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def _free_unused(capsule: int) -> None:
    """The destructor of a capsule. If no library has imported the capsule, frees the exported
    tensor. Importing a capsule changes the capsule's name.
    """
    if _is_valid(capsule, b"dltensor"):
        _alive.pop(_pointer(capsule, b"dltensor"), None)


_drop = _Destructor(_free_unused)

_new = ctypes.pythonapi.PyCapsule_New
_new.restype = ctypes.py_object
_new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, _Destructor]
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype = ctypes.c_int
_is_valid.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = [ctypes.c_void_p, ctypes.c_char_p]


def device_of(storage: Storage) -> tuple[int, int]:
    """The device of a storage as (type, index), in DLPack's numbering."""
    storage.check_placed()
    device: tuple[int, int] | None = getattr(storage.device, "dlpack", None)
    if device is None:
        raise UnsupportedError("this backend has no DLPack device number; use to_numpy")
    return device


def export(
    tensor: ir.Tensor,
    storage: Storage,
    dl_device: tuple[int, int] | None = None,
    copy: bool | None = None,
) -> Any:
    """A capsule for one importer; the memory lives as long as the importer's tensor.

    dl_device: the device that the importer requests, by default the tensor's. copy: True for a
    copy, False to fail if a copy is needed.
    """
    if tensor.dtype.name not in CODES:
        raise UnsupportedError(
            f"DLPack has no type for ark.{tensor.dtype.name}; ark.cast it, or use to_numpy"
        )
    own = device_of(storage)
    target = own if dl_device is None else _device(dl_device)
    if target not in (own, HOST):
        raise BufferError(
            f"the tensor is on {own}; it can be exported there or to {HOST}, not to {target}"
        )
    if target != own and copy is False:
        raise BufferError(
            f"the tensor is on {own}; an export to {target} needs a copy, but copy=False"
        )
    if copy or target != own:
        address, owner = _copied(tensor, storage, target)
        strides = tuple(math.prod(tensor.shape[d + 1 :]) for d in range(len(tensor.shape)))
        return _capsule(tensor, target, address, strides, owner)
    start = sum(o * s for o, s in zip(tensor.offsets, tensor.strides, strict=True))
    address = storage.address + start * tensor.dtype.itemsize
    return _capsule(tensor, own, address, tensor.strides, storage)


def _device(given: Any) -> tuple[int, int]:
    try:
        kind, index = given
        return int(kind), int(index)
    except (TypeError, ValueError) as error:
        raise BufferError(
            f"dl_device={given!r:.60} is not valid; give two numbers, or None"
        ) from error


def _copied(tensor: ir.Tensor, storage: Storage, target: tuple[int, int]) -> tuple[int, Any]:
    """Copies a tensor to contiguous memory of the device `target`. Returns the copy's address and
    the object that owns it.
    """
    values = np.ascontiguousarray(storage.read(tensor))
    if target == HOST:
        return int(values.ctypes.data), values
    assert storage.device is not None
    copied = Storage(values.nbytes, False, storage.name)
    address = copied.place(storage.device)
    storage.device.write(address, values)
    return address, copied


def _capsule(
    tensor: ir.Tensor, device: tuple[int, int], address: int, steps: Sequence[int], owner: Any
) -> Any:
    rank = len(tensor.shape)
    shape = (ctypes.c_int64 * rank)(*tensor.shape)
    strides = (ctypes.c_int64 * rank)(*steps)
    managed = _Managed()
    managed.tensor.data = address
    managed.tensor.device = _Device(*device)
    managed.tensor.ndim = rank
    managed.tensor.dtype = _Type(CODES[tensor.dtype.name], tensor.dtype.itemsize * 8, 1)
    managed.tensor.shape = shape
    managed.tensor.strides = strides
    managed.deleter = _delete
    place = ctypes.addressof(managed)
    _alive[place] = (managed, shape, strides, owner)
    return _new(place, b"dltensor", _drop)
