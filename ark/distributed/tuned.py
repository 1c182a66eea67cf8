"""What `ark tune --collectives` found on a machine: by collective, ranks and size, the algorithm
and the engine that took least.

A group takes rank 0's, so that all ranks choose alike. Called by ark.distributed.group and
ark.bench.tune_comm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from ark.runtime.measured import Header, Kept, Time

NEAR = 2.0  # a choice serves sizes up to so many times larger or smaller than what was measured
Word = Annotated[str, Meta(pattern=r"^[a-z_0-9]{1,40}$")]
Key = Annotated[str, Meta(pattern=r"^[a-z_]{1,40}\.[0-9]{1,4}$")]


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """nbytes: of a rank's larger side. us: what it took. usual_us: what is taken unmeasured."""

    nbytes: Annotated[int, Meta(ge=1, le=1 << 40)]
    algorithm: Word
    engine: Word
    us: Time
    usual_us: Time


Table = dict[Key, list[Entry]]


class Tuned(Header, frozen=True, forbid_unknown_fields=True):
    """Entries by collective and number of ranks."""

    choices: Annotated[Table, Meta(max_length=10_000)]


KEPT: Kept[Table] = Kept("tuned collectives", Tuned, "ark tune --collectives")


def key(collective: str, world: int) -> str:
    """What entries of so many ranks are kept under."""
    return f"{collective}.{world}"


def pick(table: Table, collective: str, world: int, nbytes: int) -> Entry | None:
    """The entry of the nearest size that was measured; None if none is near."""
    entries = table.get(key(collective, world), ())
    near = [e for e in entries if nbytes <= NEAR * e.nbytes and e.nbytes <= NEAR * nbytes]
    return min(near, key=lambda e: abs(math.log(e.nbytes / nbytes)), default=None)


def first_of(tables: Sequence[bytes]) -> Table:
    """Rank 0's table, of all ranks' encoded ones."""
    return KEPT.decoded(tables[0], "rank 0")
