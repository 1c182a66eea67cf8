"""Device functions for products whose result has few rows or columns, such as matrix times vector.
Reading the larger operand takes most of the time: each warp reads rows of it, or each thread
neighbouring columns if these are contiguous. matmul_thin.h has the device code.

Called by the lowering of products, which chooses tiles (ark.lower.thin_cuts), and by the writers of
device functions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ark.machine import Machine
from ark.machine.capability import Capability
from ark.plan.kind import Signature
from ark.tasks import text
from ark.tasks.matmul_form import dims, k_range, paired, part_of_k, side_strides, sums_of
from ark.tasks.matmul_params import MatmulParams

MOST_ROWS, MOST_COLUMNS = 8, 16  # most rows, or columns, of a thin product's result
MAX_ROWS_ACROSS = 8  # most rows if threads read neighbouring columns of the other operand
# The same for products of fp32 without the work of an exact tile (Costs.exact_work). In tiles that
# do not divide k among threads, 16x1000 by 1000x512 takes 60 us on an H200.
MAX_FP32_ROWS_ACROSS = 16
MIN_OTHER_ELEMENTS, MIN_K_ELEMENTS = (
    16,
    64,
)  # smallest size of the result's other dimension, and of k
# Both numbers if the narrow operand is a single vector with contiguous k.
MIN_VECTOR_SIDE_ELEMENTS = 4
VECTOR_COLUMNS = 32  # columns of the larger operand that are read at once
ROWS_PER_WARP = (2, 4)  # if the narrow operand has fewer rows than MIN_WIDE_ROWS, and if not
MIN_WIDE_ROWS = 5
# fp32 operands pass through shared memory if the narrow one has at least this many rows and, in
# each part of k, at least this many bytes. The L1 cache does not keep such an operand beside the
# loads of the other one.
LEAST_STAGED_ROWS, LEAST_STAGED_BYTES = 9, 1 << 16
LEAST_STAGES, MOST_STAGES = 2, 4
MAX_SHORT_K_STEPS, MOST_SUMS = (
    2,
    8,
)  # the most steps of k of a short product; the most sums of a thread


@dataclass(frozen=True)
class Thin:
    """How a product with few rows or columns is computed. few: 0 if the left operand has few rows,
    1 if the right operand has few columns. along: True if k is contiguous in memory in both
    operands. vector: the number of elements of the other operand that one load reads.
    """

    few: int
    along: bool
    vector: int


def thin(sig: Signature, machine: Machine) -> Thin | None:
    """How a product with few rows or columns is computed, independently of its tile. None if it has
    too many rows and columns.
    """
    if not machine.cooperative or paired(sig) or sig.read(MatmulParams).reads_images:
        return None
    if any(o.packet for o in sig.operands):
        return None
    m, n, k = dims(sig)
    few = 0 if m <= _most_rows(sig) and m <= n else 1
    small, large = (m, n) if few == 0 else (n, m)
    lying = [side_strides(sig, index)[1] == 1 for index in (0, 1)]
    least = (
        (MIN_VECTOR_SIDE_ELEMENTS,) * 2
        if small == 1 and all(lying)
        else (MIN_OTHER_ELEMENTS, MIN_K_ELEMENTS)
    )
    if small > MOST_COLUMNS or large < least[0] or k < least[1]:
        return None
    if all(lying):
        sizes = (m, n)
        vector = text.VECTOR_BYTES // max(sig.operands[i].itemsize for i in (0, 1))
        while vector > 1 and not all(_loads_vectors(sig, i, sizes[i], vector) for i in (0, 1)):
            vector //= 2
        return Thin(few, True, vector)
    other = 1 - few
    row, deep = side_strides(sig, other)
    if row != 1 or small > _most_rows_across(sig, machine) or large < VECTOR_COLUMNS:
        return None
    vector = text.VECTOR_BYTES // sig.operands[other].itemsize
    steps = (deep, large, *_batches(sig, other))
    while vector > 1 and any(s % vector for s in steps):
        vector //= 2
    return Thin(few, False, vector)


def _most_rows(sig: Signature) -> int:
    """The largest number of rows for which a left operand counts as narrow. For fp32 it equals the
    largest number of columns of a narrow right operand.
    """
    fp32 = all(sig.operands[i].dtype == "fp32" for i in (0, 1))
    return MOST_COLUMNS if fp32 and not sig.read(MatmulParams).tf32 else MOST_ROWS


def _most_rows_across(sig: Signature, machine: Machine) -> int:
    """The most rows (or columns) of a narrow operand if k is not contiguous in the other one. It is
    larger for small products of fp32 that no matrix unit computes.
    """
    plain = _most_rows(sig) == MOST_COLUMNS and not machine.has(Capability.K_PARTS)
    small = math.prod(dims(sig)) < machine.costs.exact_work
    return MAX_FP32_ROWS_ACROSS if plain and small else MAX_ROWS_ACROSS


def _loads_vectors(sig: Signature, index: int, rows: int, vector: int) -> bool:
    """True if an operand can be read in vectors of `vector` elements along k."""
    _, _, k = dims(sig)
    steps = (*_batches(sig, index), *([side_strides(sig, index)[0]] if rows > 1 else ()))
    return all(s % vector == 0 for s in (k, part_of_k(sig), *steps))


def _batches(sig: Signature, index: int) -> tuple[int, ...]:
    """The strides, in elements, from one matrix of a batched operand to the next."""
    operand = sig.operands[index]
    pairs = zip(operand.shape[:-2], operand.strides[:-2], strict=True)
    return tuple(s for n, s in pairs if n > 1)


def served(sig: Signature, machine: Machine) -> Thin | None:
    """The form in which the functions of matmul_thin.h compute this product (see `thin`). None if
    the product is not thin, or its tile does not contain all of the few rows or columns.
    """
    form = thin(sig, machine)
    if form is None:
        return None
    m, n, _ = dims(sig)
    tile = sig.read(MatmulParams).tile
    if tile[form.few] < (m, n)[form.few]:
        return None
    return form if form.along or tile[1 - form.few] == VECTOR_COLUMNS else None


def scratch(sig: Signature, form: Thin, machine: Machine) -> int:
    """Bytes of shared memory in which the warps of a block exchange their partial sums."""
    few = dims(sig)[form.few]
    if form.along:
        team = _team(sig, form, machine)
        if stages := _stages(sig, form, machine):
            return stages * _stage_bytes(sig, form, machine)
        return 4 * machine.warps * _rows(sig, form, machine) * few if team > 1 else 0
    return 4 * machine.warps * few * VECTOR_COLUMNS


def _rows(sig: Signature, form: Thin, machine: Machine) -> int:
    """The number of rows of the larger operand that a warp multiplies at the same time, so that it
    reads the narrow operand once for all of them.

    If k is so short that the loop over k has one or two steps, a warp processes more rows, so that
    more loads are in flight.
    """
    few, tile = dims(sig)[form.few], sig.read(MatmulParams).tile[1 - form.few]
    rows = ROWS_PER_WARP[int(few >= MIN_WIDE_ROWS)]
    if part_of_k(sig) <= MAX_SHORT_K_STEPS * machine.lanes * form.vector:
        while 2 * rows * few <= MOST_SUMS and rows * machine.warps < tile:
            rows *= 2
    return rows


def _team(sig: Signature, form: Thin, machine: Machine) -> int:
    """The number of warps that divide k among themselves, so that no warp is idle. It is a power of
    two that divides the number of warps.
    """
    tile, rows = sig.read(MatmulParams).tile[1 - form.few], _rows(sig, form, machine)
    teams, deep = -(-tile // rows), machine.lanes * form.vector
    team = 1
    while (
        2 * team * teams <= machine.warps
        and machine.warps % (2 * team) == 0
        and 2 * team * deep <= part_of_k(sig)
    ):
        team *= 2
    return team


def _stage_bytes(sig: Signature, form: Thin, machine: Machine) -> int:
    """Bytes of a stage: a vector of each lane of a team from each row of the narrow operand, and
    from each row of the other one that the block multiplies at a time.
    """
    team, rows = _team(sig, form, machine), _rows(sig, form, machine)
    tile = sig.read(MatmulParams).tile[1 - form.few]
    high = min(machine.warps // team, -(-tile // rows)) * rows
    return (dims(sig)[form.few] + high) * team * machine.lanes * text.VECTOR_BYTES


def _stages(sig: Signature, form: Thin, machine: Machine) -> int:
    """The number of stages in shared memory through which both operands pass, or 0 if warps load
    them directly.
    """
    few, left, right = dims(sig)[form.few], *(o.dtype for o in sig.operands[:2])
    if not form.along or few < LEAST_STAGED_ROWS or left != "fp32" or right != "fp32":
        return 0
    large = few * part_of_k(sig) * sig.operands[0].itemsize >= LEAST_STAGED_BYTES
    full_vectors = form.vector * sig.operands[0].itemsize == text.VECTOR_BYTES
    if machine.variant.name != "block" or not large or not full_vectors:
        return 0
    room = machine.task_bytes
    stages = min(MOST_STAGES, room // _stage_bytes(sig, form, machine))
    return stages if stages >= LEAST_STAGES else 0


def passes(sig: Signature, form: Thin, machine: Machine) -> int:
    """The number of times that a warp loads rows of a tile and waits for the loads."""
    if not form.along:
        return 1
    teams = machine.warps // _team(sig, form, machine)
    return -(-sig.read(MatmulParams).tile[1 - form.few] // (teams * _rows(sig, form, machine)))


def rounds_of_sums(sig: Signature, form: Thin, machine: Machine) -> int:
    """The number of times per pass that a warp adds its lanes' sums, MOST_SUMS at a time."""
    if not form.along:
        return 1
    sums = _rows(sig, form, machine) * dims(sig)[form.few]
    if _stages(sig, form, machine) and sums % machine.lanes == 0:
        return sums // machine.lanes
    return -(-sums // MOST_SUMS)


def thin_headers(sig: Signature, form: Thin, machine: Machine) -> str:
    """The headers that only this product's device function needs."""
    if not _stages(sig, form, machine):
        return ""
    texts = "".join(map(text.header, ("pack_copies.h", "matmul_thin_staged.h")))
    return f"#ifndef ARK_MATMUL_THIN_STAGED\n#define ARK_MATMUL_THIN_STAGED 1\n{texts}#endif\n"


def thin_text(
    sig: Signature, form: Thin, machine: Machine, sides: tuple[str, str], finish: str
) -> str:
    """C++ statements that compute a tile. sides: for each operand, the text of a lambda that maps
    (row or column, k) to the address of an element. finish: the text of a lambda of (row, column,
    sum) that stores a result.
    """
    few, many = form.few, 1 - form.few
    sizes = dims(sig)[:2]
    constants: tuple[object, ...] = (sizes[many], sizes[few], sig.read(MatmulParams).tile[many])
    callee = "ark_matmul_thin_along" if form.along else "ark_matmul_thin_across"
    if form.along:
        constants = (*constants, _rows(sig, form, machine))
    team = (_team(sig, form, machine),) if form.along else ()
    begin, end = k_range(sig)
    places = ", ".join(("n0" if few == 0 else "m0", begin, end, "many", "few", "store"))
    total = "float" if sums_of(sig) == "fp32" else "ark_i32"

    stages = _stages(sig, form, machine)

    def call(vector: int) -> str:
        staged = stages > 0 and vector == form.vector
        name = "ark_matmul_thin_staged" if staged else callee
        listed = ", ".join(map(str, (*constants, vector, *team, *((stages,) if staged else ()))))
        return f"{name}<{listed}>(ARK_SCRATCH(c), {places});\n"

    order = "j, i" if few == 0 else "i, j"
    body = (
        f"  const auto many = {sides[many]};\n  const auto few = {sides[few]};\n"
        f"  const auto finish = {finish};\n"
        f"  const auto store = [&](int i, int j, {total} sum) {{ finish({order}, sum); }};\n"
    )
    asked = text.addresses(sig, (0, 1) if form.along else (many,))
    if form.vector == 1 or asked == "0u":
        return f"{body}  {call(form.vector)}"
    return (
        f"{body}  if (ark_aligned({asked})) {{\n    {call(form.vector)}"
        f"  }} else {{\n    {call(1)}  }}\n"
    )
