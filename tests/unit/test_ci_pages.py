"""ci/pages.py: pages of docs/ are short and narrow, name their readers and link to further
pages.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cases.ci import load

pages = load("pages")
ROOT = Path(__file__).resolve().parents[2]
GOOD = "# A page\n\nThis page is for those who read.\n\n"


def test_pages_of_the_tree_have_no_faults() -> None:
    assert [fault for page in pages.pages() for fault in pages.faults(page)] == []
    assert pages.total() <= pages.MAX_WORDS


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (GOOD, ""),
        (GOOD + "| " + "cell " * 30 + "|\n", ""),
        (GOOD + "line\n" * 300, "304 lines"),
        (GOOD + "word " * 30 + "\n", "columns"),
        (GOOD + "```\n" + "word " * 30 + "\n```\n", "a line of code"),
        ("# A page\n\nText.\n", "for whom"),
        ("# A page\n\nText for once.\n", "for whom"),
        (GOOD + "[a](gone.md)\n", "leads nowhere"),
        (GOOD + "[a](#nothing)\n", "names no heading"),
        (GOOD + "[a](start.md#install)\n", ""),
        (GOOD + "## One: `two`\n\n[a](#one-two)\n", ""),
    ],
)
def test_each_fault_of_a_page_is_named(
    text: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    page = tmp_path / "docs/page.md"
    page.parent.mkdir()
    (page.parent / "start.md").write_text("# Start\n\n## Install\n")
    page.write_text(text)
    messages = list(pages.faults(page))
    assert bool(messages) == bool(fault) and fault in "".join(messages)


WORD = st.sampled_from(["a", "word", "`code here`", "-", "1.", "#", "|", "longer-than-most", "+"])
PARAGRAPH = st.lists(WORD, min_size=1, max_size=30).map(" ".join)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(PARAGRAPH, min_size=1, max_size=3))
def test_wrapping_keeps_words_and_is_done_once(paragraphs: list[str]) -> None:
    text = "\n\n".join(f"- first {p}" if i % 2 else f"first {p}" for i, p in enumerate(paragraphs))
    once = pages.wrapped(text)
    assert once.split() == text.split()
    assert pages.wrapped(once) == once
    # Wrapping has not moved a list marker or heading sign to the start of a line.
    starts = [line for line in once.splitlines() if re.match(r"\s*([-+*|#]|\d+\.)(\s|$)", line)]
    assert len(starts) == len(paragraphs) // 2


def test_blocks_of_code_are_not_wrapped() -> None:
    text = "```bash\n" + "word " * 40 + "\n```\n"
    assert pages.wrapped(text) == text and pages.words(text) == 0


def test_test_follows_each_page_that_has_programs() -> None:
    tests = "".join(
        p.read_text() for p in (ROOT / "tests").rglob("test_*page*.py") if "test_ci" not in p.name
    )
    tests += (ROOT / "tests/unit/test_readme.py").read_text()
    shown = [
        p for p in pages.pages() if pages.kind(p) != "history" and "```python" in p.read_text()
    ]
    assert len(shown) > 10
    assert [p.name for p in shown if p.name not in tests and p.stem not in tests] == []
