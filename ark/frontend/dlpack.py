"""DLPack: tensors that other libraries see in place (https://dmlc.github.io/dlpack, version 0.8).

Written with ctypes, because the memory is a device's and NumPy can only speak for the host's.
Called by ark.frontend.tensor.
"""

from __future__ import annotations

import ctypes
from typing import Any

from ark.errors import InvalidUsageError, UnsupportedError
from ark.frontend.storage import Storage
from ark.ir import values as ir

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


# What exported tensors need, by the address of their structure, until the importer lets go.
_alive: dict[int, tuple[Any, ...]] = {}


@_Deleter
def _delete(managed: int) -> None:
    _alive.pop(managed, None)


# The capsule comes as a plain address: it is being destroyed and must not be counted again.
_Destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@_Destructor
def _drop(capsule: int) -> None:
    """A capsule that nobody imported gives its memory back; a used one has another name."""
    if _is_valid(capsule, b"dltensor"):
        _alive.pop(_pointer(capsule, b"dltensor"), None)


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
    """(type, index) of the memory's device, as DLPack numbers them."""
    if storage.device is None:
        raise InvalidUsageError(
            f"the tensor {storage.name!r} has no memory yet; call Runtime.launch() first"
        )
    found = getattr(storage.device, "dlpack", None)
    if found is None:
        raise UnsupportedError("this backend does not say how DLPack names its device")
    return found


def export(tensor: ir.Tensor, storage: Storage) -> Any:
    """A capsule for one importer; the memory lives as long as the importer's tensor."""
    if tensor.dtype.name not in CODES:
        raise UnsupportedError(
            f"DLPack has no type for ark.{tensor.dtype.name}; ark.cast it, or use to_numpy"
        )
    kind, index = device_of(storage)
    rank = len(tensor.shape)
    shape = (ctypes.c_int64 * rank)(*tensor.shape)
    strides = (ctypes.c_int64 * rank)(*tensor.strides)
    start = sum(o * s for o, s in zip(tensor.offsets, tensor.strides, strict=True))
    managed = _Managed()
    managed.tensor.data = storage.address + start * tensor.dtype.itemsize
    managed.tensor.device = _Device(kind, index)
    managed.tensor.ndim = rank
    managed.tensor.dtype = _Type(CODES[tensor.dtype.name], tensor.dtype.itemsize * 8, 1)
    managed.tensor.shape = shape
    managed.tensor.strides = strides
    managed.deleter = _delete
    address = ctypes.addressof(managed)
    _alive[address] = (managed, shape, strides, storage)
    return _new(address, b"dltensor", _drop)
