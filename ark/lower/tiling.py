"""Chooses the tiles into which an op's output is divided; each tile is computed by one task. There
should be enough tiles for all processors, and the work of a tile should take longer than the
synchronisation of its task. Called by the ops' lowering functions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from ark.errors import PlanError
from ark.ir.attributes import AttentionAttributes
from ark.ir.fold import CACHE_LINE_ELEMENTS, MAX_FOLDED_DIMS, block, fold, tile_of
from ark.ir.graph import Node
from ark.ir.hints import Hints
from ark.ir.values import Tensor
from ark.machine import Machine
from ark.machine.variant import COMMUNICATE
from ark.tasks.attention import in_place_bytes

# Generated source counts the elements of a tile with 32-bit integers, so a tile has at most these.
MAX_TILE_ELEMENTS = 1 << 28


def box_tile(
    shape: Sequence[int],
    machine: Machine,
    weight: int = 1,
    itemsize: int = 4,
    share: float = 1.0,
) -> list[int]:
    """The tile size in each of four dimensions. A shape with more dimensions is first folded to
    four (ark.ir.fold). weight: memory accesses per element of the result. itemsize: bytes of an
    element. share: the part of the processors that should compute the tiles.
    """
    full, shape = shape, fold(shape)
    processors = (
        max(1, int(machine.processors * share)) if machine.coalesces else machine.processors
    )
    want = max(
        math.ceil(least_elements(machine) / weight),
        math.ceil(math.prod(shape) / processors),
    )
    if weight == 1 and machine.coalesces:
        most = machine.costs.sweep_bytes // itemsize
        want = min(want, max(most, math.ceil(math.prod(shape) / (64 * machine.processors))))
    want = min(want, MAX_TILE_ELEMENTS)
    if not machine.coalesces:
        return tile_of(full, want)
    return _balanced(
        full,
        want,
        max(1, least_elements(machine) // weight),
        weight * itemsize,
        machine,
        processors,
    )


def least_elements(machine: Machine) -> int:
    """The fewest elements that a tile should have if each element costs one memory access."""
    return machine.costs.tile_elements


MAX_COORDINATE = 1 << 30  # largest size of one dimension, since a task's coordinates count it
RELATIVE_TILE_SIZES = (
    1.0,
    1.5,
    1.25,
    0.8,
    0.67,
    0.57,
    0.5,
)  # sizes of further tiles to try, relative to the size computed first
MIN_EVEN_ROUNDS = 4  # tasks per processor; with at least so many, a partial last round is short


def _balanced(
    full: Sequence[int], want: int, least: int, nbytes: int, machine: Machine, processors: int
) -> list[int]:
    """Among several tiles of about `want` elements, the tile with which all processors end
    earliest. least: the smallest number of elements of a tile. nbytes: bytes that are moved per
    element. processors: the number of processors that compute the tiles.
    """
    shape, first = fold(full), tile_of(full, want)
    rate = machine.bandwidth_gbps * 1e3 / machine.processors
    begun = machine.costs.task_us * rate / nbytes  # elements moved in the time of a task's begin

    def tasks(tile: Sequence[int]) -> int:
        return math.prod(-(-n // t) for n, t in zip(shape, tile, strict=True))

    def time(tile: Sequence[int]) -> float:
        return -(-tasks(tile) // processors) * (math.prod(tile) + begun)

    if not processors < tasks(first) < MIN_EVEN_ROUNDS * processors:
        return first
    sizes = (max(least, math.ceil(want * size)) for size in RELATIVE_TILE_SIZES)
    return min((tile_of(full, size) for size in sizes), key=time)


def hinted_tile(
    name: str, shape: Sequence[int], hints: Hints, shown: Sequence[int] | None = None
) -> list[int] | None:
    """The tile that the user's hints request, reduced to the shape where it exceeds the shape; None
    if the hints have no tile. shown: sizes to use instead of the hints' tile. Raises PlanError if
    the hints also request a number of tasks that differs from the number of tiles.
    """
    sizes = hints.tile if shown is None else shown
    if sizes is not None:
        known = list(itertools.dropwhile(lambda n: n == 1, sizes)) or [1]
        known = list(fold(known)) if len(known) > len(shape) else known
        wide = [1] * (len(shape) - len(known)) + known
        tile = [min(t, n) for t, n in zip(wide, shape, strict=True)]
    elif hints.tasks is not None:
        tile = _cut(shape, hints.tasks)
    else:
        return None
    count = math.prod(-(-n // t) for n, t in zip(shape, tile, strict=True))
    if hints.tasks not in (None, count):
        reason = f"tiles of {tile} are {count}" if sizes is not None else f"{count} is nearest"
        raise PlanError(
            f"op {name!r}: a result of shape {list(shape)} cannot be divided into NumTasks="
            f"{hints.tasks} tiles ({reason}); set NumTasks={count}, or omit NumTasks"
        )
    return tile


def _cut(shape: Sequence[int], tasks: int) -> list[int]:
    """A tile that divides the shape into about `tasks` tiles of about equal size. The number of
    tiles is exact if the dimensions have suitable sizes.
    """
    tile = list(shape)
    for d, n in enumerate(shape):
        pieces = next(p for p in range(min(n, tasks), 0, -1) if tasks % p == 0)
        tile[d] = -(-n // pieces)
        tasks //= pieces
    return tile


def _countable(chunks: tuple[int, int]) -> bool:
    return chunks[0] * chunks[1] * CACHE_LINE_ELEMENTS * CACHE_LINE_ELEMENTS <= MAX_TILE_ELEMENTS


def transpose_tile(
    shape: Sequence[int], transposed: int, machine: Machine, itemsize: int = 4
) -> list[int]:
    """The tile size of a transpose's result in each of four dimensions (after folding).
    transposed: the dimension of the result that is contiguous in the source. In this dimension and
    in the last one, tiles are long enough that source and result are accessed in whole cache lines.
    """
    if transposed == 3 or (transposed == 0 and len(shape) > MAX_FOLDED_DIMS):
        return box_tile(shape, machine, itemsize=itemsize)
    full, shape = shape, fold(shape)
    across, down = -(-shape[transposed] // CACHE_LINE_ELEMENTS), -(-shape[3] // CACHE_LINE_ELEMENTS)
    planes = math.prod(shape) // (shape[transposed] * shape[3])

    def busy(chunks: tuple[int, int]) -> tuple[int, int]:
        """A number to minimise, proportional to the time of the busiest processor. The unit is the
        time of one square whose side is a cache line; each task costs one unit more. The second
        number, the number of tasks, decides between equal times.
        """
        tasks = planes * -(-across // chunks[0]) * -(-down // chunks[1])
        return -(-tasks // machine.processors) * (chunks[0] * chunks[1] + 1), tasks

    few = [c for c in itertools.product(_powers(across), _powers(down)) if _countable(c)]
    chunks = min(few, key=busy)
    tile = [1, 1, 1, 1]
    tile[transposed] = min(shape[transposed], chunks[0] * CACHE_LINE_ELEMENTS)
    tile[3] = min(shape[3], chunks[1] * CACHE_LINE_ELEMENTS)
    if chunks == (across, down):
        plane = tile[transposed] * tile[3]
        share = min(-(-planes // machine.processors), max(1, MAX_TILE_ELEMENTS // plane))
        least = -(-least_elements(machine) // plane)
        for d in (2, 1, 0):
            if d != transposed:
                tile[d] = min(shape[d], max(share, least))
                share, least = -(-share // tile[d]), -(-least // tile[d])
    tile[0] = block(full, tile[0])
    return tile


def _powers(most: int) -> list[int]:
    """The powers of two that are less than `most`, in ascending order, and then `most` itself."""
    return [*(1 << i for i in range(most.bit_length()) if 1 << i < most), most]


def swept(coords: list[tuple[int, ...]], machine: Machine) -> list[tuple[int, ...]]:
    """The coordinates of a tensor's tiles in the order in which they are divided among processors.
    If each processor has several tiles, the order is that of `side_by_side`, so that processors
    access neighbouring memory at the same time.
    """
    many = len(coords) > machine.processors and machine.coalesces
    return side_by_side(coords, machine.processors) if many else coords


def side_by_side(coords: Sequence[tuple[int, ...]], processors: int) -> list[tuple[int, ...]]:
    """Reorders coordinates so that processors, each of which gets a consecutive share of the
    result, access neighbouring memory at the same time. For 6 coordinates and 2 processors, the
    result is 0, 2, 4, 1, 3, 5: the processors run 0, 2, 4 and 1, 3, 5.
    """
    total = len(coords)
    shares: list[list[tuple[int, ...]]] = [[] for _ in range(processors)]
    sizes = [total * (p + 1) // processors - total * p // processors for p in range(processors)]
    dealt = (p for i in range(max(sizes)) for p in range(processors) if i < sizes[p])
    for coord, p in zip(coords, dealt, strict=True):
        shares[p].append(coord)
    return [coord for share in shares for coord in share]


def box_coords(shape: Sequence[int], tile: Sequence[int]) -> list[tuple[int, ...]]:
    """The first indices of all tiles, with the last dimension fastest. Shapes of more than four
    dimensions are folded.
    """
    shape = fold(shape) if len(tile) == MAX_FOLDED_DIMS else shape
    return list(itertools.product(*(range(0, n, s) for n, s in zip(shape, tile, strict=True))))


def start_of(tensor: Tensor) -> int:
    """The offset of the tensor's first element in its buffer, in elements."""
    return sum(o * s for o, s in zip(tensor.offsets, tensor.strides, strict=True))


MIN_ATTENTION_ROWS = 32  # the rows of the smallest tile of queries


def attends(node: Node, machine: Machine) -> bool:
    """True for attention of many rows that matrix units support. Attention of few rows is included
    if all heads of all sequences together give a tile for each processor.
    """
    rows, given = node.inputs[0].shape[-2], node.read(AttentionAttributes)
    batch = node.inputs[0].shape[0] if len(node.inputs[0].shape) == 3 else 1
    tiles = batch * given.heads * -(-rows // MIN_ATTENTION_ROWS)
    filled = machine.cooperative and rows >= MIN_ATTENTION_ROWS and tiles >= machine.processors
    return (rows >= machine.large_product[0] or filled) and attends_in_units(node)


def attends_in_units(node: Node, parts: bool = False) -> bool:
    """True for attention that matrix units support: all tensors have one 16-bit type, and all heads
    and rows begin at multiples of 16 bytes. parts: if True, also accept fp32 queries and results
    with bf16 keys and values.
    """
    given = node.read(AttentionAttributes)
    types = {t.dtype.name for t in (*node.inputs[:3], node.outputs[0])}
    query, key, value = (t.dtype.name for t in node.inputs[:3])
    if parts and (query, key) == (node.outputs[0].dtype.name, value) == ("fp32", "bf16"):
        types = {key}
    return (
        len(types) == 1
        and types <= {"bf16", "fp16"}
        and given.head_dim % 8 == 0
        and given.head_dim <= 256
        and all(
            s % 8 == 0
            for t in (
                *(node.inputs[:3] if given.by_rows else node.inputs[:1]),
                node.outputs[0],
            )
            for s in (*t.strides[:-1], start_of(t))
        )
    )


def divides(given: AttentionAttributes, machine: Machine) -> bool:
    """True if the positions of attention of a single row may be divided among tasks. The positions
    of a window are divided only if a communicating warp waits for the parts; without one, a task
    for each head that reads the few positions in place takes less time.
    """
    leads = any(variant.role(COMMUNICATE) for variant in machine.variants)
    return given.split and (leads or not given.window)


def divided_bytes(node: Node) -> int:
    """Bytes of shared memory that attention of few rows needs for its queries and scores if its
    positions are divided among tasks; 0 for attention that is always divided into tiles of queries.
    """
    how, key = node.read(AttentionAttributes), node.inputs[1]
    if not how.split:
        return 0
    if node.type == "paged_attention":
        kv_heads = key.shape[1]
    else:
        kv_heads = key.shape[0] // node.inputs[3].shape[0]  # the caches of all sequences
    return in_place_bytes(how.heads // kv_heads, how.head_dim)
