"""Arrays as collectives see them: bytes of elements, of NumPy or torch, on the host or a device."""

from __future__ import annotations

import ctypes
import functools
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from ark.backend.devices import Memory
from ark.errors import InvalidUsageError
from ark.frontend.foreign import address_of, check_native, written
from ark.tasks.combine import ELEMENTS

# Elements by the names that NumPy (with ml_dtypes) and torch give to types.
_NAMES = {
    "float64": "fp64",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
    "int64": "int64",
    "int32": "int32",
    "uint32": "uint32",
    "int8": "int8",
    "uint8": "uint8",
    "bool": "uint8",
}


class Array:
    """given: what the caller passed, or what was made for him. It is contiguous."""

    def __init__(self, given: Any, name: str, shape: Sequence[int], itemsize: int) -> None:
        if name not in _NAMES:
            raise InvalidUsageError(
                f"arrays of {name} are not taken; cast to one of {', '.join(_NAMES)}"
            )
        self.given = given
        self.element = _NAMES[name]
        self.shape = tuple(shape)
        self.itemsize = itemsize
        self.elements = math.prod(shape)
        self.nbytes = self.elements * itemsize
        assert ELEMENTS[self.element].itemsize == itemsize

    def like(self, out: Any, shape: Sequence[int]) -> Array:
        """The array for a result of that shape: the caller's, of this one's type, or a new one."""
        made = self
        if out is not self.given or self.shape != shape:
            made = wrap(self.blank(shape) if out is None else out)
        made.check_writable()
        if made.elements != math.prod(shape) or made.element != self.element:
            raise InvalidUsageError(
                f"the result is {list(shape)} of {self.element}, but the array for it is "
                f"{list(made.shape)} of {made.element}"
            )
        return made

    def check_writable(self) -> None:
        """InvalidUsageError where its elements must not be written."""

    def blank(self, shape: Sequence[int]) -> Any:
        """A new array of the same kind, type and device."""
        raise NotImplementedError

    def numbers(self, values: Sequence[int]) -> Any:
        """A new array of the same kind and device that holds these, as int32."""
        raise NotImplementedError

    def listed(self) -> list[int]:
        """The elements of an array of whole numbers."""
        raise NotImplementedError

    def called(self, name: str, *options: str) -> str:
        """A call on this array as a person writes it: the same text where types and sizes fit."""
        return _call_text(name, self.element, self.elements, options)

    def rows(self, begin: int, count: int) -> Array:
        """Some rows of it, in place."""
        return wrap(self.given[begin : begin + count])

    def copy_from(self, other: Array) -> None:
        """Takes the other's elements, which are as many."""
        raise NotImplementedError

    def stream(self) -> int | None:
        """The device queue on which the caller works, None for the host's memory."""
        return None

    def view(self, memory: Memory) -> Any:
        """Device memory of as many bytes, as this kind of array sees it."""
        raise NotImplementedError

    def write_to(self, view: Any) -> None:
        """Copies the bytes to a view of device memory."""
        raise NotImplementedError

    def read_from(self, view: Any) -> None:
        """Fills the array from a view of device memory."""
        raise NotImplementedError


class HostArray(Array):
    """A NumPy array."""

    def __init__(self, given: np.ndarray) -> None:
        super().__init__(given, given.dtype.name, given.shape, given.dtype.itemsize)
        check_native(given)

    def _bytes(self) -> np.ndarray:
        return np.asarray(self.given.reshape(-1).view(np.uint8))

    def blank(self, shape: Sequence[int]) -> np.ndarray:
        return np.empty(tuple(shape), self.given.dtype)

    def numbers(self, values: Sequence[int]) -> np.ndarray:
        return np.array(values, np.int32)

    def listed(self) -> list[int]:
        return [int(each) for each in self.given.flat]

    def check_writable(self) -> None:
        if not self.given.flags.writeable:
            raise InvalidUsageError("the array for the result is read-only; pass a copy of it")

    def copy_from(self, other: Array) -> None:
        np.copyto(self.given.reshape(-1), np.asarray(other.given).reshape(-1))

    def view(self, memory: Memory) -> np.ndarray:
        return _host(memory)[: self.nbytes]

    def write_to(self, view: Any) -> None:
        view[:] = self._bytes()

    def read_from(self, view: Any) -> None:
        self._bytes()[:] = view


class TorchArray(Array):
    """A torch tensor on a device."""

    def __init__(self, given: Any) -> None:
        name = str(given.dtype).removeprefix("torch.")
        super().__init__(given, name, given.shape, given.element_size())
        self.address = address_of(given)
        self._torch = sys.modules["torch"]

    def _bytes(self) -> Any:
        return self.given.detach().reshape(-1).view(self._torch.uint8)

    def blank(self, shape: Sequence[int]) -> Any:
        return self.given.new_empty(tuple(shape))

    def numbers(self, values: Sequence[int]) -> Any:
        return self._torch.tensor(values, dtype=self._torch.int32, device=self.given.device)

    def listed(self) -> list[int]:
        return [int(each) for each in self.given.reshape(-1).tolist()]

    def copy_from(self, other: Array) -> None:
        self.given.detach().reshape(-1).copy_(other.given.detach().reshape(-1))

    def stream(self) -> int | None:
        return int(self._torch.cuda.current_stream(self.given.device).cuda_stream)

    def view(self, memory: Memory) -> Any:
        return self._torch.as_tensor(
            _DeviceBytes(memory.address, self.nbytes), device=self.given.device
        )

    def write_to(self, view: Any) -> None:
        view.copy_(self._bytes(), non_blocking=True)

    def read_from(self, view: Any) -> None:
        self._bytes().copy_(view, non_blocking=True)


class TorchHostArray(TorchArray):
    """A torch tensor on the host, copied without torch: its calls cost more than a small copy."""

    def stream(self) -> int | None:
        return None

    def view(self, memory: Memory) -> int:
        return int(_host(memory).ctypes.data)

    def write_to(self, view: int) -> None:
        ctypes.memmove(view, self.address, self.nbytes)

    def read_from(self, view: int) -> None:
        ctypes.memmove(self.address, view, self.nbytes)
        written(self.given)


class _DeviceBytes:
    """Device memory as torch and others take it without a copy."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


@functools.lru_cache(maxsize=4096)
def _call_text(name: str, element: str, elements: int, options: tuple[str, ...]) -> str:
    return f"{name}({', '.join([f'{element}[{elements}]', *options])})"


def _host(memory: Memory) -> np.ndarray:
    if memory.host is None:
        raise InvalidUsageError(
            "the group's device does not share the host's memory; pass a torch tensor that lies on "
            "the device"
        )
    return memory.host


def wrap(given: Any) -> Array:
    """The array as collectives see it; InvalidUsageError for what is none that they take."""
    if isinstance(given, np.ndarray):
        return HostArray(given)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(given, torch.Tensor):
        return (TorchHostArray if given.device.type == "cpu" else TorchArray)(given)
    raise InvalidUsageError(
        f"a collective takes NumPy arrays and torch tensors, but was given a {type(given).__name__}"
    )
