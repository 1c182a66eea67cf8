"""Device functions for batches of products of small matrices. Each warp computes whole products
without waiting for other warps, and a task has all matrices of one processor. matmul_small.h has
the device code.

Called by the lowering of products, which assigns matrices to tasks, and by the writers of device
functions.
"""

from __future__ import annotations

import math

from ark.ir.fold import fold
from ark.machine import Machine
from ark.plan.kind import Signature
from ark.tasks import text
from ark.tasks.matmul_form import along_k, dims, grid, paired, side_strides, sums_of
from ark.tasks.matmul_params import MatmulParams

MAX_SIDE_ELEMENTS, MAX_K_ELEMENTS = (
    32,
    64,
)  # largest number of rows or columns, and largest k, of a small matrix
MIN_MATRICES_PER_PROCESSOR = 2  # the fewest matrices per processor


def small(sig: Signature, machine: Machine) -> bool:
    """True for a batch of products of small matrices, whatever tile is chosen."""
    params = sig.read(MatmulParams)
    m, n, k = dims(sig)
    shape = fold(sig.operands[2].shape)
    many = shape[0] * shape[1] >= MIN_MATRICES_PER_PROCESSOR * machine.processors
    fits = max(m, n) <= MAX_SIDE_ELEMENTS and k <= MAX_K_ELEMENTS
    if not (many and fits) or not machine.cooperative or paired(sig):
        return False
    if params.reads_images or params.splits > 1 or sums_of(sig) == "int32":
        return False
    packets = any(o.packet for o in sig.operands)
    return not packets and scratch(sig, machine) <= machine.shared_bytes


def served(sig: Signature, machine: Machine) -> bool:
    """True for a batch of products of small matrices that these device functions can compute: each
    task has several whole matrices, and enough shared memory is free.
    """
    params = sig.read(MatmulParams)
    m, n, _ = dims(sig)
    whole = tuple(params.tile) == (m, n) and params.tasks > 0
    room = machine.task_bytes
    return whole and small(sig, machine) and scratch(sig, machine) <= room


def scratch(sig: Signature, machine: Machine) -> int:
    """Bytes of shared memory for both operands of each warp's matrices, in the layout of the C++
    type ArkSmall.
    """
    m, n, k = dims(sig)
    across = 1 << (n - 1).bit_length()
    depth = -(-k // 4) * 4
    pitch = across + (1 if along_k(sig, 1) or across < 4 else 4)
    return 4 * machine.warps * (-(-(m * (depth + 4) + depth * pitch) // 4) * 4)


def small_text(sig: Signature, sides: tuple[str, str], finish: str) -> str:
    """C++ statements that compute a task's matrices, one per warp at a time. In the texts, i0 and
    i1 are the batch indices of the current matrix. sides: for each operand, the text of a lambda
    that maps (row or column, k) to the address of an element. finish: the text of a lambda of (row,
    column, sum) that stores a result.
    """
    inner = grid(sig)[1]
    place = f"const int i0 = i / {inner}, i1 = i % {inner}; (void)i0; (void)i1; "
    lines = [
        f"const auto {name} = [&](int i, int line, int k) {{ {place}return {side}(line, k); }};"
        for name, side in zip("ab", sides, strict=True)
    ]
    lines.append(
        f"const auto store = [&](int i, int m, int n, float sum) {{ {place}{finish}(m, n, sum); }};"
    )
    wide, narrow = _call(sig, packed=True), _call(sig, packed=False)
    asked = text.addresses(sig, (0, 1))
    if wide != narrow and asked != "0u":
        wide = f"if (ark_aligned({asked})) {{ {wide} }} else {{ {narrow} }}"
    return "".join(f"  {line}\n" for line in (*lines, wide))


def _call(sig: Signature, packed: bool) -> str:
    """The text of the call of the device function in matmul_small.h."""
    sides = (v for i in (0, 1) for v in _side(sig, i, packed))
    constants = (math.prod(grid(sig)), sig.read(MatmulParams).tasks, *dims(sig), *sides)
    return f"{text.called('ark_matmul_small', constants, ('a', 'b', 'store'))};"


def _side(sig: Signature, index: int, packed: bool) -> tuple[bool, int]:
    """For an operand: whether k is contiguous, and the number of elements per vector load."""
    operand, deep = sig.operands[index], along_k(sig, index)
    row, k = side_strides(sig, index)
    lines, depth = dims(sig)[index], dims(sig)[2]
    beside, length, other = (k, depth, row) if deep else (row, lines, k)
    batches = zip(operand.shape[:-2], operand.strides[:-2], strict=True)
    steps = (length, other, *(s for n, s in batches if n > 1))
    vector = text.VECTOR_BYTES // operand.itemsize if packed and beside == 1 else 1
    while vector > 1 and any(s % vector for s in steps):
        vector //= 2
    return deep, vector
