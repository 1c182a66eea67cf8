"""Drafts from earlier text: tokens that are proposed as the continuation of a text, because they
followed the same tokens before.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ark.serving.drafts import LENGTHS, MAX_PAUSE_TOKENS, Drafts, right_tokens, shortened


def test_periodic_text_is_continued() -> None:
    assert Drafts().propose([9, 1, 2, 3, 1, 2, 3], 5) == (1, 2, 3, 1, 2)
    assert Drafts().propose([4, 4, 4, 4], 3) == (4, 4, 4)


def test_latest_and_longest_repetition_counts() -> None:
    assert Drafts().propose([1, 2, 3, 7, 0, 2, 3, 8, 1, 2, 3], 1) == (7,)
    assert Drafts().propose([5, 2, 3, 7, 6, 2, 3, 8, 1, 2, 3], 1) == (8,)


def test_wrong_drafts_pause() -> None:
    drafts, text = Drafts(), [1, 2, 1, 2]
    pauses = []
    for _ in range(8):
        drafts.learn(0)
        pauses.append(0)
        while not drafts.propose(text, 1):
            pauses[-1] += 1
    assert pauses == [1, 3, 7, 15, 31, MAX_PAUSE_TOKENS, MAX_PAUSE_TOKENS, MAX_PAUSE_TOKENS]
    drafts.learn(1)
    assert drafts.propose(text, 1)


def test_longest_drafts_are_shortened_first() -> None:
    assert shortened([(1, 2, 3), (), (4,), (5, 6, 7)], 5) == [(1, 2), (), (4,), (5, 6)]
    assert shortened([(1, 2, 3), (4, 5)], 5) == [(1, 2, 3), (4, 5)]
    assert shortened([(1,), (2,)], 1) == [(1,), ()]
    assert shortened([], 0) == []


def test_draft_is_right_up_to_its_first_wrong_token() -> None:
    assert right_tokens((1, 2, 3), (1, 2, 4)) == 2
    assert right_tokens((1, 2, 3), (1, 2)) == 2
    assert right_tokens((), (1,)) == 0
    assert right_tokens((1, 1), (2, 1, 1)) == 0


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 6))
def test_draft_begins_as_the_text_went_on_before(text: list[int], most: int) -> None:
    """A draft repeats how the text continued earlier, also if the text is given piece by piece."""
    drafts = Drafts()
    for end in range(1, len(text)):
        drafts.propose(text[:end], most)
    draft = drafts.propose(text, most)
    assert draft == Drafts().propose(text, most)
    places = [
        at
        for length in LENGTHS
        for at in range(length, len(text))
        if text[at - length : at] == text[-length:] and len(text) > length
    ]
    assert bool(draft) == bool(places)
    assert not draft or draft[0] in {text[at] for at in places}
