"""The protocol and the registry of task kinds: the memory that a task accesses, its cost, and its
source.

One kind serves many ops. A signature (kind, static parameters, operand layouts) is the unit for
which one C++ function is specialised, so equal layers share a function. The planner and the
verifier ask for accesses and cost, the source writer for source and scratch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ark._late import LateTable
from ark.errors import PlanError
from ark.machine import Machine
from ark.plan.params import INT_MAX, Params, Places, read_params
from ark.plan.signature import ARRANGED, WIDEST_ACCESS_BYTES
from ark.plan.signature import OperandType as OperandType
from ark.plan.signature import Signature as Signature
from ark.plan.types import Fetch, Plan, PlanOp, PlanTensor

ALL_ROWS = (0, INT_MAX)


@dataclass(frozen=True)
class Access:
    """A box of an operand's index space that a task reads or writes; hi is exclusive.

    append_only: the buffer grows along the position. An append-only write appends at this
    iteration's position, and an append-only read reads rows that earlier iterations appended, so
    they do not conflict. appended: the first and the last + 1 of the rows after the position that
    this write may append; tasks of one op that append different rows do not conflict. claimed: the
    task touches only those tiles of the box that it claims while it runs; no other task of the op
    touches them.
    """

    operand: int
    lo: tuple[int, ...]
    hi: tuple[int, ...]
    write: bool = False
    append_only: bool = False
    appended: tuple[int, int] = ALL_ROWS
    claimed: bool = False


class TaskKind(ABC):
    """One kind of task. `coord` is the tile's position, in units that the kind defines.

    params: the schema of its static parameters. packet_types: the types that operands sent as
    packets may have. streams: True if its tasks may take operands from the operand stream.
    claimable: True if processors may claim an op's tiles while they run (ark.tasks.claimed).
    """

    name: str
    streams = False
    claimable = False
    params: type[Params] = Params
    packet_types: tuple[str, ...] = ("fp32",)

    def check(self, sig: Signature) -> None:
        """Raises PlanError unless parameters and operands are valid for the other methods. These
        rely on this check.
        """
        read_params(self.name, self.params, sig.params)
        able = self.packets(sig)
        for index, operand in enumerate(sig.operands):
            if operand.packet and (index not in able or operand.dtype not in self.packet_types):
                raise PlanError(
                    f"operand {index} ({operand.dtype}) is marked as packets; kind {self.name!r} "
                    f"takes packets of {' or '.join(self.packet_types)} for the operands "
                    f"{sorted(able)}"
                )

    @abstractmethod
    def places(self, sig: Signature) -> Places:
        """The coordinates of all tasks of an op."""

    def claims(self, sig: Signature) -> int:
        """The number of tiles that an op's tasks claim while they run; 0 if each task has a fixed
        tile.
        """
        return 0

    def to_claim(self, sig: Signature, machine: Machine) -> Mapping[str, Any] | None:
        """The op's parameters, with tiles of the size in which processors claim them. None if tasks
        with fixed tiles are faster or the kind cannot claim tiles.
        """
        return sig.params if self.claimable else None

    def in_place(self, sig: Signature) -> frozenset[int]:
        """The operands whose memory the output may occupy exactly, because each element of the
        output depends only on the operand's element at the same position.
        """
        return frozenset()

    def wide(self, sig: Signature) -> frozenset[int]:
        """The operands that bodies may read in accesses of 16 bytes, for which they must be aligned
        to 16 bytes.
        """
        return frozenset()

    @abstractmethod
    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        """The boxes that the task reads and writes. They may be larger than the true accesses,
        never smaller.
        """

    def on_rank(self, params: Mapping[str, Any], by: int) -> Mapping[str, Any]:
        """The op's parameters on the rank `by` ranks after this one, if all ranks do the same with
        peers counted relative to themselves (ark.plan.rotated). A change of rank does not change
        which memory tasks touch.
        """
        return params

    def own(self, sig: Signature) -> tuple[int, ...]:
        """Numbers that differ between ranks which otherwise do the same. Code reads them from a
        task's record (ark_own): they are its last coordinates, in reverse order, so the first
        number is the last coordinate.
        """
        return ()

    def packets(self, sig: Signature) -> frozenset[int]:
        """Operands that the body can load or publish as packets {value, epoch}."""
        return frozenset()

    def early(self, sig: Signature) -> frozenset[int]:
        """Operands that a body may read before its task's waits are complete, in variants whose
        bodies begin early (docs/loop-kernel.md). Safe are packets, whose load itself waits, and
        memory that no task writes earlier in the iteration. The verifier refuses plans in which a
        task writes it.
        """
        return frozenset()

    def apart(self, sig: Signature, machine: Machine) -> int:
        """The number of consecutive result elements that one thread computes alone, without shared
        memory, from operands as large as the result, in the order of ark/tasks/box.h. 0 if elements
        are not assigned to single threads.
        """
        return 0

    @abstractmethod
    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        """A C++ function `ARK_BODY void name(ArkCtx& c, const ArkTask& t)`."""

    def run_source(self, name: str, sig: Signature, machine: Machine) -> str:
        """A body for a run of consecutive tasks whose elements are assigned to single threads
        (`apart`): `ARK_BODY void name(ArkCtx& c, const ArkTask* tasks, ark_u32 count)`. The
        previous task's result may still be in registers (ArkTask's flow).
        """
        raise NotImplementedError

    def claiming_source(
        self, name: str, sig: Signature, machine: Machine, tasks: int, records: int
    ) -> str:
        """A body that claims its tiles itself; "" for kinds whose tiles ark_claimed of claimed.h
        claims. tasks: the number of tasks that share the tiles. records: the offset in shared
        memory, in bytes, of the area that it may use for claiming.
        """
        return ""

    def claiming_headers(self) -> tuple[str, ...]:
        """The headers that claiming bodies need, included after claimed.h."""
        return ()

    def headers(self) -> tuple[str, ...]:
        """The device code that the bodies need, in order; the writer emits each text once."""
        return ()

    def texts(self, sig: Signature) -> tuple[str, ...]:
        """The device code that only this signature's body needs, emitted after the headers."""
        return ()

    def scratch(self, sig: Signature, machine: Machine) -> int:
        """Bytes of shared memory that the task needs besides the ring."""
        return 0

    def stream(self, sig: Signature, coord: Sequence[int]) -> tuple[Fetch, ...]:
        """The task's fetches from the operand stream, in the order of use."""
        return ()

    def rounds(self, sig: Signature, machine: Machine) -> int:
        """The number of consecutive times that a task waits for loads or for sums of other threads,
        as the cost model counts them.
        """
        return 1

    def cost(self, sig: Signature, coord: Sequence[int]) -> tuple[float, float]:
        """(floating-point operations, bytes moved), for the cost model."""
        moved = sum(
            math.prod(h - lo for lo, h in zip(a.lo, a.hi, strict=True))
            * sig.operands[a.operand].itemsize
            / sig.operands[a.operand].per_item
            for a in self.accesses(sig, coord)
        )
        return moved / 4.0, float(moved)


def whole(operand: int, operand_type: OperandType, write: bool = False) -> Access:
    """An access to all of an operand."""
    return Access(operand, (0,) * len(operand_type.shape), operand_type.shape, write)


def signature(plan: Plan, op: PlanOp) -> Signature:
    """The signature of an op in a plan."""
    operands = []
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
                buffer.arena in ARRANGED
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
            f"{', '.join(sorted(_KINDS))}; make the plan again with this version"
        )
    return _KINDS[name]


def names() -> tuple[str, ...]:
    return tuple(sorted(_KINDS.filled()))
