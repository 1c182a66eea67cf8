"""The text of a choice (one of the answers to a prompt) as it is streamed, compared with Python's
str.find and the tokenizers package.
"""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from ark.models.stops import StoppedText
from ark.models.tokenizer import Tokenizer
from ark.serving.http.text import token_bytes
from tests.server.running import NOAH
from tests.slow import examples

TOKENIZER = Tokenizer.open(NOAH, vocab_size=2048)
LETTERS = st.text("abc", max_size=40)


class Pieces:
    """A stand-in for a TextStream, in which token i is the i-th piece."""

    def __init__(self, pieces: Sequence[str], rest: str) -> None:
        self._pieces, self._rest = pieces, rest

    def push(self, token: int) -> str:
        return self._pieces[token]

    def finish(self) -> str:
        return self._rest


@settings(max_examples=examples(1000), deadline=None)
@given(
    pieces=st.lists(LETTERS, max_size=12),
    rest=LETTERS,
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=4),
)
def test_stop_strings(pieces: list[str], rest: str, stops: list[str]) -> None:
    """The text ends before the stop string that is completed first, regardless of how the text is
    divided into pieces.
    """
    text = StoppedText(Pieces(pieces, rest), stops)  # type: ignore[arg-type]
    sent = [text.push(i) for i in range(len(pieces))]
    whole = "".join(pieces) + rest
    ends = [(whole.find(s) + len(s), whole.find(s)) for s in stops if s in whole]
    assert "".join(sent) + text.finish() == (whole[: min(ends)[1]] if ends else whole)
    assert (text.stopped is not None) == bool(ends)
    # Only text that may begin a stop string is held back.
    seen = 0
    for i, piece in enumerate(pieces):
        seen += len(piece)
        done = sum(map(len, sent[: i + 1]))
        if not any(end <= seen for end, _ in ends):
            held = whole[done:seen]
            assert held == "" or any(s.startswith(held) and s != held for s in stops)


@settings(max_examples=examples(600), deadline=None)
@given(ids=st.lists(st.integers(2, 2047), max_size=30))
def test_pieces_make_up_the_text_of_all_tokens(ids: list[int]) -> None:
    """Random tokens may hold parts of characters, but every piece has whole characters."""
    text = StoppedText(TOKENIZER.stream())
    parts = list(map(text.push, ids))
    rest = text.finish()
    assert "".join(parts) + rest == TOKENIZER.decode(ids)


@settings(max_examples=examples(300), deadline=None)
@given(text=st.text(max_size=20))
def test_bytes_of_tokens_make_up_the_text(text: str) -> None:
    ids = TOKENIZER.backend.encode(text, add_special_tokens=False).ids
    assert bytes(b for token in ids for b in token_bytes(TOKENIZER, token)) == text.encode()


def test_bytes_of_special_tokens() -> None:
    assert bytes(token_bytes(TOKENIZER, 1)) == b"<|end_of_text|>"
