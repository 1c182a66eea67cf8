"""The kernel suite as data: every case has a kernel's name, its grid, its arguments and NumPy's
expected results.

`test_kernels` runs the cases, `test_defects` reuses the sources. A case is a function from a random
generator and a target to `Work`; the decorator `kernel` puts it into `CASES` under the function's
name, which is the kernel's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

KERNELS = Path(__file__).parent.parent / "kernels"
ALL = ("gfx90a", "gfx942", "gfx950", "gfx1100")
CDNA = ("gfx90a", "gfx942", "gfx950")
Extent = int | tuple[int, ...]


@dataclass(frozen=True)
class Target:
    """The properties on which a case may depend: the architecture and its wave size in lanes."""

    arch: str

    @property
    def wave(self) -> int:
        return 32 if self.arch.startswith("gfx11") else 64


@dataclass(frozen=True)
class Out:
    """An argument that the kernel writes completely. The host allocates it and does not initialise
    it.
    """

    shape: tuple[int, ...]
    dtype: Any


@dataclass(frozen=True)
class Work:
    """One launch: the arguments in order, and the expected contents of some of them afterwards.

    Arrays are copied to the device and back; NumPy scalars are passed by value. `expected` maps an
    argument's index to an array (compared with `rtol`, or bit for bit if that is 0) or to a
    predicate.
    """

    args: tuple[Any, ...]
    expected: dict[int, Any]
    rtol: float = 0.0
    atol: float = 0.0
    grid: Extent | None = None
    block: Extent | None = None


@dataclass(frozen=True)
class Case:
    """A kernel of the suite: its file, its launch, and the function that creates its work."""

    name: str
    source: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    make: Callable[[np.random.Generator, Target], Work]
    archs: tuple[str, ...] = ALL
    dynamic_lds: int = 0
    cooperative: bool = False
    options: tuple[str, ...] = field(default=("-ffp-contract=off",))


CASES: dict[str, Case] = {}


def three(extent: Extent) -> tuple[int, ...]:
    """Returns the extent of a grid or block, a number or tuple, as (x, y, z)."""
    given = (extent,) if isinstance(extent, int) else extent
    return (*given, *(1,) * (3 - len(given)))


def kernel(
    source: str, grid: Extent, block: Extent, **more: Any
) -> Callable[[Callable[[np.random.Generator, Target], Work]], Callable[..., Work]]:
    """Registers the decorated function as the case of the kernel with the same name."""

    def register(make: Callable[[np.random.Generator, Target], Work]) -> Callable[..., Work]:
        name = make.__name__
        CASES[name] = Case(name, source, three(grid), three(block), make, **more)
        return make

    return register


def compare(work: Work, got: dict[int, np.ndarray]) -> None:
    """Compares the results with every expected array or predicate of `work`."""
    for k, expected in work.expected.items():
        if callable(expected):
            assert expected(got[k]), f"argument {k}: {got[k]}"
        elif work.rtol == 0.0:
            np.testing.assert_array_equal(got[k], expected, err_msg=f"argument {k}")
        else:
            values = got[k].astype(np.float64)
            np.testing.assert_allclose(
                values, expected, rtol=work.rtol, atol=work.atol, err_msg=f"argument {k}"
            )


def load_all() -> dict[str, Case]:
    """Imports every module of cases; returns all cases by kernel name."""
    from kernel_cases import (  # noqa: F401
        elementwise,
        gemm,
        histogram,
        matrix,
        movement,
        reduce,
        scalar,
        scan,
        sync,
    )

    return CASES
