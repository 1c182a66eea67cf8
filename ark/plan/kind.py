"""The protocol and the table of task kinds: which memory a task accesses, its cost, and its source.

A kind serves many ops; a signature (kind, static parameters, operand layouts) is what one C++
function is specialised for, so that equal layers share it. The planner and the verifier ask for
accesses and cost, the writer for source and scratch.
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

    append_only: the buffer grows along the position. Such a write appends at this iteration's
    position, such a read takes what earlier iterations appended, so the two never meet.
    appended: of the rows that the op appends behind the position, the first and the last+1 that
    such a write may be; tasks of one op that append different rows do not meet.
    claimed: the task touches those tiles of the box that it claims while it runs, which no other
    task of the op does.
    """

    operand: int
    lo: tuple[int, ...]
    hi: tuple[int, ...]
    write: bool = False
    append_only: bool = False
    appended: tuple[int, int] = ALL_ROWS
    claimed: bool = False


class TaskKind(ABC):
    """One kind of task. `coord` is the tile's place, in units that the kind defines.

    params: the schema of its static parameters. packet_types: of operands that come as packets.
    streams: its tasks may take operands from the stream. claimable: processors may claim an op's
    tiles while they run (ark.tasks.claimed).
    """

    name: str
    streams = False
    claimable = False
    params: type[Params] = Params
    packet_types: tuple[str, ...] = ("fp32",)

    def check(self, sig: Signature) -> None:
        """Raises PlanError unless parameters and operands are what the other methods expect.

        Everything else here may take for granted what this accepts.
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
        """The coordinates of an op's tasks, all of them."""

    def claims(self, sig: Signature) -> int:
        """Tiles that an op's tasks claim while they run; 0 where each task has its own."""
        return 0

    def to_claim(self, sig: Signature, machine: Machine) -> Mapping[str, Any] | None:
        """The op's parameters with tiles of the size that processors claim, if they may; None where
        tasks of their own are faster.
        """
        return sig.params if self.claimable else None

    def in_place(self, sig: Signature) -> frozenset[int]:
        """Operands on whose memory the output may lie exactly: each element depends on its own
        place only.
        """
        return frozenset()

    def wide(self, sig: Signature) -> frozenset[int]:
        """Operands that bodies may read in 16 bytes at once, and that must lie accordingly."""
        return frozenset()

    @abstractmethod
    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        """What the task reads and writes; exact or larger, never smaller."""

    def on_rank(self, params: Mapping[str, Any], by: int) -> Mapping[str, Any]:
        """The parameters that the op has `by` ranks further on, where all ranks do the same with
        peers counted from themselves (ark.plan.rotated). They change nothing of what tasks touch.
        """
        return params

    def own(self, sig: Signature) -> tuple[int, ...]:
        """Numbers in which ranks that else do the same differ, and which code therefore reads from
        a task's record (ark_own): they are its last coordinates, the first of them the very last.
        """
        return ()

    def packets(self, sig: Signature) -> frozenset[int]:
        """Operands that the body can load or publish as packets {value, epoch}."""
        return frozenset()

    def early(self, sig: Signature) -> frozenset[int]:
        """Operands that a body may read before its task's waits are met, in variants whose bodies
        begin so early (docs/loop-kernel.md): packets, for which reading is waiting, and what no
        task writes earlier in the iteration. The verifier refuses plans where one does.
        """
        return frozenset()

    def apart(self, sig: Signature, machine: Machine) -> int:
        """Neighbours of the result that a thread makes by itself, from such of its operands as are
        as large, in the order in which ark/tasks/box.h deals them, without shared memory; 0 where
        threads have no elements to themselves.
        """
        return 0

    @abstractmethod
    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        """A C++ function `ARK_BODY void name(ArkCtx& c, const ArkTask& t)`."""

    def run_source(self, name: str, sig: Signature, machine: Machine) -> str:
        """The same for tasks whose threads have elements to themselves (`apart`), one after the
        other: `ARK_BODY void name(ArkCtx& c, const ArkTask* tasks, ark_u32 count)`. What the task
        before has made may still be in registers (ArkTask's flow).
        """
        raise NotImplementedError

    def claiming_source(
        self, name: str, sig: Signature, machine: Machine, tasks: int, records: int
    ) -> str:
        """A body that claims its tiles itself, as ark_claimed of claimed.h does for others, which
        have none. tasks: how many share them. records: bytes of shared memory before those that it
        may use for that.
        """
        return ""

    def claiming_headers(self) -> tuple[str, ...]:
        """What such bodies stand on, behind claimed.h."""
        return ()

    def headers(self) -> tuple[str, ...]:
        """Device code that the bodies stand on, in order; the writer emits each text once."""
        return ()

    def texts(self, sig: Signature) -> tuple[str, ...]:
        """The same of this signature's body alone, behind the headers."""
        return ()

    def scratch(self, sig: Signature, machine: Machine) -> int:
        """Bytes of shared memory that the task needs besides the ring."""
        return 0

    def stream(self, sig: Signature, coord: Sequence[int]) -> tuple[Fetch, ...]:
        """What the task takes from the operand stream, in the order of use."""
        return ()

    def rounds(self, sig: Signature, machine: Machine) -> int:
        """How many times a task waits for loads or for other threads' sums, one after the other, as
        far as the cost model counts it.
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
    """The signature of a plan's op."""
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
    """The kind of that name; PlanError if there is none (a plan from a newer ark, say)."""
    if name not in _KINDS and name not in _KINDS.filled():
        raise PlanError(
            f"the plan has a task of kind {name!r}, but this ark knows only "
            f"{', '.join(sorted(_KINDS))}; make the plan again with this version"
        )
    return _KINDS[name]


def names() -> tuple[str, ...]:
    return tuple(sorted(_KINDS.filled()))
