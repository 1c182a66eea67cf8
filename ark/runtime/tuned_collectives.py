"""The fastest algorithm and engine that `ark tune --collectives` measured on a machine, by
collective, ranks and size.

All ranks use rank 0's table, so that they choose alike. Calls on arrays use algorithm and engine;
models use the engine alone, as the planner's option `engines`, because the algorithm would change
results. Called by ark.distributed.group, by all code that plans for the ranks at hand, and by
ark.bench.tune_comm.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ark.collective.programs.near import nearest
from ark.machine import Machine
from ark.runtime.measured import Header, Kept, Time
from ark.runtime.run import Ranks

Word = Annotated[str, Meta(pattern=r"^[a-z_0-9]{1,40}$")]
Key = Annotated[str, Meta(pattern=r"^[a-z_]{1,40}\.[0-9]{1,4}$")]


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """nbytes: the size of the larger of a rank's input and output. us: the measured time. usual_us:
    the time of the default choice.

    engines: for each algorithm the fastest engine that was measured.
    """

    nbytes: Annotated[int, Meta(ge=1, le=1 << 40)]
    algorithm: Word
    engine: Word
    us: Time
    usual_us: Time
    engines: Annotated[dict[Word, Word], Meta(max_length=100)] = {}


Table = dict[Key, list[Entry]]


class Tuned(Header, frozen=True, forbid_unknown_fields=True):
    """Entries by collective and number of ranks."""

    choices: Annotated[Table, Meta(max_length=10_000)]


KEPT: Kept[Table] = Kept("tuned collectives", Tuned, "ark tune --collectives")


def key(collective: str, world: int) -> str:
    """The key of entries for this number of ranks."""
    return f"{collective}.{world}"


def pick(table: Table, collective: str, world: int, nbytes: int) -> Entry | None:
    """The entry of the nearest measured size; None if none is near."""
    entries = table.get(key(collective, world), [])
    place = nearest([e.nbytes for e in entries], nbytes)
    return None if place is None else entries[place]


def of_rank_0(machine: Machine, ranks: Ranks) -> Table:
    """Rank 0's table, on all ranks, which must all call this. machine: the rank's own."""
    mine = KEPT.encoded(machine, KEPT.load(machine))
    return KEPT.decoded(ranks.all_gather(mine)[0], "rank 0")


def options(machine: Machine, world: int, ranks: Ranks | None = None) -> dict[str, Any]:
    """The planner's option `engines` for this number of ranks; nothing for one.

    ranks: all ranks that plan now, which use rank 0's table; without them the machine's own is
    used.
    """
    if world == 1:
        return {}
    table = KEPT.load(machine) if ranks is None else of_rank_0(machine, ranks)
    engines: dict[str, Any] = {}
    for name, entries in sorted(table.items()):
        collective, _, count = name.rpartition(".")
        sizes = [[e.nbytes, dict(sorted(e.engines.items()))] for e in entries if e.engines]
        if sizes and int(count) == world:
            engines[collective] = sizes
    return {"engines": engines}
