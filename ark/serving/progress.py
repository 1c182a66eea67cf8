"""A request as the scheduler sees it, and a step of the engine: what flows between scheduler, rows
and engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ark.serving.drafts import Drafts
from ark.serving.types import FinishReason, Guide, Request

COUNTED = ("repetition_penalty", "presence_penalty", "frequency_penalty")
"""Fields of SamplingParams that count the tokens of a text."""


@dataclass(eq=False)
class Progress:
    """A request and how far it is. tokens: its prompt and what was made. total: tokens that it has
    at most in the end. adapter: its number, 0 for none. computed: tokens whose keys and values lie
    in pages. names: of its full pages. admissions: how often it was given pages anew. drafts: of
    its next tokens. finish: why it ended, in a step that may still run. guide, mask: its place in
    its grammar, and the bits of the tokens that it allows next, None until they are known.
    """

    request: Request
    tokens: list[int]
    total: int
    adapter: int = 0
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)
    admissions: int = 0
    drafts: Drafts = field(default_factory=Drafts)
    finish: FinishReason | None = None
    guide: Guide | None = None
    mask: np.ndarray | None = None

    @property
    def masked(self) -> bool:
        """True where its next token may be sampled: its mask is there, if it needs one."""
        return self.guide is None or self.mask is not None

    @property
    def root(self) -> bytes:
        """What its first page's name begins with: an adapter's keys and values are its own."""
        return self.adapter.to_bytes(4, "little") if self.adapter else b""

    @property
    def last(self) -> int:
        """The place of its last known token, which a row reads to make the next one."""
        return len(self.tokens) - 1

    @property
    def new(self) -> int:
        """Tokens that were made."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def room(self) -> int:
        """The most tokens of a draft that it may use: another token follows them."""
        return self.total - len(self.tokens) - 1

    @property
    def most(self) -> int:
        """Tokens that it may have at the end of a step: a mask is of the next one alone."""
        return self.total if self.guide is None else min(self.total, len(self.tokens) + 1)

    def end(self, size: int) -> int:
        """Tokens that it may have with the pages that it has, of `size` positions."""
        return min(self.most, len(self.pages) * size + 1)

    def new_tokens(self, iterations: int, size: int) -> int:
        """Tokens that so many iterations in its row make."""
        reads = self.last - self.computed
        return max(0, min(iterations - reads, self.end(size) - len(self.tokens)))


Propose = Callable[[Sequence[Progress], int], Sequence[tuple[int, ...]]]
"""By text, up to so many tokens that may follow it."""


def lookup(texts: Sequence[Progress], most: int) -> list[tuple[int, ...]]:
    """Proposes what followed a text's last tokens before (ark.serving.drafts)."""
    return [text.drafts.propose(text.tokens, most) for text in texts]


@dataclass(frozen=True)
class Chunks:
    """Chunks of a request's text that are computed before rows decode: `count` of them from place
    `start` on. They end before the text's last token.
    """

    progress: Progress
    start: int
    count: int


@dataclass(frozen=True)
class Step:
    """What the device does next: chunks of a text, then at most so many iterations of the first
    rows. drafts: by row, the tokens that further rows read behind the last one of its request, at
    the places that follow; the iteration is a single one then.
    """

    chunks: Chunks | None
    rows: tuple[Progress, ...]
    iterations: int
    drafts: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Outcome:
    """Tokens that a row made for a request, and why it ended, if it did."""

    progress: Progress
    tokens: tuple[int, ...]
    finish: FinishReason | None


def may_draft(progress: Progress) -> bool:
    """True where a row samples by what the device has of the request before the step: no counts of
    its tokens, no log probabilities that are read row by row, no stop tokens held back.
    """
    how = progress.request.sampling
    counted = any(name in COUNTED for name in how.beyond(()))
    return (
        not (counted or progress.guide) and how.logprobs is None and progress.new >= how.min_tokens
    )
