"""Matmul tiles on AMD's matrix units, with any transposes, batches, odd edges, parts of k, and
epilogues.

It is used on machines with the capability mfma or wmma for tiles of more than eight rows. It
supports fp16 and bf16, fp32 times bf16 (activations times weights: a float is the exact sum of
three bf16), and 8-bit floats. If both operands are contiguous along k and the matrix units support
it, 8-bit floats are multiplied directly; otherwise they are converted to bf16. The
vendor-independent body computes all other cases. With mfma, tiles of 128 or 256 rows and columns of
16-bit types have a separate loop. Called by the source writer through the dialect; matrix.h,
matrix_pairs.h, matrix_large.h and matrix_store.h have the device code.
"""

from __future__ import annotations

from ark.backend.codegen.body import Body
from ark.ir.dtype import SMALL_FLOATS
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.plan.kind import Signature
from ark.tasks import matmul_vectors as vectors
from ark.tasks import text
from ark.tasks.matmul_form import (
    MIN_UNIT_TILE_ROWS,
    UNIT_PARTS,
    along_k,
    by_halves,
    dims,
    filled,
    paired,
    side_strides,
)
from ark.tasks.matmul_params import MatmulParams
from ark.tasks.matmul_text import matrix_tiles, outputs, tile_place
from ark.tasks.matmul_thin import served as is_thin
from ark_rocm.machines import ARCHS
from ark_rocm.tasks.headers import read

_OUTPUTS = ("fp32", "bf16", "fp16")
_K_STEP_ELEMENTS = 32  # 16-bit elements along k in a step: ArkUnit of matrix.h
_PADDED_ELEMENTS = 8
_SMALL = tuple(t.name for t in SMALL_FLOATS)
_PARTS = UNIT_PARTS | {(a, b): 1 for a in _SMALL for b in _SMALL}
# By architecture: the combinations of 8-bit float types that matrix units multiply directly, and
# the number of pairs of neighbours along k in a step. gfx942's e5m2 is excluded because it has no
# infinity.
_PAIRS = {
    "gfx942": ({("fp8_e4m3", "fp8_e4m3")}, 32),
    "gfx950": ({(a, b) for a in _SMALL for b in _SMALL}, 64),
}
# The tile sizes that matrix_large.h supports, with the arrangement of the waves over the tile.
_LARGE_WAVES = {(256, 256): (2, 4), (256, 128): (4, 2), (128, 256): (2, 4), (128, 128): (2, 4)}
_LARGE_PIECES = 4  # of 16 bytes along k in a step


def _follows(sig: Signature) -> bool:
    """True if the product has an epilogue expression. The sums are then stored in
    vectors of eight.
    """
    return sig.read(MatmulParams).expr is not None or paired(sig)


def _large(sig: Signature, machine: Machine) -> tuple[int, int] | None:
    """The rows and columns of a large tile (matrix_large.h) with which the signature is computed.
    None if it is computed with tiles of 16 x 16 blocks (matrix.h).
    """
    sixteen = all(sig.operands[i].itemsize == 2 for i in (0, 1))
    # On architectures whose matrix units read fp16 denormals as zero, only bf16 operands are exact
    # here. For fp16 operands, matrix.h splits each element into two bf16.
    exact = not ARCHS[machine.arch].flushes or sig.operands[0].dtype == "bf16"
    if not (sixteen and exact and machine.has(Capability.MFMA) and machine.warps == 8):
        return None
    rows, columns = sig.read(MatmulParams).tile
    able = (t for t in _LARGE_WAVES if filled(rows, t[0]) and filled(columns, t[1]))
    return next(able, None)


def _pairs(sig: Signature, machine: Machine) -> bool:
    """True if matrix units multiply these 8-bit floats directly. This requires that, in both
    operands, elements that are neighbours along k are neighbouring bytes in memory.
    """
    types, _ = _PAIRS.get(machine.arch, (set(), 0))
    strides = [side_strides(sig, side) for side in (0, 1)]
    even = all(row % 2 == 0 and k == 1 for row, k in strides) and dims(sig)[2] % 2 == 0
    return even and (sig.operands[0].dtype, sig.operands[1].dtype) in types


def _padded(sig: Signature, machine: Machine) -> tuple[int, int]:
    """The rows and columns that the matrix units compute, including those beyond the
    tile's edge.
    """
    rows, columns = sig.read(MatmulParams).tile
    return _large(sig, machine) or (-(-rows // 16) * 16, -(-columns // 16) * 16)


def _step_bytes(sig: Signature, machine: Machine) -> int:
    rows, columns = _padded(sig, machine)
    if _large(sig, machine):
        more = (2 if along_k(sig, side) else n // 128 * 8 for side, n in enumerate((rows, columns)))
        return 16 * _LARGE_PIECES * (rows + columns + sum(more))
    parts = _PARTS[sig.operands[0].dtype, sig.operands[1].dtype]
    step = _PAIRS[machine.arch][1] if _pairs(sig, machine) else _K_STEP_ELEMENTS
    return 2 * (parts * rows + columns) * (step + _PADDED_ELEMENTS)


def _slab_bytes(sig: Signature, machine: Machine) -> int:
    """Bytes of shared memory through which the waves pass sums to the epilogue: one block of sums
    for each wave, with rows padded by four floats. 0 without an epilogue.
    """
    size = 32 if _large(sig, machine) else 16
    return machine.warps * size * (size + 4) * 4 if _follows(sig) else 0


def _buffers(sig: Signature, machine: Machine) -> int:
    """The number of steps along k that shared memory holds at once: two if it is large enough,
    otherwise one.
    """
    return 2 if 2 * _step_bytes(sig, machine) <= machine.shared_bytes else 1


def _waves(blocks_m: int, blocks_n: int, waves: int) -> tuple[int, int]:
    """How the waves are arranged over the tile's blocks (rows, columns of waves). The arrangement
    needs the fewest blocks per wave and, among equals, the fewest loads.
    """

    def effort(wm: int) -> tuple[int, int, int]:
        i, j = -(-blocks_m // wm), -(-blocks_n // (waves // wm))
        return i * j, i + j, wm

    best = min((wm for wm in range(1, waves + 1) if waves % wm == 0), key=effort)
    return best, waves // best


class Tiles(Body):
    """Matmul tiles on matrix units."""

    kind = "matmul"

    def serves(self, sig: Signature, machine: Machine) -> bool:
        params = sig.read(MatmulParams)
        if not (machine.has(Capability.MFMA) or machine.has(Capability.WMMA)):
            return False
        if params.reads_images or is_thin(sig, machine) or by_halves(sig):
            return False
        a, b, out = sig.operands[:3]
        plain = not any(o.packet for o in sig.operands)
        kinds = (a.dtype, b.dtype) in _PARTS and (out.dtype in _OUTPUTS or _follows(sig))
        if not (plain and kinds and params.tile[0] >= MIN_UNIT_TILE_ROWS):
            return False
        return max(_step_bytes(sig, machine), _slab_bytes(sig, machine)) <= machine.shared_bytes

    def scratch(self, sig: Signature, machine: Machine) -> int:
        """Bytes of shared memory for the steps of both inputs that are held at once. When the sums
        are stored, the same memory holds the sums.
        """
        return max(_buffers(sig, machine) * _step_bytes(sig, machine), _slab_bytes(sig, machine))

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        rows, columns = _padded(sig, machine)
        along = (along_k(sig, 0), along_k(sig, 1))
        buffers = _buffers(sig, machine)
        callee = "ark_pairs_tile" if _pairs(sig, machine) else "ark_matrix_tile"
        waves = _waves(rows // 16, columns // 16, machine.warps)
        if _large(sig, machine):
            callee, waves = "ark_large_tile", _LARGE_WAVES[rows, columns]
        constants = (rows, columns, *waves, buffers, *along)
        end, declared = f"ark_tile_sums({tile_place(sig)})", outputs(sig)
        if _follows(sig):
            end = f"ark_tile_packs({vectors.several(sig, 'm0', 'n0')})"
            declared = vectors.declared(sig)
        return text.function(name, matrix_tiles(sig, callee, constants, end, declared))

    def headers(self, machine: Machine) -> tuple[str, ...]:
        large = ("matrix_large.h",) if machine.has(Capability.MFMA) else ()
        pairs = ("matrix_pairs.h",) if machine.arch in _PAIRS else ()
        names = ("matrix_store.h", "matrix.h", *pairs, *large)
        own = read(*names)
        return (text.header("rotary.h"), text.header("gates.h"), text.header("tiles.h"), *own)
