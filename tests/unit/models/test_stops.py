"""Stop strings in text that arrives token by token, compared with a search of the whole text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from ark.models.stops import StoppedText
from ark.models.tokenizer import Tokenizer

PIECES = ["a", "b", "ab", "ba", "aab", "e", "n", "d", "en", "nd", "\u00e9", " "]
BACKEND = Backend(models.WordLevel({piece: i for i, piece in enumerate(PIECES)}, unk_token=" "))
BACKEND.decoder = decoders.Fuse()
TOKENIZER = Tokenizer(BACKEND)


def streamed(tokens: list[int], stops: list[str]) -> tuple[list[str], str | None]:
    text = StoppedText(TOKENIZER.stream(), stops)
    pieces = [text.push(token) for token in tokens]
    return [*pieces, text.finish()], text.stopped


@given(
    st.lists(st.integers(0, len(PIECES) - 1), max_size=30),
    st.lists(st.text("abend \u00e9", min_size=1, max_size=5), max_size=4),
)
def test_text_ends_before_the_first_stop_string(tokens: list[int], stops: list[str]) -> None:
    whole = "".join(PIECES[t] for t in tokens)
    pieces, stopped = streamed(tokens, stops)
    ends = [end for end in range(len(whole) + 1) if whole[:end].endswith(tuple(stops))]
    if not stops or not ends:
        assert stopped is None
        assert "".join(pieces) == whole
        return
    longest = max((stop for stop in stops if whole[: ends[0]].endswith(stop)), key=len)
    assert stopped == longest
    assert "".join(pieces) == whole[: ends[0] - len(longest)]


@given(st.lists(st.integers(0, len(PIECES) - 1), max_size=30))
def test_no_part_of_a_stop_string_is_shown(tokens: list[int]) -> None:
    """Text that may become a stop string is held back, and no more than that."""
    stops = ("end", "abba")
    text = StoppedText(TOKENIZER.stream(), stops)
    shown, whole = "", ""
    for token in tokens:
        shown += text.push(token)
        whole += PIECES[token]
        if text.stopped is not None:
            break
        parts = [stop[:n] for stop in stops for n in range(1, len(stop))]
        held = max((len(part) for part in parts if whole.endswith(part)), default=0)
        assert shown == whole[: len(whole) - held]


def test_stop_string_over_three_tokens_is_never_shown() -> None:
    pieces, stopped = streamed([PIECES.index(p) for p in ("ab", "e", "n", "d", "b")], ["end"])
    assert pieces == ["ab", "", "", "", "", ""]
    assert stopped == "end"
    pieces, stopped = streamed([PIECES.index(p) for p in ("ab", "e", "n", "a")], ["end"])
    assert pieces == ["ab", "", "", "ena", ""]
    assert stopped is None


def test_first_min_tokens_are_not_searched() -> None:
    text = StoppedText(TOKENIZER.stream(), ["a"], min_tokens=2)
    pieces = [text.push(PIECES.index(piece)) for piece in ("a", "ba", "b", "ab", "n")]
    assert ("".join(pieces), text.stopped) == ("abab", "a")
