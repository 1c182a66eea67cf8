"""The memory of tensors that Python code holds: one Storage for each buffer with a tensor that is
still referenced. A Storage outlives launches, runtimes and models, so that results can be read and
used later. It is freed when its last tensor is dropped. Created by ark.frontend.tensor, filled by
ark.runtime.runtime.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

import numpy as np

from ark.backend.devices import Device, Memory, MemoryKind
from ark.errors import InvalidUsageError
from ark.ir import values as ir
from ark.ir.packed import from_memory, to_memory


class Storage:
    """`nbytes` bytes of a tensor's memory. The address is known after `place` has allocated memory
    on a device, or after `bind` has set the address of memory that the caller owns.

    foreign: True if the caller owns the memory (a placeholder). owner: the object that keeps
    foreign memory alive. weight: True for memory that is rarely written and often read. symmetric:
    True if each launch has memory of its own, which peers can address. on_host: True for host
    memory that is mapped for the device.

    settle, busy: functions that a launch may set. settle is called before each write. busy is
    called before each read and write, to wait for iterations in progress.
    """

    def __init__(self, nbytes: int, foreign: bool, name: str) -> None:
        self.nbytes = nbytes
        self.foreign = foreign
        self.name = name
        self.address = 0
        self.owner: Any = None
        self.weight = False
        self.symmetric = False
        self.on_host = False
        self.settle: WeakMethod[Callable[[], None]] | None = None
        self.busy: WeakMethod[Callable[[], None]] | None = None
        self.device: Device | None = None
        self._memory: Memory | None = None

    def bind(self, address: int, owner: Any) -> None:
        """Sets the address of memory that the caller owns."""
        self.address, self.owner = address, owner

    def place(self, device: Device, kind: MemoryKind = "device") -> int:
        """The address on `device`; allocates zeroed memory of that kind on first use, or memory of
        the host if `on_host` is set.

        Raises InvalidUsageError for foreign memory that was never bound, or memory on another
        device.
        """
        if self.foreign:
            self._check_bound()
            self.device = device
            return self.address
        if self._memory is None:
            self._memory = device.alloc(self.nbytes, "host" if self.on_host else kind)
            self.address, self.device = self._memory.address, device
        elif self.device is not device:
            raise InvalidUsageError(
                f"the tensor {self.name!r} is on another device; copy it with to_numpy and "
                "from_numpy"
            )
        return self.address

    def _check_bound(self) -> None:
        if self.foreign and not self.address:
            raise InvalidUsageError(
                f"the placeholder {self.name!r} has no memory; pass tensor_mappings={{placeholder: "
                "torch_tensor} to Runtime.launch, or data=torch_tensor to ark.placeholder"
            )

    def lies_in(self, kind: MemoryKind) -> bool:
        """True if ark has allocated this memory, and it is of the given kind."""
        return self._memory is not None and self._memory.kind == kind

    def _placed(self) -> Device:
        if self.symmetric:
            raise InvalidUsageError(
                f"the tensor {self.name!r} is in symmetric memory, which each launch allocates "
                "anew; copy it in the model (ark.copy, after a channel's wait) and read the "
                "copy, or write a tensor that the model copies to it"
            )
        self.check_placed()
        assert self.device is not None
        self.wait()
        return self.device

    def check_placed(self) -> None:
        """Raises InvalidUsageError if the tensor has no memory."""
        self._check_bound()
        if self.device is None:
            raise InvalidUsageError(
                f"the tensor {self.name!r} has no memory yet; call Runtime.launch() first"
            )

    def wait(self) -> None:
        """Waits for iterations that a launch was asked to run (run(non_blocking=True)) and has not
        finished.
        """
        busy = self.busy() if self.busy is not None else None
        if busy is not None:
            busy()

    def read(self, tensor: ir.Tensor) -> np.ndarray:
        """Copies a tensor's elements from the device to a new NumPy array."""
        device = self._placed()
        if tensor.dense and not tensor.dtype.packed:
            start = _start(tensor) * np.dtype(tensor.dtype.numpy).itemsize
            data = device.read(self.address + start, tensor.nbytes)
            return from_memory(data, tensor.shape, tensor.dtype)
        return np.array(self._box(tensor)[1], order="C")

    def _box(self, tensor: ir.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """A copy of the whole buffer as an array, and the view of this array that has the tensor's
        elements.
        """
        nbytes = tensor.dtype.nbytes(math.prod(tensor.extents))
        data = self._placed().read(self.address, nbytes)
        whole = from_memory(data, tensor.extents, tensor.dtype)
        host = tensor.dtype.host_shape
        sides = zip(host(tensor.offsets), host(tensor.shape), strict=True)
        return whole, whole[tuple(slice(o, o + n) for o, n in sides)]

    def write(self, tensor: ir.Tensor, values: np.ndarray) -> None:
        """Copies `values` to the elements of a tensor on the device; they must have the tensor's
        shape and type.
        """
        device = self._placed()
        settle = self.settle() if self.settle is not None else None
        if settle is not None:
            settle()
        if tensor.dense and not tensor.dtype.packed:
            device.write(
                self.address + _start(tensor) * values.itemsize, np.ascontiguousarray(values)
            )
            return
        whole, box = self._box(tensor)
        box[...] = values
        device.write(self.address, to_memory(whole, tensor.dtype))

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # At the interpreter's exit nothing is freed: the driver may be unloaded already, which has
        # freed the memory.
        if self._memory is not None and self.device is not None and not finalizing():
            self.device.free(self._memory)
            self._memory = None


def _start(tensor: ir.Tensor) -> int:
    return sum(o * s for o, s in zip(tensor.offsets, tensor.strides, strict=True))
