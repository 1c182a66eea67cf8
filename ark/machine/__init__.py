"""Machine models: what the planner must know of a device, with or without the device.

A model is a frozen value. Backends own the named ones (a backend knows its hardware, the planner
does not); an opened device fills one in from what it reports. Called by ark.plan and the backends.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from ark.machine.capability import Capability
from ark.machine.costs import ESTIMATED, Costs
from ark.machine.ranges import Bytes, Count, LineBytes, MemoryBytes, Name, Rate, Threads, Word
from ark.machine.tiles import BoxTiles, UnitTiles
from ark.machine.variant import COMPUTE, MOVE, Variant, block


@dataclass(frozen=True)
class Machine:
    """A device as the planner sees it.

    name: the model's name, as `--machine` takes it. arch: what source is compiled for. processors:
    SMs, CUs or cores that run one block each. lanes: threads of a warp (wavefront).
    shared_bytes: shared memory (LDS) that tasks and the ring may use, without what the loop keeps
    for itself (ark.codegen.layout.LOOP_BYTES). variants: kernel variants that it can run, the one
    to use first. bandwidth_gbps, tflops: of memory and of matrix units, all processors together.
    costs: all other times and rates (ark.machine.costs). line_bytes: a cache line; counters of
    different producers lie so far apart. tile: rows and columns of a matmul tile. large_tiles: rows
    and columns of those that have a loop of their own for 16-bit types, and the share of its time
    that matrix units multiply. exact_tiles: the same of products of fp32 in its own digits, the
    last number the speed beside the others'. attention_rows: of a tile of attention on matrix
    units, at most. large_product: rows and columns of a product, and rows of attention, for which
    operands are rounded or laid for matrix units, at least. box_tiles, unit_tiles: what its bodies
    of products are written for (ark.machine.tiles); None where it has no such bodies. capabilities:
    what bodies and forms are chosen by (ark.machine.capability), each once.
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
        """Task lists of a phase: one a processor, and where the variant has warps that move, behind
        these one more each.
        """
        return self.processors * (2 if self.variant.role(MOVE) else 1)

    @property
    def threads(self) -> int:
        """Threads of a block, all roles together."""
        return self.lanes * self.variant.warps

    @property
    def coalesces(self) -> bool:
        """Lanes load neighbouring elements in one access, so a load of one costs a whole line."""
        return self.lanes > 1

    @property
    def cooperative(self) -> bool:
        """Several threads share a task: bodies deal its elements to lanes and meet at barriers, and
        warps of the same block may move what others compute. Else a body is a loop in one thread,
        which the compiler vectorises.
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
        """The machine with only the variant of that name; itself if it has no such variant."""
        matching = [v for v in self.variants if v.name == name]
        return dataclasses.replace(self, variants=tuple(matching)) if matching else self

    def without_ring(self) -> Machine:
        """The machine whose variant `block` reads operands in place: the
        ring's shared memory becomes cache, and the loading warps' registers go to the others.
        """
        variants = tuple(
            block(v.role(COMPUTE)) if v.name == "block" and v.stages else v for v in self.variants
        )
        return dataclasses.replace(self, variants=variants)

    def under(self, place: int) -> Machine:
        """The machine with only the variant at that place."""
        return dataclasses.replace(self, variants=(self.variants[place],))

    def shaped(self, **changes: Any) -> Machine:
        """The machine with these fields of all its variants changed."""
        variants = tuple(dataclasses.replace(v, **changes) for v in self.variants)
        return dataclasses.replace(self, variants=variants)

    def has(self, capability: Capability) -> bool:
        """TypeError for a word: a misspelt one would be quietly false."""
        if not isinstance(capability, Capability):
            raise TypeError(f"{capability!r} is a string; expected a member of Capability")
        return capability in self.capabilities

    def with_capabilities(self, *more: Capability) -> Machine:
        """The machine with these capabilities too."""
        lacking = tuple(c for c in more if c not in self.capabilities)
        return dataclasses.replace(self, capabilities=(*self.capabilities, *lacking))

    def without_capabilities(self, *fewer: Capability) -> Machine:
        """The machine without these capabilities."""
        kept = tuple(c for c in self.capabilities if c not in fewer)
        return dataclasses.replace(self, capabilities=kept)

    def matmul_tile(self, rows: int, columns: int, batch: int, bits: int = 32) -> tuple[int, int]:
        """Rows and columns of a matmul tile: large for reuse, small enough to keep all processors
        busy.

        bits: of an element of the left side.
        """
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

    def exact_tile(self, rows: int, columns: int, depth: int, batch: int) -> tuple[int, int] | None:
        """Rows and columns of a tile of a product of fp32, of so many elements of k: of the tiles
        that have a loop of their own, the one that ends first; None where there are none.
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
