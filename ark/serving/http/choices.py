"""Submits a checked request to the engine and converts the events of its choices to pieces of the
answer. Shared by the routes of completions and chats.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ark.errors import InvalidUsageError
from ark.models.sampling import SamplingParams
from ark.models.stops import StoppedText
from ark.serving.http.errors import SERVER_ERROR, ApiError
from ark.serving.http.forms import Form
from ark.serving.http.jobs import Dispatcher, Job, refused
from ark.serving.http.model import ServedModel
from ark.serving.http.schema import ChatRequest, CompletionRequest, StreamOptions
from ark.serving.types import Event, FinishReason, Grammar

CONTEXT_TOKENS = 16  # the prompt's last tokens, which the text of new tokens can depend on


@dataclass(frozen=True)
class Logprob:
    """A token and the logarithm of its probability; None for a text's first token, which has no
    probability. top: the most probable tokens at this position.
    """

    token: int
    logprob: float | None
    top: Mapping[int, float]


@dataclass
class Piece:
    """The next part of a choice (one of the answers to a request). finish: the reason why the
    choice ends; set in its last piece only. tokens: the number of tokens in the piece.
    """

    index: int
    text: str
    finish: str | None = None
    tokens: int = 0
    logprobs: list[Logprob] = field(default_factory=list)


class Choice:
    """One choice (answer) of a request that is in progress. shown: by id, the texts of the special
    tokens that are included in the answer's text.
    """

    def __init__(
        self,
        index: int,
        text: StoppedText,
        stop_token_ids: frozenset[int],
        shown: Mapping[int, str],
    ) -> None:
        self.ended = False
        self._shown = shown
        self._index = index
        self._text = text
        self._stops = stop_token_ids
        self._kept = Piece(index, "")

    def take(self, events: Sequence[Event]) -> Piece | None:
        """Returns the piece that these events complete, or None if there is no text to send yet."""
        kept = self._kept
        for event in events:
            self._add(event, kept)
            if self.ended:
                break
        if not kept.text and kept.finish is None:
            return None
        self._kept = Piece(self._index, "")
        return kept

    def _add(self, event: Event, kept: Piece) -> None:
        if event.finish is FinishReason.ERROR:
            raise failure(event)
        tokens = event.tokens
        kept.tokens += len(tokens)
        if event.logprobs:
            tops = event.top_logprobs or ({},) * len(tokens)
            kept.logprobs += map(Logprob, tokens, event.logprobs, tops)
        if event.finish is FinishReason.STOP and tokens and tokens[-1] in self._stops:
            tokens = tokens[:-1]  # the stop token is not part of the text
        for token in tokens:
            kept.text += self._shown.get(token, "") or self._text.push(token)
        if event.finish is not None:
            kept.text += self._text.finish()
        if self._text.stopped is not None:
            kept.finish = FinishReason.STOP.value
        elif event.finish is FinishReason.CANCELLED:
            raise failure(event)
        elif event.finish is not None:
            kept.finish = event.finish.value
        self.ended = kept.finish is not None


class Answer:
    """The choices of a request, submitted to the engine. Iterate over `pieces`, then `close`."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        model: ServedModel,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        timeout_s: float,
        name: str,
        grammar: Grammar | None = None,
        shown: Mapping[int, str] | None = None,
    ) -> None:
        self.prompt_tokens = sum(map(len, prompts))
        self.completion_tokens = 0
        ends = frozenset() if sampling.ignore_eos else model.stop_token_ids
        stops = ends | frozenset(sampling.stop_token_ids)
        samplings = [sampling.sample(i) for i in range(sampling.n)]
        requests = [(prompt, one, stops, grammar) for prompt in prompts for one in samplings]
        self._choices = [
            Choice(
                i,
                StoppedText.sampled(model.tokenizer.stream(prompt[-CONTEXT_TOKENS:]), sampling),
                stops,
                shown or {},
            )
            for i, (prompt, *_) in enumerate(requests)
        ]
        self._job: Job = dispatcher.submit(name, requests, model.adapter)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(timeout_s, self._job.end, timeout(timeout_s))

    def __len__(self) -> int:
        return len(self._choices)

    async def pieces(self) -> AsyncIterator[Piece]:
        """The pieces of all choices in the order of their arrival. Raises ApiError if the answer
        cannot be finished.
        """
        while not all(choice.ended for choice in self._choices):
            events = await self._job.events()
            arrived: dict[int, list[Event]] = {}
            for index, event in events:
                arrived.setdefault(index, []).append(event)
            for index, some in arrived.items():
                choice = self._choices[index]
                piece = None if choice.ended else choice.take(some)
                if piece is not None:
                    self.completion_tokens += piece.tokens
                    if choice.ended:
                        self._job.cancel(index)
                    yield piece

    def close(self) -> None:
        """Frees the slots of choices that have not ended. Must be called at the end."""
        self._timer.cancel()
        self._job.cancel()

    def usage(self) -> dict[str, int]:
        """The numbers of prompt and answer tokens, as the object `usage` of OpenAI's API."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


def running_usage(answer: Answer, options: StreamOptions | None) -> dict[str, Any]:
    """The field `usage` of a chunk that is not the last. Empty unless the request asks for it."""
    asked = options is not None and options.include_usage and options.continuous_usage_stats
    return {"usage": answer.usage()} if asked else {}


def failure(event: Event) -> ApiError:
    """The error for a choice that the engine has ended with ERROR or CANCELLED."""
    if event.finish is FinishReason.ERROR:
        reason = event.error or "the engine has failed"
        return ApiError(500, reason, kind=SERVER_ERROR, code="engine_failed")
    if event.error:
        return ApiError(400, event.error, code="form_failed")
    return ApiError(500, "the request was cancelled", kind=SERVER_ERROR, code="cancelled")


def timeout(limit_s: float) -> ApiError:
    """The error for a request that exceeded its time limit."""
    return ApiError(
        504,
        f"the request took longer than the server's limit of {limit_s:g} s; request fewer tokens, "
        "or start the server with a larger --timeout",
        kind=SERVER_ERROR,
        code="timeout",
    )


def sampling_of(
    asked: CompletionRequest | ChatRequest,
    defaults: Mapping[str, Any],
    max_tokens: int | None,
    logprobs: int | None,
    form: Form | None,
    names: Mapping[str, str] | None = None,
) -> SamplingParams:
    """The sampling parameters that a body asks for. defaults: values for fields that the body
    omits; they take precedence over the defaults of SamplingParams. form: the form of the text.
    names: for fields that have another name in the body than in SamplingParams, the body's name.
    """
    same = (
        *("n", "temperature", "top_p", "min_p", "typical_p", "repetition_penalty"),
        *("presence_penalty", "frequency_penalty", "logit_bias", "seed", "min_tokens"),
        *("ignore_eos", "top_k", "stop", "stop_token_ids"),
    )
    given = {name: value for name in same if (value := getattr(asked, name)) is not None}
    given |= {"max_tokens": max_tokens, "logprobs": logprobs}
    given["structured_outputs"] = None if form is None else form.params
    try:
        return SamplingParams(**{**defaults, **given})
    except InvalidUsageError as error:
        raise refused(error, names) from None


def check_common(asked: CompletionRequest | ChatRequest, model: ServedModel) -> None:
    """Raises ApiError for fields that neither completions nor chats support, and for ids outside
    the vocabulary.
    """
    model.check_tokens(list(asked.logit_bias or ()), "logit_bias")
    model.check_tokens(asked.stop_token_ids or (), "stop_token_ids")
    if asked.stream_options is not None and not asked.stream:
        raise ApiError(
            400,
            "stream_options needs stream to be true; set stream, or omit stream_options",
            param="stream_options",
        )
