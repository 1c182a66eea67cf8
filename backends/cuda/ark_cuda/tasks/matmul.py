"""Matmul tiles of more than eight rows on tensor cores, for bf16 and fp16 weights and any
transposes.

fp32 rows times bf16 weights occur when a prompt is read (activations times weights). Each fp32
number is then split into two bf16 numbers, which keep all of fp32's range and most of its
precision. matmul.h has the device code. exact.py computes products of fp32 with fp32. Called by the
source writer through the dialect.
"""

from __future__ import annotations

from dataclasses import dataclass

from ark.backend.codegen.body import BoxMap
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.plan.kind import Signature
from ark.tasks import matmul_small, text
from ark.tasks.matmul_form import along_k, paired
from ark.tasks.matmul_params import MatmulParams
from ark.tasks.matmul_text import matrix_tiles, outputs, tile_place
from ark.tasks.matmul_thin import served
from ark_cuda.tasks import products
from ark_cuda.tasks.matmul_body import MatmulBody
from ark_cuda.tasks.stages import SCRATCH_BYTES

_MIN_ROWS = 9
_PAIRS = (("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "bf16"))
_OUTPUTS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class _Shape:
    """The arrangement of the warps over a tile; these are the template arguments of
    ark_matrix_tile.
    """

    blocks_m: int
    blocks_n: int
    warps_n: int
    slices: int
    parts: int

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory. During the multiplication it holds a chunk of a, afterwards the
        sums of the warps that divide k.
        """
        rows, columns = 16 * self.blocks_m, 8 * self.blocks_n * self.warps_n
        chunk = self.parts * rows * 2 * (32 * self.slices + 32)
        return max(chunk, 4 * self.slices * rows * columns)


def _shape(sig: Signature, machine: Machine) -> _Shape | None:
    """The arrangement with the largest chunk of k that fits in shared memory, or None if only the
    vendor-independent body supports the signature.
    """
    params = sig.read(MatmulParams)
    a, b, out = sig.operands[:3]
    if params.expr is not None or paired(sig):
        return None
    if params.splits > 1 or params.reads_images or served(sig, machine):
        return None
    if matmul_small.served(sig, machine):
        return None
    rows, columns = params.tile
    if (
        not machine.has(Capability.MMA_SYNC)
        or rows < _MIN_ROWS
        or a.packet
        or b.packet
        or out.packet
    ):
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
        if small and shape.nbytes <= machine.task_bytes:
            return shape
        slices //= 2
    return None


class Warpgroups(MatmulBody):
    """The body for matmul tiles whose operands are loaded by box copies (TMA) and multiplied by
    warpgroups (products.py).
    """

    def serves(self, sig: Signature, machine: Machine) -> bool:
        return products.serves(sig, machine)

    def scratch(self, sig: Signature, machine: Machine) -> int:
        return SCRATCH_BYTES

    def maps(self, sig: Signature, machine: Machine) -> tuple[BoxMap, ...]:
        return products.maps(sig, machine)

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        return products.write(name, sig, machine)

    def load(self, name: str, sig: Signature, machine: Machine) -> str | None:
        return products.load(name, sig, machine)


class MmaTiles(MatmulBody):
    """The body for matmul tiles on mma.sync, in any kernel variant."""

    def serves(self, sig: Signature, machine: Machine) -> bool:
        return _shape(sig, machine) is not None

    def scratch(self, sig: Signature, machine: Machine) -> int:
        shape = _shape(sig, machine)
        assert shape is not None
        return shape.nbytes

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        shape = _shape(sig, machine)
        assert shape is not None
        constants = (shape.blocks_m, shape.blocks_n, shape.warps_n, shape.slices, along_k(sig, 0))
        tiles = matrix_tiles(sig, "ark_matrix_tile", constants, tile_place(sig), outputs(sig))
        return text.function(name, tiles)
