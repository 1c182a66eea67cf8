"""RVD layouts of a tensor over devices: the number of replicas, of value splits, and of splits of
each dimension.

The representation is that of Lin et al., "SuperScaler / nnScaler" (OSDI 2024). The number of
devices is the product of these numbers, and each device holds one block. With V value splits, the
tensor is the sum of V partial tensors. Layouts are created by callers and by `Layout.parse`;
ark.parallel.layout.paths searches over them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ark.errors import InvalidUsageError

MOST_DEVICES = 1 << 16
MOST_DIMENSIONS = 8
_FORM = re.compile(r"R([0-9]{1,9})V([0-9]{1,9})D([0-9]{1,9}(?:,[0-9]{1,9})*)")


@dataclass(frozen=True)
class Layout:
    """`replicas` copies of `values` partial tensors, with dimension d cut into `dims[d]` equal
    parts.

    Devices are numbered row by row over (replicas, values, *dims). In CoCoNet's terms, Local is a
    layout that has value splits only, Replicated one that has replicas only, and Sliced(d) one that
    has splits of dimension d only.

    Examples:
        >>> layout = ark.parallel.Layout.parse("R2V1D4,1")  # two copies; rows in four parts
        >>> layout.devices, layout.block((8, 2))
        (8, (2, 2))
    """

    replicas: int
    values: int
    dims: tuple[int, ...]

    def __post_init__(self) -> None:
        if min(self.counts) < 1 or len(self.dims) > MOST_DIMENSIONS or not self.dims:
            raise InvalidUsageError(
                f"the layout {self} is not valid: all numbers must be at least 1, for 1 to "
                f"{MOST_DIMENSIONS} dimensions"
            )
        if self.devices > MOST_DEVICES:
            raise InvalidUsageError(
                f"the layout {self} has {self.devices} devices; at most {MOST_DEVICES} are "
                "supported"
            )

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Reads text such as "R1V4D1,1". Raises InvalidUsageError for any other text."""
        match = _FORM.fullmatch(text)
        if not match:
            raise InvalidUsageError(
                f"{text[:60]!r} is not a layout; write replicas, value splits and the splits of "
                "each dimension, as in R1V4D1,1"
            )
        replicas, values, dims = match.groups()
        return cls(int(replicas), int(values), tuple(int(n) for n in dims.split(",")))

    def __str__(self) -> str:
        return f"R{self.replicas}V{self.values}D{','.join(map(str, self.dims))}"

    @property
    def counts(self) -> tuple[int, ...]:
        """(replicas, values, *dims)."""
        return (self.replicas, self.values, *self.dims)

    @property
    def devices(self) -> int:
        """The number of devices."""
        return math.prod(self.counts)

    def block(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of one device's block of a tensor of `shape`.

        Raises InvalidUsageError if a dimension is not divisible by its number of parts.
        """
        if len(shape) != len(self.dims):
            raise InvalidUsageError(
                f"the layout {self} has {len(self.dims)} dimensions, but the tensor has "
                f"{len(shape)}: {list(shape)}; give one split per dimension"
            )
        for d, (size, parts) in enumerate(zip(shape, self.dims, strict=True)):
            if size % parts:
                raise InvalidUsageError(
                    f"the layout {self} cuts dimension {d} into {parts} parts, but its size "
                    f"{size} is not divisible by {parts}; use a divisor of {size}"
                )
        return tuple(size // parts for size, parts in zip(shape, self.dims, strict=True))

    def elements(self, shape: Sequence[int]) -> int:
        """The number of elements in one device's block."""
        return math.prod(self.block(shape))

    def coordinates(self) -> np.ndarray:
        """The coordinates of the block that each device holds: one row (replica, value, *dims) per
        device.
        """
        return np.stack(np.unravel_index(np.arange(self.devices), self.counts), axis=1)


def layouts(shape: Sequence[int], devices: int) -> Iterator[Layout]:
    """All layouts of a tensor over a number of devices, in lexicographic order."""

    def factors(left: int, sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if not sizes:
            yield (left,)
            return
        for parts in divisors(left):
            if sizes[0] % parts == 0:
                for rest in factors(left // parts, sizes[1:]):
                    yield (parts, *rest)

    for *dims, rest in factors(devices, tuple(shape)):
        for replicas in divisors(rest):
            yield Layout(replicas, rest // replicas, tuple(dims))


def divisors(number: int) -> list[int]:
    """All divisors in ascending order, with 1 and the number itself."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]
