"""Chooses the cut of a matrix product: its tile size and, in the kernel variant `matrix`, the
number of parts into which the summed dimension k is split. In that variant it takes the cut with
the shortest predicted time (docs/matmul.md has measured shapes). In the other variants it takes the
machine's tile. A cut that `ark tune` measured for the shape takes precedence.

Called by the lowering of matmul.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ark.errors import PlanError
from ark.ir.values import Tensor
from ark.log import note, shows
from ark.machine import Machine
from ark.machine.costs import FULL_STEP_SHAPE, BoxCosts
from ark.machine.tiles import BoxTiles
from ark.plan.kind import OperandType, Signature
from ark.plan.types import BOX_ALIGNMENT_BYTES, MAX_OPERANDS
from ark.tasks.expression import MAX_NODES
from ark.tasks.matmul_form import K_PART_ALIGNMENT_BYTES, MIN_UNIT_TILE_ROWS
from ark.tasks.matmul_params import MatmulParams
from ark.tasks.matmul_small import small

MIN_PIXEL_ROWS = 32  # fewest rows of a box of a product over pixels
# One op adds all parts. Its expression also has the product's epilogue.
MAX_PARTS = min(MAX_OPERANDS - 2, MAX_NODES // 2 - 4)


@dataclass(frozen=True)
class Cut:
    """How a product is divided into tasks. rows, columns: the size of a tile of the result. parts:
    the number of parts into which the summed dimension k is divided; separate tasks compute the
    sums over these parts, which are added later (split-k).
    """

    rows: int
    columns: int
    parts: int = 1


def candidates(
    shape: Sequence[int],
    depth: int,
    itemsize: int,
    machine: Machine,
    parts: bool,
    narrow: bool = False,
    windows: bool = False,
    plain: bool = False,
    heads: int = 0,
    channels: int = 0,
) -> list[Cut]:
    """The cuts for which kernels exist, for a product of this shape (batch, batch, rows, columns).

    depth: elements of k. parts: True if k may be divided. narrow: True if k is contiguous in the
    right operand. windows: True if an operand is a matrix of convolution windows. plain: True if
    each element of the result is stored without its neighbours, so that a tile may end inside an
    attention head or a pair of columns. heads: the width of attention heads whose halves are
    rotated; 0 if there are none. If heads are rotated, one warpgroup must compute all columns of a
    head; in tiles with the fewest rows, two warpgroups share the columns. channels: the rows of
    the right operand of a product over pixels; 0 for other products.
    """
    steps, given = -(-depth * itemsize // K_PART_ALIGNMENT_BYTES), box_tiles(machine)
    wide = min(columns for _, columns in set(given.tiles) - set(given.narrow))
    low = shape[2] <= given.least_rows or shape[3] < wide or _few_tiles(shape, machine)
    several = parts and shape[0] == shape[1] == 1
    deep = given.deep_parts if depth * itemsize >= given.deep_bytes else ()
    counts = (1, *(p for p in (*given.parts, *deep) if several))
    # Tile widths between the machine's standard widths are candidates only for products of many
    # rows, because products of few rows are bound by memory bandwidth.
    between = (plain or heads > 0) and not windows and shape[2] > given.least_rows
    between = between or channels > 0
    # If the columns of the right operand are contiguous, its box copies load whole cache lines, so
    # the width of a tile must be a multiple of a cache line.
    between_tiles = {
        tile
        for tile in given.plain
        if between and (narrow or tile[1] * itemsize % K_PART_ALIGNMENT_BYTES == 0)
    }
    # A tile may be wider than the result under two conditions: the rows of the result consist of
    # whole 16-byte vectors, and there are enough rows to give most processors a tile.
    many_rows = 2 * shape[2] >= given.least_rows * machine.processors
    vectors = narrow and between and many_rows and shape[3] * itemsize % BOX_ALIGNMENT_BYTES == 0
    return [
        Cut(tile[0], min(tile[1], shape[3]), many)
        for tile in given.tiles
        for many in (*counts, *(_filling(tile, shape, machine) if several and channels else ()))
        if (many - 1) * -(-steps // many) < steps
        and not (windows and tile in given.shallow)
        and (tile[1] <= shape[3] or (tile in given.narrow and vectors))
        and (tile not in given.narrow or (narrow and low))
        and (tile not in given.plain or tile in between_tiles)
        and (tile[0] == given.least_rows or shape[2] > given.least_rows)
        and (not heads or tile[1] % (heads * (1 + (tile[0] == given.least_rows))) == 0)
        and (not channels or math.gcd(channels, tile[1]) >= MIN_PIXEL_ROWS)
    ]


def _filling(tile: Sequence[int], shape: Sequence[int], machine: Machine) -> Iterator[int]:
    """The number of parts of k with which each processor computes one tile of a product over
    pixels, if it is not too large.
    """
    parts = machine.processors // (-(-shape[2] // tile[0]) * -(-shape[3] // tile[1]))
    if 1 < parts <= MAX_PARTS:
        yield parts


def box_tiles(machine: Machine) -> BoxTiles:
    """The sizes of tiles for products whose operands are loaded by box copies (hardware copies of
    rectangles). Raises PlanError if the machine model does not have them.
    """
    if machine.box_tiles is None:
        raise PlanError(f"machine {machine.name!r} has the variant `matrix`, but no box_tiles")
    return machine.box_tiles


def _few_tiles(shape: Sequence[int], machine: Machine) -> bool:
    """True if the result has so few tiles of the smallest square size that some processors would be
    idle, so that smaller tiles are worthwhile.
    """
    side = box_tiles(machine).least_rows
    many = shape[0] * shape[1] * -(-shape[2] // side) * -(-shape[3] // side)
    return many <= box_costs(machine).few_tiles


def predicted_us(
    cut: Cut,
    shape: Sequence[int],
    depth: int,
    itemsize: int,
    machine: Machine,
    normed: bool = False,
    windows: bool = False,
    beside: int = 1,
) -> float:
    """The approximate microseconds of a product with this cut, for comparing cuts.

    normed: True if a norm reads the rows of the result; the norm's tasks then also add the parts of
    k. windows: True if an operand is a matrix of convolution windows. beside: the number of equal
    products that run at the same time; the result is then the time until all of them end.
    """
    costs, rows, columns = box_costs(machine), shape[2], shape[3]
    tiles = shape[0] * shape[1] * -(-rows // cut.rows) * -(-columns // cut.columns) * cut.parts
    high = min(cut.rows, -(-rows // 8) * 8)
    line = K_PART_ALIGNMENT_BYTES * (high + cut.columns)
    lines_per_stage = next((n for n in (4, 2) if n * line <= costs.small_stage), 1)
    busy = rows > costs.few_rows and not _few_tiles(shape, machine)
    small, least = (
        lines_per_stage > 1 and not busy and not windows,
        costs.least_step_us / lines_per_stage,
    )
    step = max(
        costs.full_step_us * cut.rows * cut.columns / math.prod(FULL_STEP_SHAPE),
        line / (costs.small_load_rate if small else costs.load_rate),
        least,
    )
    steps = math.ceil(math.ceil(depth * itemsize / K_PART_ALIGNMENT_BYTES) / cut.parts)
    fold = 0.0
    if cut.parts > 1 and normed:
        # If there are few rows and a norm adds the partial sums, adding them costs no time: the
        # norm's tasks take as long as without parts of k.
        few = rows <= min(high for high, _ in box_tiles(machine).tiles)
        fold = costs.each_part_us * cut.parts if few else costs.normed_us
    elif cut.parts > 1:
        moved = 8.0 * cut.parts * rows * columns
        fold = costs.fold_us + costs.each_part_us * cut.parts
        fold += max(0.0, moved - costs.kept_bytes) / costs.fold_rate
    begun = costs.tile_us if windows else 0.0
    return -(-tiles * beside // machine.processors) * (steps * step + begun) + fold


def estimated_boxes(machine: Machine) -> BoxCosts:
    """The costs of products whose operands are loaded by box copies, estimated from the machine's
    peak rates and general costs.
    """
    costs, rate = machine.costs, machine.tflops * 1e6 / machine.processors
    load = costs.cache_rate / machine.processors
    return BoxCosts(
        full_step_us=2.0 * math.prod(FULL_STEP_SHAPE) * (K_PART_ALIGNMENT_BYTES // 2) / rate,
        least_step_us=costs.pass_us,
        small_stage=machine.shared_bytes // 8,
        small_load_rate=load,
        load_rate=load,
        tile_us=costs.task_us,
        fold_us=costs.signal_us,
        each_part_us=costs.each_signal_us,
        normed_us=costs.signal_us,
        kept_bytes=costs.cache_bytes,
        fold_rate=costs.cache_rate,
        band_bytes=int(costs.cache_bytes),
        few_rows=2 * box_tiles(machine).least_rows,
        few_tiles=max(1, machine.processors // 2),
        least_rows=machine.large_product[1] // 4,
        least_work=4.0 * costs.exact_work,
        least_reads=machine.large_product[1],
        laid_rate=machine.bandwidth_gbps * 1e3,
        common_rate=rate / 2,
        tf32_rate=rate / 2,
        plain_rate=costs.scalar_rate,
        attention_rate=rate / 2,
        code_rate=costs.scalar_rate / 4,
    )


def box_costs(machine: Machine) -> BoxCosts:
    """The machine's costs of products with box copies; estimated from its peak rates if they were
    not measured.
    """
    return machine.costs.boxes or estimated_boxes(machine)


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
    plain: bool = False,
    beside: int = 1,
    heads: int = 0,
    channels: int = 0,
) -> Cut:
    """The cut of a product under the variant `matrix`: the measured one if there is one, otherwise
    the one with the shortest predicted time.

    measured: the fastest measured cuts, by `key`. normed, beside: see `predicted_us`. parts,
    narrow, windows, plain, heads, channels: see `candidates`.
    """
    flags = (narrow, windows, plain, heads, channels)
    able = candidates(shape, depth, itemsize, machine, parts, *flags)
    known = measured.get(key(shape, depth, itemsize))
    if known is not None and Cut(*known) in able:
        return Cut(*known)
    if normed:
        able = [c for c in able if c.parts <= box_tiles(machine).normed_parts]

    def time(cut: Cut) -> float:
        return predicted_us(cut, shape, depth, itemsize, machine, normed, windows, beside)

    return fastest(able, time, shape, depth)


def fastest(
    able: Sequence[Cut], predicted: Callable[[Cut], float], shape: Sequence[int], depth: int
) -> Cut:
    """The cut with the shortest predicted time. With ARK_DEBUG=lower, the three fastest cuts are
    printed.
    """
    cut = min(able, key=predicted)
    if shows("lower"):
        others = sorted((c for c in able if c != cut), key=predicted)[:2]
        texts = [f"{_text(c)}: {predicted(c):.3g} us" for c in (cut, *others)]
        product = "x".join(map(str, (*shape, depth)))
        losers = f" (not {'; '.join(texts[1:])})" if others else ""
        note("lower", f"product {product}: tiles {texts[0]}{losers}")
    return cut


def _text(cut: Cut) -> str:
    split = f", {cut.parts} parts of k" if cut.parts > 1 else ""
    return f"{cut.rows}x{cut.columns}{split}"


MAX_TILES_PER_TASK = 4
MIN_SPLIT_TILE = 8  # rows and columns of the smallest tiles into which few tiles are divided


def tiles_per_task(many: int, machine: Machine) -> int:
    """The number of tiles that one task should compute: as many as take no longer than the
    synchronisation of a task, at most MAX_TILES_PER_TASK. many: the number of multiplications of
    one tile.
    """
    return min(MAX_TILES_PER_TASK, int(machine.costs.hand_over_work) // many)


def is_exact(dtypes: Sequence[str], shape: Sequence[int], depth: int, machine: Machine) -> bool:
    """True for a product of fp32 that is computed in full precision and is large enough for the
    tiles in Machine.exact_tiles.
    """
    large = math.prod(shape) * depth >= machine.costs.exact_work and shape[2] >= MIN_UNIT_TILE_ROWS
    return large and set(dtypes) == {"fp32"}


def deals_matrices(params: MatmulParams, tensors: Sequence[Tensor], machine: Machine) -> bool:
    """True for a batch of many products of small matrices, of which each processor computes its
    share in one task. tensors: both operands, the addends of the product, and the result.
    """
    return small(signature(params, tensors), machine)


def signature(params: MatmulParams, tensors: Sequence[Tensor]) -> Signature:
    """The signature (kind, parameters, operand types) of a product's tasks. Arguments: see
    `deals_matrices`.
    """
    left, right, *_, out = tensors
    seen = (OperandType(t.dtype.name, t.shape, t.strides) for t in (left, right, out))
    return Signature("matmul", params.to_plan(), tuple(seen))


def tiles(
    shape: Sequence[int], depth: int, itemsize: int, machine: Machine, exact: bool = False
) -> list[Cut]:
    """The cuts that `ark tune` tries in all variants except `matrix`. The default cut is the first,
    followed by tiles whose rows and columns are a quarter, half, once or twice those of the
    default. exact: True for products to which `is_exact` applies; their cuts are the machine's
    exact_tiles.
    """
    batch = shape[0] * shape[1]
    usual = machine.exact_tile(shape[2], shape[3], depth, batch) if exact else None
    if usual:
        others = (Cut(min(t[0], shape[2]), min(t[1], shape[3])) for t in machine.exact_tiles)
        return list(dict.fromkeys((Cut(*usual), *others)))
    rows, columns = machine.matmul_tile(shape[2], shape[3], batch, 8 * itemsize)
    while columns < shape[3] and tiles_per_task(2 * rows * columns * depth, machine):
        columns = min(2 * columns, shape[3])
    least = machine.costs.hand_over_work if itemsize == 4 else 0.0
    little = math.prod(shape) * depth <= least * machine.processors
    while little and _idle(shape, rows, columns, machine) and rows * columns * depth > least:
        rows, columns = (rows // 2, columns) if rows > columns else (rows, columns // 2)
    cuts = {Cut(rows, columns): None}
    for high, wide in itertools.product((1.0, 0.5, 0.25, 2.0), repeat=2):
        sizes = max(1, int(rows * high)), max(1, int(columns * wide))
        cuts[Cut(min(sizes[0], shape[2]), min(sizes[1], shape[3]))] = None
    return list(cuts)


def _idle(shape: Sequence[int], rows: int, columns: int, machine: Machine) -> bool:
    """True if at least half of the processors have no tile, and a tile of this size can be
    halved.
    """
    count = shape[0] * shape[1] * -(-shape[2] // rows) * -(-shape[3] // columns)
    return 2 * count <= machine.processors and max(rows, columns) > MIN_SPLIT_TILE


def choose_tile(
    shape: Sequence[int],
    depth: int,
    itemsize: int,
    machine: Machine,
    measured: Mapping[str, Sequence[int]],
    exact: bool = False,
) -> tuple[int, int]:
    """Rows and columns of the tiles of a product in any variant except `matrix`."""
    able = tiles(shape, depth, itemsize, machine, exact)
    known = measured.get(key(shape, depth, itemsize))
    cut = Cut(*known) if known is not None and Cut(*known) in able else able[0]
    return cut.rows, cut.columns


def key(shape: Sequence[int], depth: int, itemsize: int) -> str:
    """The key under which `ark tune` stores the measured cut of a product of this shape."""
    return "x".join(str(n) for n in (*shape, depth, itemsize))


def matrix_group(rows: int, depth: int, itemsize: int, machine: Machine) -> int:
    """The number of rows of tiles that form a band. The tiles of a band are computed column by
    column, so that the band's rows of the left operand stay in the cache. rows: the rows of a tile.
    depth: the number of elements of k. itemsize: bytes of an element.
    """
    costs = machine.costs
    band = costs.boxes.band_bytes if costs.boxes else int(costs.cache_bytes)
    return max(1, min(costs.group_rows, band // (rows * depth * itemsize)))
