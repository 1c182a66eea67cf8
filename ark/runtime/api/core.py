"""Types and random numbers under the names of ARK's compiled core (microsoft/ark), because ARK's
scripts and tests use them.
"""

from __future__ import annotations

import random

from ark.frontend.tensor import NullTensor
from ark.ir.dtype import bf16, byte, fp16, fp32, int8, int32, uint8, uint32
from ark.ir.values import MAX_DIMS, whole

DIMS_LEN = MAX_DIMS
FP32, FP16, BF16 = fp32, fp16, bf16
INT32, UINT32, INT8, UINT8, BYTE = int32, uint32, int8, uint8, byte

_random = random.Random(0)


def srand(seed: int = -1) -> None:
    """Sets the seed of `rand`. For -1 the seed is chosen by the system."""
    _random.seed(None if seed == -1 else seed)


def rand() -> int:
    """A random number from 0 to 2^31 - 1, from ark's own generator."""
    return _random.getrandbits(31)


class Dims(tuple[int, ...]):
    """A shape: Dims(2, 3) or Dims([2, 3]).

    Examples:
        >>> ark.Dims(2, 3).nelems()
        6
    """

    def __new__(cls, *sizes: object) -> Dims:
        """Creates Dims from sizes, or from one sequence of sizes. Raises InvalidUsageError for
        other values.
        """
        values = sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
        dims = tuple(whole("Dims", n) for n in values)  # type: ignore[attr-defined]
        return super().__new__(cls, dims)

    def ndims(self) -> int:
        """Number of dimensions."""
        return len(self)

    def nelems(self) -> int:
        """Number of elements."""
        count = 1
        for n in self:
            count *= n
        return count


__all__ = [
    "BF16",
    "BYTE",
    "DIMS_LEN",
    "FP16",
    "FP32",
    "INT8",
    "INT32",
    "UINT8",
    "UINT32",
    "Dims",
    "NullTensor",
    "rand",
    "srand",
]
