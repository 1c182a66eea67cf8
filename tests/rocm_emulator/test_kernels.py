"""The kernel suite on the emulator, through hip-python: results are right at -O0 and -O3.

`nox` tests every kernel at -O3 and -O0 on gfx942 (or the first architecture that supports
it) and at -O3 on gfx1100. Kernels that synchronise run with four seeds, and also on gfx90a and
gfx950, as do the matrix instructions. ARK_EMULATOR_SWEEP=1 (the nox session `emulator_sweep`) tests
everything on all architectures with ten seeds.
"""

from __future__ import annotations

import os

import kernel_cases
import pytest
from ark_rocm_emulator import emulated
from hip_runner import run_case

CASES = kernel_cases.load_all()
SWEEP = os.environ.get("ARK_EMULATOR_SWEEP") == "1"
FIRST = ("gfx942", "gfx1100", "gfx950", "gfx90a")


def _plan() -> list[tuple[str, str, str, tuple[int, ...]]]:
    """(kernel, arch, optimisation, seeds) of this run."""
    chosen = []
    for name, case in CASES.items():
        if SWEEP:
            chosen += [(name, a, o, tuple(range(10))) for a in case.archs for o in ("-O0", "-O3")]
            continue
        first = next(arch for arch in FIRST if arch in case.archs)
        chosen.append((name, first, "-O3", (0, 4, 5, 6) if case.source == "sync.hip" else (0,)))
        chosen.append((name, first, "-O0", (1,)))
        if "gfx1100" in case.archs and first != "gfx1100":
            chosen.append((name, "gfx1100", "-O3", (2,)))
        if case.source in ("sync.hip", "mfma.hip"):
            chosen += [(name, a, "-O3", (3,)) for a in ("gfx90a", "gfx950") if a in case.archs]
    return sorted(chosen, key=lambda c: (c[1], c[0], c[2]))


@pytest.mark.parametrize(
    ("name", "arch", "optimisation", "seeds"),
    [pytest.param(*c, id=f"{c[0]}-{c[1]}-{c[2][1:]}") for c in _plan()],
)
def test_kernel(name: str, arch: str, optimisation: str, seeds: tuple[int, ...]) -> None:
    for seed in seeds:
        with emulated(arch, seed=seed, report=0):
            run_case(CASES[name], arch, (optimisation,), seed)


def test_suite_has_all_its_kernels() -> None:
    assert len(CASES) >= 40
    for arch in kernel_cases.ALL:
        assert sum(arch in case.archs for case in CASES.values()) >= 40
