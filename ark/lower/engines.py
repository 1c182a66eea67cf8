"""The engines of a channel, which carry bytes to a peer: their requirements, and the sizes for
which each is chosen.

An engine is chosen when a put is lowered, by the machine's capabilities and the size of the whole
transfer; a caller may name one, and of a collective it is what was measured to be fastest, where
something was. docs/channels.md describes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ark.collective.programs.near import nearest
from ark.errors import UnsupportedError
from ark.log import note
from ark.machine import Machine
from ark.machine.capability import Capability

AUTO = "auto"
ONE_SHOT = "one_shot"  # the algorithm of a call that names none: to every peer at once
PACKET = "packet"
THREADS = "threads"
BULK = "bulk"
DMA = "dma"
NIC = "nic"
SWITCH = "switch"


@dataclass(frozen=True)
class Engine:
    """needs: a capability of the machine, if any. kind: the task kind by which processors copy with
    it. messages: it moves messages, with their own signal; memory: it writes memory that the peer
    has in any case. proxied: the host's proxy moves it. copies: it copies only and does not reduce.
    The least piece that pays is Costs.piece_bytes.
    """

    name: str
    needs: Capability | None
    kind: str = "combine"
    memory: bool = True
    messages: bool = True
    proxied: bool = False
    copies: bool = False

    def on(self, machine: Machine) -> bool:
        """True where the machine has this engine."""
        return self.needs is None or machine.has(self.needs)


ENGINES = {
    e.name: e
    for e in (
        # {word, epoch}: no counter and no barrier, for twice the bytes on the wire.
        Engine(PACKET, Capability.PEER_PACKETS, memory=False),
        # 16-byte stores, then a counter.
        Engine(THREADS, None),
        # Pieces that hardware of the processor copies through shared memory, then a counter.
        Engine(BULK, Capability.PEER_BULK, kind="bulk", copies=True),
        # Copy engines, which the host's proxy starts.
        Engine(DMA, Capability.PROXY, proxied=True, copies=True),
        # To other hosts, by the proxy; to ranks of this one as `threads`.
        Engine(NIC, Capability.PROXY, memory=False, messages=False),
        # Sums by the switch between devices; no machine is said to have one.
        Engine(SWITCH, Capability.PEER_MULTICAST, memory=False, messages=False),
    )
}
# What can move a message, with its own signal, and what memory that the peer has in any case.
MESSAGES = tuple(e.name for e in ENGINES.values() if e.messages)
TRANSFERS = tuple(e.name for e in ENGINES.values() if e.memory)
FAR = (NIC,)  # what reaches other hosts
TILE_ALIGNMENT_BYTES = 128
MAX_PARTS_OF_A_SHARE = 8


def choose_engine(
    machine: Machine, nbytes: int, asked: str = AUTO, among: Sequence[str] = MESSAGES
) -> Engine:
    """The engine of a transfer of so many bytes; UnsupportedError if the asked one is not there or
    cannot do it (among: those that can).
    """
    able = [ENGINES[name] for name in among]
    able = [e for e in able if e.on(machine)]
    if asked != AUTO:
        engine = next((e for e in able if e.name == asked), None)
        if engine is None:
            there = [e.name for e in able]
            raise UnsupportedError(
                f"{machine.name} does not support this transfer by the engine {asked!r}; it has "
                f"{', '.join(there) or 'no other engine for it'}"
            )
        return engine
    packets = ENGINES[PACKET] in able and in_packets(machine, nbytes)
    limit, other = machine.costs.packet_bytes, THREADS if packets else PACKET
    where = f"up to {limit} bytes are faster as packets"
    reason = where if ENGINES[PACKET] in able else f"no {PACKET} here"
    chosen = ENGINES[PACKET if packets else THREADS]
    note("lower", f"{nbytes} bytes to peers: engine {chosen.name}, not {other}: {reason}")
    return chosen


def in_packets(machine: Machine, nbytes: int) -> bool:
    """True where a transfer of so many bytes is faster as packets."""
    return nbytes <= machine.costs.packet_bytes


def measured(
    options: Mapping[str, Any], machine: Machine, collective: str, algorithm: str, nbytes: int
) -> str:
    """The engine by which an algorithm was measured to be fastest for a collective of about so many
    bytes on a rank's larger side, as the planner's option `engines` has it; AUTO if none was
    measured, or the machine does not have it.
    """
    rows = options.get("engines", {}).get(collective, ())
    place = nearest([row[0] for row in rows], nbytes)
    name = AUTO if place is None else rows[place][1].get(algorithm, AUTO)
    if name not in MESSAGES:
        return AUTO
    return name if ENGINES[name].on(machine) else AUTO


def tile_bytes(engine: Engine, machine: Machine, nbytes: int) -> int:
    """Bytes that one task of a transfer moves: a processor's share, not below the least piece that
    pays with the engine; a part of a large share, so that peers
    may begin before all of it has arrived.
    """
    share = -(-nbytes // machine.processors)
    costs = machine.costs
    share = max(min(share, costs.share_bytes), -(-share // MAX_PARTS_OF_A_SHARE))
    least = dict(costs.piece_bytes).get(engine.name, costs.share_bytes)
    return max(least, -(-share // TILE_ALIGNMENT_BYTES) * TILE_ALIGNMENT_BYTES)


def joined_tiles(machine: Machine, tiles: int, nbytes: int, peers: int) -> int:
    """How many tiles of so many bytes one task puts where all of them go to each of several peers:
    as many as give each processor one put, in puts of at most put_bytes, since peers begin when
    all of a put is there.
    """
    each = max(1, machine.processors // max(1, peers))
    return max(1, min(-(-tiles // each), machine.costs.put_bytes // nbytes))
