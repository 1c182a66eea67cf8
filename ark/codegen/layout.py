"""The structures that host and device share, defined once for both.

Each definition gives the C struct that the writer emits and the NumPy dtype that the runtime fills,
so the two always agree. All members are naturally aligned, so compilers add no padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

# Operands whose addresses are in a task's record. If an op has more, the record's last entry is the
# address of a list of the remaining addresses, which begins with the one that the entry would have
# held.
RECORD_OPERANDS = 12
MAX_COORDS = 6
MAP_BYTES = 128  # per box map, in the hardware's form
SLOT_COUNTER_OPS = 8  # waits and signals of a task that the loop copies ahead of the task
FIFO_SLOTS = 1024  # capacity in triggers for the proxy; a power of two

_NUMPY = {"u32": "<u4", "i32": "<i4", "u64": "<u8"}

STRUCTS: dict[str, tuple[tuple[str, str, int], ...]] = {
    # One tile task. wait/signal/fetch are index ranges into counter_ops and into the processor's
    # fetches; the signals begin at wait_end, after the waits. flow: for tasks that warps execute
    # without block barriers (ark.runtime.flows), in the first task's low byte the number of these
    # tasks from this one on, in the next byte how many of them have this task's body, and in the
    # high half a bit for each operand that the previous task has produced. growth: 1 + the index of
    # its growing fetch among all growths, 0 without one. If boxes are loaded and nothing grows: 1
    # if the task's boxes may be loaded before it begins, 2 if only those of its right side may.
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
    # A wait (value = threshold within an iteration, step = increments per iteration) or a signal
    # (value = increment). flags: bit 0 = peers take part (system scope), bit 2 = on another host,
    # bit 3 = a signal by stores; then step and counter are the low and high half of the address at
    # which the rank counts its signals.
    "ArkCounterOp": (
        ("address", "u64", 1),
        ("value", "u32", 1),
        ("step", "u32", 1),
        ("counter", "u32", 1),
        ("flags", "u32", 1),
    ),
    # One stage of the operand stream. form: 0; or 1 + the index of a growth, which gives the number
    # of stages; or a value of fetch_form, and then `bytes` are those of one piece; or a value of
    # box_form, and then address is that of a box map.
    "ArkFetch": (("address", "u64", 1), ("bytes", "u32", 1), ("form", "u32", 1)),
    # A fetch of rows that iterations append (ark.plan.types.Growth). address, beside: addresses of
    # the first rows. length: address of the number of rows. row: bytes of a row. rows: the most
    # rows. step: rows of a stage. For rows in pages: table: address of the page numbers; page: rows
    # of a page, 0 without pages; pitch: bytes from one page to the next; pages: number of pages.
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
    ),
    # begin/end of a processor's tasks and fetches in one phase.
    "ArkRange": (
        ("task_begin", "u32", 1),
        ("task_end", "u32", 1),
        ("fetch_begin", "u32", 1),
        ("fetch_end", "u32", 1),
    ),
    # Device memory that controls the loop. limit: iterations to run (a stop token lowers it); go:
    # iterations released so far (persistent mode raises it); fifo_head: triggers pushed so far. It
    # is followed by a word for each phase except the last: the iteration at which the phase ends.
    "ArkControl": (
        ("abort", "u32", 1),
        ("error", "u32", 1),
        ("limit", "u32", 1),
        ("go", "u32", 1),
        ("fifo_head", "u32", 1),
    ),
    # Host-mapped memory: target, quit and abort are written by the host, the rest is read by it.
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
    # A request of the device to the host's proxy: to copy `size` bytes (31 bits; bit 31 is the
    # parity of the lap) or, if size is 0, to add the source's low word to the counter at target.
    # high: bits 32 to 47 of both addresses.
    "ArkTrigger": (
        ("source", "u32", 1),
        ("target", "u32", 1),
        ("high", "u32", 1),
        ("size", "u32", 1),
    ),
    # Host-mapped memory: triggers as words, and the number of triggers that have been served.
    "ArkFifo": (
        ("done", "u32", 1),
        ("pad", "u32", 15),
        ("words", "u32", 4 * FIFO_SLOTS),
    ),
    # A copy engine's queue that the device writes itself. head, told: requests taken and submitted
    # so far. done: requests that the engine has completed (written by it). slots: requests that the
    # ring holds (a power of two). The rest are addresses.
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
    # Kernel parameters; every address is valid on the device. first, end: the range of iterations
    # of a launch that continues where the previous one ended; otherwise end is 0 and the limit ends
    # the launch. barrier_step: signals that open the iteration barrier; peers: 1 if some of them
    # come from peers. queue: an ArkQueue, 0 if copies are requested from the proxy. multicast: the
    # distance from an address of symmetric memory to the multicast address that stands for it on
    # all ranks, 0 without multicast.
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

# Reasons for which a wait or a check stopped the loop, by the number in ArkHost.error.
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
    """The form of stages of `pieces` pieces each, which begin `pitch` bytes apart in memory and are
    contiguous in the stage (ark_stream_pieces on the device).
    """
    return (1 << 31) | (pieces - 1) << 24 | pitch // 16


def box_form(row: np.ndarray) -> np.ndarray:
    """The form of stages that are boxes. row: the box's first row in its map. The fetch's `bytes`
    are those of the box, with its first index in the map's last dimension above bit 16.
    """
    return (3 << 30) | row


def control(limit: int, ends: Sequence[int]) -> np.ndarray:
    """ArkControl before a launch of `limit` iterations, followed by the ends of all phases except
    the last, as words.
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


# Bytes that the loop keeps in shared memory beside a task's scratch: records, waits and signals of
# the next tasks, and the loop's state that bodies read (ArkLoop in task_slots.h).
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
