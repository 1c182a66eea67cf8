"""Vendor bodies: one object for each task kind and form that a vendor implements itself.

They are in the vendor's package `tasks`, each beside the device code that it needs, and are listed
in `Dialect.bodies`. The first body of the task's kind that serves its signature is used; if none
does, the common body of the kind is (ark.tasks).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ark.machine import Machine
from ark.plan.kind import Signature


@dataclass(frozen=True)
class BoxMap:
    """The description of an operand for hardware that copies boxes.

    operand: its index. dims: elements, innermost dimension first. strides: bytes from one index to
    the next, of dimensions 1 and up. box: elements of one copy, per dimension. fetched: bytes that
    are loaded from memory into the cache at a time, 128 or 256.

    With `steps` it is a map of windows with the dimensions (channels, across, down, n), and `box`
    contains the channels and the number of places of a copy. A place is the position of a window's
    first tap. Places begin at `lower` (across, down), end at the last index plus `upper`, and are
    `steps` apart.
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
    """A body of the task kind `kind`. Other methods than `serves` are called only with signatures
    that it serves. `serves` and `source` have no default.

    enters: in the variant `block`, the body begins before its task's waits and calls ark_enter
    itself. Then it returns a bool, and before that call it reads only data that the stream fetches.
    moves: the body is run by the warps that have a task list of their own.
    """

    kind: ClassVar[str]
    enters: ClassVar[bool] = False
    moves: ClassVar[bool] = False

    def serves(self, sig: Signature, machine: Machine) -> bool:
        """True where this body implements the signature on the machine, under the machine's
        variant.
        """
        raise NotImplementedError

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        """The source of `ARK_BODY void NAME(ArkCtx& c, const ArkTask& t)` or, for a body that
        moves, of NAME_move(const ArkTask&).
        """
        raise NotImplementedError

    def headers(self, machine: Machine) -> tuple[str, ...]:
        """The device code that the source needs; each text is emitted once."""
        return ()

    def scratch(self, sig: Signature, machine: Machine) -> int:
        """Bytes of shared memory that a task with this device function needs."""
        return 0

    def maps(self, sig: Signature, machine: Machine) -> tuple[BoxMap, ...]:
        """The maps of operands that this function loads by box copies. In a task's record their
        addresses follow those of the operands.
        """
        return ()

    def poll(self, name: str, sig: Signature, machine: Machine) -> str | None:
        """The source of `void NAME_poll(ArkCtx&, const ArkTask&)`, with which the leading warp of
        the variant `roles` waits for the task's input. None if the body has the form of the variant
        `block`.
        """
        return None

    def load(self, name: str, sig: Signature, machine: Machine) -> str | None:
        """The source of NAME_load, the loads of the body as a function of their own, which a
        loading thread runs in variants that have loading warps but no ring. None if the body has no
        such function.
        """
        return None
