"""What `ark tune` found on a machine: how products are cut, by their shapes.

One file of the cache for each device model, JSON that is checked against a schema. Planning for
that device reads it; so plans stay the same as long as the file does. Called by all who plan for
the device at hand, and by ark.bench.tune.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ark import log
from ark.machine import Machine
from ark.runtime import cache

FORMAT = 1
Size = Annotated[int, Meta(ge=1, le=1 << 20)]
Key = Annotated[str, Meta(pattern=r"^[0-9]{1,12}(x[0-9]{1,12}){5}$", max_length=80)]
Time = Annotated[float, Meta(ge=0.0, le=1e9)]


class Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """cut: rows and columns of tiles, parts of k. us: what it took. usual_us: what the cut took
    that is taken without measuring.
    """

    cut: tuple[Size, Size, Size]
    us: Time
    usual_us: Time


class Tuned(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Choices by what they are good for (ark.lower.cuts.key)."""

    format: Annotated[int, Meta(ge=FORMAT, le=FORMAT)]
    machine: Annotated[str, Meta(max_length=200)]
    choices: Annotated[dict[Key, Choice], Meta(max_length=100_000)]


def load(machine: Machine) -> dict[str, Choice]:
    """The machine's choices, none where nothing was measured or the file cannot be used."""
    data = cache.load(cache.TUNED, _name(machine))
    if data is None:
        return {}
    try:
        return dict(msgspec.json.decode(data, type=Tuned).choices)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeError) as error:
        log.warn(
            f"what `ark tune` kept for {machine.name} is not used: {error}; measure again with "
            "`ark tune`, or remove it with `ark tune --forget`"
        )
        return {}


def store(machine: Machine, choices: dict[str, Choice]) -> None:
    """Keeps choices in place of all that were there."""
    kept = Tuned(FORMAT, label(machine), dict(sorted(choices.items())))
    cache.store(cache.TUNED, _name(machine), msgspec.json.encode(kept))


def forget(machine: Machine) -> None:
    """Removes the machine's choices."""
    cache.drop(cache.TUNED, _name(machine))


def options(machine: Machine) -> dict[str, Any]:
    """What the planner is told of them: its option `cuts`, or nothing."""
    found = {key: list(choice.cut) for key, choice in load(machine).items()}
    return {"cuts": found} if found else {}


def label(machine: Machine) -> str:
    """The device model that figures were measured on."""
    return f"{machine.backend} {machine.name} {machine.arch} {machine.processors}"


def _name(machine: Machine) -> str:
    return cache.key("tuned", str(FORMAT), label(machine))
