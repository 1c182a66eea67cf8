"""The memory of a plan on a device: allocates its arenas (one for each purpose), and reads and
writes the tensors in them by name.

Used by the executor of loop kernels, and by backends that execute plans themselves.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ark.backend.devices import Device, Memory
from ark.errors import BaseError, InvalidUsageError
from ark.ir.dtype import by_name
from ark.ir.packed import cast, from_memory, to_memory
from ark.ir.values import row_major
from ark.plan.types import Plan, PlanTensor


class PlanMemory:
    """The arenas of one rank's plan. externals: device addresses of external buffers, by buffer
    id.
    """

    def __init__(self, plan: Plan, device: Device, externals: Mapping[int, int] | None) -> None:
        self.plan = plan
        self.device = device
        self._memory: list[Memory] = []
        self._arenas: dict[str, Memory] = {}
        self._externals = dict(externals or {})

    def _alloc(self, nbytes: int, kind: Any = "device") -> Memory:
        memory = self.device.alloc(max(nbytes, 256), kind)
        self._memory.append(memory)
        return memory

    def _allocate_arenas(self, elsewhere: Sequence[str] = ()) -> None:
        """Allocates the plan's arenas on the device. elsewhere: the arenas that are not allocated
        here, because the caller allocates them in another kind of memory.
        """
        for arena, nbytes in sorted(self.plan.arenas.items()):
            if nbytes and arena not in elsewhere:
                self._arenas[arena] = self._alloc(nbytes, "host" if arena == "host" else "device")

    def buffer_address(self, buffer_id: int) -> int:
        """The device address of a buffer of the plan."""
        buffer = self.plan.buffers[buffer_id]
        if buffer.arena == "external":
            if buffer_id not in self._externals:
                raise InvalidUsageError(
                    f"the external buffer {buffer.name!r} has no memory; pass its tensor in "
                    "tensor_mappings or create the placeholder with data"
                )
            return self._externals[buffer_id]
        return self._arenas[buffer.arena].address + buffer.offset

    def tensor_address(self, tensor: PlanTensor) -> int:
        """The device address of a tensor's first element."""
        return self.buffer_address(tensor.buffer) + tensor.first_byte

    def find(self, name: str, elements: int = 0) -> PlanTensor:
        """Finds a tensor of the plan by name. Tensors whose memory lasts beyond an iteration take
        precedence. If several tensors have the name, returns the first with `elements` elements,
        or else the largest. If even the largest has fewer than `elements` elements, and a buffer
        has the name, returns a tensor over the whole buffer.
        """
        named = [t for t in self.plan.tensors if t.name == name]
        named = [t for t in named if self.plan.buffers[t.buffer].initial] or named
        exact = next((t for t in named if math.prod(t.shape) == elements), None)
        if exact is not None:
            return exact
        largest = max(named, key=lambda t: math.prod(t.shape), default=None)
        if largest is not None and math.prod(largest.shape) >= elements:
            return largest
        for tensor in self.plan.tensors:
            if self.plan.buffers[tensor.buffer].name == name:
                zeros = (0,) * len(tensor.extents)
                return replace(tensor, name=name, shape=tensor.extents, offsets=zeros)
        if largest is None:
            raise InvalidUsageError(f"the plan has no tensor {name!r}")
        return largest

    def write(self, name: str, values: np.ndarray) -> None:
        """Writes a dense tensor of the plan by name. Values are cast to the tensor's type if the
        type can represent them.
        """
        array = np.asarray(values)
        tensor = self.find(name, array.size)
        kind = by_name(tensor.dtype)
        array = cast(array, kind, f"tensor {name!r}")
        if array.size > np.prod(kind.host_shape(tensor.shape)):
            raise InvalidUsageError(
                f"{array.size} values do not fit tensor {name!r} of shape {list(tensor.shape)}"
            )
        self.device.write(self.tensor_address(tensor), to_memory(array, kind))

    def read(self, name: str) -> np.ndarray:
        """Reads a tensor of the plan by name. Its rows may have gaps between them."""
        tensor = self.find(name)
        kind, items = by_name(tensor.dtype), tensor.items
        steps, dense = row_major(items.extents), row_major(items.shape)
        if all(n == 1 or s == d for n, s, d in zip(items.shape, steps, dense, strict=True)):
            data = self.device.read(self.tensor_address(tensor), tensor.nbytes)
            return from_memory(data, tensor.shape, kind)
        span = 1 + sum((n - 1) * s for n, s in zip(items.shape, steps, strict=True))
        data = self.device.read(self.tensor_address(tensor), span * tensor.itemsize)
        strides = [s * tensor.itemsize for s in steps]
        rows = np.lib.stride_tricks.as_strided(data.view(kind.numpy), items.shape, strides)
        return np.ascontiguousarray(rows)

    def host_view(self, name: str) -> np.ndarray:
        """A view of a tensor in host-mapped memory, which shows what the device writes."""
        tensor = self.find(name)
        buffer = self.plan.buffers[tensor.buffer]
        arena = self._arenas[buffer.arena]
        if arena.host is None:
            raise InvalidUsageError(f"tensor {name!r} is not in host-mapped memory")
        kind = by_name(tensor.dtype)
        view: np.ndarray = arena.host[buffer.offset : buffer.offset + buffer.nbytes]
        return np.asarray(view.view(kind.numpy)).reshape(tensor.shape)

    def device_bytes(self) -> int:
        """The device memory that the plan uses, in bytes."""
        return sum(m.nbytes for m in self._memory if m.kind != "host")

    def _free(self, memories: Sequence[Memory], strict: bool) -> None:
        for memory in memories:
            with contextlib.suppress(*tolerated(strict)):
                self.device.free(memory)

    def phase_iterations(self, iterations: int | Sequence[int]) -> list[int]:
        """The number of iterations of each phase in a launch. A single number is for the last
        phase.
        """
        phases = len(self.plan.phases)
        each = [*[0] * (phases - 1), iterations] if isinstance(iterations, int) else [*iterations]
        if len(each) != phases or min(each) < 0:
            raise InvalidUsageError(
                f"iterations={each} has {len(each)} entries; expected one number of at least 0 "
                f"for each of the {phases} phases"
            )
        return each


def tolerated(strict: bool) -> tuple[type[BaseException], ...]:
    """The types of errors that are ignored while memory is freed: none if `strict` is True."""
    return () if strict else (BaseError,)
