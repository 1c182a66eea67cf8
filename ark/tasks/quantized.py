"""Rows times weights of 4 or 8 bits, which share a scale (and a zero point) in groups.

params: group (elements of a weight's row that share them). operands: rows (m, k), weights (n, k) of
an integer type, fp4 or fp8, scales (n, k / group), [zeros, of the scales' shape and a type of
floats], output (m, n). A weight is scale * (value - zero). coord: first and last+1 row of weights.
quantized.h has the device side.
"""

from __future__ import annotations

from collections.abc import Sequence

from ark.machine import Machine
from ark.plan.kind import Access, Signature, TaskKind, register, whole
from ark.plan.params import Params, Places, Size, count, is_dense, matrix, need, shaped
from ark.tasks import text

WEIGHTS = ("int4", "uint4", "fp4", "int8", "uint8", "fp8_e4m3", "fp8_e5m2")
MOST_ROWS = 8
STEP = 8  # elements of a weight's row that a lane takes at once
MOST_SIDE_BY_SIDE = 4  # rows of the weights that a warp takes at once
MOST_HELD = 4  # elements of the next chunk that a thread holds meanwhile


def _padded(rows: int) -> int:
    """Rows as shared memory holds them: by fours from three on."""
    return rows if rows < 3 else -(-rows // 4) * 4


def _chunk(rows: int, k: int, machine: Machine) -> int:
    """Elements of each row that are in shared memory at once; all, or two chunks; 0: no room."""
    room = (machine.shared_bytes - machine.ring_bytes) // (4 * _padded(rows))
    wide = STEP * machine.lanes
    all_of_them = -(-k // wide) * wide
    if all_of_them <= room:
        return all_of_them
    return min(room // 2, MOST_HELD * machine.lanes * machine.warps // rows) // wide * wide


def most_rows(k: int, machine: Machine) -> int:
    """How many rows of k elements a task has the shared memory for, at least 1."""
    return max(m for m in range(1, MOST_ROWS + 1) if m == 1 or _chunk(m, k, machine))


class QuantizedParams(Params, frozen=True):
    group: Size


class QuantizedLinear(TaskKind):
    name = "quantized_linear"
    params = QuantizedParams

    def check(self, sig: Signature) -> None:
        super().check(sig)
        count(sig, 4, 5)
        (m, k), (n, depth) = matrix(sig, 0), matrix(sig, 1, *WEIGHTS)
        group = sig.read(QuantizedParams).group
        need(m <= MOST_ROWS and k == depth, f"{m} rows of {k} do not meet weights of {depth}")
        need(k % group == 0 == group % STEP, f"rows of {k} are not in groups of {group}")
        need(is_dense(sig.operands[1]), "the weights are strided")
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
        found = [whole(0, sig.operands[0])]
        found += [Access(i, (first, 0), (last, sig.operands[i].shape[1])) for i in range(1, out)]
        found.append(Access(out, (0, first), (sig.operands[0].shape[0], last), write=True))
        return found

    def scratch(self, sig: Signature, machine: Machine) -> int:
        m, k = sig.operands[0].shape
        chunk = _chunk(m, k, machine)
        return (1 if chunk >= k else 2) * 4 * _padded(m) * chunk

    def cost(self, sig: Signature, coord: Sequence[int]) -> tuple[float, float]:
        m, k = sig.operands[0].shape
        rows = coord[1] - coord[0]
        weights = sig.operands[1]
        return 2.0 * m * k * rows, rows * k * weights.itemsize / weights.per_item

    def headers(self) -> tuple[str, ...]:
        return (text.header("quantized.h"),)

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        (m, k), out = sig.operands[0].shape, len(sig.operands) - 1
        operands = [text.given(sig, i) for i in range(3)]
        operands.append(text.given(sig, 3) if out == 4 else "ArkNoOperand{}")
        operands.append(text.given(sig, out, const=False))
        each = sig.operands[1].per_item
        rows, warps = -(-sig.operands[1].shape[0] // machine.processors), machine.warps
        side_by_side = -(-rows // (warps * -(-rows // (warps * MOST_SIDE_BY_SIDE))))
        head = (m, k, _chunk(m, k, machine), side_by_side)
        constants = (*head, sig.read(QuantizedParams).group, STEP // each, k // each)
        return text.call(name, "ark_quantized_linear", constants, operands)


register(QuantizedLinear())
