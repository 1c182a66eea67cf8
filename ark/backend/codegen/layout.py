"""The structures that host and device share, defined once for both.

Each definition gives the C struct that the writer emits and the NumPy dtype that the runtime fills,
so the two always agree. All members are naturally aligned, so compilers add no padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

# The number of operand addresses in a task's record. If an op has more operands, the last entry is
# the address of a list with the addresses of the operands from number RECORD_OPERANDS - 1 on.
RECORD_OPERANDS = 12
MAX_COORDS = 6
MAP_BYTES = 128  # size of a box map in the hardware's format
SLOT_COUNTER_OPS = 8  # waits and signals of a task that the loop copies ahead of the task
FIFO_SLOTS = 1024  # capacity of the queue of requests to the proxy; a power of two

_NUMPY = {"u32": "<u4", "i32": "<i4", "u64": "<u8"}

STRUCTS: dict[str, tuple[tuple[str, str, int], ...]] = {
    # The record of one task.
    # wait_begin, wait_end: the range of its waits in counter_ops; its signals follow to signal_end.
    # fetch_begin, fetch_end: the range of its fetches among those of the processor.
    # flow: describes a sequence of tasks between which warps need no block barrier
    # (ark.runtime.flows). Its low byte is the number of tasks of the sequence from this one on.
    # The next byte is how many of these, from this one on, call the same device function.
    # The high half has a bit for each operand that the previous task has computed.
    # growth: if the task has a growing fetch, 1 + the index of its ArkGrowth; otherwise 0.
    # In kernels that load boxes (TMA), growth has bits instead, which say what may be loaded before
    # the task begins (ark.runtime.tables). 1: all boxes. 2: the boxes of the right operand.
    # 4: the remaining boxes, once the preceding task has performed its waits.
    "ArkTask": (
        ("kind", "u32", 1),
        ("op", "u32", 1),
        ("wait_begin", "u32", 1),
        ("wait_end", "u32", 1),
        ("signal_end", "u32", 1),
        ("flow", "u32", 1),
        ("fetch_begin", "u32", 1),
        ("fetch_end", "u32", 1),
        ("coord", "i32", MAX_COORDS),
        ("index", "u32", 1),
        ("growth", "u32", 1),
        ("operand", "u64", RECORD_OPERANDS),
    ),
    # A wait for a counter, or a signal. value: the threshold of a wait within an iteration, or the
    # increment of a signal. step: the counter's increments per iteration. flags: bit 0 is set if
    # peers take part, bit 2 if the counter is on another host. Bit 3 is set for a signal by a store
    # instead of an atomic addition. The rank then counts its signals in a word of its own; counter
    # and step are the high and the low half of the address of this word.
    "ArkCounterOp": (
        ("address", "u64", 1),
        ("value", "u32", 1),
        ("step", "u32", 1),
        ("counter", "u32", 1),
        ("flags", "u32", 1),
    ),
    # A fetch of the operand stream, which copies operands to shared memory ahead of tasks.
    # form: states what the fetch copies. 0: contiguous bytes that fill one stage.
    # 1 + the index of an ArkGrowth: rows whose number is known only at run time.
    # A value of fetch_form: pieces (contiguous parts) of several rows; `bytes` is the size of one.
    # A value of box_form: a box of an operand; `address` is then that of its box map.
    "ArkFetch": (("address", "u64", 1), ("bytes", "u32", 1), ("form", "u32", 1)),
    # A fetch of rows whose number grows, because iterations append rows (ark.plan.types.Growth).
    # address, beside: the addresses of the first rows of the two operands (keys and values).
    # length: the address of the number of rows. row: bytes of a row. rows: the most rows.
    # step: the number of rows in a stage.
    # table: the address of the page numbers, if rows are in pages.
    # page: rows of a page; 0 without pages. pitch: bytes between pages. pages: their number.
    # window: only this many latest rows are copied; 0 for all rows.
    "ArkGrowth": (
        ("address", "u64", 1),
        ("beside", "u64", 1),
        ("length", "u64", 1),
        ("table", "u64", 1),
        ("row", "u32", 1),
        ("rows", "u32", 1),
        ("step", "u32", 1),
        ("part", "u32", 1),
        ("parts", "u32", 1),
        ("page", "u32", 1),
        ("pitch", "u32", 1),
        ("pages", "u32", 1),
        ("window", "u32", 1),
        ("pad", "u32", 1),
    ),
    # The index ranges of the tasks and fetches that a processor executes in one phase.
    "ArkRange": (
        ("task_begin", "u32", 1),
        ("task_end", "u32", 1),
        ("fetch_begin", "u32", 1),
        ("fetch_end", "u32", 1),
    ),
    # Device memory that controls the loop.
    # limit: the number of iterations to run; a stop token lowers it.
    # go: the number of iterations released so far, which persistent mode raises.
    # fifo_head: the number of requests sent to the host's proxy so far.
    # After the struct, a word for each phase except the last has the iteration at which it ends.
    "ArkControl": (
        ("abort", "u32", 1),
        ("error", "u32", 1),
        ("limit", "u32", 1),
        ("go", "u32", 1),
        ("fifo_head", "u32", 1),
    ),
    # Host-mapped memory. The host writes target, quit and abort, and reads the other members.
    "ArkHost": (
        ("target", "u32", 1),
        ("quit", "u32", 1),
        ("abort", "u32", 1),
        ("done", "u32", 1),
        ("error", "u32", 1),
        ("error_task", "u32", 1),
        ("error_op", "u32", 1),
        ("error_counter", "u32", 1),
        ("error_expected", "u32", 1),
        ("error_seen", "u32", 1),
        ("error_processor", "u32", 1),
        ("error_iteration", "u32", 1),
        ("pad", "u32", 4),
    ),
    # A request of the device to the host's proxy to copy `size` bytes from source to target.
    # Bit 31 of size is the parity of the lap through the queue.
    # If size is 0, the low word of source is added to the counter at target instead.
    # high: bits 32 to 47 of both addresses.
    "ArkTrigger": (
        ("source", "u32", 1),
        ("target", "u32", 1),
        ("high", "u32", 1),
        ("size", "u32", 1),
    ),
    # Host-mapped memory with the queue of requests to the proxy. done: the number of requests that
    # the proxy has executed.
    "ArkFifo": (
        ("done", "u32", 1),
        ("pad", "u32", 15),
        ("words", "u32", 4 * FIFO_SLOTS),
    ),
    # A queue of requests to a copy engine, which kernels write without the host. head: the number
    # of queue slots that tasks have reserved so far. told: the number of requests of which the
    # engine was notified so far. done: the number of requests that the engine has completed; the
    # engine writes it. slots: the number of requests that the ring holds, a power of two. ring,
    # write_pointer, doorbell: addresses of the queue's memory and registers.
    "ArkQueue": (
        ("head", "u32", 1),
        ("told", "u32", 1),
        ("slots", "u32", 1),
        ("pad", "u32", 29),
        ("done", "u32", 1),
        ("pad_done", "u32", 31),
        ("ring", "u64", 1),
        ("write_pointer", "u64", 1),
        ("doorbell", "u64", 1),
    ),
    "ArkTrace": (
        ("task", "u32", 1),
        ("iteration", "u32", 1),
        ("begin", "u64", 1),
        ("end", "u64", 1),
    ),
    # The kernel's parameters. Every address is valid on the device. first, end: the range of
    # iterations (`end` exclusive) of a launch that continues where the previous launch ended. For
    # any other launch, end is 0, and ArkControl.limit ends the launch. barrier_step: the number of
    # signals that open the iteration barrier. peers: 1 if some of these signals come from peers.
    # queue: the address of an ArkQueue; 0 if copies are requested from the proxy. multicast: the
    # distance from an address of symmetric memory to its multicast address. A store to the
    # multicast address stores on all ranks. multicast is 0 without this feature.
    "ArkParams": (
        ("tasks", "u64", 1),
        ("counter_ops", "u64", 1),
        ("fetches", "u64", 1),
        ("growths", "u64", 1),
        ("ranges", "u64", 1),
        ("barrier", "u64", 1),
        ("control", "u64", 1),
        ("host", "u64", 1),
        ("trace", "u64", 1),
        ("trace_capacity", "u32", 1),
        ("processors", "u32", 1),
        ("barrier_step", "u32", 1),
        ("persistent", "u32", 1),
        ("budget_ns", "u64", 1),
        ("idle_ns", "u64", 1),
        ("first", "u32", 1),
        ("end", "u32", 1),
        ("peers", "u32", 1),
        ("pad", "u32", 1),
        ("fifo", "u64", 1),
        ("queue", "u64", 1),
        ("multicast", "u64", 1),
    ),
}

COUNTER_OP_SYSTEM = 1
COUNTER_OP_FAR = 4
COUNTER_OP_STORED = 8

# The reasons for which a wait or a check stops the loop, by the number that the device writes to
# ArkHost.error.
ERROR_KINDS = {
    1: "counter",
    2: "packet",
    3: "operand stream",
    4: "iteration barrier",
    5: "index",
    6: "logits",
    7: "proxy",
    8: "copy engine",
    9: "alignment",
}


def fetch_form(pieces: np.ndarray, pitch: int) -> np.ndarray:
    """The value of ArkFetch.form for stages that consist of `pieces` pieces. Pieces begin `pitch`
    bytes apart in memory and are contiguous in the stage (ark_stream_pieces on the device).
    """
    return (1 << 31) | (pieces - 1) << 24 | pitch // 16


def box_form(row: np.ndarray) -> np.ndarray:
    """The value of ArkFetch.form for a stage that a box copy loads. row: the box's first row in its
    map. The fetch's `bytes` has the bytes of the box and, above bit 16, the box's first index in
    the map's last dimension.
    """
    return (3 << 30) | row


def control(limit: int, ends: Sequence[int]) -> np.ndarray:
    """The contents of ArkControl before a launch of `limit` iterations, as words, followed by the
    iterations at which all phases except the last end.
    """
    head = np.zeros(1, dtype("ArkControl"))
    head["limit"] = limit
    return np.concatenate([head.view(np.uint32), np.array(ends, np.uint32)])


def word(struct: str, member: str) -> int:
    """The offset of a member of a shared structure, in words of 32 bits."""
    fields = dtype(struct).fields
    assert fields is not None
    return int(fields[member][1]) // 4


@cache
def dtype(name: str) -> np.dtype:
    """The NumPy dtype of a shared structure."""
    return np.dtype(
        [(m, _NUMPY[t], (n,)) if n > 1 else (m, _NUMPY[t]) for m, t, n in STRUCTS[name]]
    )


# Bytes of shared memory that the loop itself uses, besides those of a task.
# They hold the records, waits and signals of the next tasks, and the state of the loop.
LOOP_BYTES = 1536
FLOW_TASKS = 64  # most tasks that warps execute without a block barrier


def declarations() -> str:
    """The declarations that the loop's code needs: a constant and the structures."""
    return f"constexpr ark_u32 ARK_SLOT_COUNTER_OPS = {SLOT_COUNTER_OPS}u;\n" + structures()


def structures() -> str:
    """The structs in the order in which they are defined, as text that is valid C and C++."""
    parts = []
    for name, members in STRUCTS.items():
        lines = [f"  ark_{t} {m}{f'[{n}]' if n > 1 else ''};" for m, t, n in members]
        size = dtype(name).itemsize
        parts.append(
            "\n".join(
                (
                    f"struct {name} {{",
                    *lines,
                    "};",
                    f'static_assert(sizeof({name}) == {size}, "{name}");',
                )
            )
        )
    return "\n".join(parts) + "\n"
