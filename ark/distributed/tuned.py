"""What `ark tune --collectives` found on a machine: by collective, ranks and size, the algorithm
and the engine that took least.

One file of the cache for each device model, JSON that is checked against a schema, beside that of
products (ark.runtime.tuned). A group takes rank 0's, so that all ranks choose alike. Called by
ark.distributed.group and ark.bench.tune_comm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from ark import log
from ark.machine import Machine
from ark.runtime import cache
from ark.runtime.tuned import label

FORMAT = 1
NEAR = 2.0  # a choice serves sizes up to so many times larger or smaller than what was measured
Word = Annotated[str, Meta(pattern=r"^[a-z_0-9]{1,40}$")]
Key = Annotated[str, Meta(pattern=r"^[a-z_]{1,40}\.[0-9]{1,4}$")]
Time = Annotated[float, Meta(ge=0.0, le=1e9)]


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """nbytes: of a rank's larger side. us: what it took. usual_us: what is taken unmeasured."""

    nbytes: Annotated[int, Meta(ge=1, le=1 << 40)]
    algorithm: Word
    engine: Word
    us: Time
    usual_us: Time


Table = dict[Key, list[Entry]]


class Tuned(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Entries by collective and number of ranks."""

    format: Annotated[int, Meta(ge=FORMAT, le=FORMAT)]
    machine: Annotated[str, Meta(max_length=200)]
    choices: Annotated[Table, Meta(max_length=10_000)]


def key(collective: str, world: int) -> str:
    """What entries of so many ranks are kept under."""
    return f"{collective}.{world}"


def pick(table: Table, collective: str, world: int, nbytes: int) -> Entry | None:
    """The entry of the nearest size that was measured; None if none is near."""
    entries = table.get(key(collective, world), ())
    near = [e for e in entries if nbytes <= NEAR * e.nbytes and e.nbytes <= NEAR * nbytes]
    return min(near, key=lambda e: abs(math.log(e.nbytes / nbytes)), default=None)


def encoded(machine: Machine, table: Table) -> bytes:
    """The table as it is kept, and as ranks tell it each other."""
    kept = {k: sorted(v, key=lambda e: e.nbytes) for k, v in sorted(table.items())}
    return msgspec.json.encode(Tuned(FORMAT, label(machine), kept))


def decoded(data: bytes, where: str) -> Table:
    """The table of some bytes; an empty one, with a warning, if they are none. where: whose."""
    try:
        return msgspec.json.decode(data, type=Tuned).choices
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeError) as error:
        log.warn(
            f"what `ark tune --collectives` kept for {where} is not used: {error}; measure again, "
            "or remove it with `ark tune --collectives --forget`"
        )
        return {}


def load(machine: Machine) -> Table:
    """The machine's table, empty where nothing was measured or the file cannot be used."""
    data = cache.load(cache.TUNED, _name(machine))
    return {} if data is None else decoded(data, machine.name)


def store(machine: Machine, table: Table) -> None:
    """Keeps a table in place of the one that was there."""
    cache.store(cache.TUNED, _name(machine), encoded(machine, table))


def forget(machine: Machine) -> None:
    """Removes the machine's table."""
    cache.drop(cache.TUNED, _name(machine))


def first_of(tables: Sequence[bytes]) -> Table:
    """Rank 0's table, of all ranks' encoded ones."""
    return decoded(tables[0], "rank 0")


def _name(machine: Machine) -> str:
    return cache.key("tuned collectives", str(FORMAT), label(machine))
