"""The route /v1/completions: continues texts or token ids, and returns texts, whole or as a stream.
Called by ark.serving.http.app.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from ark.serving.http.choices import Answer, Logprob, check_common, running_usage, sampling_of
from ark.serving.http.errors import unsupported
from ark.serving.http.forms import form_of
from ark.serving.http.jobs import Dispatcher, request_id
from ark.serving.http.model import ServedModel
from ark.serving.http.prompts import prompt_ids
from ark.serving.http.schema import CompletionRequest
from ark.serving.http.scores import scores

DEFAULT_MAX_TOKENS = 16  # as in OpenAI's interface


class Completion:
    """One request to /v1/completions, checked and submitted."""

    def __init__(self, model: ServedModel, asked: CompletionRequest, answer: Answer) -> None:
        self.answer = answer
        self.streamed = bool(asked.stream)
        self._model = model
        self._asked = asked
        self._options = asked.stream_options
        self._lengths = [0] * len(answer)  # characters sent so far, by choice
        self._common = {
            "id": request_id("cmpl"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": model.name,
        }
        # The text before each answer: the prompt if the body asks for an echo, otherwise empty.
        self._heads = [""] * len(answer)
        self._scores: list[Sequence[Logprob]] = [()] * len(answer)

    @classmethod
    async def begin(
        cls, model: ServedModel, dispatcher: Dispatcher, asked: CompletionRequest, timeout_s: float
    ) -> Completion:
        """Checks a body and submits it. Raises ApiError if it cannot be served."""
        model = model.named(asked.model)
        check_common(asked, model)
        _check(asked)
        max_tokens = asked.max_tokens
        if max_tokens is None:
            max_tokens = model.defaults.get("max_tokens") or DEFAULT_MAX_TOKENS
        form = form_of(asked)
        sampling = sampling_of(asked, model.defaults, max_tokens, asked.logprobs, form)
        prompts, texts = await prompt_ids(
            model,
            asked.prompt,
            "prompt",
            lambda count: dispatcher.check_room(count * sampling.n),
            lambda length, param: model.check_length(length, asked.max_tokens, param),
        )
        grammar = await model.grammar(form)
        scored: list[list[Logprob]] = [[] for _ in prompts]
        if asked.echo and asked.logprobs is not None:
            scored = await scores(dispatcher, model, prompts, asked.logprobs, timeout_s)
        answer = Answer(dispatcher, model, prompts, sampling, timeout_s, "cmpl", grammar)
        completion = cls(model, asked, answer)
        if asked.echo:
            completion._heads = [text for text in texts for _ in range(sampling.n)]
            completion._scores = [entries for entries in scored for _ in range(sampling.n)]
        return completion

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a stream."""
        async for piece in self.answer.pieces():
            text = self._heads[piece.index] + piece.text
            logprobs = [*self._scores[piece.index], *piece.logprobs]
            self._heads[piece.index], self._scores[piece.index] = "", ()
            choice = {
                "index": piece.index,
                "text": text,
                "logprobs": self._logprobs(piece.index, logprobs),
                "finish_reason": piece.finish,
            }
            usage = running_usage(self.answer, self._options)
            yield {**self._common, "choices": [choice], **usage}
        if self._options and self._options.include_usage:
            yield {**self._common, "choices": [], "usage": self.answer.usage()}

    async def whole(self) -> dict[str, Any]:
        """The whole answer."""
        texts = list(self._heads)
        logprobs = [list(entries) for entries in self._scores]
        finishes: list[str | None] = [None] * len(texts)
        async for piece in self.answer.pieces():
            texts[piece.index] += piece.text
            logprobs[piece.index] += piece.logprobs
            finishes[piece.index] = piece.finish
        choices = [
            {
                "index": i,
                "text": texts[i],
                "logprobs": self._logprobs(i, logprobs[i]),
                "finish_reason": finishes[i],
            }
            for i in range(len(texts))
        ]
        return {**self._common, "choices": choices, "usage": self.answer.usage()}

    def _logprobs(self, index: int, entries: Sequence[Logprob]) -> dict[str, Any] | None:
        if self._asked.logprobs is None:
            return None
        tokenizer = self._model.tokenizer
        tokens = [tokenizer.token_text(entry.token) for entry in entries]
        offsets = []
        for entry, text in zip(entries, tokens, strict=True):
            offsets.append(self._lengths[index])
            self._lengths[index] += 0 if entry.token in tokenizer.special_ids else len(text)
        return {
            "tokens": tokens,
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [
                None if entry.logprob is None else self._top(entry) for entry in entries
            ],
            "text_offset": offsets,
        }

    def _top(self, entry: Logprob) -> Mapping[str, float]:
        tokenizer = self._model.tokenizer
        return {tokenizer.token_text(token): logprob for token, logprob in entry.top.items()}


def _check(asked: CompletionRequest) -> None:
    """Raises ApiError for fields of completions that the server does not support."""
    if asked.best_of is not None and asked.best_of != (1 if asked.n is None else asked.n):
        raise unsupported("best_of", "best_of other than n is not supported; ask for n choices")
    if asked.suffix:
        raise unsupported("suffix", "suffix is not supported; omit it")
