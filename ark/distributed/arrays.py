"""Gives NumPy arrays and torch tensors, on the host or on a device, one interface. Collectives use
it to see any of them as contiguous bytes with one element type. Called by ark.distributed.group.
"""

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
from ark.ir.dtype import FLOATS, INTEGERS, SMALL_FLOATS, byte
from ark.tasks.combine import ELEMENTS

# The names of element types that NumPy (with ml_dtypes) and torch use.
_NAMES = {
    "float64": "fp64",
    **{t.torch_name: t.name for t in (*FLOATS, *SMALL_FLOATS, *INTEGERS) if t is not byte},
    "bool": "uint8",
}


class Array:
    """An array that is the input or the result of a collective. This is the base class; each kind
    of memory has a subclass. given: the caller's array, or a new array of the same kind for the
    result.
    """

    def __init__(self, given: Any, name: str, shape: Sequence[int], itemsize: int) -> None:
        if name not in _NAMES:
            raise InvalidUsageError(
                f"arrays of {name} are not supported; cast to one of {', '.join(_NAMES)}"
            )
        self.given = given
        self.element = _NAMES[name]
        self.shape = tuple(shape)
        self.itemsize = itemsize
        self.elements = math.prod(shape)
        self.nbytes = self.elements * itemsize
        assert ELEMENTS[self.element].itemsize == itemsize

    def like(self, out: Any, shape: Sequence[int]) -> Array:
        """Returns the array for a result of that shape: `out`, or a new array if `out` is None.
        Raises InvalidUsageError if `out` has another type or number of elements, or is read-only.
        """
        result = self
        if out is not self.given or self.shape != shape:
            result = wrap(self.blank(shape) if out is None else out)
        result.check_writable()
        if result.elements != math.prod(shape) or result.element != self.element:
            raise InvalidUsageError(
                f"the result is {list(shape)} of {self.element}, but `out` is "
                f"{list(result.shape)} of {result.element}; pass an array of that shape and type"
            )
        return result

    def check_writable(self) -> None:
        """Raises InvalidUsageError if the array is read-only."""

    def blank(self, shape: Sequence[int]) -> Any:
        """A new array of the same kind, type and device."""
        raise NotImplementedError

    def numbers(self, values: Sequence[int]) -> Any:
        """A new array of the same kind and device that holds these numbers as int32."""
        raise NotImplementedError

    def listed(self) -> list[int]:
        """Returns the elements of an integer array as a list."""
        raise NotImplementedError

    def called(self, name: str, *options: str) -> str:
        """The text of a call on this array, for error messages. Calls with equal types and sizes
        have equal text.
        """
        return _call_text(name, self.element, self.elements, options)

    def rows(self, begin: int, count: int) -> Array:
        """A view of `count` rows (elements of the first dimension) from row `begin` on."""
        return wrap(self.given[begin : begin + count])

    def place(self) -> int:
        """The address of the first element."""
        raise NotImplementedError

    def changed(self) -> None:
        """Called after a kernel has written the array's memory, so that torch can detect that saved
        tensors have changed.
        """

    def copy_from(self, other: Array) -> None:
        """Copies the elements of another array with the same number of elements."""
        raise NotImplementedError

    def stream(self) -> int | None:
        """The device's stream on which the caller of the collective works; None for host memory."""
        return None

    def view(self, memory: Memory) -> Any:
        """A view of as many bytes of `memory` as the array has. `write_to` and `read_from` take
        such views.
        """
        raise NotImplementedError

    def write_to(self, view: Any) -> None:
        """Copies the array's bytes to a view of device memory."""
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
            raise InvalidUsageError("`out` is read-only; pass a writable array")

    def place(self) -> int:
        return int(self.given.ctypes.data)

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

    def place(self) -> int:
        return self.address

    def changed(self) -> None:
        written(self.given)

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
    """A torch tensor on the host. It is copied without torch's functions, because a call of torch
    takes longer than a small copy.
    """

    def stream(self) -> int | None:
        return None

    def view(self, memory: Memory) -> int:
        return int(_host(memory).ctypes.data)

    def write_to(self, view: int) -> None:
        ctypes.memmove(view, self.address, self.nbytes)

    def read_from(self, view: int) -> None:
        ctypes.memmove(self.address, view, self.nbytes)
        self.changed()


class _DeviceBytes:
    """Device memory in a form that torch and other libraries can view without a copy."""

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
            "the group's device cannot address host memory; pass a torch tensor on the device"
        )
    return memory.host


def wrap(given: Any) -> Array:
    """The array in the form that collectives use. Raises InvalidUsageError for other objects."""
    if isinstance(given, np.ndarray):
        return HostArray(given)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(given, torch.Tensor):
        return (TorchHostArray if given.device.type == "cpu" else TorchArray)(given)
    raise InvalidUsageError(
        f"a collective takes NumPy arrays and torch tensors, not {type(given).__name__}"
    )
