"""The task kind `combine`, the building block of collectives. It combines tensors of several ranks
(shares) element by element: it adds, multiplies or compares them in operand order. With one share
it is a copy.

params: element (a name of ELEMENTS: the type of the operands' bytes), op (a name of OPS), divide
(the number by which the result is divided), order (the shares to combine first, in this order; the
others follow in operand order), outputs (the number of outputs, 1 by default; several must be plain
memory), moved (True if moving warps, warps that only move data, run the tasks).

operands: shares..., outputs..., all of one dimension. Each is plain memory (dense, all of one type)
or packets: a receive buffer (uint32 words, four of which hold 16 bytes of elements) or fp32
activations.

coord: the first element of the tile and the element after its last, counted in elements of the
operands' type. Tiles begin and end at multiples of 16 bytes, or at the end.

Floats below 32 bits are combined in fp32 and rounded once. A fixed order of the operands gives the
same bits on all ranks that use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec.structs import replace

from ark.ir.dtype import FLOATS, INTEGERS, SMALL_FLOATS, DataType, by_name
from ark.machine import Machine
from ark.plan.kind import Access, OperandType, Signature, TaskKind, register
from ark.plan.params import Params, Places, is_dense, need
from ark.plan.types import MAX_OPERANDS
from ark.tasks import text

ACCESS_BYTES = 16  # bytes of one access, and of the elements in four packets
PACKETS_PER_ACCESS = 4  # packets per access
RECEIVE = "uint32"  # the element type of a receive buffer


@dataclass(frozen=True)
class Element:
    """A type of elements that tasks can combine. storage: the C++ type in which they are stored."""

    storage: str
    itemsize: int


ELEMENTS = {
    "fp64": Element("double", 8),
    **{t.name: Element(t.storage, t.itemsize) for t in (*FLOATS, *SMALL_FLOATS, *INTEGERS)},
}
OPS = {"sum": "ArkJoinSum", "product": "ArkJoinProduct", "max": "ArkJoinMax", "min": "ArkJoinMin"}


Place = Annotated[int, msgspec.Meta(ge=0, le=1 << 12)]


class CombineParams(Params, frozen=True):
    element: Literal[tuple(ELEMENTS)]  # type: ignore[valid-type]
    op: Literal[tuple(OPS)] = "sum"  # type: ignore[valid-type]
    divide: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 1
    order: tuple[Place, ...] = ()
    outputs: Annotated[int, msgspec.Meta(ge=1, le=MAX_OPERANDS)] = 1
    moved: bool = False


def moved(dtype: DataType) -> str:
    """The name of the entry of ELEMENTS by which values of this type are copied. The entry's type
    has the same number of bytes.
    """
    return {1: "uint8", 2: "fp16", 4: "uint32", 8: "int64"}[dtype.itemsize]


def words(nbytes: int) -> int:
    """The number of packets that hold this many bytes of data, rounded up to whole 16-byte
    accesses.
    """
    return -(-nbytes // ACCESS_BYTES) * PACKETS_PER_ACCESS


class Combine(TaskKind):
    name = "combine"
    params = CombineParams
    packet_types = ("fp32", RECEIVE)
    headers = text.headers("combine.h")

    def check(self, sig: Signature) -> None:
        super().check(sig)
        params = sig.read(CombineParams)
        need(
            2 <= len(sig.operands) <= MAX_OPERANDS,
            f"got {len(sig.operands)} operands, expected 2 to {MAX_OPERANDS}",
        )
        order, given = params.order, sig.operands[shares(sig) :]
        need(
            shares(sig) >= 1,
            f"{len(given)} of its {len(sig.operands)} operands are outputs; expected at least one "
            "share",
        )
        need(
            len(given) == 1 or not any(o.packet for o in given),
            "several outputs do not support packets",
        )
        need(
            sorted(order) == list(range(len(order))) and len(order) <= shares(sig),
            f"the order of additions {list(order)} does not name each of the first {len(order)} "
            "shares once",
        )
        first, size = self._first(sig), unit(sig)
        element = ELEMENTS[params.element]
        for index, operand in enumerate(sig.operands):
            need(
                len(operand.shape) == 1 and is_dense(operand),
                f"operand {index} has shape {list(operand.shape)}, expected one dense dimension",
            )
            if not operand.packet:
                need(
                    (operand.dtype, operand.shape) == (first.dtype, first.shape),
                    f"operand {index} is {operand.dtype}{list(operand.shape)}, others are "
                    f"{first.dtype}{list(first.shape)}",
                )
            else:
                wanted = self._packets_of(sig, operand)
                need(
                    operand.shape[0] == wanted,
                    f"operand {index} has {operand.shape[0]} packets, expected {wanted}",
                )
        need(
            size * first.shape[0] % element.itemsize == 0 and ACCESS_BYTES % size == 0,
            f"{first.shape[0]} items of {first.dtype} are not a whole number of elements",
        )

    def on_rank(self, params: Mapping[str, Any], by: int) -> Mapping[str, Any]:
        given = CombineParams.from_plan(params)
        return replace(given, order=turned(given.order, by)).to_plan()

    def _first(self, sig: Signature) -> OperandType:
        """The operand in whose elements the coordinates of a task count: the first operand in plain
        memory or, if all operands hold packets, operand 0.
        """
        return next((o for o in sig.operands if not o.packet), sig.operands[0])

    def _packets_of(self, sig: Signature, operand: OperandType) -> int:
        nbytes = self._first(sig).shape[0] * unit(sig)
        return words(nbytes) if operand.dtype == RECEIVE else nbytes // 4

    def able(self, sig: Signature, operand: OperandType) -> bool:
        return operand.dtype == RECEIVE or (
            operand.dtype == sig.read(CombineParams).element == "fp32"
            and operand.shape[0] % PACKETS_PER_ACCESS == 0
        )

    def places(self, sig: Signature) -> Places:
        step = ACCESS_BYTES // unit(sig)
        return Places((range(0, self._first(sig).shape[0], step),), span=True)

    def in_place(self, sig: Signature) -> frozenset[int]:
        return frozenset(range(shares(sig)))

    def packets(self, sig: Signature) -> frozenset[int]:
        several = frozenset(range(shares(sig), len(sig.operands))) if outputs(sig) > 1 else ()
        able = (i for i, o in enumerate(sig.operands) if self.able(sig, o))
        return frozenset(able).difference(several)

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        begin, end = coord
        size = unit(sig)
        accesses = []
        for index, operand in enumerate(sig.operands):
            lo, hi = begin, end
            if operand.packet:
                lo, hi = begin * size // ACCESS_BYTES * PACKETS_PER_ACCESS, words(end * size)
            accesses.append(Access(index, (lo,), (hi,), write=index >= shares(sig)))
        return accesses

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        params = sig.read(CombineParams)
        element = ELEMENTS[params.element]
        last = shares(sig)

        def share(index: int) -> str:
            operand = sig.operands[index]
            kind = "ark_u64" if operand.packet else element.storage
            kind = kind if index >= last else f"const {kind}"
            scope = "true" if operand.system else "false"
            return f"ArkShare<{kind}, {scope}>{{ARK_POINTER({kind}, {text.address(sig, index)})}}"

        given = share(last)
        if outputs(sig) > 1:
            kind, places = element.storage, range(last, len(sig.operands))
            pointers = (f"ARK_POINTER({kind}, {text.address(sig, i)})" for i in places)
            given = f"ArkEach<{kind}, {outputs(sig)}>{{{{{', '.join(pointers)}}}}}"
        plain = [i for i, o in enumerate(sig.operands) if not o.packet]
        constants = [element.storage, OPS[params.op], unit(sig)]
        return text.call(
            name,
            "ark_combine",
            [*constants, params.divide],
            [
                f"ark_aligned({text.addresses(sig, plain)})",
                given,
                *(share(i) for i in terms(sig)),
            ],
        )


def unit(sig: Signature) -> int:
    """The size in bytes of the unit in which the coordinates of a task count: an element of the
    first operand in plain memory or, if all operands hold packets, of operand 0.
    """
    first = next((o for o in sig.operands if not o.packet), sig.operands[0])
    return by_name(first.dtype).itemsize


def turned(order: Sequence[int], by: int) -> tuple[int, ...]:
    """The order in which the rank that is `by` ranks after this one combines the shares."""
    return tuple((place - by) % len(order) for place in order)


def ordered(order: Sequence[int], op: str = "sum") -> list[int]:
    """The order in which the generated code combines the first shares. If there are two shares,
    they are sorted: a sum or product of two numbers has the same bits in either order, and ranks
    whose plans differ only in this order can then share a kernel. Shares of max and min are not
    sorted, because they are not symmetric for 0 and -0.
    """
    return sorted(order) if len(order) == 2 and op in ("sum", "product") else list(order)


def terms(sig: Signature) -> list[int]:
    """The indices of the shares in the order in which the code combines them."""
    params = sig.read(CombineParams)
    order = ordered(params.order, params.op)
    return [*order, *range(len(order), shares(sig))]


def outputs(sig: Signature) -> int:
    """The number of outputs, which are the last operands."""
    return sig.read(CombineParams).outputs


def shares(sig: Signature) -> int:
    """The number of shares (partial results of ranks) to combine."""
    return len(sig.operands) - outputs(sig)


def tiles(elements: int, itemsize: int, nbytes: int) -> list[tuple[int, int]]:
    """Divides elements into tiles of about `nbytes` bytes, each of whole 128-byte lines. Returns
    the first element of each tile and the element after its last.
    """
    step = max(1, nbytes // 128) * 128 // itemsize
    return [(at, min(at + step, elements)) for at in range(0, elements, step)]


register(Combine())
