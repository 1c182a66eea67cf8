"""The model that a server offers: its tokenizer, its chat template and its limits.

The routes use it to convert the prompts of requests to token ids and to check them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import msgspec

from ark.errors import InvalidUsageError, SystemError, UnsupportedError
from ark.models.chat import ChatTemplates
from ark.models.tokenizer import Tokenizer
from ark.serving.grammar import Grammars
from ark.serving.http.calls import CallFormat
from ark.serving.http.errors import CONTEXT_LENGTH, ApiError, unsupported
from ark.serving.http.forms import Form
from ark.serving.http.schema import Message, Tool
from ark.serving.types import Grammar

CHARACTERS_A_POSITION = 16  # an upper estimate: several times the characters of an average token
MAX_INLINE_SIZE = 4096  # longer texts (in characters or tokens) are processed on another thread
MOST_IDS = 1 << 20  # the most ids in one list
Result = TypeVar("Result")


@dataclass(frozen=True)
class ServedModel:
    """The model that clients can name in requests. name: its name. adapters: the names of its
    adapters, which clients may use as model names. adapter: the adapter that this name selects, or
    "". context: the most positions of a request, its answer included. stop_token_ids: the
    checkpoint's end tokens. defaults: values for fields of SamplingParams that a request omits.
    call_format: the format in which the model writes calls of tools, if known. embedding_size:
    elements of an embedding; 0 for a model that generates text.
    """

    name: str
    tokenizer: Tokenizer
    templates: ChatTemplates
    context: int
    vocab_size: int
    stop_token_ids: frozenset[int]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    call_format: CallFormat | None = None
    embedding_size: int = 0
    adapters: tuple[str, ...] = ()
    adapter: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def named(self, asked: str | None) -> ServedModel:
        """The model with the requested name, which may be the name of an adapter. Raises ApiError
        if it does not exist.
        """
        if not asked or asked == self.name:
            return self
        if asked not in self.variants:
            names = ", ".join(map(repr, (self.name, *self.adapters)))
            raise ApiError(
                404,
                f"the model {asked!r:.100} does not exist; this server has {names}",
                param="model",
                code="model_not_found",
            )
        return self.variants[asked]

    @cached_property
    def variants(self) -> dict[str, ServedModel]:
        """For each adapter, the model with this adapter, by the adapter's name."""
        return {name: replace(self, name=name, adapter=name) for name in self.adapters}

    async def encoded(
        self, texts: Sequence[str], params: Sequence[str], *, framed: bool = True
    ) -> list[list[int]]:
        """The token ids of texts. framed: include the tokens that the tokenizer adds at the
        beginning and the end of a text.

        If a text is far too long, only its beginning is encoded. params: for each text, where it is
        in the request (such as `prompt[1]`), for error messages.
        """

        def encode() -> list[list[int]]:
            pairs = zip(texts, params, strict=True)
            return [self._encode(text, param, framed) for text, param in pairs]

        return await aside(sum(map(len, texts)), encode)

    def _encode(self, text: str, param: str, framed: bool) -> list[int]:
        head = text[: CHARACTERS_A_POSITION * self.context]
        try:
            tokens = self.tokenizer.encode(head, framed)
            if len(head) < len(text):
                if len(tokens) > 2 * self.context:
                    counted = (
                        f"the first {len(head):,} of {len(text):,} characters of the prompt are"
                    )
                    raise self.too_long(f"{counted} {len(tokens):,} tokens", param)
                tokens = self.tokenizer.encode(text, framed)
        except InvalidUsageError as error:
            raise ApiError(400, str(error), param=param) from None
        return tokens

    def check_tokens(self, tokens: Sequence[Any], param: str) -> None:
        """Raises ApiError for token ids that are not in the vocabulary."""
        if len(tokens) > MOST_IDS:
            raise ApiError(
                400, f"more than {MOST_IDS:,} token ids were given; send fewer", param=param
            )
        for token in tokens:
            if not isinstance(token, int) or not 0 <= token < self.vocab_size:
                raise ApiError(
                    400,
                    f"{token!r:.60} is not a token id; ids are whole numbers from 0 to "
                    f"{self.vocab_size - 1}",
                    param=param,
                )

    def check_length(self, prompt: int, max_tokens: int | None, param: str) -> None:
        """Raises ApiError if a prompt of `prompt` tokens and its answer do not fit in the
        context.
        """
        if prompt == 0:
            raise ApiError(400, "the prompt has no tokens; give at least one", param=param)
        if prompt >= self.context:
            raise self.too_long(f"the prompt has {prompt:,} tokens", param)
        if max_tokens is not None and prompt + max_tokens > self.context:
            lengths = f"the prompt has {prompt:,} tokens and {max_tokens:,} more were asked for"
            raise self.too_long(lengths, param)

    def check_text(self, tokens: int, param: str) -> None:
        """Raises ApiError unless a text of `tokens` tokens is short enough for the embedding
        model's context.
        """
        if tokens == 0:
            raise ApiError(400, "the text has no tokens; give at least one", param=param)
        if tokens > self.context:
            raise ApiError(
                400,
                f"the text has {tokens:,} tokens, but the context holds {self.context:,}; shorten "
                "the text",
                param=param,
                code=CONTEXT_LENGTH,
            )

    def too_long(self, lengths: str, param: str) -> ApiError:
        """The error for more tokens than the context holds. lengths: the beginning of the message,
        which states the numbers of tokens.
        """
        return ApiError(
            400,
            f"{lengths}, but the context holds {self.context:,}, the answer included; shorten the "
            "prompt or ask for fewer tokens",
            param=param,
            code=CONTEXT_LENGTH,
        )

    async def chat_tokens(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        generation_prompt: bool = True,
        values: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The token ids of a conversation, rendered by the chat template."""
        if not self.templates.texts:
            raise ApiError(
                400,
                "the checkpoint has no chat template; use /v1/completions, or start the server "
                "with --chat-template FILE",
                param="messages",
                code="no_chat_template",
            )

        def encode() -> list[int]:
            plain = [_plain(message, f"messages[{i}]") for i, message in enumerate(messages)]
            functions = None if tools is None else [msgspec.to_builtins(tool) for tool in tools]
            try:
                text = self.templates.render(
                    plain, functions, add_generation_prompt=generation_prompt, **(values or {})
                )
            except InvalidUsageError as error:
                raise ApiError(400, str(error), param="messages") from None
            return self._encode(text, "messages", framed=False)

        size = sum(_size(message) for message in messages)
        if tools or values:  # these may be large, too
            size += MAX_INLINE_SIZE
        return await aside(size, encode)

    @cached_property
    def grammars(self) -> Grammars:
        """The object that compiles grammars for this tokenizer."""
        return Grammars(self.tokenizer, self.vocab_size, sorted(self.stop_token_ids))

    async def grammar(self, form: Form | None) -> Grammar | None:
        """The grammar of a form, created on another thread; None without a form. Raises ApiError if
        the form is faulty or not supported.
        """
        if form is None:
            return None
        try:
            return await asyncio.to_thread(self.grammars.grammar, form.params)
        except InvalidUsageError as error:
            raise form.refused(error) from None
        except (SystemError, UnsupportedError) as error:
            raise unsupported(form.field, str(error)) from None

    @cached_property
    def special_marks(self) -> dict[int, str]:
        """The marks of tool calls that are special tokens, by token id. If a request has tools,
        these special tokens are kept in the answer's text, so that calls can be found.
        """
        marks = () if self.call_format is None else self.call_format.marks
        ids = {self.tokenizer.backend.token_to_id(mark): mark for mark in marks}
        return {i: mark for i, mark in ids.items() if i in self.tokenizer.special_ids}


async def aside(size: int, work: Callable[[], Result]) -> Result:
    """Calls `work` and returns its result. If `size` (characters or tokens) is large, `work` runs
    on another thread, so that the event loop is not blocked.
    """
    return work() if size <= MAX_INLINE_SIZE else await asyncio.to_thread(work)


def _size(message: Message) -> int:
    """The approximate number of characters of a message."""
    content = message.content or ""
    calls = sum(len(str(call.function.arguments)) for call in message.tool_calls or ())
    if isinstance(content, str):
        return len(content) + calls + 16
    return calls + sum(len(part.text or "") + 16 for part in content)


def _arguments(value: str | dict[str, Any], param: str) -> dict[str, Any]:
    """The arguments of a call as an object, which is the form that chat templates read."""
    try:
        arguments = msgspec.json.decode(value) if isinstance(value, str) else value
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ApiError(400, f"{param} is {value!r:.60}; it must be a JSON object", param=param)
    return arguments


def _plain(message: Message, param: str) -> dict[str, Any]:
    """A message in the form that chat templates read: its content is one text."""
    plain: dict[str, Any] = msgspec.to_builtins(message)
    plain.pop("annotations", None)
    for place, call in enumerate(plain.get("tool_calls", ())):
        call.pop("index", None)
        call.setdefault("type", "function")
        call["function"]["arguments"] = _arguments(
            call["function"]["arguments"], f"{param}.tool_calls[{place}].function.arguments"
        )
    if isinstance(message.content, list):
        for part in message.content:
            if part.type != "text" or part.text is None:
                raise unsupported(
                    f"{param}.content",
                    f"a part of the message has the type {part.type!r:.60}; only text is supported",
                )
        plain["content"] = "\n".join(str(part.text) for part in message.content)
    plain.setdefault("content", "")
    return plain
