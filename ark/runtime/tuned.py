"""The cuts (divisions into tiles and parts of k) of matmuls that `ark tune` measured as fastest on
a machine, by shape.

Planning for that machine uses them, so plans stay the same as long as the stored file does. Called
by all code that plans for the local device, and by ark.cli.measure.tune.
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
    """The fastest division of one matmul. cut: rows and columns of a tile, and the number of parts
    of k. us, usual_us: the measured microseconds of this cut and of the default one.
    """

    cut: tuple[Size, Size, Size]
    us: Time
    usual_us: Time


class Tuned(Header, frozen=True, forbid_unknown_fields=True):
    """The file's content: for each matmul (identified by ark.lower.cuts.key), the fastest
    choice.
    """

    choices: Annotated[dict[Key, Choice], Meta(max_length=100_000)]


KEPT: Kept[dict[str, Choice]] = Kept("tuned", Tuned, "ark tune")


def options(machine: Machine) -> dict[str, Any]:
    """The planner's option `cuts` with the measured choices for this machine; empty if nothing was
    measured.
    """
    cuts = {key: list(choice.cut) for key, choice in KEPT.load(machine).items()}
    return {"cuts": cuts} if cuts else {}
