"""Costs of a machine: the figures that the planner and the cost model use.

Each vendor's machines.py has one value per machine, with the source of its figures. No module above
this one contains figures of a particular machine. Called by ark.lower, ark.plan.cost and the
backends.
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
FULL_STEP_SHAPE = (128, 256)  # the product that takes BoxCosts.full_step_us


@dataclass(frozen=True)
class BoxCosts:
    """Costs of matrix products on warpgroups, whose tiles are loaded by box copies, step by step
    along k.

    full_step_us: time of the matrix units for FULL_STEP_SHAPE rows and columns, 128 bytes along k.
    least_step_us: time in which the loading thread starts the two copies of a stage.
    small_stage: a stage holds two or four steps if these have at most this many bytes together.
    small_load_rate: the load rate of a processor with such stages, for products of few rows.
    load_rate: the rate in all other cases, when all processors load.
    tile_us: for tiles of windows, the time from the last step of a tile to the first step of the
        next one.

    fold_us: time to hand over parts of k to the tasks that add them up.
    each_part_us: further time for each part.
    normed_us: the time for both if a norm adds up the parts.
    kept_bytes: bytes of parts that stay in the last-level cache.
    fold_rate: the rate at which further bytes of them are written and read.
    band_bytes: bytes of the left operand that stay in that cache while the columns are processed.
    few_rows, few_tiles: a product with more rows than few_rows and more tiles of the smallest
        height than few_tiles loads at load_rate.
    least_rows, least_work: the smallest numbers of rows and multiplications of a product for which
        the variant is chosen.
    least_reads: a side of a product is copied into another layout if each of its elements is read
        at least this often.

    laid_rate: bytes that all processors together move when a side is copied into the layout of box
        copies.
    common_rate: operations of one processor in products of 16-bit types, in bodies of any variant.
    tf32_rate: the same for tiles of fp32 computed as tf32.
    plain_rate: the same for products without matrix units.
    attention_rate: the same for attention.
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
    """Costs of matrix products on matrix units in any variant, also with k cut into parts.

    line_us, small_line_us: the least time for a line of k (128 bytes), which arrives one step after
        it was requested: in the loop for large tiles, and in the loop for other tiles.
    begin_us: time until a tile's first step has arrived, and to store its sums.
    fold_us: time to hand over parts of k to the tasks that add them up, which move bytes at
        fold_share of the memory bandwidth.
    read_share: the fraction of the memory bandwidth at which all processors together read both
        operands.
    small_share: the fraction of its time in which the loop for small tiles multiplies.
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
    """Times in microseconds, rates in bytes or operations per microsecond.

    source: the device on which the figures were measured, or the way in which they were estimated.

    signal_us: from the signal of a counter by one task until another task, which waits for it,
        continues.
    each_signal_us: for each further task that signals the same counter.
    barrier_us: from the end of the last task of an iteration to the begin of the first task of the
        next one.
    task_us: one task by itself: its record is fetched, its first loads arrive, its results are
        stored.
    pass_us: each further round of loads that a task waits for.
    next_us: a task that reads the result of the previous task on its processor, with no wait
        between them, and moves at most next_bytes.
    next_rate: the rate at which it moves them.
    turned_share: the fraction of the memory bandwidth that transposes reach.

    processor_rate: bytes that one processor loads from the last-level cache while the others do
        not.
    cache_rate: bytes that all processors together load from it.
    cache_bytes: the data that it retains from one iteration to the next.
    scalar_rate: fp32 multiplications and additions of one processor without matrix units.
    exact_rate: operations of products in full fp32.
    few_rate: operations of products of 9 to 16 rows or columns, whose narrow side is read from the
        last-level cache repeatedly.

    packet_bytes: the largest transfer to a peer that is faster as packets.
    stream_rows: the most input rows for which a weight is streamed; more rows use matrix units,
        where there are any.
    begin_work: multiplications that take as long as the begin and the end of a tile of exact_tiles.
    hand_over_work: multiplications that a processor does in a common body in the time in which a
        task is handed over; 0 if that time is shorter than the smallest op, so that joining ops
        saves nothing.
    stage_codes: the most quantised weights in a stage, which one warp multiplies.
    idle_bytes: the most bytes per processor of an op that waits longer than it works.
    exact_work: the fewest multiplications of an fp32 product for which exact_tiles are used.
    turned_work: the fewest multiplications of a product for which transposing its operands is
        worthwhile.

    tile_elements: the fewest elements of a tile of an elementwise op.
    sweep_bytes: the most bytes of such a tile in a large tensor, because warps that drift apart
        scatter the accesses.
    little_elements: a result of at most this many elements is recomputed faster than handed over.
    hoisted_elements: if a result has at least this many elements, computing its small factors in an
        op of their own is worthwhile.
    read_bytes: bytes of keys and values that the heads processed together read.
    group_rows: the most rows of tiles of a product that are computed column by column.

    packet_tensor_bytes: the largest fp32 activation that may travel as packets inside a device.
    packet_elements: the most elements of packets that a task may read; beyond it a counter is
        faster.
    polled_elements: the same for a body that polls only after one packet has arrived.
    rounded_elements: the same if the op that produces several rows can round them instead.

    start_work_us: the predicted work for which starting a processor is worthwhile, if each launch
        starts its processors.
    op_us, product_tile_us: used where only whole ops are predicted (ark.parallel): the time for an
        op's last results and the wait for them, and the time for the first load and the store of a
        product's tile.
    combine_rate: bytes that one processor combines with those of peers and sends.
    put_bytes: the most bytes of tiles that are sent by one put.
    lane_bytes: bytes of a task of a processor that only transfers.
    share_bytes: the least share of a processor in a transfer before it is cut into parts.
    piece_bytes: for each engine the fewest bytes that a task moves; share_bytes for other engines.
    part_bytes: if k is cut, the fewest bytes that a task of a product of few rows reads.
    claim_bytes: the smallest op whose tiles are claimed.
    deal_bytes: the smallest result whose rows are dealt.
    boxes, units: costs of products on warpgroups, and on matrix units in any variant; None if the
        machine has no such products.
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
