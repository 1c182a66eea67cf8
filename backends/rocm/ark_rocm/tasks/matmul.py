"""Matmul tiles on AMD's matrix units: any transposes, batches and odd edges.

Serves fp16 and bf16, and fp32 times bf16 (activations times weights: a float is the exact sum of
three bf16), in tiles of more than eight rows, on machines with the capability mfma or wmma; the
common body does the rest. Called by the writer through the dialect; matrix.h has the device side.
"""

from __future__ import annotations

from ark.machine import Machine
from ark.plan.kind import Signature
from ark.tasks import text
from ark.tasks.matmul import dims, each_tile

_PARTS = {("bf16", "bf16"): 1, ("fp16", "fp16"): 1, ("fp32", "bf16"): 3}  # of the left side
_OUTPUTS = ("fp32", "bf16", "fp16")
_MIN_ROWS = 9  # below, a row at a time on the vector units reads the weights as fast
_PITCH = 40  # ARK_PITCH of matrix.h


def serves(sig: Signature, machine: Machine) -> bool:
    """Whether this body takes the signature."""
    if not (machine.has("mfma") or machine.has("wmma")):
        return False
    if sig.params.get("expr") is not None or sig.params.get("gated"):
        return False
    if sig.params.get("splits", 1) > 1:
        return False
    a, b, out = sig.operands
    plain = not (a.packet or b.packet or out.packet)
    kinds = (a.dtype, b.dtype) in _PARTS and out.dtype in _OUTPUTS
    if not (plain and kinds and sig.params["tile"][0] >= _MIN_ROWS):
        return False
    return _step_bytes(sig) <= machine.shared_bytes


def scratch(sig: Signature, machine: Machine) -> int:
    """The steps of both sides that are held at once, in bytes."""
    return _buffers(sig, machine) * _step_bytes(sig) if serves(sig, machine) else 0


def write(name: str, sig: Signature, machine: Machine) -> str | None:
    """The body's source, or None where the common body serves."""
    if not serves(sig, machine):
        return None
    m, n, k = dims(sig)
    rows, columns = _padded(sig)
    waves_m, waves_n = _waves(rows // 16, columns // 16, machine.warps)
    a_row, a_k = _strides(sig, 0, bool(sig.params["transpose_a"]))
    b_k, b_row = _strides(sig, 1, bool(sig.params["transpose_b"]))
    o_row, o_column = _strides(sig, 2, False)
    tile_m, tile_n = sig.params["tile"]
    left, right = sig.operands[0].ctype, sig.operands[1].ctype
    places = text.indices(sig.operands[2].shape, ["i0", "i1", "0", "0"])
    starts = [text.offset(sig, i, places) for i in range(3)]
    along_a, along_b = _along_k(a_row, a_k), _along_k(b_row, b_k)
    declare = (
        text.operand(sig, 0, "pa")
        + text.operand(sig, 1, "pb")
        + text.operand(sig, 2, "po", const=False)
    )
    body = (
        "  const ark_i64 row0 = m0, column0 = n0;\n"
        f"  const int rows = m0 + {tile_m} < {m} ? {tile_m} : {m} - m0;\n"
        f"  const int columns = n0 + {tile_n} < {n} ? {tile_n} : {n} - n0;\n"
        f"  const ArkSide<{left}> a{{pa + {starts[0]} + row0 * {a_row}, {a_row}, {a_k}, rows, "
        f"{k}}};\n"
        f"  const ArkSide<{right}> b{{pb + {starts[1]} + column0 * {b_row}, {b_row}, {b_k}, "
        f"columns, {k}}};\n"
        f"  ark_matrix_tile<{rows}, {columns}, {waves_m}, {waves_n}, {_buffers(sig, machine)}, "
        f"{along_a}, {along_b}>(\n"
        f"      ARK_SCRATCH(c), a, b, po + {starts[2]} + row0 * {o_row} + column0 * {o_column}, "
        f"{o_row}, {o_column});\n"
    )
    return text.function(name, declare + each_tile(sig, body))


def _padded(sig: Signature) -> tuple[int, int]:
    rows, columns = sig.params["tile"]
    return -(-rows // 16) * 16, -(-columns // 16) * 16


def _step_bytes(sig: Signature) -> int:
    rows, columns = _padded(sig)
    parts = _PARTS[sig.operands[0].dtype, sig.operands[1].dtype]
    return 2 * (parts * rows + columns) * _PITCH


def _buffers(sig: Signature, machine: Machine) -> int:
    """Two if shared memory has room, else one."""
    return 2 if 2 * _step_bytes(sig) <= machine.shared_bytes else 1


def _strides(sig: Signature, index: int, transposed: bool) -> tuple[int, int]:
    """Element strides of the operand's matrix: down and across, as it is multiplied."""
    down, across = sig.operands[index].strides[-2:]
    return (across, down) if transposed else (down, across)


def _along_k(row_stride: int, k_stride: int) -> str:
    return "false" if row_stride == 1 and k_stride != 1 else "true"


def _waves(blocks_m: int, blocks_n: int, waves: int) -> tuple[int, int]:
    """How the waves stand over the tile's blocks: fewest blocks a wave, then fewest loads."""

    def effort(wm: int) -> tuple[int, int, int]:
        i, j = -(-blocks_m // wm), -(-blocks_n // (waves // wm))
        return i * j, i + j, wm

    best = min((wm for wm in range(1, waves + 1) if waves % wm == 0), key=effort)
    return best, waves // best
