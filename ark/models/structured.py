"""The form that a text must have, with vLLM's names. It is a field of `ark.SamplingParams`, from
which ark.serving.grammar makes a grammar of token ids.
"""

from __future__ import annotations

import json as json_text
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ark.errors import InvalidUsageError

MAX_CHARACTERS = 1 << 18
"""The most characters of a schema, a regular expression or a grammar."""
NAMES = "json (a schema), regex, choice (a list of strings), grammar or json_object=True"


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The form of a text; exactly one field is given.

    json: a JSON schema, as an object or as text. regex: a regular expression of the whole text.
    choice: the texts to choose from. grammar: a context-free grammar in Lark's or GBNF's syntax.
    json_object: any JSON object.

    Examples:
        >>> form = ark.StructuredOutputsParams(regex="[a-z]+")
        >>> ark.SamplingParams(structured_outputs=form).structured_outputs.regex
        '[a-z]+'
    """

    json: Mapping[str, object] | str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        given = [f.name for f in fields(self) if getattr(self, f.name) not in (None, False)]
        if len(given) != 1:
            names = " and ".join(given) or "none of its fields"
            raise InvalidUsageError(
                f"structured_outputs has {names}; it must be exactly one of {NAMES}"
            )
        name, text = given[0], ""
        if name == "json":
            text = _schema(self.json)
            object.__setattr__(self, name, text)
        elif name == "choice":
            object.__setattr__(self, name, _choices(self.choice))
            text = "".join(self.choice or ())
        elif name == "json_object":
            if self.json_object is not True:
                raise InvalidUsageError(
                    f"structured_outputs.json_object is {self.json_object!r:.60}; it must be True"
                )
        else:
            text = getattr(self, name)
            if not isinstance(text, str) or not text:
                raise InvalidUsageError(
                    f"structured_outputs.{name} is {text!r:.60}; it must be a text, not empty"
                )
        if len(text) > MAX_CHARACTERS:
            raise InvalidUsageError(
                f"structured_outputs.{name} has {len(text):,} characters; at most "
                f"{MAX_CHARACTERS:,} are allowed"
            )


def _schema(value: Any) -> str:
    """A JSON schema as text."""
    schema = value
    try:
        if isinstance(value, str):
            schema = json_text.loads(value)
        if isinstance(schema, Mapping):
            return json_text.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidUsageError(
            f"structured_outputs.json is {value!r:.60}, which is not JSON ({error!s:.100}); give a "
            "JSON schema"
        ) from None
    raise InvalidUsageError(
        f"structured_outputs.json is {value!r:.60}; give a JSON schema, which is an object"
    )


def _choices(value: Any) -> tuple[str, ...]:
    listed = isinstance(value, (list, tuple)) and value
    if not listed or not all(isinstance(text, str) and text for text in value):
        raise InvalidUsageError(
            f"structured_outputs.choice is {value!r:.60}; give a list of texts, none of them empty"
        )
    return tuple(value)


def structured_outputs(name: str, value: Any) -> StructuredOutputsParams | None:
    """Checks the field `structured_outputs` of SamplingParams. The value may also be a mapping with
    the fields of StructuredOutputsParams.
    """
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    known = [f.name for f in fields(StructuredOutputsParams)]
    if isinstance(value, Mapping) and all(key in known for key in value):
        return StructuredOutputsParams(**value)
    raise InvalidUsageError(
        f"{name} is {value!r:.100}; it must be an ark.StructuredOutputsParams, or an object with "
        f"{NAMES}"
    )
