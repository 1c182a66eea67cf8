"""The JSON bodies that the routes take, as types that msgspec checks.

Fields and ranges are OpenAI's; those that vLLM adds have vLLM's names. A field that is not listed
is refused, since ignoring it could change the answer. Each field may be null, which omits it.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from ark.server.errors import ApiError

MAX_CHOICES = 128
MAX_STOPS = 32
MAX_TOP_LOGPROBS = 20

Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Token = Annotated[int, Meta(ge=0, lt=1 << 31)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
StopText = Annotated[str, Meta(min_length=1, max_length=1000)]
Stops = Annotated[list[StopText], Meta(max_length=MAX_STOPS)]
Tokens = Annotated[list[Token], Meta(max_length=MAX_STOPS)]
Prompts = str | list[str | int | list[Token]]

_PLACE = re.compile(r" - at (?:`key` in )?`\$\.?(.*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`")


class StreamOptions(msgspec.Struct, frozen=True):
    """include_usage: a last chunk counts the tokens."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Common(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Fields of completions and of chats."""

    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=1 << 31)] | None = None
    min_p: Share | None = None
    typical_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[Token, Bias] | None = None
    seed: Seed | None = None
    max_tokens: Annotated[int, Meta(ge=1, lt=1 << 31)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    stop: StopText | Stops | None = None
    stop_token_ids: Tokens | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    # Fields without an effect on the answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class CompletionRequest(Common, frozen=True, kw_only=True):
    """The body of /v1/completions. prompt: texts or token ids, one or several."""

    prompt: Prompts
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


class ContentPart(msgspec.Struct, frozen=True):
    """A part of a message. Only text is supported."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message of a conversation."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    reasoning_content: str | None = None
    refusal: str | None = None


class ChatRequest(Common, frozen=True, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=10000)]
    max_completion_tokens: Annotated[int, Meta(ge=1, lt=1 << 31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None


class TokenizeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of /tokenize: a prompt or a conversation."""

    prompt: str | None = None
    messages: list[Message] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of /detokenize."""

    tokens: list[Token]
    model: str | None = None


Body = TypeVar("Body", CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)


def decoded(text: bytes, kind: type[Body]) -> Body:
    """The body as `kind`; ApiError that names the field where it does not match."""
    if not text:
        raise ApiError(400, "the body is empty; send a JSON object")
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        raise _refused(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON in UTF-8: {error}") from None


def _refused(said: str) -> ApiError:
    """The error for a body that does not match its type. said: msgspec's words."""
    place = _PLACE.search(said)
    param = place.group(1) if place else None
    cause = said[: place.start()] if place else said
    unknown = _UNKNOWN.search(cause)
    if unknown:
        param = f"{param}.{unknown.group(1)}" if param else unknown.group(1)
        return ApiError(
            400,
            f"the field {param!r:.100} is not supported; omit it",
            param=param[:100],
            code="unknown_parameter",
        )
    missing = re.search(r"missing required field `(.*?)`", cause)
    if missing:
        param = f"{param}.{missing.group(1)}" if param else missing.group(1)
        return ApiError(400, f"the field {param!r} is missing; give it", param=param)
    cause = cause[:1].lower() + cause[1:]
    where = f" in {param!r:.100}" if param else ""
    return ApiError(400, f"the request is not valid{where}: {cause:.300}", param=param)
