"""/v1/chat/completions: a conversation in, the next message out, whole or as a stream."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from ark.server.choices import Answer, Logprob, check_common, sampling_of
from ark.server.errors import ApiError, unsupported
from ark.server.jobs import Dispatcher, request_id
from ark.server.model import ServedModel
from ark.server.schema import ChatRequest
from ark.server.text import token_bytes

RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message", "template")


class Chat:
    """One request to /v1/chat/completions, checked and submitted."""

    def __init__(self, model: ServedModel, asked: ChatRequest, answer: Answer) -> None:
        self.answer = answer
        self.streamed = bool(asked.stream)
        self._model = model
        self._logprobs_asked = bool(asked.logprobs)
        self._options = asked.stream_options
        self._common: dict[str, Any] = {
            "id": request_id("chatcmpl"),
            "object": "chat.completion.chunk" if asked.stream else "chat.completion",
            "created": int(time.time()),
            "model": model.name,
        }

    @classmethod
    async def begin(
        cls, model: ServedModel, dispatcher: Dispatcher, asked: ChatRequest, timeout_s: float
    ) -> Chat:
        """Checks a body and submits it; ApiError where it cannot be served."""
        check_common(asked, model)
        _check(asked)
        most = asked.max_completion_tokens or asked.max_tokens
        logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
        prompt = await model.chat_tokens(
            asked.messages,
            generation_prompt=asked.add_generation_prompt is not False,
            values=asked.chat_template_kwargs,
        )
        model.check_length(len(prompt), most, "messages")
        most = most or model.defaults.get("max_tokens")
        sampling = sampling_of(asked, model.defaults, most, logprobs)
        answer = Answer(dispatcher, model, [prompt], sampling, timeout_s, "chat")
        return cls(model, asked, answer)

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a stream; the first of each choice has its role."""
        opened: set[int] = set()
        async for piece in self.answer.pieces():
            if piece.index not in opened:
                opened.add(piece.index)
                yield self._chunk(piece.index, {"role": "assistant", "content": ""}, None, None)
            if piece.text or piece.logprobs:
                logprobs = self._logprobs(piece.logprobs)
                yield self._chunk(piece.index, {"content": piece.text}, logprobs, None)
            if piece.finish is not None:
                yield self._chunk(piece.index, {}, None, piece.finish)
        if self._options and self._options.include_usage:
            yield {**self._common, "choices": [], "usage": self.answer.usage()}

    async def whole(self) -> dict[str, Any]:
        """The whole answer."""
        number = len(self.answer)
        texts, finishes = [""] * number, [""] * number
        logprobs: list[list[Logprob]] = [[] for _ in texts]
        async for piece in self.answer.pieces():
            texts[piece.index] += piece.text
            logprobs[piece.index] += piece.logprobs
            finishes[piece.index] = piece.finish or ""
        choices = [
            {
                "index": i,
                "message": {"role": "assistant", "content": texts[i]},
                "logprobs": self._logprobs(logprobs[i]),
                "finish_reason": finishes[i],
            }
            for i in range(number)
        ]
        return {**self._common, "choices": choices, "usage": self.answer.usage()}

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, finish: str | None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return {**self._common, "choices": [choice]}

    def _logprobs(self, entries: Sequence[Logprob]) -> dict[str, Any] | None:
        if not self._logprobs_asked:
            return None
        content = []
        for entry in entries:
            top = [self._token(token, logprob) for token, logprob in entry.top.items()]
            content.append({**self._token(entry.token, entry.logprob), "top_logprobs": top})
        return {"content": content}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        tokenizer = self._model.tokenizer
        text, data = tokenizer.token_text(token), token_bytes(tokenizer, token)
        return {"token": text, "logprob": logprob, "bytes": data}


def _check(asked: ChatRequest) -> None:
    """ApiError for fields of chats whose meaning the server does not have."""
    if asked.tools:
        raise unsupported("tools", "tools are not supported; omit them")
    if asked.tool_choice not in (None, "none", "auto"):
        raise unsupported("tool_choice", "tool_choice needs tools, which are not supported")
    if asked.top_logprobs is not None and not asked.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true; set it", param="top_logprobs")
    if asked.max_completion_tokens is not None and asked.max_tokens is not None:
        raise ApiError(
            400,
            "max_tokens and max_completion_tokens mean the same; give one of them",
            param="max_tokens",
        )
    for name in asked.chat_template_kwargs or {}:
        if name in RESERVED or not name.isidentifier():
            raise ApiError(
                400,
                f"chat_template_kwargs cannot set {name!r:.60}; use the request's own field",
                param="chat_template_kwargs",
            )
