"""What an engine is asked and what it answers. Used by the engine, `ark.LLM` and the server."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ark.models.sampling import SamplingParams


class FinishReason(enum.Enum):
    """Why a request ended."""

    STOP = "stop"  # a stop token
    LENGTH = "length"  # max_tokens were made, or the context is full
    CANCELLED = "cancelled"
    ERROR = "error"  # the engine failed; the event's text says why


class Guide(Protocol):
    """The state of one text within a grammar. Used by one thread at a time."""

    def advance(self, tokens: Sequence[int]) -> np.ndarray | None:
        """Takes the text's next tokens, which are none at first.

        Returns which tokens may follow, bool (vocabulary,), or None where the text is complete.
        InvalidUsageError where the grammar cannot be followed.
        """


class Grammar(Protocol):
    """The form that a text must have (ark.serving.grammar)."""

    def begin(self) -> Guide:
        """The state before the first token."""


@dataclass(frozen=True)
class Request:
    """A prompt of token ids and how it is continued.

    id: unique among those that have not ended. stop_token_ids: end tokens of the checkpoint
    included, unless the sampling ignores them. grammar: of the sampling's structured outputs.
    adapter: the name of one that the engine has, or "" for none.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    stop_token_ids: frozenset[int] = frozenset()
    grammar: Grammar | None = None
    adapter: str = ""


@dataclass(frozen=True)
class Event:
    """What happened to a request since its last event.

    tokens: ids that were made, often one. logprobs: of each of them its natural logarithm of
    probability, or empty where none was asked for. top_logprobs: of each of them the most probable
    ids with theirs. finish: set in the last event of a request. error: why the engine failed, or
    why it cancelled this request by itself.
    """

    id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[dict[int, float], ...] = ()
    finish: FinishReason | None = None
    error: str = ""


@dataclass(frozen=True)
class Stats:
    """The engine's state between two steps, and counts since it was opened."""

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
    slot_ids: tuple[str, ...] = field(default=())  # of each slot its request's id, or ""


class EngineLike(Protocol):
    """An engine. Every method may be called from any thread."""

    @property
    def context(self) -> int:
        """Positions that a request may have, its prompt included."""

    def submit(self, request: Request, on_event: Callable[[Event], None]) -> None:
        """Queues a request. on_event is called on the engine's thread and must return quickly.

        Raises InvalidUsageError for a prompt that cannot be served.
        """

    def cancel(self, request_id: str) -> None:
        """Ends a request with CANCELLED at the next iteration; unknown ids are ignored."""

    def stats(self) -> Stats:
        """What the engine does now."""

    def close(self, drain: bool = False) -> None:
        """Ends the engine. drain: first finish what was submitted; else requests are cancelled."""
