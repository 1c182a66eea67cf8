"""The JSON bodies of requests, as types that msgspec checks (ark.serving.http.bodies).

Fields are OpenAI's; those that vLLM adds have vLLM's names. Ranges are ark.models.sampling's. A
body with any other field is refused, because an answer that ignores the field could be wrong. A
field that is null counts as omitted.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

MAX_TOOLS = 128

Token = Annotated[int, Meta(ge=0, lt=1 << 31)]
Prompts = str | list[str | int | list[Token]]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """include_usage: an additional last chunk has the counts of tokens. continuous_usage_stats:
    every chunk has the counts so far, as in vLLM.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A JSON schema. Answers always follow it; `strict` is accepted but has no effect."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The form that the answer's text must have. type: text, json_object or json_schema."""

    type: str
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The form that the answer's text must have, with the fields of
    ark.models.structured.StructuredOutputsParams.
    """

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Common(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fields that bodies of completions and of chats have in common. Ranges are those of
    ark.models.sampling.
    """

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[Token, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Token] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
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
    logprobs: int | None = None


class ContentPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a message. Only text is supported."""

    type: str
    text: str | None = None
    # Fields of parts of other types. They are accepted here so that the error names the type.
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    refusal: Any = None


class CalledFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The name and the arguments of a called function. arguments: a JSON object, or the text of
    one.
    """

    name: str
    arguments: str | dict[str, Any]


class ToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A call of a tool in an earlier answer of the conversation."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None


class Message(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    # Fields of answers. Clients send earlier answers back in later messages, so these fields are
    # accepted if they are null or empty.
    annotations: list[None] | None = None
    audio: None = None
    function_call: None = None


class Function(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A function that the model may call. parameters: a JSON schema. strict: has no effect."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool."""

    type: Literal["function"]
    function: Function


class ChosenFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The function that must be called."""

    name: str


class ToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tool that must be called."""

    function: ChosenFunction
    type: Literal["function"] = "function"


class ChatRequest(Common, frozen=True, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=10000)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None


class EmbeddingRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of /v1/embeddings. input: texts or token ids, one or several."""

    input: Prompts
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None  # without an effect on the answer


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
