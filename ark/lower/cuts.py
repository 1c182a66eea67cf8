"""How a product is cut: rows and columns of its tiles, and in the variant `matrix` also in how many
parts of k. There what is predicted to end first, by rates that were measured on an H100
(docs/matmul.md has the table of shapes); elsewhere the machine's tile. A cut that was measured for
a shape (`ark tune`) comes before any prediction.

Called by the lowering of matmul.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ark.ir.values import Tensor
from ark.machine import Machine
from ark.plan.kind import OperandType, Signature
from ark.tasks.matmul_small import small

LINE = 128  # bytes of k in a step
# Microseconds, and bytes a microsecond, of one processor of an H100.
FULL_STEP_US = 0.58  # 128 by 256, 128 bytes deep, on the matrix units
LEAST_STEP_US = 0.18  # the loading thread starts a stage's two copies
SMALL_STAGE = 32768  # bytes up to which a stage holds two steps, at a higher rate of few rows
FEW_ROWS = 128  # with more of them, and many tiles, all processors load at L2's rate
NARROW = 32  # columns of tiles of few rows, where k of the right side lies side by side
FEW_TILES = 64  # of 64 by 64, which leave half of an H100 idle
SMALL_LOAD_RATE = 110e3
LOAD_RATE = 68e3  # what a processor loads while all do: L2 gives 8.7 TB/s
FOLD_US, EACH_PART_US = 2.0, 0.1  # parts are handed over to those who add them up
NORMED_US, MOST_NORMED = 2.0, 2  # a norm of parts against that of a sum; more parts brought nothing
TILE_US = 1.2  # from the last step of a tile of windows to the next one's first
SHALLOW = (64, 256)  # tiles that leave too few stages for windows, whose copies take longer
KEPT, FOLD_RATE = 6e6, 1.6e6  # bytes of parts that L2 keeps, and what is written and read of more


@dataclass(frozen=True)
class Cut:
    """rows, columns: of a tile. parts: of k."""

    rows: int
    columns: int
    parts: int = 1


def candidates(
    shape: Sequence[int],
    depth: int,
    itemsize: int,
    parts: bool,
    narrow: bool = False,
    windows: bool = False,
) -> list[Cut]:
    """The cuts of a product of this shape (batch, batch, rows, columns) that kernels exist for.

    depth: elements of k. parts: may k be cut? narrow: do the right side's elements of k lie side by
    side? windows: is a side a matrix of windows?
    """
    steps = -(-depth * itemsize // LINE)
    few = _few_tiles(shape)
    several = parts and shape[0] == shape[1] == 1
    counts = [p for p in (1, 2, 3, 4, 6, 8) if p == 1 or several]
    found = [
        Cut(rows, columns, many)
        for rows, columns, many in itertools.product((128, 64), (256, 128, 64, NARROW), counts)
        if (many - 1) * -(-steps // many) < steps
        and not (windows and (rows, columns) == SHALLOW)
        and columns <= shape[3]
        and (columns > NARROW or (narrow and rows == 64 and (shape[2] <= 64 or few)))
    ]
    return [c for c in found if c.rows == 64 or shape[2] > 64]


def _few_tiles(shape: Sequence[int]) -> bool:
    return shape[0] * shape[1] * -(-shape[2] // 64) * -(-shape[3] // 64) <= FEW_TILES


def predicted_us(
    cut: Cut,
    shape: Sequence[int],
    depth: int,
    itemsize: int,
    machine: Machine,
    normed: bool = False,
    windows: bool = False,
) -> float:
    """About how long the product takes; only comparisons of cuts mean something.

    normed: whoever adds parts up norms the rows, which somebody has to read anyway. windows: a side
    is a matrix of windows.
    """
    rows, columns = shape[2], shape[3]
    tiles = shape[0] * shape[1] * -(-rows // cut.rows) * -(-columns // cut.columns) * cut.parts
    high = min(cut.rows, -(-rows // 8) * 8)
    line = LINE * (high + cut.columns)
    together = next((n for n in (4, 2) if n * line <= SMALL_STAGE), 1)
    busy = rows > FEW_ROWS and not _few_tiles(shape)
    small, least = together > 1 and not busy and not windows, LEAST_STEP_US / together
    step = max(
        FULL_STEP_US * cut.rows * cut.columns / (128 * 256),
        line / (SMALL_LOAD_RATE if small else LOAD_RATE),
        least,
    )
    steps = math.ceil(math.ceil(depth * itemsize / LINE) / cut.parts)
    fold = 0.0
    if cut.parts > 1 and normed:
        fold = NORMED_US
    elif cut.parts > 1:
        moved = 8.0 * cut.parts * rows * columns
        fold = FOLD_US + EACH_PART_US * cut.parts + max(0.0, moved - KEPT) / FOLD_RATE
    begun = TILE_US if windows else 0.0
    return -(-tiles // machine.processors) * (steps * step + begun) + fold


def choose_cut(
    shape: Sequence[int],
    depth: int,
    itemsize: int,
    machine: Machine,
    parts: bool,
    measured: Mapping[str, Sequence[int]],
    narrow: bool = False,
    normed: bool = False,
    windows: bool = False,
) -> Cut:
    """The cut of a product; measured: cuts by `key`, for what they were found to be fastest.

    normed: a norm of its rows follows. windows: as in `candidates`.
    """
    able = candidates(shape, depth, itemsize, parts, narrow, windows)
    known = measured.get(key(shape, depth, itemsize))
    if known is not None and Cut(*known) in able:
        return Cut(*known)
    if normed:
        able = [c for c in able if c.parts <= MOST_NORMED]

    def time(cut: Cut) -> float:
        return predicted_us(cut, shape, depth, itemsize, machine, normed, windows)

    return min(able, key=time)


FEW = 1 << 15  # multiplications that a processor does in the time of a hand-over
MOST_TOGETHER = 4  # tiles, one behind the other


def tiles_together(many: int, machine: Machine) -> int:
    """How many tiles of so many multiplications take no longer than handing one of them over."""
    return 0 if machine.has("single_thread") else min(MOST_TOGETHER, FEW // many)


EXACT_WORK, EXACT_ROWS = 1 << 24, 9  # of a product of fp32 that is worth tiles of its own


def is_exact(dtypes: Sequence[str], shape: Sequence[int], depth: int) -> bool:
    """Is it a product of fp32 with work for tiles of its own (Machine.exact_tiles)?"""
    large = math.prod(shape) * depth >= EXACT_WORK and shape[2] >= EXACT_ROWS
    return large and set(dtypes) == {"fp32"}


def deals_matrices(params: Mapping[str, Any], tensors: Sequence[Tensor], machine: Machine) -> bool:
    """Is it many products of small matrices, of which a processor has a task?

    tensors: both sides, what is added to the product, and the result.
    """
    return small(signature(params, tensors), machine)


def signature(params: Mapping[str, Any], tensors: Sequence[Tensor]) -> Signature:
    """The product's. Arguments as of `deals_matrices`."""
    left, right, *_, out = tensors
    seen = (OperandType(t.dtype.name, t.shape, t.strides) for t in (left, right, out))
    return Signature("matmul", params, tuple(seen))


def tiles(
    shape: Sequence[int], depth: int, itemsize: int, machine: Machine, exact: bool = False
) -> list[Cut]:
    """The cuts to try where the variant is another: the usual one first, then tiles a quarter,
    half, as large and twice as high and wide. exact: as of `is_exact`.
    """
    batch = shape[0] * shape[1]
    usual = machine.exact_tile(shape[2], shape[3], depth, batch) if exact else None
    if usual:
        others = (Cut(min(t[0], shape[2]), min(t[1], shape[3])) for t in machine.exact_tiles)
        return list(dict.fromkeys((Cut(*usual), *others)))
    rows, columns = machine.matmul_tile(shape[2], shape[3], batch, 8 * itemsize)
    while columns < shape[3] and tiles_together(2 * rows * columns * depth, machine):
        columns = min(2 * columns, shape[3])
    found = {Cut(rows, columns): None}
    for high, wide in itertools.product((1.0, 0.5, 0.25, 2.0), repeat=2):
        sizes = max(1, int(rows * high)), max(1, int(columns * wide))
        found[Cut(min(sizes[0], shape[2]), min(sizes[1], shape[3]))] = None
    return list(found)


def choose_tile(
    shape: Sequence[int],
    depth: int,
    itemsize: int,
    machine: Machine,
    measured: Mapping[str, Sequence[int]],
    exact: bool = False,
) -> tuple[int, int]:
    """Rows and columns of the tiles of a product in any variant but `matrix`."""
    able = tiles(shape, depth, itemsize, machine, exact)
    known = measured.get(key(shape, depth, itemsize))
    cut = Cut(*known) if known is not None and Cut(*known) in able else able[0]
    return cut.rows, cut.columns


def key(shape: Sequence[int], depth: int, itemsize: int) -> str:
    """What a measured cut is good for."""
    return "x".join(str(n) for n in (*shape, depth, itemsize))


BAND = 16 << 20  # bytes of a product's left side that stay in L2 while its columns pass by
MOST_GROUP = 16  # rows of tiles: about as high as wide is what runs together


def matrix_group(rows: int, depth: int, itemsize: int) -> int:
    """Rows of tiles of a product whose columns follow each other, so that they share L2.

    rows: of a tile. depth: of the product. itemsize: bytes of an element.
    """
    return max(1, min(MOST_GROUP, BAND // (rows * depth * itemsize)))
