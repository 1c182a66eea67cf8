"""The data that the scheduler, the engine and ark.serving.rows exchange: the state of a request,
and the description of a step (one launch).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ark.serving.drafts import Drafts
from ark.serving.types import FinishReason, Guide, Request

COUNTED = ("repetition_penalty", "presence_penalty", "frequency_penalty")
"""Fields of SamplingParams whose effect depends on how often tokens occur in the text."""


@dataclass(eq=False)
class Progress:
    """The state of a request. tokens: the prompt and the sampled tokens. total: the most tokens
    that it may reach. adapter: the adapter's number, 0 for none. computed: the number of tokens,
    from the first on, whose keys and values are in pages. names: the names of the request's full
    pages. admissions: how often the request was admitted; it gets new pages each time. drafts: its
    drafts of next tokens. finish: why the request ended; the step that computed it may still be
    running. guide: the state of the text in the request's grammar. mask: a bit for each token that
    may come next; None until it is computed.
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
        """True if the next token may be sampled: the request needs no mask, or its mask is
        computed.
        """
        return self.guide is None or self.mask is not None

    @property
    def root(self) -> bytes:
        """The prefix of the first page's name. It has the adapter's number, because keys and values
        depend on the adapter.
        """
        return self.adapter.to_bytes(4, "little") if self.adapter else b""

    @property
    def last(self) -> int:
        """The index of the last known token, from which the device computes the next token."""
        return len(self.tokens) - 1

    @property
    def new(self) -> int:
        """The number of sampled tokens."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def room(self) -> int:
        """The most tokens of a useful draft. It is one less than the remaining tokens, because the
        step samples one token in addition to the draft.
        """
        return self.total - len(self.tokens) - 1

    @property
    def most(self) -> int:
        """The most tokens that the text can have after the next step. With a grammar, a step adds
        at most one token, because a mask of allowed tokens is valid for one token only.
        """
        return self.total if self.guide is None else min(self.total, len(self.tokens) + 1)

    def end(self, size: int) -> int:
        """The most tokens that the text can have after the next step if the request gets no further
        pages. size: the positions of a page.
        """
        return min(self.most, len(self.pages) * size + 1)

    def new_tokens(self, iterations: int, size: int) -> int:
        """The number of tokens that the request's row samples in `iterations` iterations."""
        reads = self.last - self.computed
        return max(0, min(iterations - reads, self.end(size) - len(self.tokens)))


Propose = Callable[[Sequence[Progress], int], Sequence[tuple[int, ...]]]
"""A function that returns, for each text, a draft of at most the given number of tokens."""


def lookup(texts: Sequence[Progress], most: int) -> list[tuple[int, ...]]:
    """Drafts from the texts themselves: if the last tokens have occurred before, the tokens that
    followed them there (ark.serving.drafts).
    """
    return [text.drafts.propose(text.tokens, most) for text in texts]


@dataclass(frozen=True)
class Chunks:
    """Chunks of a request's prompt that a step computes before the rows of the batch decode:
    `count` chunks from token `start` on. They end before the text's last token.
    """

    progress: Progress
    start: int
    count: int


@dataclass(frozen=True)
class Step:
    """The work of one launch: chunks of a prompt, then at most `iterations` iterations in which the
    rows of the batch decode. drafts: for each row, the draft tokens of its request. Other rows read
    these tokens, at the positions after the request's last token, to verify them. A step with
    drafts has a single iteration.
    """

    chunks: Chunks | None
    rows: tuple[Progress, ...]
    iterations: int
    drafts: tuple[tuple[int, ...], ...] = ()

    @property
    def chunk_count(self) -> int:
        """The number of chunks."""
        return 0 if self.chunks is None else self.chunks.count


@dataclass(frozen=True)
class Done:
    """The part of a step that the device has done: the numbers of chunks, and of iterations of the
    rows. They are smaller than planned if the host has ended the launch.
    """

    chunks: int
    iterations: int


@dataclass(frozen=True)
class Outcome:
    """The new tokens of a request, which a row of the batch has sampled. finish: why the request
    ended, or None.
    """

    progress: Progress
    tokens: tuple[int, ...]
    finish: FinishReason | None


def may_draft(progress: Progress) -> bool:
    """True if the request may use drafts. It may not if its sampling depends on counts of earlier
    tokens or on a grammar, if it reports log probabilities (which are read from one row only), or
    while min_tokens forbids stop tokens.
    """
    how = progress.request.sampling
    counted = any(name in COUNTED for name in how.beyond(()))
    return (
        not (counted or progress.guide) and how.logprobs is None and progress.new >= how.min_tokens
    )
