"""A cache of one model's kernels. Each combination of input sizes needs a kernel of its own, so
sizes are rounded up to limit the number of kernels. If the cache is full, the least recently used
kernel is freed. Called by ark.interop.torch and ark.interop.onnx.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

MAX_KERNELS = 64  # the most kernels of one model


def bucket(size: int, most: int | None) -> int:
    """The rounded size for which a kernel is compiled: the smallest power of two that is at least
    `size`, or `most` (the upper bound of the size) if that is smaller.
    """
    size_class = max(1, 1 << (size - 1).bit_length())
    return max(size, min(size_class, most)) if most is not None else size_class


T = TypeVar("T")


class Kernels(Generic[T]):
    """A cache of kernels by key, which threads may share. end: a function that frees a kernel.
    most: the number of kernels that are cached, by default MAX_KERNELS.
    """

    def __init__(self, end: Callable[[T], None], most: int | None = None) -> None:
        self._end, self._most = end, most
        self._kernels: OrderedDict[Hashable, T] = OrderedDict()
        self._lock = threading.RLock()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The kernel with the key `key`. If it is not in the cache, it is created by `make`."""
        with self._lock:
            if key not in self._kernels:
                kernel = make()
                while len(self._kernels) >= (self._most or MAX_KERNELS):
                    self._end(self._kernels.popitem(last=False)[1])
                self._kernels[key] = kernel
            self._kernels.move_to_end(key)
            return self._kernels[key]

    def __len__(self) -> int:
        return len(self._kernels)

    def close(self) -> None:
        """Frees all kernels."""
        with self._lock:
            while self._kernels:
                self._end(self._kernels.popitem(last=False)[1])
