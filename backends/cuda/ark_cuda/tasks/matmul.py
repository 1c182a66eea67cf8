"""Matmul tiles of more than eight rows on tensor cores: bf16 and fp16 weights, any transposes.

fp32 rows times bf16 weights, as activations meet weights while a prompt is read, are split into two
bf16 parts, so that nothing of fp32's range and little of its precision is lost. matmul.h has the
device side. Called by the writer through the dialect.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

from ark.machine import Machine
from ark.plan.kind import Signature
from ark.tasks import text
from ark.tasks.matmul import dims, each_tile
from ark_cuda.tasks import wgmma

_MIN_ROWS = 9
_PAIRS = (("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "bf16"))
_OUTPUTS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class _Shape:
    """How the warps stand over a tile; the template arguments of ark_matrix_tile."""

    blocks_m: int
    blocks_n: int
    warps_n: int
    slices: int
    parts: int

    @property
    def nbytes(self) -> int:
        """Shared memory: a's chunk while multiplying, the slices' sums after."""
        rows, columns = 16 * self.blocks_m, 8 * self.blocks_n * self.warps_n
        chunk = self.parts * rows * 2 * (32 * self.slices + 32)
        return max(chunk, 4 * self.slices * rows * columns)


def _shape(sig: Signature, machine: Machine) -> _Shape | None:
    """The largest chunk that fits; None where the common body serves."""
    a, b, out = sig.operands[:3]
    if sig.params.get("expr") is not None or sig.params.get("gated"):
        return None
    if sig.params.get("splits", 1) > 1:
        return None
    rows, columns = sig.params["tile"]
    if not machine.has("mma_sync") or rows < _MIN_ROWS or a.packet or b.packet or out.packet:
        return None
    if (a.dtype, b.dtype) not in _PAIRS or out.dtype not in _OUTPUTS:
        return None
    blocks_m, across = -(-rows // 16), -(-columns // 8)
    slices = 1
    while 2 * slices <= machine.warps and 16 * blocks_m * 64 * slices <= 8 * 32 * machine.warps:
        slices *= 2
    while slices:
        warps_n = min(machine.warps // slices, across)
        parts = 2 if a.dtype == "fp32" else 1
        shape = _Shape(blocks_m, -(-across // warps_n), warps_n, slices, parts)
        small = shape.blocks_m * shape.blocks_n <= 16  # sums are held in registers
        if small and shape.nbytes <= machine.shared_bytes - machine.ring_bytes:
            return shape
        slices //= 2
    return None


def scratch(sig: Signature, machine: Machine) -> int:
    """Shared memory, in bytes."""
    if wgmma.serves(sig, machine):
        return wgmma.SCRATCH
    shape = _shape(sig, machine)
    return shape.nbytes if shape else 0


def write(name: str, sig: Signature, machine: Machine) -> str | None:
    """The body's source, or None where the common body serves."""
    if wgmma.serves(sig, machine):
        return wgmma.write(name, sig, machine)
    shape = _shape(sig, machine)
    if shape is None:
        return None
    m, n, k = dims(sig)
    tile_m, tile_n = sig.params["tile"]
    a_row, a_k = _strides(sig, 0, bool(sig.params["transpose_a"]))
    b_k, b_row = _strides(sig, 1, bool(sig.params["transpose_b"]))
    o_row, o_column = sig.operands[2].strides[-2:]
    places = text.indices(sig.operands[2].shape, ["i0", "i1", "0", "0"])
    starts = [text.offset(sig, i, places) for i in range(3)]
    declare = (
        text.operand(sig, 0, "pa")
        + text.operand(sig, 1, "pb")
        + text.operand(sig, 2, "po", const=False)
    )
    body = f"""  const ark_i64 row0 = m0, column0 = n0;
  const int rows = m0 + {tile_m} < {m} ? {tile_m} : {m} - m0;
  const int columns = n0 + {tile_n} < {n} ? {tile_n} : {n} - n0;
{_side(sig, 0, "a", "rows", a_row, a_k, k, f"pa + {starts[0]} + row0 * {a_row}")}
{_side(sig, 1, "b", "columns", b_row, b_k, k, f"pb + {starts[1]} + column0 * {b_row}")}
  ark_matrix_tile<{shape.blocks_m}, {shape.blocks_n}, {shape.warps_n}, {shape.slices}, \
{"false" if a_row == 1 and a_k != 1 else "true"}>(
      ARK_SCRATCH(c), a, b, po + {starts[2]} + row0 * {o_row} + column0 * {o_column}, {o_row},
      {o_column});
"""
    header = resources.files("ark_cuda").joinpath("tasks/matmul.h").read_text()
    return header + text.function(name, declare + each_tile(sig, body))


def _side(
    sig: Signature, index: int, name: str, rows: str, row: int, k: int, depth: int, at: str
) -> str:
    operand = sig.operands[index]
    even = k == 1 and row % 8 == 0 and depth % 8 == 0
    wide = f"(reinterpret_cast<ark_u64>(at_{name}) & 15u) == 0u" if even else "false"
    return (
        f"  const {operand.ctype}* at_{name} = {at};\n"
        f"  const ArkSide<{operand.ctype}> {name}{{at_{name}, {row}, {k}, {rows}, {depth},\n"
        f"      {wide}}};"
    )


def _strides(sig: Signature, index: int, transposed: bool) -> tuple[int, int]:
    """Element strides of the operand's matrix, down and across, as it is multiplied."""
    down, across = sig.operands[index].strides[-2:]
    return (across, down) if transposed else (down, across)
