"""Dialects: a vendor's parts of the loop kernel's source (prelude, entry point, own bodies).

The writer joins `prelude` (the device ABI, listed in docs/device-abi.md), the shared structures,
the task bodies and the loop, and ends with `entry`. The rest is the same for all vendors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ark.codegen.body import Body
from ark.machine import Machine
from ark.plan.kind import Signature


@dataclass(frozen=True)
class Source:
    """A loop kernel's source text and the name of its entry point.

    parts: the number of times that the text is compiled, in parallel, if its functions are compiled
    separately and then linked; with several parts, each compilation defines its number as ARK_PART.
    0: the text is compiled as one program. loop: the loop and the entry point as a separate text
    that many kernels share. `text` contains them too, but not if it is compiled with ARK_PART 1.
    "": the loop is not shared.
    """

    text: str
    entry: str = "ark_loop"
    parts: int = 0
    loop: str = ""


# A function that writes the loop of a loading thread, given the signatures of a plan's ops.
LoaderRule = Callable[[Sequence[Signature], Machine], str]


@dataclass(frozen=True)
class Dialect:
    """The vendor-specific parts of the loop kernel.

    prelude: source text that implements the device ABI. entry: source text of the entry point
    `ark_loop`, placed last. suffix: file ending of emitted source. bodies: the vendor's own bodies,
    in the order in which they are tried. stream: source text of the operand stream for machines
    with a ring, placed before the bodies; without a ring operands are read in place. roles: source
    text of the loop of the variant `roles`, placed after the stream. loader: writes the source text
    of the loop of the loading thread in variants that have loading warps but no ring, for the
    signatures of all ops; unstaged: bytes at the beginning of shared memory that do not belong to
    the stages of loading warps. joint_bodies: the largest number of bodies with which a kernel of
    the variant `block` is compiled as one program; with more bodies, its functions are compiled
    separately. 0: all kernels are compiled as one program. shares_loops: kernels of the variant
    `block` share the machine code of equal loops.
    """

    name: str
    suffix: str
    prelude: str
    entry: str
    bodies: tuple[Body, ...] = ()
    stream: str = ""
    roles: str = ""
    loader: LoaderRule | None = None
    unstaged: int = 0
    joint_bodies: int = 0
    shares_loops: bool = False

    def body(self, sig: Signature, machine: Machine, moves: bool = False) -> Body | None:
        """The vendor's body for the signature; None if the vendor has none and the common body is
        used. moves: search the bodies for moving warps.
        """
        able = (b for b in self.bodies if b.kind == sig.kind and b.moves == moves)
        return next((b for b in able if b.serves(sig, machine)), None)
