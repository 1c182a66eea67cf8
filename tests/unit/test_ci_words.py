"""ci/words.py reports words that messages, docstrings, comments and names may not contain."""

from __future__ import annotations

import pytest

from tests.cases.ci import load
from tests.slow import slow

words = load("words")


def patterns(source: str) -> list[tuple[int, str]]:
    return [(use.line, use.pattern) for use in words.uses("a.py", source)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('def f():\n    """Is it no number?"""\n', [(2, "question"), (2, "question-opening")]),
        ('"""Text.\n\nMore of\nit? Yes.\n"""\n', [(4, "question")]),
        ("found = 1 + n\nmade, other = 2, 3\n", [(1, "found-made"), (2, "found-made")]),
        ("def test_what_begins_anywhere():\n    pass\n", [(1, "riddle-name")] * 2),
        ('raise PlanError(f"{n} rows: this is no plan")\n', [(1, "is-no")]),
        (
            'raise e.PlanError(f"{n}" "torn " "apart" + " in the midst")\n',
            [(1, "midst"), (1, "torn")],
        ),
        ('raise UsageError("leave the chunk away")\n', [(1, "leave-away")]),
        ("FEW = 1 << 10\n", [(1, "bare-constant"), (1, "vague-bound")]),
        ("ROWS, MAX_HELD = 4, -(2**6)\n", [(1, "vague-bound")]),
        ("self._made = 1 + n\n", [(1, "found-made")]),
        ("def f(pack):\n    pass\n", [(1, "pack")]),
        ("x = 1\n# Whoever reads it\n", [(2, "whoever")]),
        ("said = 1\n", [(1, "participle-name")]),
        ("def test_a_plan_is_refused():\n    pass\n", [(1, "article-name")]),
        ('def f():\n    """Has the node a weight"""\n', [(2, "question-opening")]),
        ("def lay_sides():\n    pass\n", [(1, "renamed")]),
        ('raise UsageError(f"the op {n} is not built")\n', [(1, "not-built")]),
        ('raise UsageError(f"{n} knows nothing called {m}")\n', [(1, "knows-nothing")]),
        ('raise UsageError("tasks of copy take no tile")\n', [(1, "take-no")]),
        ('raise UsageError("memory of this rank alone")\n', [(1, "this-alone")]),
        ('raise UsageError(f"{n} cannot be seen as {m}")\n', [(1, "seen-as")]),
        ("# Is it aligned?\n", [(1, "question")]),
        ('Rule = int\n"""May it split?"""\n', [(2, "question"), (2, "question-opening")]),
        ('raise UsageError(f"there is no plan {n}")\n', [(1, "is-no")]),
        ('fault(f"{n} ranks were asked for")\n', [(1, "asked-for")]),
        ('"""Rows that begin anywhere.\n\nWhat is read."""\n', [(1, "anywhere"), (3, "what-is")]),
    ],
)
def test_pattern_is_found_on_its_line(source: str, expected: list[tuple[int, str]]) -> None:
    assert sorted(patterns(source)) == sorted(expected)


def test_device_comments_and_replaced_names_are_reported() -> None:
    source = "// Whoever\n// reads it.\nint n = own_first ? 1 : 0;  // is it?\n"
    present = [(use.line, use.pattern) for use in words.uses("a.h", source)]
    assert present == [(1, "whoever"), (3, "question"), (3, "renamed")]
    assert not words.uses("a.h", "const x = a ? b : c;  // https://host/what?is=1\n")


@pytest.mark.parametrize(
    "source",
    [
        'def f():\n    """True where the element is NaN."""\n',
        "candidates = []\nMAX_IDLE_FRACTION = 1 / 20\nMAX_SHORT_ROW_ELEMENTS = 1024\n",
        'raise PlanError(f"k={k} is not divisible by split_k={n}")\n',
        'print("whoever")\npattern = "what is"\n',
        'FORMS = ("a", "b")\nROWS, COLUMNS = 4, 8\n',
    ],
)
def test_plain_words_are_not_reported(source: str) -> None:
    assert patterns(source) == []


def test_use_is_printed_with_line_and_hint() -> None:
    (use,) = words.uses("a.py", "x = 0\nmade = 1 + x\n")
    assert str(use).startswith("a.py:2: found-made: ...made...")
    assert "name what it holds" in str(use)


@slow  # the lint session runs the same check
def test_no_file_uses_a_pattern() -> None:
    present = words.all_uses()
    assert not present, "\n".join(map(str, present))
