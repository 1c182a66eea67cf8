"""Finds the addresses of arrays that collectives may read and write in place, without a copy.

The kernel of a call accesses its input and its result by addresses. If the caller has registered
the array, this is the array's own address. Otherwise the array is copied to or from memory that
belongs to the call. Called by ark.distributed.group.
"""

from __future__ import annotations

from typing import Any

from ark.backend.devices import Device, InlineDevice
from ark.distributed.arrays import Array, wrap
from ark.errors import InvalidUsageError

ACCESS_BYTES = 16  # the widest access of a task


class Registered:
    """The arrays that the caller has registered, by address. An array is kept alive until it is
    unregistered.
    """

    def __init__(self) -> None:
        self._arrays: dict[int, Array] = {}

    def add(self, given: Any, device: Device) -> None:
        """Registers an array. Raises InvalidUsageError unless it is writable, aligned memory of the
        device.
        """
        array = wrap(given)
        if (array.stream() is None) != isinstance(device, InlineDevice):
            raise InvalidUsageError(
                f"register: the array is not memory of {device.machine.name}, the group's device; "
                "register one that is"
            )
        array.check_writable()
        address = array.place()
        if address % ACCESS_BYTES:
            raise InvalidUsageError(
                f"register: the array begins at the address {address:#x}, which is not a multiple "
                f"of {ACCESS_BYTES} bytes; register an aligned array"
            )
        self._arrays[address] = array

    def remove(self, given: Any) -> None:
        """Unregisters an array. Raises InvalidUsageError if it is not registered."""
        if self._arrays.pop(wrap(given).place(), None) is None:
            raise InvalidUsageError("unregister: the array is not registered; register it first")

    def addresses(self, x: Array | None, y: Array | None) -> tuple[int | None, int | None]:
        """The addresses at which a call may read x and write y in place; None for an array that
        must be copied. If x and y overlap, x is copied, because the kernel writes y before all
        ranks have read x.
        """
        source, target = self._address(x), self._address(y)
        if source is None or target is None or x is None or y is None:
            return source, target
        apart = source + x.nbytes <= target or target + y.nbytes <= source
        return (source if apart else None), target

    def _address(self, array: Array | None) -> int | None:
        if array is None or not self._arrays:
            return None
        address = array.place()
        held = any(
            begin <= address and address + array.nbytes <= begin + each.nbytes
            for begin, each in self._arrays.items()
        )
        return address if held and address % ACCESS_BYTES == 0 else None
