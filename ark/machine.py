"""Machine models: what the planner must know of a device, with or without the device.

A model is a frozen value. Backends own the named ones (a backend knows its hardware, the planner
does not); an opened device fills one in from what it reports. Called by ark.plan and the backends.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """A device as the planner sees it.

    name: the model's name, as `--machine` takes it. arch: what source is compiled for.
    processors: SMs, CUs or cores that run one block each. lanes: threads of a warp or wave.
    warps: warps of a block that compute. shared_bytes: shared memory (LDS) a block may use.
    ring_bytes: share of it that the operand stream's ring takes, 0 where operands are read in
    place. stage_bytes: largest single fetch into the ring. in_flight: fetches outstanding at once
    per processor. row_slice: elements of a single input row that a thread can keep in registers
    over a linear task, so that rows of weights wider than a stage come in pieces; 0 where it
    cannot. bandwidth_gbps, tflops: for the cost model. signal_us: one counter hand-over.
    tile: rows and columns of a matmul tile.
    capabilities: words such as "mma_sync", "mfma", "wmma", "bulk_copy" by which bodies are chosen.
    """

    name: str
    arch: str
    backend: str
    processors: int
    lanes: int
    warps: int
    shared_bytes: int
    ring_bytes: int = 0
    stage_bytes: int = 16384
    in_flight: int = 2
    row_slice: int = 0
    memory_bytes: int = 0
    bandwidth_gbps: float = 10.0
    tflops: float = 0.1
    signal_us: float = 1.0
    tile: tuple[int, int] = (64, 64)
    capabilities: tuple[str, ...] = ()

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
