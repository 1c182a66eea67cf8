"""Machine models of AMD GPUs for the planner: named models, and the model of an opened device.

ARCHS lists what depends on the architecture: widths, shared memory and special units. MODELS lists
what depends on the product: counts and speeds, from its data sheet. Called by ark_rocm.__init__ and
ark_rocm.device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ark.backend.codegen.layout import LOOP_BYTES
from ark.backend.occupancy import ProcessorLimits
from ark.errors import UnsupportedError
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.machine.costs import Costs, UnitCosts
from ark.machine.tiles import UnitTiles
from ark.machine.variant import block

STATIC_BYTES = 256  # shared memory for votes and prefetches (prelude.h), rounded up
RESERVED = STATIC_BYTES + LOOP_BYTES  # plus the loop's shared memory
CAPABILITIES = (
    Capability.PACKETS,
    Capability.PACKET_GATE,
    Capability.PEER_PACKETS,
    Capability.PROXY,
    Capability.UNCACHED_COPIES,
    Capability.K_PARTS,
)


@dataclass(frozen=True)
class Arch:
    """The properties of one architecture (instruction set). lanes: lanes of a wave. lds: shared
    memory of a workgroup in bytes.

    tick_ns: period of the constant-rate clock. unit: the kind of matrix unit. to_lds: True if
    direct loads to LDS have a separate address for each lane. flushes: True if the matrix unit
    reads 16-bit denormals as zero.
    """

    lanes: int
    lds: int
    tick_ns: int
    unit: Capability
    to_lds: bool = False
    flushes: bool = False

    @property
    def limits(self) -> ProcessorLimits:
        """The registers and shared memory of a processor: of a compute unit on CDNA, of a
        work-group processor (two compute units) on RDNA.
        """
        if self.unit == Capability.WMMA:
            return ProcessorLimits(4, 1536, 24, 16, 128 << 10, 1024)
        return ProcessorLimits(4, 512, 8, 8, self.lds, 512 if self.lds == 64 << 10 else 1280)

    @property
    def capabilities(self) -> tuple[Capability, ...]:
        """The capabilities by which bodies and kernel variants are chosen."""
        asks = self.unit == Capability.MFMA  # tasks/ask.h, linear_several.h: layers on such units
        return (
            self.unit,
            *CAPABILITIES,
            *(Capability.ASKS_AHEAD, Capability.ROWS_ON_UNITS) * asks,
            *(Capability.PEER_BULK,) * self.to_lds,
            *(Capability.ATTENTION_UNITS, Capability.ATTENTION_PARTS) * (not self.flushes),
        )


ARCHS = {
    "gfx90a": Arch(64, 65536, 40, Capability.MFMA, True, flushes=True),
    "gfx942": Arch(64, 65536, 10, Capability.MFMA, True),
    "gfx950": Arch(64, 163840, 10, Capability.MFMA, True),
    "gfx1100": Arch(32, 65536, 10, Capability.WMMA),
}

BLOCK_WARPS = 8
CACHE_LINE_BYTES = 128  # bytes of a line of the second-level cache, which CDNA and RDNA 3 share
STAGE_BYTES = 4096  # weights are read in place, and divided among tasks by stages of this size
STAGES_IN_FLIGHT = 32  # stages in flight in a block that waits (tasks/linear_matrix.h)
TILE = (128, 128)  # of a matmul; two steps of both operands need 40 KB of shared memory
# Rows of an attention tile, by kind of matrix unit. Each of the 8 waves computes as many rows as a
# block of the matrix unit has.
ATTENTION_ROWS = {Capability.MFMA: 256, Capability.WMMA: 128}
# Large tiles for products of 16-bit types: rows, columns, and the share of the issue slots of the
# tile's loop that matrix instructions take on gfx942.
LARGE_TILES = ((256, 256, 0.9), (256, 128, 0.86), (128, 256, 0.86), (128, 128, 0.79))

UNIT_TILES = UnitTiles(block=16, least_columns=32, parts=(2, 3, 4, 6, 8, 12, 16))


@dataclass(frozen=True)
class Model:
    """The data of a GPU model, such as MI300X. processors: compute units (work-group processors on
    RDNA).
    """

    arch: str
    processors: int
    memory_gib: int
    bandwidth_gbps: float
    tflops: float
    costs: Costs


# The costs of an MI300X. No MI300X was measured: the times were computed by the timing model
# (docs/rocm-timing.md) with the published clocks and latencies.
CDNA3 = Costs(
    source="the timing model of an MI300X",
    signal_us=0.75,
    each_signal_us=0.005,
    barrier_us=3.3,
    task_us=1.2,
    pass_us=0.5,
    processor_rate=134e3,
    cache_rate=14e6,
    cache_bytes=256e6,
    scalar_rate=500e3,
    exact_rate=400e3,
    few_rate=50e3,
    packet_bytes=512 << 10,
    stream_rows=8,
    hand_over_work=32768.0,
    op_us=4.0,
    product_tile_us=1.5,
    divided_heads_bytes=16 << 20,
    combine_rate=6e3,
    put_bytes=128 << 10,
    part_bytes=128 << 10,
    claim_bytes=64 << 20,
    deal_bytes=32 << 20,
    units=UnitCosts(
        line_us=0.66,
        small_line_us=1.1,
        begin_us=1.5,
        fold_us=2.5,
        fold_share=0.83,
        read_share=0.81,
        small_share=0.55,
    ),
)
_DIE = replace(CDNA3, source="estimated from an MI300X by published rates", signal_us=0.8)

MODELS = {
    # These are figures of one die. An MI250X has two dies, which HIP reports as two devices.
    "mi250x": Model(
        *("gfx90a", 110, 64, 1638.0, 191.5), replace(_DIE, cache_rate=3.5e6, cache_bytes=8e6)
    ),
    "mi300x": Model("gfx942", 304, 192, 5300.0, 1307.0, CDNA3),
    "mi355x": Model("gfx950", 256, 288, 8000.0, 2500.0, CDNA3),
    "rx7900xtx": Model(
        *("gfx1100", 48, 24, 960.0, 122.8), replace(_DIE, cache_rate=3e6, cache_bytes=96e6)
    ),
}


def describe(arch: str) -> Arch:
    """The architecture of the given name. Raises UnsupportedError if this backend does not support
    it.
    """
    name = arch.split(":", 1)[0]
    if name not in ARCHS:
        raise UnsupportedError(
            f"the rocm backend does not know the architecture {name!r}; it compiles for "
            f"{', '.join(ARCHS)}"
        )
    return ARCHS[name]


def machine(name: str, model: Model) -> Machine:
    """A machine model for the planner."""
    arch = describe(model.arch)
    return Machine(
        name=name,
        arch=model.arch,
        backend="rocm",
        processors=model.processors,
        lanes=arch.lanes,
        shared_bytes=arch.lds - RESERVED,
        variants=(block(BLOCK_WARPS, stage_bytes=STAGE_BYTES, in_flight=STAGES_IN_FLIGHT),),
        memory_bytes=model.memory_gib << 30,
        bandwidth_gbps=model.bandwidth_gbps,
        tflops=model.tflops,
        costs=model.costs,
        line_bytes=CACHE_LINE_BYTES,
        tile=TILE,
        large_tiles=LARGE_TILES if arch.unit == Capability.MFMA else (),
        attention_rows=ATTENTION_ROWS[arch.unit],
        unit_tiles=UNIT_TILES,
        capabilities=arch.capabilities,
    )


def opened(
    name: str, arch: str, processors: int, shared_bytes: int, memory: int, peer_stores: bool = False
) -> Machine:
    """The model of an opened device. Its counts are those of the device; its speeds are those of a
    named product of the same architecture.

    peer_stores: True if the device's links to other devices support only loads and stores, not
    read-modify-write.
    """
    plain = arch.split(":", 1)[0]
    describe(plain)
    like = machine(name, next(m for m in MODELS.values() if m.arch == plain))
    scale = processors / like.processors
    return replace(
        like,
        processors=processors,
        shared_bytes=shared_bytes - RESERVED,
        memory_bytes=memory,
        bandwidth_gbps=like.bandwidth_gbps * scale,
        tflops=like.tflops * scale,
        capabilities=(*like.capabilities, *(Capability.PEER_STORES,) * peer_stores),
    )
