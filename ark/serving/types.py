"""The types of an engine's interface: requests, events and statistics. Used by the engine,
`ark.LLM` and the server.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ark.models.sampling import SamplingParams


class FinishReason(enum.Enum):
    """The reason for which a request ended."""

    STOP = "stop"  # a stop token
    LENGTH = "length"  # max_tokens are sampled, or the context is full
    CANCELLED = "cancelled"
    ERROR = "error"  # the engine failed; the event's `error` has the reason


class Guide(Protocol):
    """The state of one text in a grammar, which determines the tokens that may come next. Used by
    one thread at a time.
    """

    def advance(self, tokens: Sequence[int]) -> np.ndarray | None:
        """Appends tokens to the text. The first call appends none.

        Returns a mask of the tokens that may follow, bool (vocabulary,), or None if the text is
        complete. Raises InvalidUsageError if the grammar is not supported.
        """


class Grammar(Protocol):
    """The form that a text must have (ark.serving.grammar)."""

    def begin(self) -> Guide:
        """The state before the first token."""


@dataclass(frozen=True)
class Request:
    """A prompt of token ids, and how to continue it.

    id: unique among the requests that have not ended. stop_token_ids: the tokens that end the text.
    They include the checkpoint's end tokens unless the sampling parameters ignore them. grammar:
    the grammar of the sampling parameters' structured outputs. adapter: the name of one of the
    engine's adapters, or "" for none.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    stop_token_ids: frozenset[int] = frozenset()
    grammar: Grammar | None = None
    adapter: str = ""


@dataclass(frozen=True)
class Event:
    """The progress of a request since its last event.

    tokens: the ids of the new tokens, often one. logprobs: the natural logarithm of each token's
    probability; empty if not requested. top_logprobs: for each token, the most probable ids at its
    position and their log probabilities. finish: set in the last event of a request. error: why the
    engine failed, or why it cancelled this request.
    """

    id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[dict[int, float], ...] = ()
    finish: FinishReason | None = None
    error: str = ""


@dataclass(frozen=True)
class LaunchRecord:
    """The record of a launch. It had `chunks` iterations, each of which computed chunk_rows tokens
    of a prompt, and then `iterations` iterations, each of which decoded a batch of `form` rows. Of
    these rows, `rows` had a request or a draft token.

    begin_s: time.monotonic() at its begin. time_us: its microseconds by the device's clock. While
    it runs, time_us is None and the numbers of iterations are the planned ones. chunk_us: the part
    of time_us that the chunks took, until the host read the first token; None if the host read no
    token in time.
    """

    begin_s: float
    chunks: int
    chunk_rows: int
    iterations: int
    form: int
    rows: int
    time_us: float | None = None
    chunk_us: float | None = None


@dataclass(frozen=True)
class Stats:
    """The engine's state between two steps, and counts of its work since it was opened. launches:
    the latest launches, oldest first.
    """

    slots: int
    running: int
    waiting: int
    pages: int
    free_pages: int
    prompt_tokens: int
    cached_prompt_tokens: int
    generated_tokens: int
    iterations: int
    preemptions: int
    slot_ids: tuple[str, ...] = field(default=())  # the request's id by slot, or ""
    launches: tuple[LaunchRecord, ...] = ()


class EngineLike(Protocol):
    """The interface of an engine. Every method may be called from any thread."""

    on_failure: Callable[[str], None]
    """Called once, with the reason, if the engine fails: its requests have ended then, and it
    refuses others. By default it logs a warning; the engine's owner may replace it.
    """

    @property
    def context(self) -> int:
        """The most positions of a request, its prompt included."""

    def submit(self, request: Request, on_event: Callable[[Event], None]) -> None:
        """Queues a request. on_event is called on the engine's thread and must return quickly.

        Raises InvalidUsageError for a prompt that cannot be served.
        """

    def cancel(self, request_id: str) -> None:
        """Ends a request with CANCELLED at the next iteration; unknown ids are ignored."""

    def stats(self) -> Stats:
        """The engine's current state and counts."""

    def close(self, drain: bool = False) -> None:
        """Closes the engine. drain: if True, submitted requests are finished first; otherwise they
        are cancelled.
        """
