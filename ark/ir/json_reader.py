"""The one strict reader of plans, collective programs, networks and sketches.

A form is a tree of closed msgspec structs; text that is not JSON, lacks a field, has one too many
or a value of another type is refused with its place in the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from ark.errors import ModelError

Form = TypeVar("Form")


class Closed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What every object of a form is: only fields that are known."""


class FormError(ModelError):
    """Data do not fit their form; `fault` names how, `place` is a JSON path such as $.links[3]."""

    def __init__(self, subject: str, fault: str, reason: str, place: str) -> None:
        where = "" if place == "$" else f" at {place.replace('$.', '')}"
        self.fault, self.place = fault, place
        self.message = f"{subject} does not fit its form{where}: {reason}"
        super().__init__(f"{self.message}.")


def read(
    source: str | bytes | Mapping[str, Any] | list[Any], form: type[Form], subject: str
) -> Form:
    """Returns the form's value of JSON text, or of the object that it holds; FormError if it is
    none. `what` opens the error's sentence."""
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
