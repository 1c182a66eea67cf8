"""The base class and the registry of task kinds. A task kind states which memory a task accesses,
what the task costs, and the C++ function that computes it.

One kind serves many ops. One C++ function is specialised for each signature (kind, static
parameters, operand layouts), so equal layers share a function. The planner and the verifier call a
kind's methods for accesses and cost, the source writer those for source and scratch memory.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ark.errors import PlanError
from ark.ir.late import LateTable
from ark.machine import Machine
from ark.plan.params import INT_MAX, Params, Places, read_params
from ark.plan.signature import ARRANGED, EXTERNAL_ALIGNMENT, WIDEST_ACCESS_BYTES
from ark.plan.signature import OperandType as OperandType
from ark.plan.signature import Signature as Signature
from ark.plan.types import Fetch, Plan, PlanOp, PlanTensor

ALL_ROWS = (0, INT_MAX)


@dataclass(frozen=True)
class Access:
    """A box (rectangle of indices, lo to hi - 1) of an operand that a task reads or writes.

    append_only: the buffer grows by rows, as a cache of keys and values does. An append-only write
        appends rows at this iteration's position, and an append-only read reads rows that earlier
        iterations appended. So the two do not conflict.
    appended: the range of rows that this write may append, as (first, last + 1), counted from the
        iteration's position. Tasks of one op that append different rows do not conflict.
    claimed: the op's tasks claim the tiles of the box at run time, each tile by one task. So the
        task accesses only some tiles of the box, and no other task of the op accesses the same
        ones.
    """

    operand: int
    lo: tuple[int, ...]
    hi: tuple[int, ...]
    write: bool = False
    append_only: bool = False
    appended: tuple[int, int] = ALL_ROWS
    claimed: bool = False


class TaskKind(ABC):
    """One kind of task. In the methods, `coord` is the position of a task's tile, in units that the
    kind defines.

    params: the schema of the kind's static parameters.
    packet_types: the types that operands may have if they are sent as packets (a value and an epoch
        in one word).
    streams: True if tasks of the kind may read operands from the operand stream, which copies them
        to shared memory ahead of the tasks.
    claimable: True if processors may claim an op's tiles at run time by an atomic counter
        (ark.tasks.claimed).
    headers: the device code that all functions of the kind need, in order. The source writer emits
        each text once per kernel. common_headers: those that only `source` needs, not the vendors'
        own functions, emitted after the headers. claiming_headers: those of the function of
        `claiming_source`, included after claimed.h.
    """

    name: str
    streams = False
    claimable = False
    headers: tuple[str, ...] = ()
    common_headers: tuple[str, ...] = ()
    claiming_headers: tuple[str, ...] = ()
    params: type[Params] = Params
    packet_types: tuple[str, ...] = ("fp32",)

    def check(self, sig: Signature) -> None:
        """Raises PlanError unless the op's parameters and operands are valid for this kind. All
        other methods rely on this check.
        """
        read_params(self.name, self.params, sig.params)
        able = self.packets(sig)
        for index, operand in enumerate(sig.operands):
            if operand.packet and (index not in able or operand.dtype not in self.packet_types):
                raise PlanError(
                    f"operand {index} ({operand.dtype}) is stored as packets, but kind "
                    f"{self.name!r} supports packets only of type "
                    f"{' or '.join(self.packet_types)}, and only for the operands {sorted(able)}"
                )

    @abstractmethod
    def places(self, sig: Signature) -> Places:
        """The coordinates that the tasks of an op have: one set of coordinates per tile."""

    def claims(self, sig: Signature) -> int:
        """The number of tiles that an op's tasks claim at run time by an atomic counter. 0 if each
        task has a fixed tile.
        """
        return 0

    def to_claim(self, sig: Signature, machine: Machine) -> Mapping[str, Any] | None:
        """Parameters for an op whose tiles processors claim at run time: the op's parameters with
        the best tile size for that. None if tasks with fixed tiles are faster, or if the kind does
        not support claiming.
        """
        return sig.params if self.claimable else None

    def in_place(self, sig: Signature) -> frozenset[int]:
        """The indices of the operands whose memory the output may share. For these operands, each
        element of the output depends only on the operand's element at the same position, so the
        output may overwrite them.
        """
        return frozenset()

    def wide(self, sig: Signature) -> frozenset[int]:
        """The indices of the operands that the device function may read 16 bytes at a time. Their
        addresses must be multiples of 16.
        """
        return frozenset()

    @abstractmethod
    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        """The boxes that the task reads and writes. They contain all elements that it accesses, and
        possibly more.
        """

    def on_rank(self, params: Mapping[str, Any], by: int) -> Mapping[str, Any]:
        """The op's parameters for the rank that is `by` ranks after this one. Called for plans in
        which all ranks do the same work (ark.plan.rotated). The parameters may contain rank numbers
        of peers, which differ between ranks. They must not change which memory the tasks access.
        """
        return params

    def own(self, sig: Signature) -> tuple[int, ...]:
        """Numbers that differ between ranks that share the code, such as the number of a rank's
        share. They are stored as the last coordinates of a task, in reverse order. The device
        function reads them there by ark_own.
        """
        return ()

    def packets(self, sig: Signature) -> frozenset[int]:
        """The indices of the operands that the device function can load or store as packets {value,
        epoch}.
        """
        return frozenset()

    def early(self, sig: Signature) -> frozenset[int]:
        """The indices of the operands that the device function may read before its task's waits are
        complete. It does so in kernel variants whose computing warps begin tasks early
        (docs/loop-kernel.md).

        Such a read is safe for packets, because their load itself waits, and for memory that no
        task writes earlier in the iteration. The verifier refuses plans in which an earlier task of
        the iteration writes such an operand.
        """
        return frozenset()

    def apart(self, sig: Signature, machine: Machine) -> int:
        """The number of consecutive result elements that each thread computes on its own, without
        shared memory, from the operands' elements at the same positions. The order of elements is
        that of ark/tasks/box.h. 0 for kinds in which threads cooperate.
        """
        return 0

    @abstractmethod
    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        """The text of the C++ function `ARK_BODY void name(ArkCtx& c, const ArkTask& t)` that
        computes a task.
        """

    def run_source(self, name: str, sig: Signature, machine: Machine) -> str:
        """The text of a C++ function that computes several consecutive tasks: `ARK_BODY void
        name(ArkCtx& c, const ArkTask* tasks, ark_u32 count)`. Only for kinds in which each thread
        works on its own (see `apart`). The function may use the previous task's result while it is
        still in registers (ArkTask's flow).
        """
        raise NotImplementedError

    def claiming_source(
        self, name: str, sig: Signature, machine: Machine, tasks: int, records: int
    ) -> str:
        """The text of a device function whose tasks claim their tiles while they run. "" for kinds
        for which the common function ark_claimed (claimed.h) does so. tasks: the number of tasks
        that share the tiles. records: the offset in shared memory, in bytes, of the area for
        claiming.
        """
        return ""

    def texts(self, sig: Signature) -> tuple[str, ...]:
        """The device code that only the function of this signature needs, emitted after the
        headers.
        """
        return ()

    def scratch(self, sig: Signature, machine: Machine) -> int:
        """Bytes of shared memory that the task needs besides the ring."""
        return 0

    def stream(self, sig: Signature, coord: Sequence[int]) -> tuple[Fetch, ...]:
        """The bytes of operands that are copied ahead of time for the task (its fetches from the
        operand stream), in the order of use.
        """
        return ()

    def coalesced(self, sig: Signature, machine: Machine) -> bool:
        """For the cost model: True if the elements that a task moves pass through shared memory, so
        that neighbouring threads access neighbouring memory in any case.
        """
        return False

    def rounds(self, sig: Signature, machine: Machine) -> int:
        """For the cost model: how many times in a row a task waits for the latency of loads or of
        sums over threads.
        """
        return 1

    def cost(self, sig: Signature, coord: Sequence[int]) -> tuple[float, float]:
        """For the cost model: the floating-point operations of a task and the bytes that it
        moves.
        """
        moved = bytes_of(sig, self.accesses(sig, coord))
        return moved / 4.0, moved


def bytes_of(sig: Signature, accesses: Iterable[Access]) -> float:
    """The bytes of the boxes that a task accesses, without padding."""
    return float(
        sum(
            math.prod(h - lo for lo, h in zip(a.lo, a.hi, strict=True))
            * sig.operands[a.operand].itemsize
            / sig.operands[a.operand].per_item
            for a in accesses
        )
    )


def whole(operand: int, operand_type: OperandType, write: bool = False) -> Access:
    """An access (a read or a write) to all elements of an operand."""
    return Access(operand, (0,) * len(operand_type.shape), operand_type.shape, write)


def signature(plan: Plan, op: PlanOp) -> Signature:
    """The signature of an op in a plan."""
    operands = []
    placed = plan.meta.get(EXTERNAL_ALIGNMENT, 1) % WIDEST_ACCESS_BYTES == 0
    arranged = (*ARRANGED, "external") if placed else ARRANGED
    for tensor_id in op.operands:
        tensor: PlanTensor = plan.tensors[tensor_id]
        buffer = plan.buffers[tensor.buffer]
        operands.append(
            OperandType(
                tensor.dtype,
                tensor.shape,
                tensor.strides,
                tensor.packet,
                buffer.arena == "symmetric",
                buffer.arena in arranged
                and (buffer.offset + tensor.first_byte) % WIDEST_ACCESS_BYTES == 0,
            )
        )
    return Signature(op.kind, op.params, tuple(operands))


_KINDS: LateTable[TaskKind] = LateTable("task kinds")


def register(kind: TaskKind) -> TaskKind:
    """Adds a kind to the registry; called once per kind when ark.tasks is imported."""
    _KINDS[kind.name] = kind
    return kind


def get(name: str) -> TaskKind:
    """The kind of that name. Raises PlanError if it does not exist, for example in a plan of a
    newer ark.
    """
    if name not in _KINDS and name not in _KINDS.filled():
        raise PlanError(
            f"the plan has a task of kind {name!r}, but this ark knows only "
            f"{', '.join(sorted(_KINDS))}; plan again with this version"
        )
    return _KINDS[name]


def names() -> tuple[str, ...]:
    return tuple(sorted(_KINDS.filled()))
