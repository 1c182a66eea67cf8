"""Finds the addresses of peers' memory: it is mapped if a peer is on this host, and reached through
the proxy if it is on another host. Created by the executor when a plan is loaded.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from ark.backend.codegen import layout
from ark.backend.codegen.constants import signal_words
from ark.backend.devices import KernelDevice, Memory
from ark.errors import InvalidUsageError, SystemError
from ark.plan.serialize import machine_of
from ark.plan.types import Plan
from ark.runtime.proxy import Proxy
from ark.runtime.run import Ranks


@dataclass
class Peers:
    """The peers of one rank. far: ranks on other hosts. signallers: for each counter of this rank,
    the peers that signal it.
    """

    plan: Plan
    far: frozenset[int]
    signallers: dict[str, list[int]] = field(default_factory=dict)
    _entries: dict[int, tuple[Memory, dict[str, Any]]] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: Plan) -> Peers:
        """The peers of a plan's rank. Their memory is not mapped yet."""
        hosts = plan.meta.get("hosts") or [0] * plan.world_size
        return cls(plan, frozenset(r for r, h in enumerate(hosts) if h != hosts[plan.rank]))

    @property
    def near(self) -> list[Memory]:
        """The mapped memory of the peers that are on this host."""
        return [memory for rank, (memory, _) in self._entries.items() if rank not in self.far]

    def proxy(self, device: KernelDevice, variants: Set[str], host: Memory) -> Proxy | None:
        """Creates the proxy, if tasks need the host to copy or peers are on other hosts; otherwise
        returns None.

        variants: the kernel variants of the plan. host: the memory of the structure ArkHost.
        """
        if not self.far and not any(op.kind == "transfer" for op in self.plan.ops):
            return None
        if self.far and variants != {"block"}:
            raise InvalidUsageError(
                f"the plan has kernels of the variants {', '.join(sorted(variants))}; only kernels "
                "of the variant 'block' can signal counters on other hosts: plan with the option "
                "variant='block'"
            )
        at = layout.dtype("ArkHost").fields
        assert host.host is not None and at is not None
        return Proxy(device, host.host.ctypes.data + int(at["abort"][1]))

    def connect(
        self,
        ranks: Ranks,
        device: KernelDevice,
        proxy: Proxy | None,
        shared: Memory,
        counters: Mapping[str, int],
    ) -> None:
        """Exchanges memory handles, and the names by which peers refer to buffers and counters.

        counters: for each counter's name, its offset in bytes from the beginning of `shared`.
        """
        plan = self.plan
        mine = {
            "handle": device.export(shared).hex(),
            "network": proxy.network(shared) if self.far and proxy is not None else None,
            "buffers": {
                b.name: b.offset
                for b in plan.buffers
                if b.arena == "symmetric" and b.rank == plan.rank
            },
            "counters": dict(counters),
            "words": signal_words(plan, machine_of(plan)),
            "signals": [[c.rank, c.name] for c in plan.counters if c.rank != plan.rank],
        }
        for rank, data in enumerate(ranks.all_gather(json.dumps(mine).encode())):
            if rank != plan.rank:
                entry = json.loads(data)
                if entry["words"] != mine["words"]:
                    raise SystemError(
                        f"rank {plan.rank} and rank {rank} signal each other in different ways, "
                        "because the links between some devices do not support atomic additions; "
                        "let every rank see the same devices"
                    )
                self._entries[rank] = (self._reach(rank, entry, ranks, device, proxy), entry)
                for target, name in entry["signals"]:
                    if target == plan.rank:
                        self.signallers.setdefault(name, []).append(rank)

    def _reach(
        self,
        rank: int,
        entry: Mapping[str, Any],
        ranks: Ranks,
        device: KernelDevice,
        proxy: Proxy | None,
    ) -> Memory:
        """Returns a peer's memory. Raises SystemError that names the rank. If the rank has ended,
        which may become known a moment later, the error says so.
        """
        try:
            if rank in self.far and proxy is not None:
                return proxy.connect(rank, entry["network"])
            return device.map_peer(bytes.fromhex(entry["handle"]))
        except SystemError as error:
            end = time.monotonic() + 1.0
            while ranks.failure() is None and time.monotonic() < end:
                time.sleep(0.01)
            failed = ranks.failure()
            if failed is not None:
                raise SystemError(failed) from error
            raise SystemError(f"the memory of rank {rank} cannot be accessed: {error}") from error

    def address(self, rank: int, table: str, name: str) -> int:
        """The address of a peer's buffer or counter. table: "buffers" or "counters"."""
        memory, entry = self._entries[rank]
        if name not in entry[table]:
            raise SystemError(
                f"rank {self.plan.rank} refers to {name!r} on rank {rank}, but that rank's plan "
                "has no such entry; all ranks must load plans of the same planner run"
            )
        return memory.address + int(entry[table][name])

    def clear(self) -> list[Memory]:
        """Removes all peers. Returns the memory of peers that was mapped here."""
        mapped = self.near
        self._entries.clear()
        return mapped
