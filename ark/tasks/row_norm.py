"""The task kinds for operations on whole rows: softmax and its logarithm, layernorm and rmsnorm
over the last dimension. Emitted by ark.lower.ops.norms.

params: function, eps, rows (rows of dimension 2 per task), dealt (a task has all rows of dimension
    1 at one index of dimension 2; these rows are not contiguous in memory).

operands: input, [weight, [bias]], output; only layernorm has a bias. A rounded_rmsnorm rounds to
the output's type before it multiplies by the weight.

coord: first index of dimensions 0 to 2. If possible, a warp or the block holds a row in registers.
Of a longer row the block holds as much as it can and reads the rest several times. Rows that cannot
be read in vectors are held in shared memory. row_norm.h and row_norm_long.h have the device code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec.structs import replace

from ark.errors import PlanError
from ark.ir.fold import fold, unfold
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.machine.variant import COMPUTE
from ark.plan.kind import Access, OperandType, Signature, TaskKind, register, whole
from ark.plan.params import (
    Epsilon,
    Params,
    Places,
    Rows,
    box,
    count,
    fits,
    need,
    shaped,
    typed,
)
from ark.tasks import text

ROW_OPS = {
    "softmax": "ArkSoftmax",
    "safe_softmax": "ArkSafeSoftmax",
    "log_softmax": "ArkLogSoftmax",
    "layernorm": "ArkLayerNorm",
    "rmsnorm": "ArkRmsNorm",
    "rounded_rmsnorm": "ArkRmsNorm",
}
# Two bounds per thread: the most elements of a row that it keeps in registers, and the most bytes
# of loads that it has in flight.
MAX_REGISTER_ELEMENTS = 32
MAX_WAITING_REGISTER_BYTES = 64
# Bounds for short rows without vector accesses: fewer lanes with several elements each need fewer
# exchanges between lanes.
MAX_ODD_LANES, MAX_ODD_ELEMENTS = 8, 8
BATCH_ELEMENTS = 16  # elements of several short rows that a thread holds at once
# If threads have at least MANY_REGISTERS registers, a warp holds all of its rows of a task in
# registers at once. A thread then holds up to MOST_TOGETHER elements of at most MOST_ROWS rows.
# More rows would need registers for their addresses and sums that a model's other device functions
# take.
MANY_REGISTERS, MAX_ELEMENTS_AT_ONCE, MOST_ROWS = 200, 64, 4
MIN_LONG_ROW_ELEMENTS = 4096  # the registers of most blocks hold rows of at most this many elements
# The most bytes of a long row that a thread keeps in registers, if it has MANY_REGISTERS of them or
# fewer.
MAX_LONG_ROW_BYTES, MAX_LONG_ROW_BYTES_IN_FEW_REGISTERS = 320, 64
# Rows are claimed at run time only if elements have at most this many bytes, because some backends
# load rows of wider elements by hardware copies.
MAX_CLAIMED_ITEMSIZE = 2
MAX_PACKET_ROW = 4096  # elements of a row that is read as packets
MAX_VECTOR_SUMS = 16  # sums of a thread that runs alone, for vectorisation


def vector_elements(operands: Sequence[OperandType], columns: int) -> int:
    """The number of elements of a vector access for rows of `columns` elements in all these
    operands. It divides a row, and is at most 8 elements and 16 bytes of the narrowest operand.
    """
    vector = min(8, 16 // min(o.itemsize for o in operands))
    strides = [s for o in operands for s in o.strides[:-1]]
    while vector > 1 and (columns % vector or any(s % vector for s in strides)):
        vector //= 2
    return vector


def no_packets(name: str, sig: Signature, machine: Machine) -> None:
    """Raises PlanError if the input is packets, because only some vendors' device functions read
    them.
    """
    if sig.operands[0].packet:
        raise PlanError(
            f"{name} reads packets, but a processor of {machine.arch} has no function for that; "
            "plan again for this machine"
        )


def row_places(shape: Sequence[int], rows: int, dealt: bool = False) -> Places:
    """The coordinates of the tasks of an op on rows. Each task has `rows` rows of the shape, which
    is folded to four dimensions.
    """
    return box((*fold(shape)[:3], 1), (1, rows, 1, 1) if dealt else (1, 1, rows, 1))


def row_box(
    shape: Sequence[int],
    coord: Sequence[int],
    rows: int,
    columns: int | None = None,
    dealt: bool = False,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The box of the rows of the task at `coord`: its first indices and the indices after its last.
    columns: the number of columns in it, by default all.
    """
    sizes = fold(shape)
    last = (rows, coord[2] + 1) if dealt else (coord[1] + 1, min(coord[2] + rows, sizes[2]))
    hi = (coord[0] + 1, *last, sizes[3] if columns is None else columns)
    return unfold(shape, (*coord[:3], 0), hi)


def folds(machine: Machine) -> int:
    """Bytes of shared memory in which the warps of a block exchange their sums."""
    return 2 * BATCH_ELEMENTS * 4 * machine.warps


def row_constants(sig: Signature) -> tuple[int, int, int]:
    """Three compile-time constants of the device function: the number of rows of a task, the size
    of the dimension along which a task has rows, and the number of elements of a row.
    """
    params = sig.read(RowNormParams)
    shape = fold(sig.operands[-1].shape)
    return params.rows, shape[1 if params.dealt else 2], shape[3]


def row_op(name: str, sig: Signature) -> tuple[str, str]:
    """The name of the C++ type that computes the row operation, and its definition if no header
    defines it ("" otherwise). A definition is needed for rounded_rmsnorm, which rounds to the
    result's type before it multiplies by the weight. name: the name of the device function.
    """
    function = sig.read(RowNormParams).function
    op, ctype = ROW_OPS[function], sig.operands[-1].ctype
    if function != "rounded_rmsnorm":
        return op, ""
    body = (
        f"  ARK_DEVICE float value(float v, float factor) {{\n    {ctype} rounded;\n"
        "    ark_put(&rounded, 0, v * factor);\n    return ark_get(&rounded, 0);\n  }\n"
    )
    return f"{name}_op", f"struct {name}_op : {op} {{\n{body}}};\n"


def operands(sig: Signature, of_all: bool = False) -> tuple[str, ...]:
    """The C++ texts of a device function's arguments: the addresses of input and output rows, the
    weight and eps.

    of_all: True if addresses are those of the tensor's first row instead of the task's.
    """
    params = sig.read(RowNormParams)
    out = len(sig.operands) - 1
    at = ["r", "t.coord[2]"] if params.dealt else ["t.coord[1]", "(t.coord[2] + r)"]
    if of_all:
        at = ["0", "r"]
    names = text.indices(sig.operands[out].shape, ["t.coord[0]", *at, "0"])
    return (
        text.place(sig, 0, ("r",), names),
        text.place(sig, out, ("r",), names, const=False),
        _weight(sig),
        text.literal(params.eps),
    )


def _weight(sig: Signature) -> str:
    """The text of the scale and shift of values, as an argument for row_norm.h."""
    *given, _ = sig.operands[1:]
    if len(given) < 2:
        return text.pointer(sig, 1) if given else "ArkOnes{}"
    types = ", ".join(o.ctype for o in given)
    return f"ArkAffine<{types}>{{{text.pointer(sig, 1)}, {text.pointer(sig, 2)}}}"


def _at_once(held: tuple[int, int, int, int, int], machine: Machine) -> int:
    """The number of rows that a team (the warps that share a row) holds in registers at once."""
    return held[2] * (machine.lanes // held[4])


def _for_task(
    held: tuple[int, int, int, int, int], rows: int, machine: Machine
) -> tuple[int, int, int, int, int]:
    """The layout of rows in registers (see `_held`), changed for a task of `rows` rows. If there
    are few rows, fewer are held at once, so that all teams of warps have rows. On machines with
    many registers, more rows are held at once.
    """
    vector, each, at_once, team, part = held
    each_team = math.ceil(rows / (machine.warps // team * (machine.lanes // part)))
    if machine.variant.registers(COMPUTE) >= MANY_REGISTERS:
        most = min(MOST_ROWS, MAX_ELEMENTS_AT_ONCE // (vector * each))
        at_once = max(at_once, min(each_team, most))
    return vector, each, min(at_once, each_team), team, part


class RowNormParams(Params, frozen=True):
    function: Literal[tuple(ROW_OPS)]  # type: ignore[valid-type]
    rows: Rows
    eps: Epsilon = 0.0
    dealt: bool = False


class RowNorm(TaskKind):
    name = "row_norm"
    claimable = True
    params = RowNormParams
    headers = text.headers("folds.h", "row_norm.h")
    claiming_headers = text.headers("row_norm_claimed.h")

    def check(self, sig: Signature) -> None:
        super().check(sig)
        params = sig.read(RowNormParams)
        function, given = params.function, len(sig.operands) - 2
        least, most = {
            "rmsnorm": (1, 1),
            "rounded_rmsnorm": (1, 1),
            "layernorm": (0, 2),
        }.get(function, (0, 0))
        count(sig, *range(2 + least, 3 + most))
        shape = typed(sig, 0).shape
        shaped(sig, len(sig.operands) - 1, shape)
        for i in range(1, 1 + given):
            shaped(sig, i, shape[-1:], dense=True)
        fits((params.rows,), row_constants(sig)[1:2])
        need(
            not params.dealt or params.rows == fold(shape)[1],
            f"with dealt=True, rows must be {fold(shape)[1]}, got {params.rows}",
        )

    def places(self, sig: Signature) -> Places:
        params = sig.read(RowNormParams)
        dealt = params.dealt
        return row_places(sig.operands[-1].shape, params.rows, dealt)

    def in_place(self, sig: Signature) -> frozenset[int]:
        return frozenset({0})

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        params = sig.read(RowNormParams)
        out = len(sig.operands) - 1
        dealt = params.dealt
        box = row_box(sig.operands[out].shape, coord, params.rows, dealt=dealt)
        accesses = [Access(0, *box), Access(out, *box, write=True)]
        return accesses + [whole(i, sig.operands[i]) for i in range(1, out)]

    def packets(self, sig: Signature) -> frozenset[int]:
        shape = sig.operands[0].shape if sig.operands else ()
        few = len(shape) == 2 and shape[0] == 1 and shape[1] <= MAX_PACKET_ROW
        return frozenset({0} if few and sig.read(RowNormParams).function == "rmsnorm" else ())

    def to_claim(self, sig: Signature, machine: Machine) -> Mapping[str, Any] | None:
        held, shape = self._held(sig, machine), fold(sig.operands[-1].shape)
        narrow = sig.operands[-1].itemsize <= MAX_CLAIMED_ITEMSIZE
        if held is None or not narrow or shape[0] * shape[1] > 1 or sig.read(RowNormParams).dealt:
            return None
        return replace(sig.read(RowNormParams), rows=_at_once(held, machine)).to_plan()

    def claiming_source(
        self, name: str, sig: Signature, machine: Machine, tasks: int, records: int
    ) -> str:
        held, (rows, *others) = self._held(sig, machine), row_constants(sig)
        if (
            held is None
            or rows != _at_once(held, machine)
            or math.prod(fold(sig.operands[-1].shape)[:2]) > 1
        ):
            return ""
        op, definition = row_op(name, sig)
        constants = (
            op,
            *others,
            1,
            self._kept(sig, machine),
            folds(machine),
            *held,
            tasks,
            len(sig.operands),
            records,
        )
        addresses = text.addresses(sig, range(len(sig.operands)))
        arguments = (*operands(sig, of_all=True), addresses)
        return definition + text.call(name, "ark_row_norm_claimed", constants, arguments)

    def texts(self, sig: Signature) -> tuple[str, ...]:
        short = sig.operands[-1].shape[-1] <= MIN_LONG_ROW_ELEMENTS
        return () if short else (text.header("row_norm_long.h"),)

    def scratch(self, sig: Signature, machine: Machine) -> int:
        columns = sig.operands[-1].shape[-1]
        return folds(machine) + (4 * columns if self._kept(sig, machine) else 0)

    def _kept(self, sig: Signature, machine: Machine) -> bool:
        """True if a row that exceeds the registers fits into shared memory."""
        columns = sig.operands[-1].shape[-1]
        room = machine.task_bytes // 2
        read = self._held(sig, machine) or self._long(sig, machine)
        return read is None and 4 * columns <= room

    def _long(self, sig: Signature, machine: Machine) -> tuple[int, int] | None:
        """For long rows, of which registers hold at most a part: the elements of a vector, and the
        vectors of a row that a thread keeps. None for other rows, and without vector accesses.
        """
        columns = sig.operands[-1].shape[-1]
        vector = vector_elements((sig.operands[0], sig.operands[-1]), columns)
        short = vector == 1 or columns <= MIN_LONG_ROW_ELEMENTS or not machine.cooperative
        if short or self._held(sig, machine):
            return None
        many = machine.variant.registers(COMPUTE) >= MANY_REGISTERS
        most = MAX_LONG_ROW_BYTES if many else MAX_LONG_ROW_BYTES_IN_FEW_REGISTERS
        each = -(-columns // (vector * machine.lanes * machine.warps))
        kept = min(each, most // (vector * sig.operands[0].itemsize))
        return vector, kept

    def _held(self, sig: Signature, machine: Machine) -> tuple[int, int, int, int, int] | None:
        """The layout of rows in registers, as a tuple: elements of a vector, vectors of a row
        per thread, rows that a thread holds at once, warps that share a row, and lanes that share a
        row if a row needs only a part of a warp. None if registers cannot hold a row.
        """
        columns = sig.operands[-1].shape[-1]
        vector = vector_elements((sig.operands[0], sig.operands[-1]), columns)
        if not machine.cooperative:
            return None
        itemsize = sig.operands[0].itemsize
        part = 1 << (-(-columns // vector) - 1).bit_length()
        if vector == 1 and columns <= MAX_ODD_LANES * MAX_ODD_ELEMENTS:
            part = min(part, MAX_ODD_LANES)
        if part < machine.lanes:
            each = -(-columns // (vector * part))
            waiting = MAX_WAITING_REGISTER_BYTES // (vector * itemsize)
            return vector, each, max(1, min(BATCH_ELEMENTS, waiting) // each), 1, part
        teams = [1, machine.warps]
        if machine.has(Capability.NAMED_BARRIERS):
            teams = sorted({*teams, *(t for t in (2, 4, 8) if machine.warps % t == 0)})
        for team in teams:
            each = -(-columns // (vector * machine.lanes * team))
            held = each * vector
            if held <= MAX_REGISTER_ELEMENTS and (
                held * itemsize <= MAX_WAITING_REGISTER_BYTES or team == machine.warps
            ):
                return (
                    vector,
                    each,
                    max(1, min(BATCH_ELEMENTS, BATCH_ELEMENTS // held)),
                    team,
                    machine.lanes,
                )
        return None

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        no_packets(name, sig, machine)
        op, definition = row_op(name, sig)
        held, long = self._held(sig, machine), self._long(sig, machine)
        addresses = text.addresses(sig, range(len(sig.operands)))
        if long is not None:
            numbers, arguments = (op, *row_constants(sig), *long), (*operands(sig), addresses)
            return definition + text.call(name, "ark_row_norm_long", numbers, arguments)
        if held is not None:
            held = _for_task(held, sig.read(RowNormParams).rows, machine)
        constants = (
            op,
            *row_constants(sig),
            MAX_VECTOR_SUMS if not machine.cooperative else 1,
            self._kept(sig, machine),
            folds(machine),
            *(held or (0, 0, 0, 0, 0)),
        )
        return definition + text.call(name, "ark_row_norm", constants, (*operands(sig), addresses))


register(RowNorm())
