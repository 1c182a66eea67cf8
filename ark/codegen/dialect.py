"""What a vendor adds to the loop kernel's source: a prelude, an entry point, bodies of its own.

The writer joins `prelude` (the device ABI, listed in docs/device-abi.md), the shared structures,
the task bodies and the loop, and ends with `entry`. Nothing else differs between vendors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ark.machine import Machine
from ark.plan.kind import Signature


@dataclass(frozen=True)
class Source:
    """A loop kernel's source text and the name of its entry point.

    parts: where its functions are compiled each by itself, as for a library, and then linked: as
    how many texts, side by side, each with its number as ARK_PART where there are several. 0: as
    one program.
    """

    text: str
    entry: str = "ark_loop"
    parts: int = 0


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


# The maps that a kind's bodies need; their addresses follow the operands' in a task's record.
MapRule = Callable[[Signature, Machine], "tuple[BoxMap, ...]"]

# A body writer gets the function's name, the signature and the machine; it returns a C++ function
# `ARK_BODY void name(ArkCtx& c, const ArkTask& t)`, or None where it does not serve the signature.
BodyWriter = Callable[[str, Signature, Machine], "str | None"]

# Device code that a vendor's own bodies of a kind stand on; each text is emitted once.
HeaderRule = Callable[[Machine], "tuple[str, ...]"]

# The loop of a loading thread, for the signatures of a plan's ops.
LoaderRule = Callable[[Sequence[Signature], Machine], str]

# Does the vendor's own body of the variant `block` wait for its task itself?
EnterRule = Callable[[Signature, Machine], bool]

# Shared memory, in bytes, that a vendor's own body needs for a signature; 0 where it serves none.
ScratchRule = Callable[[Signature, Machine], int]


@dataclass(frozen=True)
class Dialect:
    """One vendor's way of spelling the loop kernel.

    prelude: source text that implements the device ABI. entry: source text of the entry point
    `ark_loop`, placed last. bodies: vendor-owned body writers by task kind ("matmul", ...), tried
    before the common one. headers: the device code that those stand on, by task kind, placed before
    the kinds' own. scratch: what those bodies need of shared memory, by task kind, where it is more
    than the common body does. suffix: file ending of emitted source. stream: source text of
    the operand stream for machines with a ring, placed before the bodies; without a ring operands
    are read in place. roles: source text of the loop of the variant `roles`, behind the stream.
    polls: by task kind, writers of `void NAME_poll(ArkCtx&, const ArkTask&)`, with which the lead
    warp there waits for a task's input; where one writes None, the body is in block form. loads: by
    task kind, writers of NAME_load, the half of a body that a loading thread runs in variants that
    have loading warps but no ring; loader: writes the source text of their loop, for the signatures
    of all ops; unstaged: bytes at the beginning of shared memory that are no part of their
    stages. moves: by task kind, writers of NAME_move(const ArkTask&), which the warps run that
    have a task list of their own. enters: by task kind, whether the vendor's own body of the
    variant `block` begins before its task's waits and calls ark_enter itself; it returns a bool
    then, and until that call reads nothing but what the stream fetches. maps: by task kind, the
    box maps of its operands. together: the most bodies that a kernel of the variant `block` is
    compiled with as one program; where it has more, its functions are compiled separately. 0: all
    kernels are compiled as one.
    """

    name: str
    suffix: str
    prelude: str
    entry: str
    bodies: Mapping[str, BodyWriter] = field(default_factory=dict)
    headers: Mapping[str, HeaderRule] = field(default_factory=dict)
    scratch: Mapping[str, ScratchRule] = field(default_factory=dict)
    stream: str = ""
    polls: Mapping[str, BodyWriter] = field(default_factory=dict)
    roles: str = ""
    loads: Mapping[str, BodyWriter] = field(default_factory=dict)
    moves: Mapping[str, BodyWriter] = field(default_factory=dict)
    enters: Mapping[str, EnterRule] = field(default_factory=dict)
    maps: Mapping[str, MapRule] = field(default_factory=dict)
    loader: LoaderRule | None = None
    unstaged: int = 0
    together: int = 0
