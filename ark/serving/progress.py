"""The data that scheduler, rows and engine exchange: the state of a request, and a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ark.serving.drafts import Drafts
from ark.serving.types import FinishReason, Guide, Request

COUNTED = ("repetition_penalty", "presence_penalty", "frequency_penalty")
"""Fields of SamplingParams that depend on the counts of tokens in a text."""


@dataclass(eq=False)
class Progress:
    """The state of a request. tokens: the prompt and the sampled tokens. total: the most tokens
    that it may reach. adapter: the adapter's number, 0 for none. computed: the number of first
    tokens whose keys and values are in pages. names: of its full pages. admissions: how often it
    was admitted, each time with new pages. drafts: proposals for its next tokens. finish: why it
    ended; the step may still run. guide: its state in its grammar. mask: the bits of the tokens
    that may come next; None until they are computed.
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
        """True if its next token may be sampled: it needs no mask, or the mask is computed."""
        return self.guide is None or self.mask is not None

    @property
    def root(self) -> bytes:
        """The prefix of its first page's name. It depends on the adapter, because keys and values
        do.
        """
        return self.adapter.to_bytes(4, "little") if self.adapter else b""

    @property
    def last(self) -> int:
        """The place of its last known token, which a row reads to compute the next one."""
        return len(self.tokens) - 1

    @property
    def new(self) -> int:
        """The number of sampled tokens."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def room(self) -> int:
        """The most tokens of a useful draft: the step itself samples one token more."""
        return self.total - len(self.tokens) - 1

    @property
    def most(self) -> int:
        """The most tokens after the next step. With a grammar a step adds one token at most, since
        a mask is valid for one token.
        """
        return self.total if self.guide is None else min(self.total, len(self.tokens) + 1)

    def end(self, size: int) -> int:
        """The most tokens after the next step with its present pages of `size` positions."""
        return min(self.most, len(self.pages) * size + 1)

    def new_tokens(self, iterations: int, size: int) -> int:
        """The number of tokens that `iterations` iterations in its row sample."""
        reads = self.last - self.computed
        return max(0, min(iterations - reads, self.end(size) - len(self.tokens)))


Propose = Callable[[Sequence[Progress], int], Sequence[tuple[int, ...]]]
"""A function that returns a draft of at most `int` tokens for each text."""


def lookup(texts: Sequence[Progress], most: int) -> list[tuple[int, ...]]:
    """Drafts from the texts themselves: the tokens that followed the last ones when they occurred
    before (ark.serving.drafts).
    """
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
    """The device's next work: chunks of a text, then at most `iterations` iterations of the rows.
    drafts: for each row, the tokens that additional rows read at the places after the request's
    last token. A step with drafts has a single iteration.
    """

    chunks: Chunks | None
    rows: tuple[Progress, ...]
    iterations: int
    drafts: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Outcome:
    """The tokens that a request has received from a row. finish: why it ended, if it did."""

    progress: Progress
    tokens: tuple[int, ...]
    finish: FinishReason | None


def may_draft(progress: Progress) -> bool:
    """True if the request may use drafts. It may not if its sampling depends on counts of earlier
    tokens or on a grammar, if it reports log probabilities (they are read from one row), or while
    min_tokens bars stop tokens.
    """
    how = progress.request.sampling
    counted = any(name in COUNTED for name in how.beyond(()))
    return (
        not (counted or progress.guide) and how.logprobs is None and progress.new >= how.min_tokens
    )
