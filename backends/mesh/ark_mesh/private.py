"""The cores' private memories: which parts of buffers each one holds, and each core's table of
tasks.

Called by ark_mesh.executor, once for a plan and its supersteps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from ark.backend.devices import Memory
from ark.errors import SystemError
from ark.plan.types import INITIAL, Phase, Plan
from ark.runtime import tables
from ark_mesh.device import MeshDevice
from ark_mesh.exchange import Exchange, Message, Piece
from ark_mesh.machines import CORE_BYTES

BUFFER_ALIGNMENT_BYTES = 64
MESSAGE = np.dtype([("from", "<u8"), ("to", "<u8"), ("bytes", "<u4"), ("changed", "<u4")])
POISON_BYTE = 0xFF  # initial bytes of private memory: NaN as floats, -1 as integers


class Cores:
    """The memories of a mesh's cores in one allocation, one after another. A second region of the
    same size follows, for a copy of the state at the beginning of an iteration.
    """

    def __init__(self, plan: Plan, exchange: Exchange, device: MeshDevice) -> None:
        self.plan = plan
        self.exchange = exchange
        self._lists: list[np.ndarray] = []  # kept alive, since tables point to them
        self._places: list[dict[int, int]] = []  # by core and buffer, from the memory's start
        self.bytes: list[int] = []  # bytes used, by core
        at = 0
        for core, windows in enumerate(exchange.windows):
            begin, places = at, {}
            for buffer, (low, high) in sorted(windows.items()):
                places[buffer] = at - low // BUFFER_ALIGNMENT_BYTES * BUFFER_ALIGNMENT_BYTES
                at += (
                    (
                        high
                        - low // BUFFER_ALIGNMENT_BYTES * BUFFER_ALIGNMENT_BYTES
                        + 2 * BUFFER_ALIGNMENT_BYTES
                        - 1
                    )
                    // BUFFER_ALIGNMENT_BYTES
                    * BUFFER_ALIGNMENT_BYTES
                )
            self._places.append(places)
            self.bytes.append(at - begin)
            if at - begin > CORE_BYTES:
                raise SystemError(
                    f"core {core} of the mesh would hold {(at - begin) / 1e6:.1f} MB of the plan, "
                    f"but a core has {CORE_BYTES / 1e6:.1f} MB; use more cores (ARK_MESH_CORES) or "
                    "a smaller model"
                )
        self.remembered = at
        self._memory = device.alloc(2 * at + BUFFER_ALIGNMENT_BYTES, "device")
        self.own: list[Memory] = [self._memory]
        assert self._memory.host is not None
        self._memory.host[:] = POISON_BYTE

    def address(self, core: int, buffer: int) -> int:
        """The address of the buffer's first byte in the core's memory; 0 if the core does not use
        the buffer.
        """
        place = self._places[core].get(buffer)
        return 0 if place is None else self._memory.address + place

    def tables(self, core: int, opcode: Sequence[int]) -> tables.Tables:
        """The tasks of one core in the order of supersteps, with addresses in that core's
        memory.
        """
        phases = []
        for phase, steps in zip(self.plan.phases, self.exchange.phases, strict=True):
            order = sorted(steps.tasks[core], key=lambda entry: entry[0])
            own = tuple(dataclasses.replace(t, waits=(), signals=()) for _, t in order)
            phases.append(Phase(phase.name, (own,), phase.variant))
        plan = dataclasses.replace(self.plan, phases=tuple(phases), counters=())
        listed = tables.listed(plan)
        lists = np.zeros(max(1, listed), np.uint64)
        self._lists.append(lists)
        built = tables.build(
            plan,
            opcode,
            lambda buffer: self.address(core, buffer),
            lambda counter: 0,
            list_address=lists.ctypes.data,
        )
        lists[:listed] = built.lists
        return built

    def bounds(self) -> np.ndarray:
        """For each phase and core, a row with the number of the first task of each superstep. The
        last entry of a row is the number of the core's last task + 1.
        """
        rows: list[np.ndarray] = []
        begun = [0] * len(self._places)
        for steps in self.exchange.phases:
            for core, own in enumerate(steps.tasks):
                places = np.sort(np.array([step for step, _ in own], np.int64))
                bounds = np.searchsorted(places, np.arange(len(steps.exchanges) + 1))
                rows.append(begun[core] + bounds)
                begun[core] += len(own)
        return np.concatenate(rows).astype(np.uint32)

    def messages(self, messages: Sequence[Message]) -> np.ndarray:
        """The messages between cores, as the structs that the entry point reads."""
        records = [np.zeros(0, MESSAGE)]
        for m in messages:
            target = self.address(m.target, m.piece.buffer)
            records.append(self._moves(m.piece, target, out=True))
            records[-1]["changed"] = m.changed
        return np.concatenate(records)

    def transfers(
        self, pieces: Sequence[Piece], host: Mapping[int, int] | None, out: bool
    ) -> np.ndarray:
        """The messages between cores and the host's memory. host: addresses by buffer. Without it,
        the messages go from a core to its copy of the iteration's initial state.
        """
        records = [np.zeros(0, MESSAGE)]
        for piece in pieces:
            own = self.address(piece.core, piece.buffer)
            other = own + self.remembered if host is None else host[piece.buffer]
            records.append(self._moves(piece, other, out))
        return np.concatenate(records)

    def _moves(self, piece: Piece, other: int, out: bool) -> np.ndarray:
        """The copies between a core's memory and a buffer at the given address. piece: the byte
        ranges of the buffer. other: the buffer's address. out: True to copy from the core.
        """
        records = np.zeros(len(piece.begin), MESSAGE)
        records["from" if out else "to"] = self.address(piece.core, piece.buffer) + piece.begin
        records["to" if out else "from"] = other + piece.begin
        records["bytes"] = piece.end - piece.begin
        return records

    def initial(self) -> list[Piece]:
        """The pieces that cores hold before the first iteration."""
        return [
            Piece(core, buffer, np.array([low]), np.array([high]))
            for core, windows in enumerate(self.exchange.windows)
            for buffer, (low, high) in sorted(windows.items())
            if self.plan.buffers[buffer].initial or self.plan.buffers[buffer].arena in INITIAL
        ]
