"""Drafts of a text's next tokens from the text itself: what followed its last few tokens when they
stood there before (prompt lookup decoding, Saxena 2023). Plain data, used by the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence

LENGTHS = (3, 2)
"""Tokens that must repeat, the longest first."""
MAX_PAUSE_TOKENS = 32


class Drafts:
    """Drafts for one text, which only grows."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, ...], int] = {}  # behind the latest time, by tokens
        self._known = 0
        self._misses = self._pause = 0

    def propose(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        """At most so many tokens that may follow. None while recent drafts were wrong."""
        for end in range(max(self._known, 1), len(tokens)):
            for length in LENGTHS:
                self._places[tuple(tokens[max(0, end - length) : end])] = end
        self._known = max(self._known, len(tokens))
        if self._pause > 0:
            self._pause -= 1
            return ()
        for length in LENGTHS:
            place = self._places.get(tuple(tokens[-length:]))
            if place is not None and len(tokens) >= length:
                repeated = [*tokens[place:]]
                while len(repeated) < most:  # the text may go on repeating itself
                    repeated += repeated
                return tuple(repeated[:most])
        return ()

    def learn(self, accepted: int) -> None:
        """So many tokens of the draft were right; after wrong ones the pause doubles."""
        self._misses = 0 if accepted else self._misses + 1
        self._pause = min((1 << self._misses) - 1, MAX_PAUSE_TOKENS)
