"""The engines, which are the ways of moving bytes to a peer: their requirements, and the rules that
choose one.

An engine is chosen when a put is lowered, by the machine's capabilities and the size of the whole
transfer. A caller may select one instead. A collective uses the engine that was measured as fastest
if there are measurements. docs/channels.md describes the engines.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    """One way of moving bytes to a peer. needs: the capability that the machine must have, or None.
    kind: the task kind with which processors copy. memory: True if the engine can write the peer's
    memory directly. messages: True if it can move messages, which have their own signal. proxied:
    True if the host's proxy thread moves the bytes. copies: True if it can copy but not reduce.
    Costs.piece_bytes has the smallest number of bytes that is worth a task with this engine.
    """

    name: str
    needs: Capability | None
    kind: str = "combine"
    memory: bool = True
    messages: bool = True
    proxied: bool = False
    copies: bool = False

    def on(self, machine: Machine) -> bool:
        """True if the machine has the capability that this engine needs."""
        return self.needs is None or machine.has(self.needs)


ENGINES = {
    e.name: e
    for e in (
        # packet: data travel as {value, epoch} pairs. They need no counter and no barrier, but
        # twice the bytes.
        Engine(PACKET, Capability.PEER_PACKETS, memory=False),
        # threads: threads store 16 bytes at a time, then add to a counter on the peer.
        Engine(THREADS, None),
        # bulk: hardware copies pieces through shared memory, then the task adds to a counter on the
        # peer.
        Engine(BULK, Capability.PEER_BULK, kind="bulk", copies=True),
        # dma: copy engines of the device copy; the host's proxy thread starts the copies.
        Engine(DMA, Capability.PROXY, proxied=True, copies=True),
        # nic: the proxy thread sends to ranks on other hosts. Ranks of this host are reached as
        # with `threads`.
        Engine(NIC, Capability.PROXY, memory=False, messages=False),
        # switch: the switch between devices computes sums. No machine model has this capability at
        # present.
        Engine(SWITCH, Capability.PEER_MULTICAST, memory=False, messages=False),
    )
}
# The names of the engines that can move messages, and of the engines that can write the peer's
# memory directly.
MESSAGES = tuple(e.name for e in ENGINES.values() if e.messages)
TRANSFERS = tuple(e.name for e in ENGINES.values() if e.memory)
# PROXIED: the engines that use the host's proxy thread. COPIED: the engines among these that copy
# data within a host.
PROXIED = tuple(e.name for e in ENGINES.values() if e.needs is Capability.PROXY)
COPIED = tuple(e.name for e in ENGINES.values() if e.proxied and e.copies)
FAR = (NIC,)  # engines that reach other hosts
TILE_ALIGNMENT_BYTES = 128
MAX_PARTS_OF_A_SHARE = 8
MAX_SIZE_RATIO = 2.0  # largest ratio of a size to the measured size that is used for it


def choose_engine(
    machine: Machine, nbytes: int, asked: str = AUTO, among: Sequence[str] = MESSAGES
) -> Engine:
    """The engine for a transfer of `nbytes` bytes. asked: the engine that the caller selected, or
    AUTO. among: the names of the engines that support this transfer. Raises UnsupportedError if the
    machine does not have the selected engine, or if `among` does not contain it.
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
    """True if a transfer of `nbytes` bytes is faster as packets."""
    return nbytes <= machine.costs.packet_bytes


def nearest(sizes: Sequence[int], nbytes: int) -> int | None:
    """The index of the measured size that is nearest to `nbytes`, by ratio. None if all sizes
    differ by more than the factor MAX_SIZE_RATIO.
    """
    near = [
        i
        for i, n in enumerate(sizes)
        if nbytes <= MAX_SIZE_RATIO * n and n <= MAX_SIZE_RATIO * nbytes
    ]
    return min(near, key=lambda i: abs(math.log(sizes[i] / nbytes)), default=None)


def measured(
    options: Mapping[str, Any], machine: Machine, collective: str, algorithm: str, nbytes: int
) -> str:
    """The engine that was measured as fastest for a collective with this algorithm, according to
    the planner's option `engines`. nbytes: bytes of a rank's input or output, whichever is larger;
    the measurement of the nearest size is used. AUTO if there is no measurement or the machine does
    not have the engine.
    """
    rows = options.get("engines", {}).get(collective, ())
    place = nearest([row[0] for row in rows], nbytes)
    name = AUTO if place is None else rows[place][1].get(algorithm, AUTO)
    if name not in MESSAGES:
        return AUTO
    return name if ENGINES[name].on(machine) else AUTO


def tile_bytes(engine: Engine, machine: Machine, nbytes: int) -> int:
    """The number of bytes that one task of a transfer moves: a processor's share of the transfer,
    but at least the smallest number of bytes that is worth a task with this engine. A large share
    is divided into several tasks, so that the peer can use the first bytes before the last have
    arrived.
    """
    share = -(-nbytes // machine.processors)
    costs = machine.costs
    share = max(min(share, costs.share_bytes), -(-share // MAX_PARTS_OF_A_SHARE))
    least = dict(costs.piece_bytes).get(engine.name, costs.share_bytes)
    return max(least, -(-share // TILE_ALIGNMENT_BYTES) * TILE_ALIGNMENT_BYTES)


def joined_tiles(machine: Machine, tiles: int, nbytes: int, peers: int) -> int:
    """The number of tiles that one task sends to one peer, if every tile goes to several peers.
    `nbytes` is the size of a tile. The number is chosen so that each processor has one put (one
    task that sends to one peer). A put has at most Costs.put_bytes bytes, because the peer can use
    its data only when all of it has arrived.
    """
    each = max(1, machine.processors // max(1, peers))
    return max(1, min(-(-tiles // each), machine.costs.put_bytes // nbytes))
