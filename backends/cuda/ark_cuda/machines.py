"""Machine models of NVIDIA GPUs, for planning with and without the device.

The named models are data-centre GPUs, and one desktop GPU so that plans for sm_120 can be made.
Read bandwidths of H100 and H200 were measured; the others are near the published ones. The operand
ring has the shape that ran fastest on an H100: stages of 16 KB, many slots, and two copies in
flight. More copies in flight would delay the packets that tasks wait for. Called by the backend
object.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ark.backend.codegen.layout import LOOP_BYTES
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.machine.costs import BoxCosts, Costs
from ark.machine.tiles import BoxTiles
from ark.machine.variant import COMMUNICATE, COMPUTE, LOAD, MOVE, Role, Variant, block

BYTES_PER_GIB = 1 << 30
STAGE_BYTES = 16384
BLOCK_WARPS = 16
ROLE_WARPS = 12  # computing warps of the variant `roles`; one more if shared memory suffices
SEVERAL_WARPS = (12, 11, 10, 9, 8, 7, 6, 5)  # fewer for several rows, which need more space
# A variant whose block has more than ROOMY_WARPS warps supports at most FEW_ROWS input rows,
# because more rows need more registers per thread than such a block has.
FEW_ROWS, ROOMY_WARPS = 4, 12
# Variants for quantised weights, each with its number of computing warps, slots of the operand
# ring, bytes of a slot, and copies in flight. Slots have 18 KB, or about 8 KB so that one warp has
# fewer rows to multiply per slot. With 12 warps in a block, a thread has 144 registers.
ROW_STAGES = ((12, 24, 8448, 8), (10, 20, 9216, 8), (10, 10, 18432, 4))
# Elements of an input row that a thread keeps in registers. A thread has 96 registers if the block
# has 17 warps.
ROW_SLICE_ELEMENTS = 32
# Bytes of shared memory that the planner may not use. They hold the loop's task records and the
# static variables, which lie before `ark_shared` (its address is a multiple of 1024).
RESERVED = 1024 + LOOP_BYTES

# Tiles (rows, columns) of fp32 products without matrix units (tasks/exact.h), each with its
# relative speed.
EXACT_TILES = (
    (256, 128, 1.0),
    (128, 256, 1.0),
    (128, 128, 0.95),
    (128, 64, 0.85),
    (64, 128, 0.85),
    (64, 64, 0.7),
    (64, 32, 0.5),
    (32, 64, 0.5),
)
# Tiles (rows, columns) of fp32 products on matrix units (tasks/exact_units.h), each with its
# relative speed.
UNIT_TILES = (
    (128, 128, 1.0),
    (64, 256, 1.0),
    (128, 64, 0.85),
    (64, 128, 0.85),
    (64, 64, 0.7),
    (64, 32, 0.5),
    (32, 64, 0.5),
    (32, 128, 0.6),
    (32, 256, 0.7),
)

# Tiles (rows, columns) of products by warpgroups (tasks/products.py). If a norm follows a product,
# dividing k into more than two parts gained nothing. If k is contiguous in the right operand, a box
# of it may have any number of rows, and a tile the same number of columns. In tiles of 64 rows,
# each of two warpgroups stores half of the columns, and this half must be a multiple of 16.
PLAIN_TILES = (
    *((128, columns) for columns in (224, 192, 160, 144, 96)),
    *((64, columns) for columns in (224, 192, 160, 96)),
)
BOX_TILES = BoxTiles(
    tiles=(
        *((128, 256), (128, 128), (128, 64), (64, 256), (64, 128), (64, 64), (64, 32), (128, 32)),
        *PLAIN_TILES,
    ),
    narrow=((64, 32), (128, 32)),
    plain=PLAIN_TILES,
    shallow=((64, 256),),
    parts=(2, 3, 4, 6, 8),
    deep_parts=(10, 12, 14),
    deep_bytes=1 << 17,
    normed_parts=2,
    attention_rows=128,
    codes=((64, 32), (64, 64)),  # wider tiles would leave fewer stages for other products
)


# Measured on an H100 80GB HBM3 and on an H200: a barrier of 132 blocks takes 1.44 us, 0.7 us of
# which is one signal from block to block (signal_us). While all blocks load, plain loads from the
# last-level cache reach 68 GB/s per block, 8,700 GB/s together (docs/matmul.md and
# docs/history/performance.md). Fitted with `ark bench fidelity` on an H200, 2026-11-28: next_us and
# next_rate from its two chains of 64 additions (14.2 us in bf16, 19.7 us in fp32), turned_share
# from its two transposes of 8192 x 8192 (81 and 205 us). unaligned_share from a product of
# 1000x333x777 in fp32, whose rows are not aligned (28.5 us; with aligned rows it would take 17.6
# us, estimated from the time of its aligned part; 2026-11-30). apart_rate from tasks of a training
# step of ResNet-18 in fp32: copies whose last dimensions are windows of 3x3 (14,112 elements in
# 18.2 us) and sums of rows of 9 elements (225,792 in 169 us). column_rate from sums of a BERT's
# bias gradients (256 rows of 64 columns in bf16: 2.8 us). column_row_bytes from sums of 1,576 rows
# of 16 columns of bf16 (6.0 us) and of 394 rows of 64 columns (3.4 us), and from GPT-2's training
# step, where parts of 2,048 rows of 32 columns brought nothing (2026-12-01).
HOPPER = Costs(
    source="measured on H100 and H200, 2026-11",
    signal_us=0.7,
    each_signal_us=0.0056,
    barrier_us=1.44,
    task_us=0.8,
    pass_us=0.3,
    next_us=0.1,
    next_rate=185e3,
    next_bytes=131072,
    turned_share=0.7,
    apart_rate=1e3,
    processor_rate=68e3,
    cache_rate=8.7e6,
    cache_bytes=50e6,
    scalar_rate=450e3,
    exact_rate=320e3,
    unaligned_share=0.6,
    column_rate=16e3,
    column_row_bytes=22,
    few_rate=83e3,
    staged_rate=140e3,
    packet_bytes=512 << 10,
    stream_rows=8,
    hand_over_work=32768.0,
    op_us=4.0,
    product_tile_us=1.5,
    combine_rate=6e3,
    put_bytes=128 << 10,
    part_bytes=128 << 10,
    claim_bytes=64 << 20,
    deal_bytes=32 << 20,
    boxes=BoxCosts(
        full_step_us=0.58,
        least_step_us=0.18,
        small_stage=32768,
        small_load_rate=110e3,
        load_rate=68e3,
        tile_us=1.2,
        fold_us=2.0,
        each_part_us=0.1,
        normed_us=2.0,
        kept_bytes=6e6,
        fold_rate=1.6e6,
        band_bytes=16 << 20,
        few_rows=128,
        few_tiles=64,
        least_rows=16,
        least_work=67108864.0,
        least_reads=64,
        laid_rate=2.4e6,
        common_rate=275e3,
        tf32_rate=680e3,
        plain_rate=33e3,
        attention_rate=2e6,
        code_rate=40e3,
    ),
)
CACHE_BYTES = {"a100": 40e6, "b200": 126e6, "rtx5090": 96e6}  # published


def _costs(name: str, processors: int, gbps: float) -> Costs:
    """The costs of a machine: measured ones if they exist, otherwise the H100's, scaled by
    processors and bandwidth.
    """
    if name not in CACHE_BYTES:
        return HOPPER
    return dataclasses.replace(
        HOPPER,
        source="estimated from an H100 by processors, bandwidth and published sizes",
        each_signal_us=HOPPER.each_signal_us * 132 / processors,
        cache_rate=HOPPER.cache_rate * gbps / 3079.0,
        cache_bytes=CACHE_BYTES[name],
    )


def _variants(slots: int, in_flight: int, warpgroups: bool) -> tuple[Variant, ...]:
    """The kernel variants that a machine can run. slots: slots of the operand ring in shared
    memory. With 0 slots, tasks read operands from memory in place.

    warpgroups: True if the machine multiplies matrices by warpgroups. Two warpgroups of a block
    compute, and one thread of a third one loads. In plans with products and collectives, three more
    warps of the third warpgroup move data.
    """
    if not slots:
        return (block(BLOCK_WARPS),)
    # With 12 warps in a block, each thread begins with 168 registers. Registers are then
    # redistributed between the roles. Each role below has its number of warps and of registers per
    # thread.
    alone = Variant("matrix", (Role(COMPUTE, 8, 232), Role(LOAD, 4, 40)))
    moving = Variant("matrix", (Role(COMPUTE, 8, 224), Role(LOAD, 1, 56), Role(MOVE, 3, 56)))
    matrix = (alone, moving) if warpgroups else ()
    ring = {
        "stages": slots,
        "stage_bytes": STAGE_BYTES,
        "in_flight": in_flight,
        "row_slice": ROW_SLICE_ELEMENTS,
    }
    variants = (block(BLOCK_WARPS, 1, **ring),)
    if slots < ROLE_WARPS:
        return (*variants, *matrix)
    # The variant for wide input rows. The row takes the shared memory of the ring's last slot, so
    # the block has one computing warp less. One more copy may be in flight, because waits for
    # packets are a smaller part of the time per token.
    wide = _roles(ROLE_WARPS, min(in_flight + 1, 3))
    several = tuple(_roles(warps, in_flight) for warps in SEVERAL_WARPS)
    rows = tuple(_roles(warps, under_way, *ring) for warps, *ring, under_way in ROW_STAGES)
    return (*variants, _roles(ROLE_WARPS + 1, in_flight), wide, *several, *rows, *matrix)


def _roles(warps: int, in_flight: int, stages: int = 0, stage_bytes: int = STAGE_BYTES) -> Variant:
    """The variant `roles`, in which each computing warp owns one or more slots of the operand
    ring.
    """
    roles = (Role(COMPUTE, warps), Role(COMMUNICATE, 1), Role(LOAD, 1))
    few = FEW_ROWS if sum(role.warps for role in roles) > ROOMY_WARPS else 0
    return Variant("roles", roles, stages or warps, stage_bytes, in_flight, most_rows=few)


def _machine(
    name: str,
    arch: str,
    processors: int,
    shared_kib: int,
    slots: int,
    in_flight: int,
    memory_gib: int,
    gbps: float,
    tflops: float,
    capabilities: tuple[Capability, ...],
) -> Machine:
    variants = _variants(slots, in_flight, not _GROUPS.isdisjoint(capabilities))
    return Machine(
        name=name,
        arch=arch,
        backend="cuda",
        processors=processors,
        lanes=32,
        shared_bytes=shared_kib * 1024 - RESERVED,
        variants=variants,
        memory_bytes=memory_gib * BYTES_PER_GIB,
        bandwidth_gbps=gbps,
        tflops=tflops,
        costs=_costs(name, processors, gbps),
        box_tiles=BOX_TILES if not _GROUPS.isdisjoint(capabilities) else None,
        exact_tiles=UNIT_TILES if Capability.FP32_PARTS in capabilities else EXACT_TILES,
        capabilities=capabilities,
    )


_COMMON = (
    Capability.ATTENTION_UNITS,
    Capability.MMA_SYNC,
    Capability.NAMED_BARRIERS,
    Capability.PACKETS,
    Capability.PEER_PACKETS,
    Capability.PROXY,
    Capability.ROUNDS_AHEAD,
    Capability.SHORT_PACKETS,
)
_HOPPER = (
    *_COMMON,
    Capability.CLAIMS,
    Capability.CODE_BOXES,
    Capability.FP32_PARTS,
    Capability.PEER_BULK,
    Capability.ROW_COPIES,
    Capability.WGMMA,
    Capability.WINDOW_BOXES,
)
_DESKTOP = (*_COMMON, Capability.ROW_COPIES)
_BLACKWELL = (*_COMMON, Capability.ROW_COPIES, Capability.TCGEN05, Capability.WINDOW_BOXES)
_GROUPS = frozenset(
    (Capability.WGMMA, Capability.TCGEN05)
)  # instructions of warpgroups, of the variant `matrix`

MODELS = {
    m.name: m
    for m in (
        _machine(
            "a100", "sm_80", 108, 163, 0, 0, 80, 1900.0, 280.0, (*_COMMON, Capability.FP32_PARTS)
        ),
        _machine("h100", "sm_90a", 132, 227, 12, 2, 80, 3079.0, 700.0, _HOPPER),
        _machine("h200", "sm_90a", 132, 227, 12, 2, 141, 4300.0, 750.0, _HOPPER),
        _machine("b200", "sm_100a", 148, 227, 12, 4, 180, 7700.0, 2000.0, _BLACKWELL),
        _machine("rtx5090", "sm_120", 170, 99, 4, 2, 32, 1700.0, 200.0, _DESKTOP),
    )
}


def names() -> tuple[str, ...]:
    """The names of the machine models, sorted."""
    return tuple(sorted(MODELS))


def by_name(name: str) -> Machine | None:
    """The machine model of the given name, or None."""
    return MODELS.get(name)


@dataclass(frozen=True)
class Reported:
    """Properties that an opened device reports. shared_bytes: the most shared memory that a block
    can opt in to.
    """

    name: str
    major: int
    minor: int
    processors: int
    shared_bytes: int
    memory_bytes: int
    bandwidth_gbps: float


def arch_name(major: int, minor: int) -> str:
    """The architecture to compile for. If there is a variant with architecture-specific
    instructions (sm_90a), it is used.
    """
    return f"sm_{major}{minor}{'a' if (major, minor) in ((9, 0), (10, 0)) else ''}"


def of_device(reported: Reported) -> Machine:
    """The model of an opened device: the nearest named model with the properties that the device
    reports.

    Properties that a device does not report (ring shape, copies in flight, rates) come from the
    model of its architecture with the nearest bandwidth.
    """
    arch = arch_name(reported.major, reported.minor)
    family = [m for m in MODELS.values() if m.arch == arch]
    if not family:
        family = [MODELS["a100"] if reported.major < 9 else MODELS["rtx5090"]]
    nearest = min(family, key=lambda m: abs(m.bandwidth_gbps - reported.bandwidth_gbps))
    shared = reported.shared_bytes - RESERVED
    slots = min(nearest.variant.stages, (shared - 32 * 1024) // STAGE_BYTES)
    return dataclasses.replace(
        nearest,
        name=reported.name,
        arch=arch,
        processors=reported.processors,
        shared_bytes=shared,
        variants=_variants(
            slots if slots > nearest.in_flight else 0,
            nearest.in_flight,
            not _GROUPS.isdisjoint(nearest.capabilities),
        ),
        memory_bytes=reported.memory_bytes,
    )
