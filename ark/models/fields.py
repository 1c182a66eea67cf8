"""Reads the JSON files of a checkpoint directory with checks of types, and with a specific error
for each fault.

The readers of configs, checkpoints and tokenizers use it, so that missing files, damaged files and
fields of a wrong type give the same errors everywhere.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ark.errors import ModelError

# The names of JSON types in error messages, by the Python type to which the JSON value is parsed.
_KINDS = {
    "NoneType": "null",
    "bool": "true or false",
    "int": "a number",
    "float": "a number",
    "str": "a string",
    "list": "an array",
}


def check_directory(directory: Path) -> None:
    """Raises ModelError unless `directory` exists and is a directory."""
    if not directory.is_dir():
        state = "is a file" if directory.exists() else "does not exist"
        raise ModelError(
            f"{directory} {state}, but a checkpoint is a directory with config.json, safetensors "
            f"weights and tokenizer.json. Give the directory that holds them{_download(directory)}."
        )


def _download(directory: Path) -> str:
    """A hint on how to download a Hugging Face repository with the name of the directory. Empty if
    it cannot be such a name.
    """
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(directory)) or directory.exists():
        return ""
    return (
        f". If {directory} is a repository of the Hugging Face hub, download it (pip install "
        f"huggingface_hub; hf download {directory} --local-dir {directory.name}) and give "
        f"{directory.name}"
    )


def check_file(path: Path) -> None:
    """Raises ModelError if `path` exists but is not a regular file: reading a FIFO would block."""
    if path.exists() and not path.is_file():
        raise ModelError(f"{path} is neither a file nor a link to one. Put the file itself there.")


@dataclass(frozen=True)
class Fields:
    """The fields of one JSON object, with checks. source: the name of the file, for error
    messages.
    """

    source: str
    values: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Fields:
        """Reads a JSON object from a file. Raises ModelError if the file is missing or does not
        contain an object.
        """
        check_file(path)
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            json.dumps(values, ensure_ascii=False).encode()  # fails for half of a surrogate pair
        except FileNotFoundError:
            raise ModelError(
                f"{path.parent} has no {path.name}, which an ordinary Hugging Face Llama directory "
                "has. Give the directory that holds it, or download the missing file."
            ) from None
        except OSError as error:
            raise ModelError(
                f"{path} cannot be read ({error.strerror}). Make it readable, then try again."
            ) from None
        except (ValueError, RecursionError) as error:
            raise ModelError(
                f"{path} is not valid JSON ({error}), so the file is damaged or incomplete. "
                "Download it again."
            ) from None
        if not isinstance(values, dict):
            raise ModelError(
                f"{path} holds {_KINDS[type(values).__name__]} where an object with named fields "
                "was expected. Download it again."
            )
        return cls(str(path), values)

    def with_defaults(self, defaults: Mapping[str, Any]) -> Fields:
        """These fields, with `defaults` for absent ones. A field that is null is not absent."""
        return Fields(self.source, {**defaults, **self.values})

    def get(self, name: str) -> Any:
        """The value of a field; None if it is absent or null."""
        return self.values.get(name)

    def wrong(self, name: str, expected: str) -> ModelError:
        """The error for a field whose value is not as expected."""
        value = "no such field" if name not in self.values else json.dumps(self.values[name])
        return ModelError(
            f"{self.source}: {name} should be {expected}, but found {value[:200]}. Correct the "
            "field, or download the file again."
        )

    def size(self, name: str, default: int | None = None) -> int:
        """A positive integer; `default`, if given, for a field that is absent or null."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if type(value) is not int or value <= 0:
            raise self.wrong(name, "a positive integer")
        return value

    def count(self, name: str) -> int:
        """An integer of at least 0."""
        value = self.get(name)
        if type(value) is not int or value < 0:
            raise self.wrong(name, "an integer of at least 0")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive finite number; `default`, if given, for a field that is absent or null."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not _positive(value):
            raise self.wrong(name, "a positive number")
        return float(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of positive finite numbers."""
        values = self.get(name)
        if not isinstance(values, list) or not all(map(_positive, values)):
            raise self.wrong(name, "a list of positive numbers")
        return tuple(map(float, values))

    def flag(self, name: str, default: bool | None = None) -> bool:
        """True or false; `default`, if given, for a field that is absent or null."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if type(value) is not bool:
            raise self.wrong(name, "true or false")
        return value

    def text(self, name: str) -> str | None:
        """A string; None if the field is absent or null."""
        value = self.get(name)
        if value is not None and type(value) is not str:
            raise self.wrong(name, "a string")
        return value

    def table(self, name: str) -> Fields | None:
        """A nested object; None if the field is absent, null or empty."""
        value = self.get(name)
        if not value:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return Fields(f"{self.source}, {name}", value)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Token ids from a field that has one id or a list; empty if the field is absent or
        null.
        """
        value = self.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(i) is not int or i < 0 for i in ids):
            raise self.wrong(name, "a token id or a list of token ids")
        return tuple(ids)


def _positive(value: Any) -> bool:
    """True for a positive number that a float can hold."""
    return type(value) in (int, float) and 0 < value <= sys.float_info.max
