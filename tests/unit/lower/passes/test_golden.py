"""Each pass alone on a small printed graph: its texts before and after equal the stored ones.

Also tests that a second run of the pass changes nothing.
"""

from __future__ import annotations

import pytest

from ark.ir.text import to_text
from ark.lower.passes import PASSES
from tests.unit.lower.passes.cases import CASES, RUNS, Case, step_of, text_of


def test_every_pass_has_a_case() -> None:
    assert {case.name for case in CASES} == {step.name for step in PASSES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_each_pass_gives_the_stored_graph(case: Case) -> None:
    text = text_of(case)
    before, _, after = text.removeprefix("before\n").partition("after\n")
    assert before != after
    assert text == case.path.read_text(), "python -m tests.unit.lower.passes.cases writes them"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_second_run_of_each_pass_changes_nothing(case: Case) -> None:
    before, context = step_of(case)
    once = RUNS[case.name](before, context)
    assert to_text(RUNS[case.name](once, context)) == to_text(once)
