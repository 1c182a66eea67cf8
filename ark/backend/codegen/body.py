"""The interface of vendor bodies. A body is the device function that computes one task (a tile of
an op). A vendor can write its own body for a task kind, for example a matmul on its matrix units. A
backend keeps its bodies and their headers in its package `tasks`, and lists the bodies in
`Dialect.bodies`.

A signature is a task's kind, its parameters and the layouts of its operands. For each signature,
the writer calls `serves` of the kind's vendor bodies, and uses the first body that returns True. If
none does, it uses the vendor-independent body of the task kind (ark.tasks).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ark.machine import Machine
from ark.plan.kind import Signature


@dataclass(frozen=True)
class BoxMap:
    """Describes an operand to hardware that copies boxes (rectangular ranges of indices). It has
    the arguments of a TMA tensor map.

    operand: the operand's index in the op. dtype: the type of the elements. In shared memory, a box
    of type `byte` is stored row after row. A box of another type is stored in rows of 128 bytes, in
    which chunks of 16 bytes are swizzled. dims: elements, innermost dimension first. strides: bytes
    from one index to the next, of dimensions 1 and up. box: elements of one copy, per dimension.
    fetched: the unit in which memory is loaded into the cache, 128 or 256 bytes.

    If `steps` is given, the map loads convolution windows from an image with the dimensions
    (channels, columns, rows, n). A copy then loads, for several consecutive windows, the pixels
    under one element of the convolution kernel; `box` is (channels, number of windows). The first
    window begins at `lower` (column, row). Neighbouring windows are `steps` apart. The last window
    begins at most at the image's last index plus `upper`.
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

    enters: True if, in the kernel variant `block`, the function is called before its task's
    dependencies are complete. The function then waits itself, by calling ark_enter, and it returns
    a bool. Before this call it reads only data that the operand stream fetches. moves: True if
    moving warps run the function.
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
        """The source of `void NAME_poll(ArkCtx&, const ArkTask&)`, which waits for the task's
        input. The communicating warp of the kernel variant `roles` calls it. None if the body has
        no such function.
        """
        return None

    def load(self, name: str, sig: Signature, machine: Machine) -> str | None:
        """The source of the function NAME_load, which contains the loads of the body. A loading
        thread calls it in kernel variants that have loading warps but no ring. None if the body has
        no such function.
        """
        return None
