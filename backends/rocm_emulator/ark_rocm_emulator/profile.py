"""Reads the profile of the timing model, which predicts a launch's times on a GPU product: the
cycles that the launch has spent at each instruction.

Called by the ROCm backend for `ark bench ops --isa`. The profile is a text file. An environment
variable sets its path (docs/rocm-timing.md).
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
    """The profile of one instruction. offset: its offset in the code object. cycles: the cycles
    that waves have spent at the instruction. shared: the cycles for which the instruction kept the
    LDS busy. conflicts: how many of the `shared` cycles were bank conflicts.
    """

    offset: int
    cycles: int
    shared: int
    conflicts: int
    instruction: str


def read(path: Path) -> list[Spent]:
    """Reads the profile that the last launch wrote."""
    spent = []
    for line in path.read_text().splitlines():
        offset, cycles, shared, conflicts, text = line.split("\t", 4)
        spent.append(Spent(int(offset, 16), int(cycles), int(shared), int(conflicts), text))
    return spent


@contextmanager
def counting(arch: str) -> Iterator[Callable[[], tuple[int, int]] | None]:
    """Emulates one device of `arch` with a timing model. Yields a function that returns the number
    of cycles for which the last launch kept the LDS busy, and how many of them were bank conflicts.
    Yields None, without a device, if no timing model supports the architecture.
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
