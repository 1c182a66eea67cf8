"""The interface of vendor bodies. A body is the device function that computes one task, which is a
tile of an op. A vendor can write its own body for a task kind, for example a matmul on its matrix
units. A backend has these bodies in its package `tasks`, beside the headers that they need, and
lists them in `Dialect.bodies`. A signature consists of a task's kind, its parameters and its
operands' layouts. For a signature, the writer uses the first vendor body of the kind whose `serves`
is True. If there is none, it uses the vendor-independent body, which the task kind writes
(ark.tasks).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ark.machine import Machine
from ark.plan.kind import Signature


@dataclass(frozen=True)
class BoxMap:
    """A description of an operand for hardware that copies boxes, which are rectangular ranges of
    indices (the arguments of a TMA tensor map).

    operand: the operand's index in the op. dtype: the type of the elements. In shared memory, a box
    of type `byte` is stored row after row; a box of another type is stored in rows of 128 bytes
    whose 16-byte pieces are swizzled. dims: elements, innermost dimension first. strides: bytes
    from one index to the next, of dimensions 1 and up. box: elements of one copy, per dimension.
    fetched: bytes that are loaded from memory into the cache at a time, 128 or 256.

    If `steps` is given, the map loads convolution windows from an image with the dimensions
    (channels, columns, rows, n). A copy then loads, for a number of consecutive
    windows, the pixels at one element of the kernel; `box` is (channels, number of windows). The
    origins of windows start at `lower` (column, row), are `steps` apart and end at the last index
    plus `upper`.
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
    """The base class of vendor bodies of the task kind `kind`. `serves` and `source` must be
    defined. The other methods are called only with signatures for which `serves` is True.

    enters: True if, in the kernel variant `block`, the function is called before the waits of its
    task are met. The function then calls ark_enter, which waits, and returns a bool. Before
    ark_enter it reads only data that the operand stream fetches. moves: True if moving warps run
    the function.
    """

    kind: ClassVar[str]
    enters: ClassVar[bool] = False
    moves: ClassVar[bool] = False

    def serves(self, sig: Signature, machine: Machine) -> bool:
        """True if this body supports the signature on the machine, in the machine's kernel
        variant.
        """
        raise NotImplementedError

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        """The source of the function `ARK_BODY void NAME(ArkCtx& c, const ArkTask& t)`, or if
        `moves` is True of NAME_move(const ArkTask&).
        """
        raise NotImplementedError

    def headers(self, machine: Machine) -> tuple[str, ...]:
        """The texts of the headers that all functions of this body need, in order. The writer emits
        each text once per kernel.
        """
        return ()

    def texts(self, sig: Signature, machine: Machine) -> tuple[str, ...]:
        """The texts of the headers that only the function of this signature needs, emitted after
        `headers`.
        """
        return ()

    def scratch(self, sig: Signature, machine: Machine) -> int:
        """Bytes of shared memory that a task with this function needs, besides the ring."""
        return 0

    def maps(self, sig: Signature, machine: Machine) -> tuple[BoxMap, ...]:
        """The maps of the operands that the function loads by box copies. In the record of a task,
        the addresses of the maps follow those of the operands.
        """
        return ()

    def poll(self, name: str, sig: Signature, machine: Machine) -> str | None:
        """The source of `void NAME_poll(ArkCtx&, const ArkTask&)`, which the communicating warp of
        the kernel variant `roles` calls to wait for the task's input. None if the body has no part
        for this warp.
        """
        return None

    def load(self, name: str, sig: Signature, machine: Machine) -> str | None:
        """The source of the function NAME_load, which contains the loads of the body. A loading
        thread calls it in kernel variants that have loading warps but no ring. None if the body has
        no such function.
        """
        return None
