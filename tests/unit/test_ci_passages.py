"""ci/passages.py shows each passage with the lines around it that a reader needs."""

from __future__ import annotations

from tests.cases.ci import load

passages = load("passages")

PAGE = """# Title

The list has
two items:
- the first item,
  which goes on
- the second item
"""

CPP = """struct Ring {
 private:
  void take(int slot,
            int stage) {
    if (slot) {
      wait();
    }
    // Frees the slot.
    free(slot);
  }
};
"""


def test_each_list_item_is_a_passage_with_the_introduction() -> None:
    drawn = passages._page_passages("page.md", PAGE)
    assert [" ".join(p.text.split()) for p in drawn] == [
        "The list has two items:",
        "- the first item, which goes on",
        "- the second item",
    ]
    introduction = ("# Title", "The list has", "two items:")
    assert [p.context for p in drawn] == [("# Title",), introduction, introduction]


def test_cpp_comment_has_the_declarations_around_it() -> None:
    (passage,) = passages._cpp_passages("ring.h", CPP)
    assert passage.text == "Frees the slot."
    assert passage.context[:2] == ("struct Ring {", "  void take(int slot,")
    assert passage.context[2] == "    free(slot);"
