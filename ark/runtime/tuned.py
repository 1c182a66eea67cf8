"""What `ark tune` found on a machine: how products are cut, by their shapes.

Planning for that device reads it; so plans stay the same as long as the file does. Called by all
who plan for the device at hand, and by ark.bench.tune.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ark.machine import Machine
from ark.runtime.measured import Header, Kept, Time

Size = Annotated[int, Meta(ge=1, le=1 << 20)]
Key = Annotated[str, Meta(pattern=r"^[0-9]{1,12}(x[0-9]{1,12}){5}$", max_length=80)]


class Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """cut: rows and columns of tiles, parts of k. us: what it took. usual_us: what the cut took
    that is taken without measuring.
    """

    cut: tuple[Size, Size, Size]
    us: Time
    usual_us: Time


class Tuned(Header, frozen=True, forbid_unknown_fields=True):
    """Choices by what they are good for (ark.lower.cuts.key)."""

    choices: Annotated[dict[Key, Choice], Meta(max_length=100_000)]


KEPT: Kept[dict[str, Choice]] = Kept("tuned", Tuned, "ark tune")


def options(machine: Machine) -> dict[str, Any]:
    """What the planner is told of them: its option `cuts`, or nothing."""
    found = {key: list(choice.cut) for key, choice in KEPT.load(machine).items()}
    return {"cuts": found} if found else {}
