"""Decodes a request's JSON body to its type. If a field does not match, the error names the field
and the mismatch in a sentence. Called by the routes.
"""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from ark.serving.http.errors import ApiError
from ark.serving.http.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)

Body = TypeVar(
    "Body", CompletionRequest, ChatRequest, EmbeddingRequest, TokenizeRequest, DetokenizeRequest
)

KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
VALUES = {
    "tool_choice": "none, auto, required or an object that names a function",
    "type": "function",
    "encoding_format": "float or base64",
}
"""The allowed values, in words, of fields that allow only a few values."""
LIMITS = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than"}

# A message of msgspec is a cause, followed by the path of the faulty field in the body.
_PLACE = re.compile(r" - at (`key` in )?`\$\.?(.*)`$")
_FIELD = re.compile(r"Object (contains unknown|missing required) field `(.*?)`")
_TYPE = re.compile(r"Expected `(.*?)`, got `(.*?)`")
_RANGE = re.compile(r"Expected `(.*?)`( of length)? (>=|<=|>|<) (\S+)")
_VALUE = re.compile(r"Invalid enum value (.*)")


def decoded(text: bytes, kind: type[Body]) -> Body:
    """The body as an object of type `kind`. Raises ApiError, which names the field, if it does not
    match.
    """
    if not text:
        raise ApiError(400, "the body is empty; send a JSON object")
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        raise _refused(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        place = re.search(r"byte (\d+)", str(error))
        where = f" (at byte {place[1]})" if place else ""
        raise ApiError(400, f"the body is not valid JSON in UTF-8{where}") from None


def _refused(message: str) -> ApiError:
    """The error for a body that does not match its type. message: msgspec's message."""
    place = _PLACE.search(message)
    param = place[2] if place else None
    cause = message[: place.start()] if place else message
    field = _FIELD.match(cause)
    if field:
        param = f"{param}.{field[2]}" if param else field[2]
        if field[1] == "missing required":
            return ApiError(400, f"the field {param!r:.100} is missing; give it", param=param)
        return ApiError(
            400,
            f"the field {param!r:.100} is not supported; omit it",
            param=param[:100],
            code="unknown_parameter",
        )
    name = f"the field {param!r:.100}" if param else "the body"
    if place and place[1]:
        name = f"a key of {name}"
    return ApiError(400, f"{name} {_fault(cause, param)}", param=param)


def _fault(cause: str, param: str | None) -> str:
    """The part of the error's sentence that follows the field's name. cause: msgspec's description
    of the mismatch.
    """
    kind = _TYPE.match(cause)
    if kind:
        return f"is {_kinds(kind[2])}; it must be {_kinds(kind[1])}"
    limit = _RANGE.match(cause)
    if limit:
        noun = {"str": "characters", "array": "entries"}.get(limit[1], "")
        size = f"have {LIMITS[limit[3]]} {limit[4]} {noun}"
        return f"must {size}" if limit[2] else f"must be {LIMITS[limit[3]]} {limit[4]}"
    value = _VALUE.match(cause)
    if value:
        words = VALUES.get(str(param).rpartition(".")[2], "another word")
        return f"is {value[1]:.60}; it must be {words}"
    return "has a value that is out of range"


def _kinds(names: str) -> str:
    """Plain words for kinds of JSON values. null is listed only if no other kind is allowed,
    because a null field counts as omitted.
    """
    several = names.split(" | ")
    words = [KINDS.get(n, n) for n in several if n != "null" or len(several) == 1]
    return " or ".join(words)
