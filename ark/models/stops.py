"""Ends a streamed text before the first stop string in it. Used by `ark generate`, `ark.LLM` and
the server.
"""

from __future__ import annotations

from collections.abc import Sequence

from ark.models.sampling import SamplingParams
from ark.models.tokenizer import TextStream


class StoppedText:
    """Decodes tokens one at a time, up to a stop string. If the text contains several stop strings,
    it ends before the one whose last character comes first. So the result does not depend on how
    the text is divided into tokens.

    A stop string may extend over several tokens. If the end of the text so far may be the beginning
    of a stop string, it is held back until this is decided. min_tokens: the number of first tokens
    in which stop strings are not searched. stopped: the string that ended the text, or None.
    """

    def __init__(self, text: TextStream, stops: Sequence[str] = (), min_tokens: int = 0) -> None:
        self.stopped: str | None = None
        self._unsearched = min_tokens
        self._text = text
        self._stops = tuple(stops)
        self._held = ""

    @classmethod
    def sampled(cls, text: TextStream, sampling: SamplingParams) -> StoppedText:
        """A StoppedText with the stop strings of a request's sampling parameters."""
        return cls(text, sampling.stop, sampling.min_tokens)

    def push(self, token: int) -> str:
        """The text that `token` completes; empty after a stop string."""
        if self.stopped is not None:
            return ""
        piece = self._text.push(token)
        if self._unsearched:
            self._unsearched -= 1
            return piece
        return self._advance(piece)

    def finish(self) -> str:
        """The text that was still held back. Called after the last token."""
        if self.stopped is not None:
            return ""
        last = self._advance(self._text.finish())
        rest, self._held = self._held, ""
        return last + ("" if self.stopped is not None else rest)

    def _advance(self, piece: str) -> str:
        text = self._held + piece
        places = [
            (at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0
        ]
        if places:
            # If the text contains several stop strings, the one that ends first is taken, so that
            # the result does not depend on how the text is divided into tokens.
            _, end, self.stopped = min(places)
            self._held = ""
            return text[:end]
        shown = len(text) - max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[shown:]
        return text[:shown]


def overlap(text: str, stop: str) -> int:
    """The length of the longest beginning of `stop` with which `text` ends."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)
