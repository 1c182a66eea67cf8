"""What a launch on a timed product spent at each of its instructions: the timing model's profile.

Called by the ROCm backend for `ark bench ops --isa`; people read the file that the environment
variable names (docs/rocm-timing.md).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ark_rocm_emulator.device import TIMED, emulated

VARIABLE = "ARK_ROCM_EMULATOR_PROFILE"


@dataclass(frozen=True)
class Spent:
    """One instruction. offset: in the code object. cycles: that waves have spent at it. shared: for
    which it kept the LDS busy; conflicts: those of them in which lanes waited for a bank that
    others of them had.
    """

    offset: int
    cycles: int
    shared: int
    conflicts: int
    instruction: str


def read(path: Path) -> list[Spent]:
    """The profile that the last launch wrote."""
    spent = []
    for line in path.read_text().splitlines():
        offset, cycles, shared, conflicts, text = line.split("\t", 4)
        spent.append(Spent(int(offset, 16), int(cycles), int(shared), int(conflicts), text))
    return spent


@contextmanager
def counting(arch: str) -> Iterator[Callable[[], tuple[int, int]] | None]:
    """Emulates one device of `arch` with a timing model; what it gives says for how many cycles the
    last launch kept LDS busy, and how many of these were bank conflicts. None, and no device, where
    no timing model has the architecture.
    """
    product = next((name for name, (known, _, _) in TIMED.items() if known == arch), None)
    if product is None:
        yield None
        return
    before = os.environ.get(VARIABLE)
    with tempfile.TemporaryDirectory() as folder, emulated(product):
        path = Path(folder) / "profile"
        os.environ[VARIABLE] = str(path)

        def used() -> tuple[int, int]:
            rows = read(path)
            return sum(row.shared for row in rows), sum(row.conflicts for row in rows)

        try:
            yield used
        finally:
            if before is None:
                del os.environ[VARIABLE]
            else:
                os.environ[VARIABLE] = before
