"""Costs of a machine: the times and rates from which the planner predicts times, and the sizes
from which on an optimisation saves time.

Each vendor's machines.py has one `Costs` per machine and states the source of its figures. Other
modules of ark contain no figures of a particular machine. Called by ark.lower, ark.plan.cost and
the backends.
"""

from __future__ import annotations

from dataclasses import dataclass

from ark.machine.ranges import Bytes, Count, Name, Rate, Work

# The default of Costs.piece_bytes: for each transfer engine (packets, stores by threads, bulk
# copies, ...), the fewest bytes that one task transfers.
PIECES = (
    ("packet", 4 << 10),
    ("threads", 16 << 10),
    ("bulk", 64 << 10),
    ("dma", 4 << 20),
    ("nic", 1 << 20),
    ("switch", 64 << 10),
)
FULL_STEP_SHAPE = (128, 256)  # rows and columns of the tile that BoxCosts.full_step_us describes


@dataclass(frozen=True)
class BoxCosts:
    """Costs of matrix products on warpgroups. Box copies load their tiles into the ring, step by
    step along the inner dimension k; a step is 128 bytes of k.

    full_step_us: time in which the matrix units multiply one step of a tile of FULL_STEP_SHAPE rows
        and columns.
    least_step_us: time in which the loading thread starts the two box copies of a stage, one per
        operand. A step never takes less.
    small_stage: tiles of which two steps are together at most this many bytes are called small
        here. A stage of the ring holds several of their steps.
    small_load_rate: bytes per microsecond that one processor loads for small tiles of products that
        are not busy (see few_rows).
    load_rate: the same in all other cases, while all processors load.
    tile_us: for products that read convolution windows, the time between the last step of a tile
        and the first step of the next tile of the same processor.

    fold_us: if k is cut into parts, the time until the tasks that add the partial sums can begin.
    each_part_us: further time for each part.
    normed_us: the time that replaces fold_us and each_part_us if a norm adds the partial sums.
    kept_bytes: bytes of partial sums that stay in the last-level cache until they are added.
    fold_rate: bytes per microsecond at which partial sums beyond kept_bytes are written and read.
    band_bytes: bytes of the left operand that stay in the last-level cache while a band (some rows
        of tiles) is computed column by column.
    few_rows, few_tiles: a product is busy, so that it loads at load_rate, if it has more than
        few_rows rows and more than few_tiles square tiles of the smallest height.
    least_rows, least_work: the kernel variant with warpgroups is chosen for products with at least
        this many rows and, all together, multiplications.
    least_reads: an operand is copied to a layout that box copies can load if each of its elements
        is multiplied at least this often.

    laid_rate: bytes per microsecond that all processors together move in such a copy.
    common_rate: operations per microsecond of one processor in products of 16-bit types, in device
        functions that work in every kernel variant.
    tf32_rate: the same for fp32 tiles that are computed as tf32.
    plain_rate: the same for products that do not use matrix units.
    attention_rate: the same for attention.
    code_rate: codes of quantised weights that a processor converts and multiplies in products of
        few rows.
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
    code_rate: Rate


@dataclass(frozen=True)
class UnitCosts:
    """Costs of matrix products on matrix units in device functions that work in every kernel
    variant. A step of their loops is 128 bytes of the inner dimension k.

    line_us, small_line_us: the shortest time of a step, because its operands arrive one step after
        they were requested: in the loop for large tiles, and in the loop for other tiles.
    begin_us: time of a tile besides its steps: until the operands of the first step have arrived,
        and to store the result.
    fold_us: if k is cut into parts, the time until the tasks that add the partial sums can begin.
    fold_share: the fraction of the memory bandwidth at which partial sums are stored and loaded.
    read_share: the fraction of the memory bandwidth at which all processors together read both
        operands.
    small_share: the fraction of the time of the loop for small tiles in which the matrix units
        multiply.
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
    """Costs from which the planner predicts times. Times are in microseconds, rates in bytes or
    operations per microsecond. A multiplication and an addition are two operations.

    source: the device on which the figures were measured, or how they were estimated.

    signal_us: time from a task's signal of a counter until a task of another processor, which waits
        for the counter, continues.
    each_signal_us: further time for each further task that signals the same counter.
    barrier_us: time from the end of the last task of an iteration to the start of the first task of
        the next one.
    task_us: time of a task besides its work: its record is fetched, its first loads arrive, its
        results are stored.
    pass_us: further time for each further round of loads for which a task waits.
    next_us: the time that replaces task_us if a task reads the result of the previous task of its
        processor without a wait between them.
    next_bytes: the largest number of bytes moved by a task to which next_us applies.
    next_rate: the rate at which such a task moves its bytes.
    turned_share: the fraction of the memory bandwidth that transposes reach.
    apart_rate: elements that one processor moves if neighbouring threads access elements that are
        not neighbours in memory.

    processor_rate: the rate at which one processor loads from the last-level cache while the others
        do not load.
    cache_rate: the rate at which all processors together load from the last-level cache.
    cache_bytes: bytes that the last-level cache retains from one iteration to the next.
    scalar_rate: fp32 operations of one processor without matrix units.
    exact_rate: operations of one processor in products in full fp32.
    unaligned_share: the fraction of its time by which such a product takes longer if rows of an
        operand do not begin at multiples of 16 bytes.
    column_rate: bytes per microsecond that one processor adds up in columns of a few thousand
        elements, while others do so too.
    column_row_bytes: bytes by which each row of such columns counts as longer, because short rows
        are read at a lower rate.
    few_rate: operations of one processor in products with 9 to 16 rows or columns, which read this
        narrow operand from the last-level cache repeatedly.
    staged_rate: the same for fp32 in the variant `block`, where the operand is read from shared
        memory; 0 if it is not.

    packet_bytes: the largest transfer to a peer that is faster as packets than by other engines.
    stream_rows: the largest number of input rows of a linear layer for which the operand stream
        copies the weight. Layers of more rows are matmuls, on matrix units if the machine has them.
    begin_work: the time to begin and end a tile of Machine.exact_tiles, as the number of
        multiplications that take as long.
    hand_over_work: the time of the synchronisation between two tasks, as the number of
        multiplications that a processor does in it without matrix units. 0 if it is shorter than
        the smallest op, so that fusing ops saves nothing.
    stage_codes: the largest number of elements of quantised weights in one stage of the ring, which
        one warp multiplies.
    idle_bytes: if an op moves at most this many bytes per processor, it spends more time waiting
        than working, and the planner may reorder it to run beside other ops.
    exact_work: the fewest multiplications of an fp32 product that uses tiles of
        Machine.exact_tiles.
    turned_work: the fewest multiplications of a product for which transposing its operands first
        saves time.

    tile_elements: the fewest elements of a tile of an elementwise op.
    sweep_bytes: the most bytes of such a tile in a large tensor. In larger tiles the warps drift
        apart, and their accesses to memory are scattered.
    little_elements: a result of at most this many elements is computed again by each task that
        reads it, because that is faster than passing it from task to task.
    hoisted_elements: if a result has at least this many elements, the planner computes factors that
        are equal for many of them in a separate op.
    read_bytes: the most bytes of keys and values that are read by the attention heads which are
        computed at the same time, so that the cache holds them.
    divided_heads_bytes: the most bytes of keys and values of a batch for which tasks divide the
        query heads of a key/value head, so that each reads all of its keys and values; if there are
        more, tasks divide the positions.
    group_rows: the most rows of tiles in a band. Tiles of a band are computed column by column.

    packet_tensor_bytes: the largest fp32 activation that may travel as packets inside a device.
    packet_elements: the most elements that one task may read as packets. With more elements, a
        counter is faster.
    polled_elements: the same for a linear layer, or a product with chosen experts, whose function
        polls one packet until it has arrived before it loads the others.
    rounded_elements: the same for linear layers of several rows, whose input can instead be rounded
        to 16 bits by the op that computes it.

    start_work_us: if each launch starts its processors (capability starts_processors), one
        processor is started for this much predicted work.
    op_us, product_tile_us: figures for predictions of whole ops (ark.parallel): the time for an
        op's last results and the wait for them, and the time for the first load and the store of a
        product's tile.
    combine_rate: the rate at which one processor combines data with those of peers and sends them.
    put_bytes: the most bytes of tiles that one put sends.
    lane_bytes: bytes of a task that combines or sends, on a processor or moving warp that has no
        other work.
    share_bytes: a processor's share of a transfer is cut into several tasks if it is larger.
    piece_bytes: the fewest bytes that one task transfers, for each engine; share_bytes for engines
        that are not listed.
    part_bytes: the fewest bytes of the weight that one task reads in a product of few rows if k is
        cut into parts.
    claim_bytes: the fewest bytes that an op moves whose tiles processors claim at run time.
    deal_bytes: the fewest bytes of a result whose rows are distributed to processors in turn, row
        by row, instead of in consecutive ranges.
    boxes, units: costs of matrix products on warpgroups, and on matrix units in every kernel
        variant; None if the machine has no such products.
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
    apart_rate: Rate = 1e12
    processor_rate: Rate = 12e3
    cache_rate: Rate = 12e3
    cache_bytes: Rate = 1e6
    scalar_rate: Rate = 20e3
    exact_rate: Rate = 20e3
    unaligned_share: Work = 0.0
    column_rate: Rate = 16e3
    column_row_bytes: Bytes = 0
    few_rate: Rate = 20e3
    staged_rate: Work = 0.0
    packet_bytes: Bytes = 2 << 10
    stream_rows: Count = 64
    begin_work: Rate = 524288.0
    hand_over_work: Work = 0.0
    idle_bytes: Rate = 65536.0
    start_work_us: Rate = 300.0
    op_us: Rate = 4.0
    product_tile_us: Rate = 1.5
    long_row_bytes: Bytes = 128 << 10
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
    divided_heads_bytes: Bytes = 0
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
