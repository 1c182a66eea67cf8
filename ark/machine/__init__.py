"""Machine models: the properties of a device that the planner uses, whether or not the device is
present.

A model is an immutable value. Each backend defines the models that have a name; for an opened
device it makes one from what the device reports. Called by ark.plan and the backends.
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

# Tiles of machines whose bodies are loops: their sides are multiples of this, and a side is cut
# into at most so many parts more than its tile's limit asks for.
TILE_STEP_ELEMENTS = 32
MAX_EXTRA_PARTS = 8


@dataclass(frozen=True)
class Machine:
    """A device as the planner sees it.

    name: the model's name, as `--machine` takes it.
    arch: the architecture that source is compiled for.
    processors: the number of SMs, CUs or cores; each runs one block.
    lanes: threads of a warp (wavefront).
    shared_bytes: shared memory (LDS) for tasks and the ring; what the loop itself uses
        (ark.codegen.layout.LOOP_BYTES) is subtracted already.
    variants: the kernel variants that it can run, the preferred one first.
    bandwidth_gbps, tflops: memory bandwidth, and the rate of the matrix units, of all processors
        together.
    costs: all other times and rates (ark.machine.costs).
    line_bytes: size of a cache line; counters of different producers are at least this far apart.
    tile: rows and columns of a matmul tile.
    large_tiles: for each tile size with a loop of its own for 16-bit types: rows, columns, and the
        fraction of the loop's time in which the matrix units multiply.
    exact_tiles: the same for products in full fp32; the third number is the speed relative to the
        other sizes.
    attention_rows: the largest number of rows of an attention tile on matrix units.
    large_product: the smallest numbers of rows (of attention, too) and of columns for which
        rounding operands or changing their layout for matrix units is worthwhile.
    box_tiles, unit_tiles: the tile sizes of its matrix-unit bodies (ark.machine.tiles); None if it
        has no such bodies.
    capabilities: the basis on which bodies and forms are chosen (ark.machine.capability), without
        duplicates.
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
        """The kernel variant in use."""
        return self.variants[0]

    @property
    def warps(self) -> int:
        """Computing warps of a block."""
        return self.variant.role(COMPUTE)

    @property
    def lists(self) -> int:
        """Task lists of a phase: one for each processor; if the variant has moving warps, one more
        for each processor, behind the others.
        """
        return self.processors * (2 if self.variant.role(MOVE) else 1)

    @property
    def threads(self) -> int:
        """Threads of a block, all roles together."""
        return self.lanes * self.variant.warps

    @property
    def coalesces(self) -> bool:
        """True if lanes load neighbouring elements in one access, so that loading one element costs
        a whole cache line.
        """
        return self.lanes > 1

    @property
    def cooperative(self) -> bool:
        """True if several threads share a task: bodies divide its elements among lanes and
        synchronise at barriers, and warps of the same block may copy data while others compute.
        Otherwise a body is a loop in one thread, which the compiler vectorises.
        """
        return not self.has(Capability.SINGLE_THREAD)

    @property
    def ring_bytes(self) -> int:
        return self.variant.ring_bytes

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
        """The machine with only the variant of that name, or unchanged if it has no variant of that
        name.
        """
        matching = [v for v in self.variants if v.name == name]
        return dataclasses.replace(self, variants=tuple(matching)) if matching else self

    def without_ring(self) -> Machine:
        """The machine without a ring in its variant `block`, which then reads operands in place.
        The ring's shared memory becomes cache, and the registers of the loading warps go to the
        other warps.
        """
        variants = tuple(
            block(v.role(COMPUTE)) if v.name == "block" and v.stages else v for v in self.variants
        )
        return dataclasses.replace(self, variants=variants)

    def under(self, place: int) -> Machine:
        """The machine with only the variant at that position of `variants`."""
        return dataclasses.replace(self, variants=(self.variants[place],))

    def shaped(self, **changes: Any) -> Machine:
        """The machine with these fields of all its variants changed."""
        variants = tuple(dataclasses.replace(v, **changes) for v in self.variants)
        return dataclasses.replace(self, variants=variants)

    def has(self, capability: Capability) -> bool:
        """True if the machine has the capability; raises TypeError for a string, because a misspelt
        name would silently give False.
        """
        if not isinstance(capability, Capability):
            raise TypeError(f"{capability!r} is a string; expected a member of Capability")
        return capability in self.capabilities

    def with_capabilities(self, *more: Capability) -> Machine:
        """The machine with these capabilities added."""
        lacking = tuple(c for c in more if c not in self.capabilities)
        return dataclasses.replace(self, capabilities=(*self.capabilities, *lacking))

    def without_capabilities(self, *fewer: Capability) -> Machine:
        """The machine with these capabilities removed."""
        kept = tuple(c for c in self.capabilities if c not in fewer)
        return dataclasses.replace(self, capabilities=kept)

    def matmul_tile(self, rows: int, columns: int, batch: int, bits: int = 32) -> tuple[int, int]:
        """Rows and columns of a matmul tile: large enough for reuse of operands, small enough that
        all processors have work.

        bits: size of an element of the left operand.
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
        """Rows and columns, no more than those of `tile`, with which the processors have the least
        to multiply and then the least to read.
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
        """Rows and columns of a tile for an fp32 product with `depth` elements along k: the one of
        exact_tiles with the shortest predicted time; None if the machine has no exact_tiles.
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
