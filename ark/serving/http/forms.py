"""Reads from a request the form that the answer's text must have, such as a JSON schema. It is
given by `response_format` or by vLLM's fields for the same purpose. Called by the routes of
completions and chats.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ark.errors import InvalidUsageError
from ark.models.structured import StructuredOutputsParams
from ark.serving.http.errors import ApiError, unsupported
from ark.serving.http.schema import ChatRequest, CompletionRequest, ResponseFormat, Tool

GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""For each of vLLM's older fields, the field of StructuredOutputsParams that has its meaning."""


@dataclass(frozen=True)
class Form:
    """The form that an answer's text must have, and the field of the request that asks for it;
    errors name the field.
    """

    params: StructuredOutputsParams
    field: str

    def refused(self, error: Exception) -> ApiError:
        """The error for a form that is not valid or not supported."""
        return _refused(self.field, error)


def form_of(asked: CompletionRequest | ChatRequest) -> Form | None:
    """The form that a body requires, or None. Raises ApiError if the form is not valid or if the
    body has two forms.
    """
    values = {name: getattr(asked, name) for name in GUIDED}
    forms: dict[str, Mapping[str, Any]] = {
        name: {GUIDED[name]: value} for name, value in values.items() if value is not None
    }
    if asked.structured_outputs is not None:
        fields = ("json", "regex", "choice", "grammar", "json_object")
        forms["structured_outputs"] = {n: getattr(asked.structured_outputs, n) for n in fields}
    shape = asked.response_format
    if shape is not None and shape.type != "text":
        forms["response_format"] = _of_format(shape)
    if len(forms) > 1:
        names = ", ".join(sorted(forms))
        raise ApiError(400, f"{names} were given together; give one of them", param=names)
    return next((_form(wanted, field) for field, wanted in forms.items()), None)


def _refused(field: str, error: Exception) -> ApiError:
    """The error for a form, in which the name of the field of SamplingParams is replaced by the
    name of the request's field.
    """
    message = re.sub(r"structured_outputs(\.\w+)?", field, str(error), count=1)
    return ApiError(400, message, param=field)


def _form(values: Mapping[str, Any], field: str) -> Form:
    try:
        return Form(StructuredOutputsParams(**values), field)
    except InvalidUsageError as error:
        raise _refused(field, error) from None


def _of_format(shape: ResponseFormat) -> Mapping[str, Any]:
    """The field of StructuredOutputsParams for a response_format other than `text`."""
    kind, schema = shape.type, shape.json_schema
    if kind == "json_object":
        return {"json_object": True}
    if kind != "json_schema":
        raise unsupported(
            "response_format",
            f"the type of response_format is {kind!r:.60}; text, json_object and json_schema are "
            "supported",
        )
    if schema is None or schema.schema is None:
        raise ApiError(
            400,
            "response_format of type json_schema needs json_schema.schema; give a JSON schema",
            param="response_format",
        )
    return {"json": schema.schema}


def call_form(tools: Sequence[Tool], name: str | None, parallel: bool) -> Form:
    """The form of a text that must call tools. If `name` is given, the text is the arguments of
    that tool; otherwise it is a list of calls of any of the tools.
    """
    for tool in tools:
        if tool.function.name == name:
            return _form({"json": tool.function.parameters or {"type": "object"}}, "tools")
    calls, identifiers = [], set()
    for place, tool in enumerate(tools):
        # Each tool's schema gets an identifier (`$id`), so that references within the schema are
        # relative to it. Schemas of older JSON Schema drafts cannot have an identifier beside
        # `$ref`.
        given = tool.function.parameters or {"type": "object"}
        schema = {key: value for key, value in given.items() if key not in ("$schema", "id")}
        own = schema.get("$id")
        if not isinstance(own, str) or own in identifiers:
            schema["$id"] = f"https://tools.invalid/{place}"
        identifiers.add(schema["$id"])
        properties = {"name": {"const": tool.function.name}, "parameters": schema}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    limits = {} if parallel else {"maxItems": 1}
    whole = {"type": "array", "minItems": 1, **limits, "items": {"anyOf": calls}}
    return _form({"json": whole}, "tools")
