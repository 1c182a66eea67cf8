"""Every planted defect is detected on every architecture on which it is not harmless, and no
correct program is reported.

The emulator's checks are tried first. Vector clocks on a sequentially consistent execution cannot
detect every defect (for example a store and a load of another word that are reordered). Defects
that the checks miss must give a wrong value in stale mode.
"""

from __future__ import annotations

from collections import Counter

import pytest
from checks_bench import ALL
from planted import DEFECTS, Defect, assembly
from planted_programs import PROGRAMS
from planted_runs import CHECK_SEEDS, SOUND_SEEDS, STALE_SEEDS, linted, reports

from tests.kept import assemble
from tests.slow import few

PAIRS = [(d, arch) for d in DEFECTS for arch in d.archs]
SOUND = [(name, arch) for name in PROGRAMS for arch in ALL]


@pytest.mark.parametrize(("name", "arch"), few(14, SOUND))
def test_lint_reports_no_correct_program(name: str, arch: str) -> None:
    assert linted(PROGRAMS[name], arch) == []


@pytest.mark.parametrize("name", ["chain", "dekker", "peterson"])
def test_release_without_own_stores_is_not_reported(name: str) -> None:
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


def test_table_is_large_enough() -> None:
    assert len(PROGRAMS) >= 40
    for arch in ALL:
        assert len([d for d in DEFECTS if arch in d.archs and arch not in d.sound]) >= 60
    assert max(Counter(d.name for d in DEFECTS if d.archs == ALL).values()) == 1
