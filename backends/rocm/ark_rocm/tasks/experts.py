"""Products of quantised weights of chosen experts with one input row each. On gfx950 the scaled
matrix instruction multiplies fp4 codes without a conversion (experts_scaled.h). If the codes of a
load share a scale and each wave has the same part of all rows, vector units multiply, as in linear
layers of one row. Otherwise matrix units multiply, as in linear layers of several rows.

Used in the variant `block` on machines with MFMA, for weights that these linear layers support. The
vendor-independent body computes all other cases. Called by the source writer through the dialect.
"""

from __future__ import annotations

from dataclasses import dataclass

from ark.backend.codegen.body import Body
from ark.ir.dtype import bf16, fp4
from ark.machine import Machine
from ark.plan.kind import Signature
from ark.tasks import text
from ark.tasks.expert_epilogue import constants, declared, weight_operands
from ark.tasks.experts import outputs_of_task, share_of
from ark.tasks.linear_form import codes_on_units
from ark.tasks.row_values import HEADER, bytes_of
from ark_rocm.tasks.headers import read
from ark_rocm.tasks.linear_rows import (
    parts_of,
    row_type_of,
    shares_scales,
    split_bytes,
)
from ark_rocm.tasks.linear_several import SeveralRows, group_of, slab_bytes

MAX_SHARED_SUMS = 6144  # sums in shared memory at once
SCALED = "gfx950"  # the architecture with the scaled matrix instruction
# The sizes of a product by the scaled matrix instruction: columns (elements along k) and rows of
# the weights, the columns that share a power of two, and the parts into which each element of the
# input is split.
DEPTH, TILE_ROWS, BLOCK, PARTS = 256, 8, 32, 6
MAX_WAVE_STEPS = 6  # of a tile in a wave; the input of each step takes 8 registers
MAX_LOADS_IN_FLIGHT = 20  # of a wave in flight; each takes 5 registers


def _runs(sig: Signature) -> tuple[int, int]:
    """The number of runs of a task and of its input rows. A run is the rows of one weight matrix
    for one slot (chosen expert).
    """
    weights, slots = constants(sig)
    return weights * max(1, slots), max(1, slots) if len(sig.operands[0].shape) == 3 else 1


def _rows(sig: Signature, machine: Machine) -> int:
    """The most outputs whose sums shared memory holds at once on vector units; 0 if matrix units
    multiply.
    """
    dtype = row_type_of(sig)
    parts = parts_of(dtype, machine)
    fits = shares_scales(dtype) and machine.warps % parts == 0
    room = MAX_SHARED_SUMS // (parts * _runs(sig)[0])
    return min(sig.operands[1].shape[1], room) if fits else 0


@dataclass(frozen=True)
class Scaled:
    """How the waves divide products by the scaled matrix instruction. k_waves: the number of waves
    that divide a tile's steps along k. steps: steps of a tile in a wave. rows: outputs whose
    weights are loaded at once.
    """

    k_waves: int
    steps: int
    rows: int

    def scratch(self, sig: Signature) -> int:
        """Bytes of shared memory for the input, the 8-bit parts into which its elements are split,
        and the sums.
        """
        (runs, inputs), columns = _runs(sig), sig.operands[1].shape[2]
        steps = self.k_waves * self.steps
        parts = 2 * PARTS * (steps * DEPTH // 2 + 16) + steps * DEPTH // BLOCK
        sums = runs * self.rows // TILE_ROWS * 16 * self.k_waves
        return inputs * (-(-parts // 16) * 16 + 4 * columns) + 4 * sums


def _scaled(sig: Signature, machine: Machine) -> Scaled | None:
    """The form of scaled products; None if the weights or the machine do not support them."""
    dtype, columns = row_type_of(sig), sig.operands[1].shape[2]
    scales = dtype.scales == bf16 and not dtype.zeros and dtype.group % BLOCK == 0
    if machine.arch != SCALED or dtype.codes != fp4 or not scales or columns % BLOCK:
        return None
    all_steps = -(-columns // DEPTH)
    shares = [n for n in range(1, machine.warps + 1) if machine.warps % n == 0]
    shares = [n for n in shares if -(-all_steps // n) <= MAX_WAVE_STEPS]
    if not shares:
        return None
    k_waves = min(shares, key=lambda n: (-(-all_steps // n) * n, -n if n <= 4 else n))
    steps = -(-all_steps // k_waves)
    runs, _ = _runs(sig)
    most = MAX_LOADS_IN_FLIGHT // steps * (machine.warps // k_waves) // runs
    rows = min(-(-outputs_of_task(sig, machine) // TILE_ROWS), most) * TILE_ROWS
    form = Scaled(k_waves, steps, rows)
    fits = rows > 0 and form.scratch(sig) <= machine.shared_bytes
    return form if fits else None


def _ahead(sig: Signature, machine: Machine) -> int:
    """The number of loads of a run that a wave has in flight. It is chosen so that in the last
    round few loads are past the last row.
    """
    loads = -(-outputs_of_task(sig, machine) * parts_of(row_type_of(sig), machine) // machine.warps)
    return min((4, 3), key=lambda n: -(-loads // n) * n)


def _plain(sig: Signature) -> bool:
    """True if there is one weight matrix and results are not added up over experts. Matrix units
    support only this case.
    """
    return constants(sig) == (1, 0)


class Experts(Body):
    """Multiplies an expert's quantised weights by each input row that chose the expert."""

    kind = "expert_linear"
    enters = True

    def serves(self, sig: Signature, machine: Machine) -> bool:
        if not codes_on_units(sig.operands[1], machine):
            return False
        if _scaled(sig, machine):
            return True
        fits = self.scratch(sig, machine) <= machine.shared_bytes
        several = _plain(sig) and not sig.operands[0].packet
        return fits and (several or _rows(sig, machine) > 0)

    def headers(self, machine: Machine) -> tuple[str, ...]:
        rows = ("held_rows.h", "linear_rows.h")
        codes = ("codes.h", "code_pairs.h", "linear_codes.h")
        own = read("lines.h", "ask.h", *codes, *rows, "experts.h")
        if machine.arch == SCALED:
            own = (*own, *read("experts_scaled.h"))
        return (*SeveralRows().headers(machine), HEADER, *own)

    def scratch(self, sig: Signature, machine: Machine) -> int:
        form = _scaled(sig, machine)
        if form:
            return form.scratch(sig)
        rows = _rows(sig, machine)
        if not rows:
            return slab_bytes(group_of(1), 1, machine)
        runs, inputs = _runs(sig)
        return split_bytes(row_type_of(sig), rows, machine, runs, min(inputs, 2))

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        x, weight = sig.operands[:2]
        dense = x.strides[-1] == 1 and all(s * x.itemsize % 16 == 0 for s in x.strides[:-1])
        common = (weight.ctype, *weight.shape[:2], len(x.shape) == 3, *share_of(sig))
        own: tuple[object, ...]
        rows = _rows(sig, machine)
        weights = [bytes_of(sig, 1)]
        scaled = _scaled(sig, machine)
        if scaled:
            form = "scaled"
            own = (*constants(sig), scaled.k_waves, scaled.steps, scaled.rows)
            weights.append(bytes_of(sig, weight_operands(sig)[-1]))
        elif rows:
            parts = parts_of(row_type_of(sig), machine)
            form, own = "split", (*constants(sig), parts, _ahead(sig, machine), rows)
            weights.append(bytes_of(sig, weight_operands(sig)[-1]))
        else:
            form, own = "several", (group_of(1), dense and x.aligned and not x.packet)
        operands = (text.given(sig, 0), *weights, text.given(sig, 2), "finish")
        call = text.called(f"ark_expert_{form}", (*common, *own), operands)
        body = f"{declared(sig)}  return {call};\n"
        return f"ARK_BODY bool {name}(ArkCtx& c, const ArkTask& t) {{\n{body}}}\n"
