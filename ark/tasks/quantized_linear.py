"""The task kind `quantized_linear`: rows times weights of 4 or 8 bits, in which groups of elements
share a scale (and a zero point). Emitted by ark.lower.ops.quantize.

params: group (neighbouring elements of a weight's row that share a scale).

operands: rows (m, k), weights (n, k) of an integer type, fp4 or fp8, scales (n, k / group), [zeros,
of the scales' shape, floating point], output (m, n); or rows, weights of a RowType, output. A
weight is scale * (value - zero).

coord: the first row of weights and the row after the last. quantized_linear.h has the device code.
"""

from __future__ import annotations

from collections.abc import Sequence

from ark.ir.dtype import CODES, RowType, by_name
from ark.machine import Machine
from ark.plan.kind import Access, Signature, TaskKind, register, whole
from ark.plan.params import Params, Places, Size, count, is_dense, matrix, need, shaped
from ark.tasks import text
from ark.tasks.row_values import check_rows

WEIGHTS = tuple(t.name for t in CODES)
MAX_ROWS = 8
ELEMENTS_PER_LANE = 8  # elements of a weight's row that a lane processes at once
MAX_ROWS_PER_WARP = 4  # rows of the weights that a warp processes at once
MAX_HELD_ELEMENTS = 4  # elements of the next chunk that a thread holds in registers


def _padded(rows: int) -> int:
    """The number of input rows for which shared memory is reserved. Three or more rows are rounded
    up to a multiple of four.
    """
    return rows if rows < 3 else -(-rows // 4) * 4


def _chunk(rows: int, k: int, machine: Machine) -> int:
    """The number of elements of each input row that are in shared memory at a time: all elements if
    they fit, otherwise a chunk so small that two chunks fit (one is loaded while the other is
    used). 0 if there is too little shared memory.
    """
    room = machine.task_bytes // (4 * _padded(rows))
    wide = ELEMENTS_PER_LANE * machine.lanes
    all_of_them = -(-k // wide) * wide
    if all_of_them <= room:
        return all_of_them
    return min(room // 2, MAX_HELD_ELEMENTS * machine.lanes * machine.warps // rows) // wide * wide


def most_rows(k: int, machine: Machine) -> int:
    """The most rows of k elements for which a task has enough shared memory, at least 1."""
    return max(m for m in range(1, MAX_ROWS + 1) if m == 1 or _chunk(m, k, machine))


class QuantizedLinearParams(Params, frozen=True):
    group: Size


class QuantizedLinear(TaskKind):
    name = "quantized_linear"
    params = QuantizedLinearParams
    headers = text.headers("quantized_linear.h")

    def check(self, sig: Signature) -> None:
        super().check(sig)
        count(sig, 3, 4, 5)
        rows = row_type_of(sig)
        weights = matrix(sig, 1, *WEIGHTS) if rows is None else check_rows(sig.operands[1])
        need(
            (rows is None) == (len(sig.operands) > 3),
            "scales must be an operand, or stored in the weights' rows, not both",
        )
        (m, k), (n, depth) = matrix(sig, 0), weights
        group = sig.read(QuantizedLinearParams).group
        need(
            rows is None or rows.group == group,
            f"the weights' groups have {rows.group if rows else group} elements, expected {group}",
        )
        need(
            m <= MAX_ROWS and k == depth,
            f"got {m} input rows of {k} elements; expected at most {MAX_ROWS} rows of {depth}",
        )
        need(
            k % group == 0 == group % ELEMENTS_PER_LANE,
            f"k={k} is not divisible by group={group}, or group is not divisible by "
            f"{ELEMENTS_PER_LANE}",
        )
        need(is_dense(sig.operands[1]), "the weights are strided, expected dense")
        for index in range(2, len(sig.operands) - 1):
            shaped(sig, index, (n, k // group), dense=True)
        shaped(sig, len(sig.operands) - 1, (m, n))

    def places(self, sig: Signature) -> Places:
        return Places((range(0, sig.operands[1].shape[0]),), span=True)

    def wide(self, sig: Signature) -> frozenset[int]:
        return frozenset({1})

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        first, last = coord[:2]
        out = len(sig.operands) - 1
        accesses = [whole(0, sig.operands[0])]
        accesses += [Access(i, (first, 0), (last, sig.operands[i].shape[1])) for i in range(1, out)]
        accesses.append(Access(out, (0, first), (sig.operands[0].shape[0], last), write=True))
        return accesses

    def scratch(self, sig: Signature, machine: Machine) -> int:
        m, k = sig.operands[0].shape
        chunk = _chunk(m, k, machine)
        return (1 if chunk >= k else 2) * 4 * _padded(m) * chunk

    def cost(self, sig: Signature, coord: Sequence[int]) -> tuple[float, float]:
        m, k = sig.operands[0].shape
        rows = coord[1] - coord[0]
        weights = sig.operands[1]
        return 2.0 * m * k * rows, rows * k * weights.itemsize / weights.per_item

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        (m, k), out = sig.operands[0].shape, len(sig.operands) - 1
        rows, weights = row_type_of(sig), sig.operands[1]
        if rows is None:
            each, pitch = weights.per_item, k // weights.per_item
            parts = [text.given(sig, i) for i in (1, 2)]
            parts.append(text.given(sig, 3) if out == 4 else "ArkNoOperand{}")
        else:
            each = rows.codes.per_item
            pitch = rows.itemsize // rows.codes.itemsize
            parts = _parts_of_rows(sig, rows)
        operands = [text.given(sig, 0), *parts, text.given(sig, out, const=False)]
        shared, warps = -(-weights.shape[0] // machine.processors), machine.warps
        side_by_side = -(-shared // (warps * -(-shared // (warps * MAX_ROWS_PER_WARP))))
        head = (m, k, _chunk(m, k, machine), side_by_side)
        turned = rows is not None and rows.codes.packed
        constants = (
            *head,
            sig.read(QuantizedLinearParams).group,
            ELEMENTS_PER_LANE // each,
            pitch,
            turned,
        )
        return text.call(name, "ark_quantized_linear", constants, operands)


def row_type_of(sig: Signature) -> RowType | None:
    """The type of the weights if they are a RowType; None if the scales are a separate operand."""
    dtype = by_name(sig.operands[1].dtype)
    return dtype if isinstance(dtype, RowType) else None


def _parts_of_rows(sig: Signature, dtype: RowType) -> list[str]:
    """The C++ texts of the codes, scales and zero points of quantised rows, as arguments of the
    device function.
    """

    def part(storage: str, itemsize: int, byte: int) -> str:
        address = f"{text.address(sig, 1)} + {byte}"
        kind = f"ArkOperand<const {storage}, 0, 0, {dtype.itemsize // itemsize}, 1, false>"
        return f"{kind}{{ARK_POINTER(const {storage}, {address})}}"

    size = dtype.scales.itemsize
    places = [dtype.scales_at, *([dtype.zeros_at] if dtype.zeros else [])]
    parts = [part(dtype.codes.storage, dtype.codes.itemsize, 0)]
    parts += [part(dtype.scales.storage, size, place) for place in places]
    return parts if dtype.zeros else [*parts, "ArkNoOperand{}"]


register(QuantizedLinear())
