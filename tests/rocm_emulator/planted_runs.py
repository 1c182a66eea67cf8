"""Runs planted defects and correct programs on the emulator, with its checks and in stale mode, and
through the lint: for tests and for ci/defect_counts.py.
"""

from __future__ import annotations

import dataclasses
import struct

import numpy as np
from ark_rocm_emulator.engine import core
from ark_rocm_emulator.lint import TARGETS, Finding, lint
from planted import assembly
from planted_programs import DATA_WORDS, FLAG_WORDS, Program

CHECK_SEEDS, STALE_SEEDS, SOUND_SEEDS = 6, 40, 4


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
