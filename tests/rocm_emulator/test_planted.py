"""Every planted defect is detected on every architecture on which it is not harmless, and no
correct program is reported.

The emulator's checks are tried first. Vector clocks on a sequentially consistent execution cannot
detect every defect (for example a store and a load of another word that are reordered). Defects
that the checks miss must give a wrong value in stale mode.
"""

from __future__ import annotations

import dataclasses
import struct
from collections import Counter

import numpy as np
import pytest
from ark_rocm_emulator.engine import core
from ark_rocm_emulator.lint import TARGETS, Finding, lint
from checks_bench import ALL
from planted import DEFECTS, Defect, assembly
from planted_programs import DATA_WORDS, FLAG_WORDS, PROGRAMS, Program

from tests.kept import assemble
from tests.slow import few

CHECK_SEEDS, STALE_SEEDS, SOUND_SEEDS = 6, 40, 4
PAIRS = [(d, arch) for d in DEFECTS for arch in d.archs]
SOUND = [(name, arch) for name in PROGRAMS for arch in ALL]


def run(code: bytes, arch: str, program: Program, seed: int, stale: bool) -> str:
    """Runs a program. Returns the kind of the report, "value" for a wrong value, or an empty
    string.
    """
    machine = core().Machine([arch])
    loaded = machine.load(core().CodeObject(code), 0)

    def zeros(words: int) -> int:
        address: int = machine.allocate(0, "device", 4 * words, "buffer")
        machine.write(address, np.zeros(words, np.uint32).tobytes())
        return address

    flags, data = zeros(FLAG_WORDS * program.rounds), zeros(DATA_WORDS * program.rounds)
    counter, wrong = zeros(64), zeros(64)
    arguments = b"".join(struct.pack("<Q", a) for a in (flags, data, counter, wrong))
    options = core().LaunchOptions(
        checks=not stale,
        stale=stale,
        seed=seed,
        max_slice=8 if stale else 16,
        external_wait_ms=1000,
    )
    shape, block = (len(program.roles), 1, 1), (program.lanes, 1, 1)
    result = machine.run(core().LaunchDesc(loaded, "planted", shape, block, arguments, 0, options))
    if not result.ok:
        return f"{result.kind}: {result.message}"
    return "value" if np.frombuffer(machine.read(wrong, 4), np.uint32)[0] else ""


def reports(code: bytes, arch: str, program: Program, checked: int, stale: int) -> str:
    """Runs code with a number of seeds with the checks, then in stale mode. Returns the first
    report or wrong value, or an empty string.
    """
    runs = [(seed, False) for seed in range(checked)] + [(seed, True) for seed in range(stale)]
    return next(filter(None, (run(code, arch, program, *each) for each in runs)), "")


def linted(program: Program, arch: str) -> list[Finding]:
    """Returns the lint's findings in each workgroup's program. The code by which workgroups start a
    round together is left out, because it orders no memory.
    """
    alone = (
        dataclasses.replace(program, roles=(role,), meets=False)
        for role in dict.fromkeys(program.roles)
    )
    return [f for one in alone for f in lint(assembly(one, arch), TARGETS[arch])]


@pytest.mark.parametrize(("name", "arch"), few(14, SOUND))
def test_the_lint_reports_no_correct_program(name: str, arch: str) -> None:
    assert linted(PROGRAMS[name], arch) == []


@pytest.mark.parametrize("name", ["chain", "dekker", "peterson"])
def test_a_release_without_own_stores_is_not_reported(name: str) -> None:
    """The lint does not report a release by a workgroup that has stored nothing, because there is
    nothing to write back.
    """
    assert linted(PROGRAMS[name], "gfx942") == []


@pytest.mark.parametrize(("name", "arch"), few(14, SOUND))
def test_correct_programs_are_not_reported(name: str, arch: str) -> None:
    code = assemble(assembly(PROGRAMS[name], arch), arch)
    assert reports(code, arch, PROGRAMS[name], SOUND_SEEDS, 2 * SOUND_SEEDS) == ""


@pytest.mark.parametrize(
    ("defect", "arch"), few(24, PAIRS), ids=lambda v: v.name if isinstance(v, Defect) else v
)
def test_defects_are_found(defect: Defect, arch: str) -> None:
    code, program = assemble(defect.assembly(arch), arch), PROGRAMS[defect.program]
    if arch in defect.sound:
        assert reports(code, arch, program, SOUND_SEEDS, 2 * SOUND_SEEDS) == ""
    else:
        assert reports(code, arch, program, CHECK_SEEDS, STALE_SEEDS), "nothing was reported"


def test_the_table_is_large_enough() -> None:
    assert len(PROGRAMS) >= 40
    for arch in ALL:
        assert len([d for d in DEFECTS if arch in d.archs and arch not in d.sound]) >= 60
    assert max(Counter(d.name for d in DEFECTS if d.archs == ALL).values()) == 1
