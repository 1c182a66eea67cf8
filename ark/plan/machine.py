"""Machine models: what the planner must know of a device, with or without the device.

A model is a frozen value. Backends own the named ones (a backend knows its hardware, the planner
does not); an opened device fills one in from what it reports. Called by ark.plan and the backends.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

# Ranges of what a plan file may say of its machine. `Word` may stand in a compiler's options.
Word = Annotated[str, Meta(max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:+-]*$")]
Name = Annotated[str, Meta(max_length=128, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
Bytes = Annotated[int, Meta(ge=0, le=1 << 30)]
Count = Annotated[int, Meta(ge=1, le=1 << 14)]
Threads = Annotated[int, Meta(ge=1, le=64)]
Rate = Annotated[float, Meta(gt=0.0, le=1e12)]


@dataclass(frozen=True)
class Machine:
    """A device as the planner sees it.

    name: the model's name, as `--machine` takes it. arch: what source is compiled for.
    processors: SMs, CUs or cores that run one block each. lanes: threads of a warp or wave.
    warps: warps of a block that compute. shared_bytes: shared memory (LDS) that tasks and the ring
    may use, without what the loop keeps for itself (ark.codegen.layout.LOOP_BYTES).
    ring_bytes: share of it that the operand stream's ring takes, 0 where operands are read in
    place. stage_bytes: largest single fetch into the ring. in_flight: fetches outstanding at once
    per processor. row_slice: elements of a single input row that a thread can keep in registers
    over a linear task, so that rows of weights wider than a stage come in pieces; 0 where it
    cannot. bandwidth_gbps, tflops: for the cost model. signal_us: one counter hand-over.
    tile: rows and columns of a matmul tile.
    capabilities: words such as "mma_sync", "mfma", "wmma", "bulk_copy" by which bodies are chosen.
    """

    name: Name
    arch: Word
    backend: Word
    processors: Count
    lanes: Threads
    warps: Threads
    shared_bytes: Bytes
    ring_bytes: Bytes = 0
    stage_bytes: Annotated[int, Meta(ge=16, le=1 << 24)] = 16384
    in_flight: Threads = 2
    row_slice: Annotated[int, Meta(ge=0, le=1 << 10)] = 0
    memory_bytes: Annotated[int, Meta(ge=0, le=1 << 44)] = 0
    bandwidth_gbps: Rate = 10.0
    tflops: Rate = 0.1
    signal_us: Rate = 1.0
    tile: tuple[Count, Count] = (64, 64)
    capabilities: Annotated[tuple[Word, ...], Meta(max_length=64)] = ()

    @property
    def threads(self) -> int:
        """Threads of a block: the computing warps and, with a ring, one warp that fetches."""
        return self.lanes * (self.warps + (1 if self.ring_bytes else 0))

    def has(self, capability: str) -> bool:
        return capability in self.capabilities

    def matmul_tile(self, rows: int, columns: int, batch: int) -> tuple[int, int]:
        """Rows and columns of a matmul tile: large for reuse, small enough to busy everybody."""
        tile_m, tile_n = self.tile
        tile_m = min(tile_m, max(1, rows))
        tile_n = min(tile_n, max(1, columns))
        while tile_n > 32 and batch * -(-rows // tile_m) * -(-columns // tile_n) < self.processors:
            tile_n //= 2
        return tile_m, tile_n

    def with_processors(self, processors: int) -> Machine:
        return dataclasses.replace(self, processors=processors)
