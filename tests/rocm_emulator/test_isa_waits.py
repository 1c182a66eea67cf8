"""The check of missing `s_waitcnt`, tested with single instructions: waits that clang would always
emit are omitted in handwritten code.

Each fault is a few instructions that compute the right values on the emulator, because its memory
answers at once. On hardware they would read a register before its load has completed.
"""

from __future__ import annotations

import numpy as np
import pytest
from isa_program import Case, Suite

ARCHES = ("gfx942", "gfx1100")


def _cases(arch: str) -> tuple[dict[str, Case], dict[str, Case]]:
    """(correct, faulty) programs."""
    rdna = arch == "gfx1100"
    load, write, read = "global_load_dword", "ds_write_b32", "ds_read_b32"
    scalar, atomic = "s_load_dword", "global_atomic_add"
    returns = "sc0"
    if rdna:
        load, write, read = "global_load_b32", "ds_store_b32", "ds_load_b32"
        scalar, atomic, returns = "s_load_b32", "global_atomic_add_u32", "glc"
    two = f"{load} v40, v0, s[4:5]\n{load} v41, v0, s[4:5]"
    lds = f"{write} v0, v10\n{read} v40, v0"
    right = {
        "load": Case(f"{load} v40, v0, s[4:5]\ns_waitcnt vmcnt(0)\nv_add_f32 v40, v40, v40", 1),
        "first_of_two": Case(
            f"{two}\ns_waitcnt vmcnt(1)\nv_mov_b32 v42, v40\ns_waitcnt vmcnt(0)", 1, 3
        ),
        "lds": Case(f"{lds}\ns_waitcnt lgkmcnt(0)\nv_mov_b32 v41, v40", 1, 2),
        "scalar": Case(f"{scalar} s8, s[4:5], 0x0\ns_waitcnt lgkmcnt(0)\nv_mov_b32 v40, s8", 1),
        "atomic": Case(
            f"{atomic} v40, v0, v10, s[4:5] {returns}\ns_waitcnt vmcnt(0)\nv_mov_b32 v41, v40", 1, 2
        ),
    }
    wrong = {
        "load_used": Case(f"{load} v40, v0, s[4:5]\nv_add_f32 v40, v40, v40", 1),
        "load_overwritten": Case(f"{load} v40, v0, s[4:5]\nv_mov_b32 v40, 0", 1),
        "second_of_two": Case(f"{two}\ns_waitcnt vmcnt(1)\nv_mov_b32 v42, v41", 1, 3),
        "wrong_counter": Case(f"{lds}\ns_waitcnt vmcnt(0)\nv_mov_b32 v41, v40", 1, 2),
        "scalar_used": Case(f"{scalar} s8, s[4:5], 0x0\nv_mov_b32 v40, s8", 1),
        "scalar_counted": Case(
            f"{scalar} s8, s[4:5], 0x0\n{scalar} s9, s[4:5], 0x4\ns_waitcnt lgkmcnt(1)\n"
            "v_mov_b32 v40, s8",
            1,
        ),
        "atomic_used": Case(f"{atomic} v40, v0, v10, s[4:5] {returns}\nv_mov_b32 v41, v40", 1, 2),
    }
    if rdna:
        # Waiting for the counter of stores does not complete loads and returning atomics, so this
        # is a fault.
        wrong["store_counter"] = Case(
            f"{load} v40, v0, s[4:5]\ns_waitcnt_vscnt null, 0x0\nv_mov_b32 v41, v40", 1, 2
        )
        right["own_instruction"] = Case(
            f"{load} v40, v0, s[4:5]\ns_waitcnt_vmcnt null, 0x0\nv_mov_b32 v41, v40", 1, 2
        )
        wrong["dual"] = Case(
            f"{load} v40, v0, s[4:5]\nv_dual_mov_b32 v42, v10 :: v_dual_mov_b32 v43, v40", 1, 4
        )
    return right, wrong


PROGRAMS = {arch: _cases(arch) for arch in ARCHES}
SUITES = {arch: Suite(arch, {**right, **wrong}) for arch, (right, wrong) in PROGRAMS.items()}
RIGHT = [(arch, name) for arch in ARCHES for name in PROGRAMS[arch][0]]
WRONG = [(arch, name) for arch in ARCHES for name in PROGRAMS[arch][1]]


def run(arch: str, name: str, checks: bool) -> None:
    lanes = SUITES[arch].lanes
    SUITES[arch].run(name, [np.arange(lanes, dtype=np.uint32)], checks=checks)


@pytest.mark.parametrize(("arch", "name"), RIGHT)
def test_correct_waits_raise_no_alarm(arch: str, name: str) -> None:
    run(arch, name, checks=True)


@pytest.mark.parametrize(("arch", "name"), WRONG)
def test_missing_wait_is_reported(arch: str, name: str) -> None:
    with pytest.raises(AssertionError, match="missing wait"):
        run(arch, name, checks=True)
    run(arch, name, checks=False)
