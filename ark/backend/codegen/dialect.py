"""Dialects: the parts of the loop kernel's source that a vendor provides.

The writer (ark.backend.codegen.writer) concatenates the dialect's `prelude`, which implements the
device ABI (docs/device-abi.md), the shared structures, the loop, the bodies of the tasks and the
dialect's `entry`. The structures, the loop and the vendor-independent bodies are the same for all
vendors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ark.backend.codegen.body import Body
from ark.machine import Machine
from ark.plan.kind import Signature


@dataclass(frozen=True)
class Source:
    """The source text of a loop kernel and the name of its entry point.

    parts: if 0, the text is compiled as one program. Otherwise the text is compiled `parts` times
    in parallel, and the results are linked. If `parts` is above 1, each compilation defines the
    macro ARK_PART as its number, which selects the functions that it contains.

    loop: the text of the loop and the entry point, if kernels with equal loops share their machine
    code; otherwise "". `text` contains the loop too, but compiling `text` with ARK_PART defined as
    1 leaves the loop out.
    """

    text: str
    entry: str = "ark_loop"
    parts: int = 0
    loop: str = ""


# The type of a function that generates the source of the loading thread's loop. Its arguments are
# the signatures (kinds of bodies) of a plan's ops, and the machine.
LoaderRule = Callable[[Sequence[Signature], Machine], str]


@dataclass(frozen=True)
class Dialect:
    """The vendor-specific parts of the loop kernel.

    suffix: the file name extension of emitted source. bodies: the vendor's bodies, in the order in
    which they are tried for a signature.

    Source texts: prelude: implements the device ABI; it is placed first. entry: the entry point
    `ark_loop`; it is placed last. ring, growth, stream: the operand stream for machines with a
    ring, in this order. growth is included only in kernels with fetches of rows whose number grows
    with each iteration (a KV cache). roles: the loop of the kernel variant `roles`. loader: a
    function that returns the loop of the loading thread, for kernel variants that have loading
    warps but no ring. All these texts are placed before the bodies.

    unstaged: the bytes at the beginning of shared memory that loading warps do not use for their
    stages. joint_bodies: a kernel of the variant `block` with more bodies than this is compiled in
    separate parts and linked; with 0 every kernel is compiled as one program. apart: task kinds; a
    kernel of the variant `block` that has tasks of all these kinds is also compiled in separate
    parts. joint_products: the largest number of different matmul bodies in a kernel with loading
    warps; more would compile slowly. 0 means no limit. shares_loops: True if kernels of the variant
    `block` share the machine code of equal loops.
    """

    name: str
    suffix: str
    prelude: str
    entry: str
    bodies: tuple[Body, ...] = ()
    ring: str = ""
    growth: str = ""
    stream: str = ""
    roles: str = ""
    loader: LoaderRule | None = None
    unstaged: int = 0
    joint_bodies: int = 0
    joint_products: int = 0
    apart: frozenset[str] = frozenset()
    shares_loops: bool = False

    def body(self, sig: Signature, machine: Machine, moves: bool = False) -> Body | None:
        """The vendor's body for the signature; None if the vendor has none. moves: True to search
        the bodies of moving warps instead of those of computing warps.
        """
        able = (b for b in self.bodies if b.kind == sig.kind and b.moves == moves)
        return next((b for b in able if b.serves(sig, machine)), None)
