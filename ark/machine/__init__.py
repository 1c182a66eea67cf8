"""Machine models: the properties of a device that the planner needs. Planning for a machine does
not need the device.

A model is an immutable value. Each backend defines named models, and creates a model from the
properties that an opened device reports. Called by ark.plan and the backends.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from ark.machine.capability import Capability
from ark.machine.costs import ESTIMATED, Costs
from ark.machine.ranges import Bytes, Count, LineBytes, MemoryBytes, Name, Rate, Threads, Word
from ark.machine.tiles import BoxTiles, UnitTiles
from ark.machine.variant import COMPUTE, MOVE, Variant, block

# These bounds apply to machines on which one thread runs a task (CPUs). The rows and columns of a
# tile are multiples of TILE_STEP_ELEMENTS. If n tiles of the default size cover a dimension, tile
# sizes that divide it into n to n + MAX_EXTRA_PARTS tiles are tried.
TILE_STEP_ELEMENTS = 32
MAX_EXTRA_PARTS = 8


@dataclass(frozen=True)
class Machine:
    """A device as the planner sees it.

    name: the model's name, as `--machine` takes it.
    arch: the architecture for which the compiler compiles.
    processors: the number of SMs, CUs or cores; each runs one block.
    lanes: the number of threads of a warp (wavefront).
    shared_bytes: bytes of shared memory (LDS) that a block has for its tasks and for the ring (the
        buffer of copied operands). The bytes that the loop kernel itself uses
        (ark.backend.codegen.layout.LOOP_BYTES) are not included.
    variants: the kernel variants that the machine can run, the preferred one first; each divides
        the warps of a block differently between computing and copying (ark.machine.variant).
    bandwidth_gbps: memory bandwidth of all processors together.
    tflops: rate of the matrix units of all processors together.
    costs: all other times and rates (ark.machine.costs).
    line_bytes: size of a cache line; counters of different producers are at least this far apart.
    tile: rows and columns of a matmul tile.
    large_tiles: the tile sizes that have a specialised loop for 16-bit types: rows, columns, and
        the fraction of the loop's time in which the matrix units multiply.
    exact_tiles: the tile sizes for products in full fp32: rows, columns, and the speed relative to
        the other sizes.
    attention_rows: the largest number of queries of an attention tile on matrix units.
    large_product: the smallest number of rows of a product or attention, and of columns, for which
        it saves time to round operands or change their layout so that matrix units can be used.
    box_tiles, unit_tiles: the tile sizes of its functions for matrix units (ark.machine.tiles);
        None if it has no such functions.
    capabilities: the capabilities by which code selects implementations (ark.machine.capability),
        without duplicates.
    """

    name: Name
    arch: Word
    backend: Word
    processors: Count
    lanes: Threads
    shared_bytes: Bytes
    variants: tuple[Variant, ...]
    memory_bytes: MemoryBytes = 0
    bandwidth_gbps: Rate = 10.0
    tflops: Rate = 0.1
    line_bytes: LineBytes = 64
    tile: tuple[Count, Count] = (64, 64)
    large_tiles: tuple[tuple[Count, Count, Rate], ...] = ()
    exact_tiles: tuple[tuple[Count, Count, Rate], ...] = ()
    attention_rows: Count = 128
    large_product: tuple[Count, Count] = (128, 64)
    box_tiles: BoxTiles | None = None
    unit_tiles: UnitTiles | None = None
    capabilities: Annotated[tuple[Capability, ...], Meta(max_length=64)] = ()
    costs: Costs = ESTIMATED

    def __post_init__(self) -> None:
        for capability in self.capabilities:
            if not isinstance(capability, Capability):
                member = Capability.named(capability)
                raise TypeError(f"{capability!r} is a string; use Capability.{member.name}")

    @property
    def variant(self) -> Variant:
        """The kernel variant of the loop kernel that is planned for: the first of `variants`."""
        return self.variants[0]

    @property
    def warps(self) -> int:
        """The number of computing warps of a block. Warps that only load, move or communicate are
        not counted.
        """
        return self.variant.role(COMPUTE)

    @property
    def lists(self) -> int:
        """The number of task lists of a phase (an entry point of a plan). Each processor has one
        list. If the variant has moving warps (warps that only run copies and sums between ranks),
        each processor has a second list for its moving warps. All second lists follow the first
        ones.
        """
        return self.processors * (2 if self.variant.role(MOVE) else 1)

    @property
    def threads(self) -> int:
        """The number of threads of a block, of all roles together."""
        return self.lanes * self.variant.warps

    @property
    def coalesces(self) -> bool:
        """True if the lanes of a warp load neighbouring elements in one access. Loading a single
        element then costs as much as loading a cache line.
        """
        return self.lanes > 1

    @property
    def cooperative(self) -> bool:
        """True if several threads run a task together: device functions divide its elements among
        threads and synchronise at barriers, and some warps may copy data while others compute. If
        False, one thread runs a task in loops that the compiler vectorises.
        """
        return not self.has(Capability.SINGLE_THREAD)

    @property
    def ring_bytes(self) -> int:
        return self.variant.ring_bytes

    @property
    def task_bytes(self) -> int:
        """Bytes of shared memory that the ring of stages leaves free for a task."""
        return self.shared_bytes - self.ring_bytes

    @property
    def stage_bytes(self) -> int:
        return self.variant.stage_bytes

    @property
    def in_flight(self) -> int:
        return self.variant.in_flight

    @property
    def row_slice(self) -> int:
        return self.variant.row_slice

    def using(self, name: str) -> Machine:
        """A copy of the machine that has only the variant `name`; the machine itself if it does not
        have that variant.
        """
        matching = [v for v in self.variants if v.name == name]
        return dataclasses.replace(self, variants=tuple(matching)) if matching else self

    def without_ring(self) -> Machine:
        """A copy of the machine whose variant `block` has no ring, so that tasks read operands from
        global memory. The shared memory of the ring then serves as cache, and the computing warps
        get the registers of the loading warps.
        """
        variants = tuple(
            block(v.role(COMPUTE)) if v.name == "block" and v.stages else v for v in self.variants
        )
        return dataclasses.replace(self, variants=variants)

    def under(self, place: int) -> Machine:
        """A copy of the machine that has only one of its kernel variants. place: the index of the
        variant in `variants`.
        """
        return dataclasses.replace(self, variants=(self.variants[place],))

    def shaped(self, **changes: Any) -> Machine:
        """A copy of the machine in which the given fields have new values in all of its kernel
        variants.
        """
        variants = tuple(dataclasses.replace(v, **changes) for v in self.variants)
        return dataclasses.replace(self, variants=variants)

    def has(self, capability: Capability) -> bool:
        """True if the machine has the capability. Raises TypeError for a string, because a misspelt
        name would give False without an error.
        """
        if not isinstance(capability, Capability):
            raise TypeError(f"{capability!r} is a string; expected a member of Capability")
        return capability in self.capabilities

    def with_capabilities(self, *more: Capability) -> Machine:
        """A copy of the machine that has the given capabilities in addition."""
        lacking = tuple(c for c in more if c not in self.capabilities)
        return dataclasses.replace(self, capabilities=(*self.capabilities, *lacking))

    def without_capabilities(self, *fewer: Capability) -> Machine:
        """A copy of the machine without the given capabilities."""
        kept = tuple(c for c in self.capabilities if c not in fewer)
        return dataclasses.replace(self, capabilities=kept)

    def matmul_tile(self, rows: int, columns: int, batch: int, bits: int = 32) -> tuple[int, int]:
        """The tile (rows, columns) for a product of `rows` by `columns` elements. It is as large as
        possible, so that operands are reused, while all processors have a tile.

        batch: the number of such products. bits: size of an element of the left operand.
        """
        if not self.cooperative:
            return self._equal_tile(rows, columns, batch)
        tile_m, tile_n = self.tile
        tile_m = min(tile_m, max(1, rows))
        tile_n = min(tile_n, max(1, columns))
        while tile_n > 32 and batch * -(-rows // tile_m) * -(-columns // tile_n) < self.processors:
            tile_n //= 2
        units = self.costs.units
        if bits != 16 or units is None:
            return tile_m, tile_n

        def time(high: int, wide: int, share: float) -> float:
            tiles = batch * -(-rows // high) * -(-columns // wide)
            return -(-tiles // self.processors) * high * wide / share

        able = [t for t in self.large_tiles if t[0] <= rows and t[1] <= columns]
        others = (
            []
            if (tile_m, tile_n) in [t[:2] for t in able]
            else [(tile_m, tile_n, units.small_share)]
        )
        high, wide, _ = min((*able, *others), key=lambda t: time(*t))
        return high, wide

    def _equal_tile(self, rows: int, columns: int, batch: int) -> tuple[int, int]:
        """The tile (rows, columns), at most as large as the field `tile`, for which the busiest
        processor has the fewest multiplications. Of several such tiles, it is the one for which
        that processor reads the fewest bytes.
        """

        def sizes(whole: int, most: int) -> list[int]:
            first = -(-whole // most)
            parts = range(first, first + min(self.processors, MAX_EXTRA_PARTS))
            steps = (-(-whole // (n * TILE_STEP_ELEMENTS)) * TILE_STEP_ELEMENTS for n in parts)
            return sorted({min(n, max(1, whole), most) for n in steps}, reverse=True)

        def load(tile: tuple[int, int]) -> tuple[int, int]:
            tiles = batch * -(-rows // tile[0]) * -(-columns // tile[1])
            return -(-tiles // self.processors) * math.prod(tile), tiles * sum(tile)

        high, wide = self.tile
        return min(itertools.product(sizes(rows, high), sizes(columns, wide)), key=load)

    def exact_tile(self, rows: int, columns: int, depth: int, batch: int) -> tuple[int, int] | None:
        """The tile (rows, columns) of exact_tiles with the shortest predicted time for an fp32
        product of rows * columns results with `depth` elements along k. None if the machine has no
        exact_tiles.
        """

        def time(high: int, wide: int, speed: float) -> float:
            tiles = batch * -(-rows // high) * -(-columns // wide)
            return -(-tiles // self.processors) * (
                high * wide * depth / speed + self.costs.begin_work
            )

        if not self.exact_tiles:
            return None
        high, wide, _ = min(self.exact_tiles, key=lambda t: time(*t))
        return min(high, rows), min(wide, columns)

    def with_processors(self, processors: int) -> Machine:
        return dataclasses.replace(self, processors=processors)
