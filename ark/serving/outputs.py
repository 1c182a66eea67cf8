"""The types of the results of `ark.LLM`. Names are vLLM's where they mean the same."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Logprob:
    """The natural logarithm of a token's probability, and the token's text."""

    logprob: float
    decoded_token: str


@dataclass(frozen=True)
class Timings:
    """Seconds from the call to the first token, and from the call to the end."""

    first_token_s: float
    total_s: float


@dataclass(frozen=True)
class CompletionOutput:
    """A text that continues a prompt.

    index: the sample's number. token_ids: the sampled tokens, the stop token included. logprobs:
    for each position, the sampled token and the most probable ones, by id; None if they were not
    requested. finish_reason: "stop" (a stop token or string) or "length". stop_reason: the stop
    string or stop token that ended the text; None if a checkpoint's end token did.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, Logprob], ...] | None
    finish_reason: str
    stop_reason: str | int | None
    timings: Timings

    @property
    def cumulative_logprob(self) -> float | None:
        """The logarithm of the probability of the whole text; None if log probabilities were not
        requested.
        """
        if self.logprobs is None:
            return None
        pairs = zip(self.token_ids, self.logprobs, strict=True)
        return sum(best[token].logprob for token, best in pairs)


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and the texts that continue it. prompt: None if the prompt was given as token
    ids.
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]


@dataclass(frozen=True)
class Chunk:
    """The next part of a text in a stream. index: the sample's number. finish_reason, stop_reason:
    see CompletionOutput; set in the last chunk only.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
