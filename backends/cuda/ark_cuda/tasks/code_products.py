"""Products of few rows with quantised weights, in the variant `matrix` (sm_90a). The computing
warps convert codes in registers, so that weights are read from memory as codes.

code_products.h and code_pairs.h have the device code. Called by ark_cuda.tasks.products, which
stores the sums.
"""

from __future__ import annotations

from ark.backend.codegen.body import BoxMap
from ark.ir.dtype import RowType
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.plan.kind import Signature
from ark.tasks.matmul_codes import (
    LINE_DEPTH,
    MAX_ROWS,
    STAGE_DEPTH,
    codes_bytes,
    part_fits,
    row_type,
    scales_bytes,
    stage_bytes,
    whole,
)
from ark.tasks.matmul_form import deal, dims
from ark.tasks.matmul_params import MatmulParams
from ark.tasks.row_values import bytes_of

WIDTHS = (32, 64)
STAGE_ALIGNMENT_BYTES = 1024  # stages begin where swizzled boxes must
PLAIN_BYTES = "byte"  # the type of boxes of bytes that are not swizzled


def type_of(sig: Signature) -> RowType | None:
    """The type of a product's quantised weights; None if its weights are not quantised."""
    return row_type(sig.operands[1]) if sig.kind == "matmul" else None


def serves(sig: Signature, machine: Machine) -> bool:
    """True if this body computes the product. The task kind has already checked its types and
    layouts.
    """
    rows, columns = sig.read(MatmulParams).tile
    return (
        machine.has(Capability.CODE_BOXES)
        and rows == dims(sig)[0] <= MAX_ROWS
        and columns in WIDTHS
        and part_fits(dims(sig)[2], sig.read(MatmulParams).splits)
        and sig.operands[0].strides[-1] == 1
        and sig.operands[0].strides[-2] * sig.operands[0].itemsize % 16 == 0
    )


def stage(sig: Signature, dtype: RowType) -> int:
    """Bytes of a stage (a slot of the ring in shared memory) for this product."""
    nbytes = stage_bytes(dtype, dims(sig)[0], sig.read(MatmulParams).tile[1])
    return -(-nbytes // STAGE_ALIGNMENT_BYTES) * STAGE_ALIGNMENT_BYTES


def maps(sig: Signature, dtype: RowType) -> tuple[BoxMap, ...]:
    """The tensor maps of the input, of the codes, and of the scales and zero points that are loaded
    with them.
    """
    left, weights = sig.operands[:2]
    (high, k), columns = left.shape, sig.read(MatmulParams).tile[1]
    lines = (LINE_DEPTH, high, k // LINE_DEPTH)
    pitch, size = left.strides[0] * left.itemsize, LINE_DEPTH * left.itemsize
    box = (LINE_DEPTH, -(-high // 8) * 8, STAGE_DEPTH // LINE_DEPTH)
    given = BoxMap(0, left.dtype, lines, (pitch, size), box)
    rows = (dtype.itemsize, weights.shape[0])
    parts = [codes_bytes(dtype)] + ([] if whole(dtype) else [scales_bytes(dtype)])
    pieces = (BoxMap(1, PLAIN_BYTES, rows, rows[:1], (n, columns)) for n in parts)
    return (given, *pieces)


def product(sig: Signature) -> str:
    """The C++ type that describes a product to the computing and to the loading function."""
    left, weights = sig.operands[:2]
    high, columns = -(-dims(sig)[0] // 8) * 8, sig.read(MatmulParams).tile[1]
    dtype = row_type(weights)
    assert dtype is not None
    numbers = f"{columns}, {high}, {scales_bytes(dtype)}"
    return f"ArkCodeProduct<{deal(sig)}, {left.ctype}, {weights.ctype}, {numbers}>"


def compute(sig: Signature, k_range: tuple[str, str]) -> str:
    """The beginning of the call of the computing function. The caller appends the last argument,
    which stores the sums.
    """
    ends = ", ".join(f"[&](int i1) {{ (void)i1; return {end}; }}" for end in k_range)
    head = f"ark_code_product<{product(sig)}, {dims(sig)[1]}>"
    return f"{head}(\n      c, t, {bytes_of(sig, 1)}, {ends},"


def load(name: str, sig: Signature, dtype: RowType, k_range: tuple[str, str]) -> str:
    """The source of the function that loads the product's operands, which one thread runs."""
    first = len(sig.operands)
    at = [f"t.operand[{first + i}]" for i in range(2 if whole(dtype) else 3)]
    addresses = ", ".join((*at, "0u")[:3])
    ends = ", ".join(f"[](int i1) {{ (void)i1; return {end}; }}" for end in k_range)
    return (
        f"ARK_DEVICE void {name}_load(ArkCtx& c, const ArkTask& t, ArkMatrixLoad& load) {{\n"
        f"  ark_code_load_product<{product(sig)}>(c, t, load, {addresses}, {ends});\n}}\n"
    )
