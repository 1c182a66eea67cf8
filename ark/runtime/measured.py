"""Files of the cache that hold what was measured on a device model: `ark tune` fills them.

One file for each device model and kind of choice, JSON that is checked against a schema. Called by
ark.runtime.tuned (products) and ark.runtime.tuned_collectives (collectives).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta

from ark import log
from ark.machine import Machine
from ark.runtime import cache

FORMAT = 1
Time = Annotated[float, Meta(ge=0.0, le=1e9)]  # us
Choices = TypeVar("Choices", bound=dict[Any, Any])


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What such a file begins with; a kind adds `choices`."""

    format: Annotated[int, Meta(ge=FORMAT, le=FORMAT)]
    machine: Annotated[str, Meta(max_length=200)]


def label(machine: Machine) -> str:
    """The device model that figures were measured on."""
    return f"{machine.backend} {machine.name} {machine.arch} {machine.processors}"


@dataclass(frozen=True)
class Kept(Generic[Choices]):
    """One kind of choice: its name in the cache, its schema, and the command that measures it."""

    name: str
    schema: type[Any]
    command: str

    def encoded(self, machine: Machine, choices: Choices) -> bytes:
        """Choices as they are kept, and as ranks tell them each other."""
        kept = dict(sorted(choices.items()))
        return msgspec.json.encode(self.schema(FORMAT, label(machine), kept))

    def decoded(self, data: bytes, where: str) -> Choices:
        """The choices of some bytes; none, with a warning, if they are none. where: whose."""
        try:
            return msgspec.json.decode(data, type=self.schema).choices
        except (msgspec.ValidationError, msgspec.DecodeError, UnicodeError) as error:
            log.warn(
                f"what `{self.command}` kept for {where} is not used: {error}; measure again, or "
                f"remove it with `{self.command} --forget`"
            )
            return {}  # type: ignore[return-value]

    def load(self, machine: Machine) -> Choices:
        """The machine's choices, none where nothing was measured or the file cannot be used."""
        data = cache.load(cache.TUNED, self.key(machine))
        return {} if data is None else self.decoded(data, machine.name)  # type: ignore[return-value]

    def store(self, machine: Machine, choices: Choices) -> None:
        """Keeps choices instead of all that were there."""
        cache.store(cache.TUNED, self.key(machine), self.encoded(machine, choices))

    def forget(self, machine: Machine) -> None:
        """Removes the machine's choices."""
        cache.drop(cache.TUNED, self.key(machine))

    def key(self, machine: Machine) -> str:
        """The name of the machine's file in the cache."""
        return cache.key(self.name, str(FORMAT), label(machine))
