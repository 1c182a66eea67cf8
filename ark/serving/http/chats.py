"""The route /v1/chat/completions: answers a conversation with the next message, whole or as a
stream. Called by ark.serving.http.app.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from ark.serving.http.calls import ForcedReader, Reader
from ark.serving.http.choices import (
    Answer,
    Logprob,
    Piece,
    check_common,
    running_usage,
    sampling_of,
)
from ark.serving.http.errors import ApiError, unsupported
from ark.serving.http.forms import Form, call_form, form_of
from ark.serving.http.jobs import Dispatcher, request_id
from ark.serving.http.model import ServedModel
from ark.serving.http.schema import ChatRequest, Tool, ToolChoice
from ark.serving.http.text import token_bytes
from ark.serving.types import FinishReason

RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message", "template")


class Chat:
    """One request to /v1/chat/completions, checked and submitted."""

    def __init__(self, model: ServedModel, asked: ChatRequest, answer: Answer) -> None:
        self.answer = answer
        self.streamed = bool(asked.stream)
        self._model = model
        self._logprobs_asked = bool(asked.logprobs)
        self._options = asked.stream_options
        self._replies = [_Reply(_reader(asked, model)) for _ in range(len(answer))]
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
        """Checks a body and submits it. Raises ApiError if it cannot be served."""
        model = model.named(asked.model)
        check_common(asked, model)
        _check(asked)
        tools, form = _tools(asked, model)
        most, names = asked.max_tokens, {"logprobs": "top_logprobs"}
        if asked.max_completion_tokens is not None:
            most, names["max_tokens"] = asked.max_completion_tokens, "max_completion_tokens"
        logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
        limit = model.defaults.get("max_tokens") if most is None else most
        sampling = sampling_of(asked, model.defaults, limit, logprobs, form, names)
        prompt = await model.chat_tokens(
            asked.messages,
            tools,
            generation_prompt=asked.add_generation_prompt is not False,
            values=asked.chat_template_kwargs,
        )
        model.check_length(len(prompt), most, "messages")
        grammar = await model.grammar(form)
        marks = model.special_marks if tools else None
        answer = Answer(dispatcher, model, [prompt], sampling, timeout_s, "chat", grammar, marks)
        return cls(model, asked, answer)

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a stream. The first chunk of each choice has the role."""
        opened: set[int] = set()
        async for piece in self.answer.pieces():
            if piece.index not in opened:
                opened.add(piece.index)
                yield self._chunk(piece.index, {"role": "assistant", "content": ""}, None, None)
            reply = self._replies[piece.index]
            deltas = reply.take(piece)
            if piece.logprobs and not deltas:
                deltas = [{"content": ""}]
            logprobs = self._logprobs(piece.logprobs)
            for delta in deltas:
                yield self._chunk(piece.index, delta, logprobs, None)
                logprobs = None
            if piece.finish is not None:
                yield self._chunk(piece.index, {}, None, reply.finish)
        if self._options and self._options.include_usage:
            yield {**self._common, "choices": [], "usage": self.answer.usage()}

    async def whole(self) -> dict[str, Any]:
        """The whole answer."""
        logprobs: list[list[Logprob]] = [[] for _ in self._replies]
        async for piece in self.answer.pieces():
            self._replies[piece.index].take(piece)
            logprobs[piece.index] += piece.logprobs
        choices = [
            {
                "index": i,
                "message": reply.message(),
                "logprobs": self._logprobs(logprobs[i]),
                "finish_reason": reply.finish,
            }
            for i, reply in enumerate(self._replies)
        ]
        return {**self._common, "choices": choices, "usage": self.answer.usage()}

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, finish: str | None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        usage = running_usage(self.answer, self._options)
        return {**self._common, "choices": [choice], **usage}

    def _logprobs(self, entries: Sequence[Logprob]) -> dict[str, Any] | None:
        if not self._logprobs_asked:
            return None
        content = []
        for entry in entries:
            top = [self._token(token, logprob) for token, logprob in entry.top.items()]
            content.append({**self._token(entry.token, entry.logprob), "top_logprobs": top})
        return {"content": content}

    def _token(self, token: int, logprob: float | None) -> dict[str, Any]:
        tokenizer = self._model.tokenizer
        text, data = tokenizer.token_text(token), token_bytes(tokenizer, token)
        return {"token": text, "logprob": logprob, "bytes": data}


class _Reply:
    """The message of a choice so far: its text and its calls of tools."""

    def __init__(self, reader: Reader | ForcedReader) -> None:
        self.finish = ""
        self._reader = reader
        self._text = ""
        self._calls: list[dict[str, Any]] = []

    def take(self, piece: Piece) -> list[dict[str, Any]]:
        """Appends a piece to the message. Returns the changes as OpenAI's `delta` objects."""
        parts = self._reader.push(piece.text)
        if piece.finish is not None:
            parts += self._reader.finish()
        deltas: list[dict[str, Any]] = []
        for part in parts:
            if isinstance(part, str):
                self._text += part
                deltas.append({"content": part})
            else:
                call = part.content()
                deltas.append({"tool_calls": [{"index": len(self._calls), **call}]})
                self._calls.append(call)
        if piece.finish is not None:
            called = bool(self._calls) and piece.finish == FinishReason.STOP.value
            self.finish = "tool_calls" if called else piece.finish
        return deltas

    def message(self) -> dict[str, Any]:
        """The whole message."""
        if not self._calls:
            return {"role": "assistant", "content": self._text}
        content = self._text.strip() and self._text
        return {"role": "assistant", "content": content or None, "tool_calls": self._calls}


def _reader(asked: ChatRequest, model: ServedModel) -> Reader | ForcedReader:
    """The reader that splits the answer's text into content and calls, according to tool_choice."""
    choice = asked.tool_choice
    if isinstance(choice, ToolChoice):
        return ForcedReader(choice.function.name)
    if choice == "required":
        return ForcedReader(None)
    return Reader(model.call_format if asked.tools and choice != "none" else None)


def _tools(asked: ChatRequest, model: ServedModel) -> tuple[Sequence[Tool] | None, Form | None]:
    """The tools that the chat template renders into the prompt, and the form (JSON schema) that the
    answer must follow; None where the request needs none.
    """
    form, choice = form_of(asked), asked.tool_choice
    tools = asked.tools or []
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise ApiError(400, "two tools have the same name; name them differently", param="tools")
    if not tools:
        if choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice needs tools; give them", param="tool_choice")
        return None, form
    if choice == "none":
        return None, form
    if form is not None:
        raise ApiError(
            400,
            f"{form.field} cannot be combined with tools, whose calls have their own JSON format; "
            "omit it, or set tool_choice to none",
            param=form.field,
        )
    if model.templates.texts and not any("tools" in t for t in model.templates.texts.values()):
        raise unsupported(
            "tools", "the model's chat template does not take tools; omit them, or use another one"
        )
    if choice == "required" or isinstance(choice, ToolChoice):
        name = choice.function.name if isinstance(choice, ToolChoice) else None
        if name is not None and name not in names:
            raise ApiError(
                400,
                f"tool_choice names {name!r:.60}, which is not among the tools; name one of them",
                param="tool_choice",
            )
        return tools, call_form(tools, name, asked.parallel_tool_calls is not False)
    if model.call_format is None:
        raise unsupported(
            "tools",
            "the chat template does not show how the model writes calls; start the server with "
            "--tool-call-parser, or set tool_choice to required",
        )
    return tools, None


def _check(asked: ChatRequest) -> None:
    """Raises ApiError for fields of chats that the server does not support."""
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
