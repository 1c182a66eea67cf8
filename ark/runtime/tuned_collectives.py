"""The algorithm and engine that `ark tune --collectives` measured as fastest on a machine, by
collective, number of ranks and size.

All ranks use the table of rank 0, so that they choose the same. Calls on arrays use the algorithm
and the engine. Models use only the engine, as the planner's option `engines`, because another
algorithm would change results. Called by ark.distributed.group, by all code that plans for this
machine's ranks, and by ark.cli.measure.tune_comm.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ark.lower.engines import nearest
from ark.machine import Machine
from ark.runtime.measured import Header, Kept, Time
from ark.runtime.run import Ranks

Word = Annotated[str, Meta(pattern=r"^[a-z_0-9]{1,40}$")]
Key = Annotated[str, Meta(pattern=r"^[a-z_]{1,40}\.[0-9]{1,4}$")]


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fastest algorithm of a collective for one size. nbytes: the size of a rank's input or
    output, whichever is larger. us, usual_us: the measured microseconds of the fastest and of the
    default choice of algorithm and engine. engines: for each algorithm, the fastest engine.
    """

    nbytes: Annotated[int, Meta(ge=1, le=1 << 40)]
    algorithm: Word
    engine: Word
    us: Time
    usual_us: Time
    engines: Annotated[dict[Word, Word], Meta(max_length=100)] = {}


Table = dict[Key, list[Entry]]


class Tuned(Header, frozen=True, forbid_unknown_fields=True):
    """The file's content: for each collective and number of ranks (see `key`), the entries by
    size.
    """

    choices: Annotated[Table, Meta(max_length=10_000)]


KEPT: Kept[Table] = Kept("tuned collectives", Tuned, "ark tune --collectives")


def key(collective: str, world: int) -> str:
    """The key under which the file has the entries of a collective for a number of ranks."""
    return f"{collective}.{world}"


def pick(table: Table, collective: str, world: int, nbytes: int) -> Entry | None:
    """The entry of the nearest measured size; None if no measured size is near."""
    entries = table.get(key(collective, world), [])
    place = nearest([e.nbytes for e in entries], nbytes)
    return None if place is None else entries[place]


def of_rank_0(machine: Machine, ranks: Ranks) -> Table:
    """The table of rank 0, on all ranks. All ranks must call this. machine: this rank's own
    machine.
    """
    mine = KEPT.encoded(machine, KEPT.load(machine))
    return KEPT.decoded(ranks.all_gather(mine)[0], "rank 0")


def options(machine: Machine, world: int, ranks: Ranks | None = None) -> dict[str, Any]:
    """The planner's option `engines` for this number of ranks; empty for one rank.

    ranks: all ranks of the job, if all plan now; they use rank 0's table. Without `ranks`, the
    machine's own table is used.
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
