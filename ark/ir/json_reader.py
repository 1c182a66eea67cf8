"""The strict JSON reader of plans, collective programs, networks and sketches. The schema of a file
(its form) is a tree of msgspec structs. Text that is not JSON, lacks a field, has an unknown field
or has a value of the wrong type is rejected with the location in the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from ark.errors import ModelError

Form = TypeVar("Form")


class Closed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The base class of all objects of a schema. An object with unknown fields is rejected."""


class FormError(ModelError):
    """The error for data that do not match their schema. `fault` is the kind of mismatch, `place` a
    JSON path such as $.links[3].
    """

    def __init__(self, subject: str, fault: str, reason: str, place: str) -> None:
        where = "" if place == "$" else f" at {place.replace('$.', '')}"
        self.fault, self.place = fault, place
        self.message = f"{subject} does not fit its form{where}: {reason}"
        super().__init__(f"{self.message}.")


def read(
    source: str | bytes | Mapping[str, Any] | list[Any], form: type[Form], subject: str
) -> Form:
    """Reads JSON text, or an object parsed from it, as an instance of the schema `form`; raises
    FormError if the data do not match. subject: the beginning of the error's sentence.
    """
    try:
        if isinstance(source, (str, bytes)):
            return msgspec.json.decode(source, type=form, strict=True)
        return msgspec.convert(source, form, strict=True)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at ")
        fault = "unknown field" if "unknown field" in reason else "bad field"
        fault = "missing field" if "missing required" in reason else fault
        reason = reason.replace("`", "'")
        raise FormError(subject, fault, reason, place.strip("`") or "$") from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise FormError(subject, "not JSON", f"it is not valid JSON ({error})", "$") from None
