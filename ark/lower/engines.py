"""The engines of a channel, which move bytes to a peer: their requirements, and the sizes for which
each is chosen.

An engine is chosen when a put is lowered, by the machine's capabilities and the size of the whole
transfer. A caller may select one instead. For a collective, the engine measured as fastest is used
if there are measurements. docs/channels.md describes the engines.
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
ONE_SHOT = "one_shot"  # the default algorithm: send to every peer directly
PACKET = "packet"
THREADS = "threads"
BULK = "bulk"
DMA = "dma"
NIC = "nic"
SWITCH = "switch"


@dataclass(frozen=True)
class Engine:
    """needs: the capability that the machine must have, if any. kind: the task kind with which
    processors copy. memory: True if it can write the peer's memory directly. messages: True if it
    can move messages, which have their own signal. proxied: True if the host's proxy moves the
    bytes. copies: True if it can copy but not reduce. The smallest piece that is worth a task is in
    Costs.piece_bytes.
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
        # {value, epoch}: needs no counter and no barrier, for twice the bytes on the wire.
        Engine(PACKET, Capability.PEER_PACKETS, memory=False),
        # 16-byte stores, then a counter.
        Engine(THREADS, None),
        # Pieces that hardware of the processor copies through shared memory, then a counter.
        Engine(BULK, Capability.PEER_BULK, kind="bulk", copies=True),
        # Copy engines, started by the host's proxy.
        Engine(DMA, Capability.PROXY, proxied=True, copies=True),
        # To other hosts, by the proxy; to ranks of this host like `threads`.
        Engine(NIC, Capability.PROXY, memory=False, messages=False),
        # Sums computed by the switch between devices; no machine model has this capability.
        Engine(SWITCH, Capability.PEER_MULTICAST, memory=False, messages=False),
    )
}
# Engines that can move messages, and engines that can write the peer's memory directly.
MESSAGES = tuple(e.name for e in ENGINES.values() if e.messages)
TRANSFERS = tuple(e.name for e in ENGINES.values() if e.memory)
FAR = (NIC,)  # engines that reach other hosts
TILE_ALIGNMENT_BYTES = 128
MAX_PARTS_OF_A_SHARE = 8


def choose_engine(
    machine: Machine, nbytes: int, asked: str = AUTO, among: Sequence[str] = MESSAGES
) -> Engine:
    """The engine for a transfer of `nbytes` bytes. asked: the engine that the caller selected, or
    AUTO. among: the names of engines that can do the transfer. Raises UnsupportedError if the
    machine does not have the selected engine or it is not among these.
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
    """True where a transfer of `nbytes` bytes is faster as packets."""
    return nbytes <= machine.costs.packet_bytes


def measured(
    options: Mapping[str, Any], machine: Machine, collective: str, algorithm: str, nbytes: int
) -> str:
    """The engine with which an algorithm was measured as fastest for a collective of about `nbytes`
    bytes on a rank's larger side, from the planner's option `engines`. AUTO if there is no
    measurement or the machine does not have the engine.
    """
    rows = options.get("engines", {}).get(collective, ())
    place = nearest([row[0] for row in rows], nbytes)
    name = AUTO if place is None else rows[place][1].get(algorithm, AUTO)
    if name not in MESSAGES:
        return AUTO
    return name if ENGINES[name].on(machine) else AUTO


def tile_bytes(engine: Engine, machine: Machine, nbytes: int) -> int:
    """Bytes that one task of a transfer moves. This is a processor's share, but at least the
    engine's smallest worthwhile piece. A large share is cut into parts, so that peers may begin
    before all of it has arrived.
    """
    share = -(-nbytes // machine.processors)
    costs = machine.costs
    share = max(min(share, costs.share_bytes), -(-share // MAX_PARTS_OF_A_SHARE))
    least = dict(costs.piece_bytes).get(engine.name, costs.share_bytes)
    return max(least, -(-share // TILE_ALIGNMENT_BYTES) * TILE_ALIGNMENT_BYTES)


def joined_tiles(machine: Machine, tiles: int, nbytes: int, peers: int) -> int:
    """The number of tiles, of `nbytes` bytes each, that one task sends if every tile goes to each
    of several peers. It gives each processor one put, but puts have at most put_bytes, since peers
    begin only when a put has arrived completely.
    """
    each = max(1, machine.processors // max(1, peers))
    return max(1, min(-(-tiles // each), machine.costs.put_bytes // nbytes))
