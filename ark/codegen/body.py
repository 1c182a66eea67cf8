"""Vendor bodies: one object for each task kind and form that a vendor implements itself.

A vendor's package `tasks` holds them, each beside the device code that it stands on, and lists them
in `Dialect.bodies`. Of a task's kind the first body that serves its signature is taken; where none
does, the common body of the kind (ark.tasks).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ark.machine import Machine
from ark.plan.kind import Signature


@dataclass(frozen=True)
class BoxMap:
    """How hardware that copies boxes sees an operand.

    operand: its index. dims: elements, innermost dimension first. strides: bytes from one index to
    the next, of dimensions 1 and up. box: elements of one copy, per dimension. fetched: bytes that
    come from memory to the cache at a time, 128 or 256.

    With steps it is a map of windows, of dimensions (channels, across, down, n): box has the
    channels and places of a copy. A place is where a window's first tap lies; places begin at
    `lower` (across, down), end with the last index plus `upper`, and are `steps` apart.
    """

    operand: int
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    lower: tuple[int, ...] = ()
    upper: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    fetched: int = 256


class Body:
    """A body of the task kind `kind`. Methods other than `serves` are asked of signatures that it
    serves; `serves` and `source` have no default.

    enters: in the variant `block` it begins before its task's waits and calls ark_enter itself; it
    returns a bool then, and until that call reads nothing but what the stream fetches. moves: it is
    run by the warps that have a task list of their own.
    """

    kind: ClassVar[str]
    enters: ClassVar[bool] = False
    moves: ClassVar[bool] = False

    def serves(self, sig: Signature, machine: Machine) -> bool:
        """True for a signature that this body takes on the machine, under its variant."""
        raise NotImplementedError

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        """`ARK_BODY void NAME(ArkCtx& c, const ArkTask& t)`; of a body that moves, the function
        NAME_move(const ArkTask&).
        """
        raise NotImplementedError

    def headers(self, machine: Machine) -> tuple[str, ...]:
        """The device code that the source stands on; each text is emitted once."""
        return ()

    def scratch(self, sig: Signature, machine: Machine) -> int:
        """Shared memory of a task, in bytes."""
        return 0

    def maps(self, sig: Signature, machine: Machine) -> tuple[BoxMap, ...]:
        """The box maps of its operands, whose addresses follow theirs in a task's record."""
        return ()

    def poll(self, name: str, sig: Signature, machine: Machine) -> str | None:
        """`void NAME_poll(ArkCtx&, const ArkTask&)`, with which the lead warp of the variant
        `roles` waits for the task's input; None where the body is in block form.
        """
        return None

    def load(self, name: str, sig: Signature, machine: Machine) -> str | None:
        """NAME_load, the half that a loading thread runs in variants that have loading warps but no
        ring; None where it has none.
        """
        return None
