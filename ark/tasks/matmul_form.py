"""Properties of a matrix product, derived from its signature: its sizes, tiles and their order,
parts of k, and the memory layout of both operands. Used by the task kind (ark.tasks.matmul) and by
the backends' writers of device functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ark.ir.fold import fold
from ark.plan.kind import Signature
from ark.tasks import text
from ark.tasks.matmul_params import FinishParams, MatmulParams
from ark.tasks.matmul_windows import side_shape

POSITION_OPERAND = 3  # the index of the position, in a product that rotates queries and keys
K_PART_ALIGNMENT_BYTES = 128  # parts of k begin at multiples of this
UNIT_PARTS = {("bf16", "bf16"): 1, ("fp16", "fp16"): 1, ("fp32", "bf16"): 3}
"""The pairs of operand types that matrix units for 16-bit types multiply, and the number of 16-bit
products for each product. It is more than 1 for fp32, whose values are exact sums of three bf16
values.
"""
MIN_UNIT_TILE_ROWS = 9  # fewest rows of a tile on matrix units; fewer are as fast without them


def rotates(sig: Signature) -> bool:
    """True if the product's columns are queries, keys and values, which its epilogue rotates and
    stores.
    """
    return sig.read(MatmulParams).head_dim > 0


def by_halves(sig: Signature) -> bool:
    """True if the product's columns are heads whose epilogue rotates column i and column i + width
    / 2 of each head as a pair.
    """
    return sig.read(FinishParams).rotary > 0


def pair_distance(sig: Signature) -> int:
    """The distance between the two columns from which the epilogue computes each stored element. 0
    if each stored element depends on one column.
    """
    params = sig.read(MatmulParams)
    return params.rotary // 2 if params.rotary else int(params.gated or rotates(sig))


def paired(sig: Signature) -> bool:
    """True if each stored element depends on two columns."""
    return pair_distance(sig) > 0


def ends(sig: Signature) -> range:
    """The indices of the operands that the epilogue expression reads."""
    return range(3, len(sig.operands) - 2 * by_halves(sig))


def sums_of(sig: Signature) -> str:
    """The name of the type in which a product's sums are accumulated."""
    return "int32" if sig.operands[0].dtype == "int8" else "fp32"


def part_of_k(sig: Signature) -> int:
    """The number of elements of k in each part (split-k); the last part may have fewer."""
    splits = sig.read(MatmulParams).splits
    _, _, k = dims(sig)
    step = K_PART_ALIGNMENT_BYTES // sig.operands[0].itemsize
    return k if splits == 1 else math.ceil(math.ceil(k / step) / splits) * step


def k_range(sig: Signature) -> tuple[str, str]:
    """C++ texts of the range of k that part number i1 (a variable of the device function) covers:
    its first element, and its last element + 1.
    """
    _, _, k = dims(sig)
    part = part_of_k(sig)
    if part >= k:
        return "0", str(k)
    end = f"(i1 + 1) * {part}"
    return f"i1 * {part}", end if k % part == 0 else f"({end} < {k} ? {end} : {k})"


def place_names(sig: Signature, row: str, column: str) -> list[str]:
    """C++ texts of the output's indices for an element at a row and a column. The variables i0, i1
    of the device function are the indices of the matrix in the batch.
    """
    return text.indices(sig.operands[2].shape, ["i0", "i1", row, column])


def grid(sig: Signature) -> tuple[int, int, int, int]:
    """The number of tiles along the output's two batch dimensions, along its rows and along its
    columns.
    """
    shape = fold(sig.operands[2].shape)
    rows, columns = sig.read(MatmulParams).tile
    m, n, _ = dims(sig)
    return shape[0], shape[1], -(-m // rows), -(-n // columns)


def tiles(sig: Signature, coord: Sequence[int]) -> list[tuple[int, ...]]:
    """For each tile of the task at `coord`: its two batch indices, first row and first column."""
    params = sig.read(MatmulParams)
    tasks = params.tasks
    if not tasks:
        return [tuple(coord)]
    _, inner, down, across = grid(sig)
    rows, columns = params.tile
    group = params.group
    sizes: list[tuple[int, ...]] = []
    for number in range(coord[0], math.prod(grid(sig)), tasks):
        matrix, rest = divmod(number, down * across)
        band, rest = divmod(rest, group * across)
        high = min(group, down - band * group)
        place = (band * group + rest % high) * rows, rest // high * columns
        sizes.append((matrix // inner, matrix % inner, *place))
    return sizes


def deal(sig: Signature) -> str:
    """The text of the C++ type that computes the tiles of each task (tiles.h)."""
    params = sig.read(MatmulParams)
    _, inner, down, across = grid(sig)
    tasks, count = params.tasks, math.prod(grid(sig)) // (down * across)
    group = params.group if tasks else 1
    constants = (tasks, count, inner, down, across, group, *params.tile)
    return f"ArkDeal<{', '.join(map(str, constants))}>"


def side_strides(sig: Signature, index: int) -> tuple[int, int]:
    """Two strides in elements. For index 0 (the left operand): from one row to the next, and from
    one element of k to the next. For index 1 (the right operand): from one column to the next, and
    from one element of k to the next.
    """
    params = sig.read(MatmulParams)
    down, across = sig.operands[index].strides[-2:]
    along = params.transpose_b if index else not params.transpose_a
    return (down, across) if along else (across, down)


def along_k(sig: Signature, index: int) -> bool:
    """True if k is contiguous in the memory of operand `index`; False if the product's rows (or
    columns) are.
    """
    row, k = side_strides(sig, index)
    return not (row == 1 and k != 1)


def filled(size: int, high: int) -> bool:
    """True if at least three quarters of the rows (or columns) of the tiles are used when tiles of
    height `high` cover `size` rows (or columns).
    """
    return 3 * high <= 4 * size <= 4 * high


def dims(sig: Signature) -> tuple[int, int, int]:
    """Returns (m, n, k), the sizes of the product."""
    p, a, out = sig.read(MatmulParams), side_shape(sig, 0), sig.operands[2].shape
    k, n = a[-2] if p.transpose_a else a[-1], out[-1]
    if p.gated:
        n *= 2
    elif rotates(sig):
        n += 2 * p.kv_heads * p.head_dim
    return out[-2], n, k
