"""Files in the cache with measurements of a device model, written by `ark tune`.

There is one file for each device model and each kind of choice (such as the tiles of matmuls). A
file is JSON that is checked against a schema. Called by ark.runtime.tuned (matmuls) and
ark.runtime.tuned_collectives (collectives).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta

from ark import log
from ark.machine import Machine
from ark.runtime import cache

FORMAT_VERSION = 1
Time = Annotated[float, Meta(ge=0.0, le=1e9)]  # us
Choices = TypeVar("Choices", bound=dict[Any, Any])


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields that all files with measurements have. Each kind of file adds a field
    `choices`.
    """

    format: Annotated[int, Meta(ge=FORMAT_VERSION, le=FORMAT_VERSION)]
    machine: Annotated[str, Meta(max_length=200)]


def label(machine: Machine) -> str:
    """The name of the device model on which the figures were measured."""
    return f"{machine.backend} {machine.name} {machine.arch} {machine.processors}"


@dataclass(frozen=True)
class Kept(Generic[Choices]):
    """A kind of choice that `ark tune` measures: its name in the cache, its schema, and the command
    that measures it.
    """

    name: str
    schema: type[Any]
    command: str

    def encoded(self, machine: Machine, choices: Choices) -> bytes:
        """Choices as bytes, as they are stored and sent between ranks."""
        kept = dict(sorted(choices.items()))
        return msgspec.json.encode(self.schema(FORMAT_VERSION, label(machine), kept))

    def decoded(self, data: bytes, where: str) -> Choices:
        """The choices that `encoded` has written as these bytes. If the bytes are not valid, logs a
        warning and returns no choices. where: the origin of the bytes, for the warning.
        """
        try:
            choices: Choices = msgspec.json.decode(data, type=self.schema).choices
            return choices
        except (msgspec.ValidationError, msgspec.DecodeError, UnicodeError) as error:
            log.warn(
                f"the results of `{self.command}` for {where} are ignored: {error}; measure "
                f"again, or remove them with `{self.command} --forget`"
            )
            return {}  # type: ignore[return-value]

    def load(self, machine: Machine) -> Choices:
        """The machine's choices; empty if nothing was measured or the file cannot be used."""
        data = cache.load(cache.TUNED, self.key(machine))
        return {} if data is None else self.decoded(data, machine.name)  # type: ignore[return-value]

    def store(self, machine: Machine, choices: Choices) -> None:
        """Replaces the stored choices."""
        cache.store(cache.TUNED, self.key(machine), self.encoded(machine, choices))

    def forget(self, machine: Machine) -> None:
        """Removes the machine's choices."""
        cache.drop(cache.TUNED, self.key(machine))

    def key(self, machine: Machine) -> str:
        """The name of the machine's file in the cache."""
        return cache.key(self.name, str(FORMAT_VERSION), label(machine))
