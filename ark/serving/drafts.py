"""Drafts a text's next tokens from the text itself: the last few tokens are searched for earlier in
the text, and the tokens that followed them there are the draft (prompt lookup decoding, Saxena
2023). Used by the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence

LENGTHS = (3, 2)
"""The numbers of last tokens that are searched for earlier in the text, the largest first."""
MAX_PAUSE_TOKENS = 32


def right_tokens(draft: Sequence[int], tokens: Sequence[int]) -> int:
    """The number of tokens at the beginning of a draft that equal `tokens`, which the model has
    sampled.
    """
    pairs = enumerate(zip(draft, tokens, strict=False))
    return next((n for n, (ours, own) in pairs if ours != own), min(len(draft), len(tokens)))


def shortened(drafts: Sequence[tuple[int, ...]], room: int) -> list[tuple[int, ...]]:
    """The drafts, shortened to at most `room` tokens in all. The longest ones are shortened first,
    because a draft's first tokens are right most often.
    """
    lengths = [len(draft) for draft in drafts]
    while sum(lengths) > room:
        longest = max(range(len(lengths)), key=lambda n: (lengths[n], n))
        lengths[longest] -= 1
    return [draft[:length] for draft, length in zip(drafts, lengths, strict=True)]


class Drafts:
    """Proposes next tokens for one text. The text may only grow at its end."""

    def __init__(self) -> None:
        # Maps each short sequence of tokens of the text to the index after its latest occurrence.
        self._places: dict[tuple[int, ...], int] = {}
        self._known = 0
        self._misses = self._pause = 0

    def propose(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        """A draft of at most `most` tokens; empty while drafting is paused or if the last tokens
        have not occurred before.
        """
        for end in range(max(self._known, 1), len(tokens)):
            for length in LENGTHS:
                self._places[tuple(tokens[max(0, end - length) : end])] = end
        self._known = max(self._known, len(tokens))
        if self.paused():
            return ()
        for length in LENGTHS:
            place = self._places.get(tuple(tokens[-length:]))
            if place is not None and len(tokens) >= length:
                repeated = [*tokens[place:]]
                while len(repeated) < most:  # assume that the repetition continues
                    repeated += repeated
                return tuple(repeated[:most])
        return ()

    def paused(self) -> bool:
        """True while drafting is paused because recent drafts were wrong. Must be called once a
        step, because each call counts down the pause.
        """
        if self._pause == 0:
            return False
        self._pause -= 1
        return True

    def learn(self, accepted: int) -> None:
        """Records that the first `accepted` tokens of the draft were right. If none was, the next
        pause is about twice as long.
        """
        self._misses = 0 if accepted else self._misses + 1
        self._pause = min((1 << self._misses) - 1, MAX_PAUSE_TOKENS)
