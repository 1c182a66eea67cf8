"""Computes log probabilities of a prompt's tokens, for requests with `echo` and `logprobs`, such as
those of lm-eval.

The engine reports log probabilities of sampled tokens only, not of prompt tokens. So a request is
submitted whose prompt is only the first token of the real prompt. A grammar then forces the engine
to sample the other tokens of the real prompt, one per iteration. Called by the route of
completions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ark.models.sampling import SamplingParams
from ark.serving.http.choices import Logprob, failure, timeout
from ark.serving.http.jobs import Dispatcher
from ark.serving.http.model import ServedModel
from ark.serving.types import Event, FinishReason


@dataclass(frozen=True)
class Dictated:
    """A grammar that allows one fixed sequence of tokens; implements ark.serving.types.Grammar."""

    tokens: Sequence[int]
    vocabulary: int

    def begin(self) -> Dictation:
        """The state before the first token of the fixed sequence."""
        return Dictation(self)


class Dictation:
    """The current place in the fixed sequence; implements ark.serving.types.Guide."""

    def __init__(self, text: Dictated) -> None:
        self._text, self._place = text, 0

    def advance(self, tokens: Sequence[int]) -> np.ndarray | None:
        """The mask that allows only the next token of the sequence; None after the last one."""
        self._place += len(tokens)
        if self._place == len(self._text.tokens):
            return None
        allowed = np.zeros(self._text.vocabulary, bool)
        allowed[self._text.tokens[self._place]] = True
        return allowed


async def scores(
    dispatcher: Dispatcher,
    model: ServedModel,
    prompts: Sequence[Sequence[int]],
    count: int,
    timeout_s: float,
) -> list[list[Logprob]]:
    """For each prompt, the log probability of each of its tokens, and the `count` most probable
    tokens at each position. The first token has no log probability.
    """
    requests = []
    for prompt in prompts:
        sampling = SamplingParams(max_tokens=max(1, len(prompt) - 1), logprobs=count)
        grammar = Dictated(prompt[1:], model.vocab_size)
        requests.append((prompt[:1], sampling, frozenset[int](), grammar))
    scored = [[Logprob(prompt[0], None, {})] for prompt in prompts]
    longer = [place for place, prompt in enumerate(prompts) if len(prompt) > 1]
    job = dispatcher.submit("score", [requests[place] for place in longer], model.adapter)

    async def read() -> None:
        left = len(longer)
        while left:
            for index, event in await job.events():
                if event.finish in (FinishReason.ERROR, FinishReason.CANCELLED):
                    raise failure(event)
                scored[longer[index]] += entries(event)
                left -= event.finish is not None

    try:
        await asyncio.wait_for(read(), timeout_s)
    except asyncio.TimeoutError:
        raise timeout(timeout_s) from None
    finally:
        job.cancel()
    return scored


def entries(event: Event) -> list[Logprob]:
    """The log probabilities of an event's tokens."""
    return list(map(Logprob, event.tokens, event.logprobs, event.top_logprobs))
