"""Kernels of one model for the sizes that it is called with: how sizes are rounded up, and that the
kernel that was longest not used makes room. Called by ark.interop.torch
and ark.interop.onnx.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

MAX_KERNELS = 64  # kernels of one model, for as many combinations of sizes


def bucket(size: int, most: int | None) -> int:
    """The power of two from `size` on, or the bound `most` if that is smaller."""
    size_class = max(1, 1 << (size - 1).bit_length())
    return max(size, min(size_class, most)) if most is not None else size_class


T = TypeVar("T")


class Kernels(Generic[T]):
    """By what they are for. end: gives a kernel's memory back. most: how many are
    kept, by default MAX_KERNELS. Threads may use it.
    """

    def __init__(self, end: Callable[[T], None], most: int | None = None) -> None:
        self._end, self._most = end, most
        self._made: OrderedDict[Hashable, T] = OrderedDict()
        self._lock = threading.RLock()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The kernel for `key`, made if it is not there."""
        with self._lock:
            if key not in self._made:
                kernel = make()
                while len(self._made) >= (self._most or MAX_KERNELS):
                    self._end(self._made.popitem(last=False)[1])
                self._made[key] = kernel
            self._made.move_to_end(key)
            return self._made[key]

    def __len__(self) -> int:
        return len(self._made)

    def close(self) -> None:
        """Gives the memory of all back."""
        with self._lock:
            while self._made:
                self._end(self._made.popitem(last=False)[1])
