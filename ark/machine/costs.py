"""Costs of a machine: what the planner and the cost model count with.

Each vendor's machines.py has one value per machine, beside where its figures come from. Nothing
above this module holds a figure of a machine. Called by ark.lower, ark.plan.cost and the backends.
"""

from __future__ import annotations

from dataclasses import dataclass

from ark.machine.ranges import Bytes, Count, Name, Rate, Work

PIECES = (
    ("packet", 4 << 10),
    ("threads", 16 << 10),
    ("bulk", 64 << 10),
    ("dma", 4 << 20),
    ("nic", 1 << 20),
    ("switch", 64 << 10),
)
FULL_STEP_SHAPE = (128, 256)  # the product whose time is BoxCosts.full_step_us


@dataclass(frozen=True)
class BoxCosts:
    """Products whose tiles box copies load for warpgroups, step by step along k.

    full_step_us: of FULL_STEP_SHAPE rows and columns, 128 bytes deep, on the matrix units.
    least_step_us: until the loading thread has started a stage's two copies. small_stage: bytes up
    to which a stage holds two steps, at a higher rate of few rows: small_load_rate; load_rate: what
    a processor loads while all do. tile_us: from the last step of a tile of windows to the next
    one's first.

    fold_us, each_part_us: handing parts of k to the tasks that add them up, and each part.
    normed_us: the same where a norm adds them up. kept_bytes: of parts that the last cache keeps;
    fold_rate: at which more of them are written and read. band_bytes: of a left side that stays
    there while columns pass by. few_rows, few_tiles: with more rows, and more tiles of the lowest,
    all processors load at load_rate. least_rows, least_work: rows and multiplications of a product
    for which the variant is chosen, at least; least_reads: how often a product reads each element
    of a side that is worth laying otherwise.

    laid_rate: bytes that all processors together move where a side is laid as boxes are loaded.
    Operations a microsecond of one processor, in bodies of any variant: common_rate, of products of
    16 bits; tf32_rate, of tiles of fp32 as tf32; plain_rate, of products without matrix units;
    attention_rate, of attention.
    """

    full_step_us: Rate
    least_step_us: Rate
    small_stage: Bytes
    small_load_rate: Rate
    load_rate: Rate
    tile_us: Rate
    fold_us: Rate
    each_part_us: Rate
    normed_us: Rate
    kept_bytes: Rate
    fold_rate: Rate
    band_bytes: Bytes
    few_rows: Count
    few_tiles: Count
    least_rows: Count
    least_work: Rate
    least_reads: Count
    laid_rate: Rate
    common_rate: Rate
    tf32_rate: Rate
    plain_rate: Rate
    attention_rate: Rate


@dataclass(frozen=True)
class UnitCosts:
    """Products that matrix units take in any variant, in parts of k too.

    line_us, small_line_us: the least that a line of k, 128 bytes, takes: it arrives a step after it
    was asked for; of the loop for large tiles and of the one for others. begin_us: a tile's first
    step arrives, and its sums are stored. fold_us: parts are handed to the tasks that add them up,
    at fold_share of memory's rate. read_share: of memory's rate, at which both sides come by all
    processors together. small_share: of its time that a loop of small tiles multiplies.
    """

    line_us: Rate
    small_line_us: Rate
    begin_us: Rate
    fold_us: Rate
    fold_share: Rate
    read_share: Rate
    small_share: Rate


@dataclass(frozen=True)
class Costs:
    """Times in microseconds, rates in bytes or operations a microsecond.

    source: what the figures were measured on, or how they were estimated.

    signal_us: one task signals a counter and another one, which waits for it, goes on.
    each_signal_us: each further task that signals the same counter. barrier_us: from the end of an
    iteration's last task to the begin of the next one's first.
    task_us: one task by itself: its record is fetched, its first loads arrive, its results are
    stored. pass_us: each further round of loads of a task that waits for them before the next.
    next_us: a task that reads what the one before it on its processor made, without a wait between
    them, if it moves next_bytes at most; next_rate: bytes that it moves. turned_share: of memory's
    rate that transposes reach.

    processor_rate: bytes that one processor loads from the last cache while the others do not.
    cache_rate: bytes that all processors together load from it. cache_bytes: what it keeps from
    one iteration to the next. scalar_rate: multiplications and additions of fp32 of one processor
    outside of matrix units. exact_rate: of products of fp32 in its own digits.
    few_rate: of products of 9 to 16 rows or columns, whose few side comes from the last cache again
    and again.

    packet_bytes: of a transfer to a peer that is faster as packets, at most. stream_rows: of an
    input beside which a weight is streamed, at most; more fill matrix units, where there are any.
    begin_work: multiplications that take as long as a tile of exact_tiles begins and ends.
    hand_over_work: those that a processor does in a common body while a task is handed over; 0
    where handing over takes less than the smallest op, so that joining ops saves nothing.
    stage_codes: of quantised weights in a stage, at most, which one warp multiplies.
    idle_bytes: that a processor has at most of an op that waits longer than it works.
    exact_work: multiplications of a product of fp32 that is worth tiles of its own. turned_work:
    those of a product that is worth turning what it reads.

    tile_elements: of a tile of an elementwise op, at least; sweep_bytes: of such a tile of a large
    tensor, at most: warps that drift apart scatter the accesses. little_elements: of a result that
    is computed again in less time than handed over. hoisted_elements: of a result of whose factors
    an op of their own is worth it. read_bytes: of keys and values that are read together.
    group_rows: rows of tiles of a product that are computed column by column, at most.

    packet_tensor_bytes: of fp32 activations that may travel as packets inside a device.
    packet_elements: of one that a task may read, beyond which a counter is faster; polled_elements:
    the same where a body polls only after one packet has come; rounded_elements: the same where
    the op that makes several rows can round them instead.

    start_work_us: predicted work for which a processor is worth starting, where a launch starts
    them. op_us, product_tile_us: an op's last results and the wait for them, and a product's tile's
    first load and its store, where only whole ops are predicted (ark.parallel). combine_rate: bytes
    that one processor combines with peers' and sends. put_bytes: of tiles that are put at once, at
    most. lane_bytes: of a task of a processor that does nothing but transfers. share_bytes: of a
    processor's share of a transfer, at least, before it is cut into parts. piece_bytes: that a task
    moves at least by an engine, share_bytes by an engine that is not listed. part_bytes: that a
    task of a product of few rows reads at least where k is cut. claim_bytes, deal_bytes: of an op
    whose tiles are claimed, and of a result whose rows are dealt, at least. boxes, units: of
    products by warpgroups, and by matrix units in any variant; None where there are none.
    """

    source: Name = "a common server core, estimated"
    signal_us: Rate = 1.0
    each_signal_us: Rate = 0.01
    barrier_us: Rate = 1.0
    task_us: Rate = 0.3
    pass_us: Rate = 0.1
    next_us: Rate = 0.3
    next_rate: Rate = 12e3
    next_bytes: Bytes = 0
    turned_share: Rate = 1.0
    processor_rate: Rate = 12e3
    cache_rate: Rate = 12e3
    cache_bytes: Rate = 1e6
    scalar_rate: Rate = 20e3
    exact_rate: Rate = 20e3
    few_rate: Rate = 20e3
    packet_bytes: Bytes = 2 << 10
    stream_rows: Count = 64
    begin_work: Rate = 524288.0
    hand_over_work: Work = 0.0
    idle_bytes: Rate = 65536.0
    start_work_us: Rate = 300.0
    op_us: Rate = 4.0
    product_tile_us: Rate = 1.5
    combine_rate: Rate = 6e3
    put_bytes: Bytes = 128 << 10
    part_bytes: Bytes = 128 << 10
    claim_bytes: Bytes = 64 << 20
    deal_bytes: Bytes = 32 << 20
    exact_work: Rate = 16777216.0
    turned_work: Rate = 16777216.0
    tile_elements: Count = 4096
    sweep_bytes: Bytes = 64 << 10
    little_elements: Bytes = 16 << 10
    hoisted_elements: Bytes = 256 << 10
    read_bytes: Bytes = 16 << 20
    group_rows: Count = 16
    packet_tensor_bytes: Bytes = 256 << 10
    packet_elements: Bytes = 4 << 10
    polled_elements: Bytes = 16 << 10
    rounded_elements: Bytes = 8 << 10
    stage_codes: Bytes = 16 << 10
    lane_bytes: Bytes = 64 << 10
    share_bytes: Bytes = 64 << 10
    piece_bytes: tuple[tuple[Name, Bytes], ...] = PIECES
    boxes: BoxCosts | None = None
    units: UnitCosts | None = None


ESTIMATED = Costs()
