"""The structures that host and device share, defined once for both.

From each definition come the C struct that the writer emits and the NumPy dtype that the runtime
fills; so the two cannot drift apart. All members are naturally aligned and no compiler pads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

# Operands whose addresses lie in a task's record. Of an op with more, the record's last entry is
# the address of a list of those that are left, the record's last one among them.
RECORD_OPERANDS = 12
MAX_COORDS = 6
MAP_BYTES = 128  # of a box map in the hardware's form
SLOT_COUNTER_OPS = 8  # waits and signals of a task that the loop copies ahead
FIFO_SLOTS = 1024  # of triggers for the proxy; a power of two

_NUMPY = {"u32": "<u4", "i32": "<i4", "u64": "<u8"}

STRUCTS: dict[str, tuple[tuple[str, str, int], ...]] = {
    # One tile task. wait/signal/fetch are index ranges into counter_ops and into the processor's
    # fetches; the signals lie behind the waits, from wait_end on. flow: of tasks that warps go
    # through without meeting (ark.runtime.flows) how many there are from this one on, in the first
    # one's low byte; in the next byte how many of them have this one's body, and in the high half a
    # bit for each operand that is what the task before has made. growth: 1 + the place of its
    # growing fetch among all growths, 0 without one; where boxes are loaded and nothing grows, 1 if
    # a task's may be loaded before it begins, 2 if those of its right side may.
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
    # bit 3 = a signal by stores: step and counter are the low and high half of the address at which
    # the rank counts its signals.
    "ArkCounterOp": (
        ("address", "u64", 1),
        ("value", "u32", 1),
        ("step", "u32", 1),
        ("counter", "u32", 1),
        ("flags", "u32", 1),
    ),
    # One stage of the operand stream. form: 0; or 1 + the place of a growth, which says how many
    # stages there are; or what fetch_form makes, and then `bytes` are of one piece; or what
    # box_form does, and then address is a box map's.
    "ArkFetch": (("address", "u64", 1), ("bytes", "u32", 1), ("form", "u32", 1)),
    # A fetch of rows that iterations append (ark.plan.types.Growth). address, beside: of the first
    # rows. length: address of the number of rows. row: bytes. rows: room. step: rows of a stage.
    # Where rows lie in pages: table: address of their numbers; page: rows of one, 0 without pages;
    # pitch: bytes from one to the next; pages: how many there are.
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
    # Device memory that steers the loop. limit: iterations to run (a stop token lowers it);
    # go: iterations released so far (persistent mode raises it); fifo_head: triggers pushed so far.
    # Behind it lie the iterations at which the phases but the last end, a word each.
    "ArkControl": (
        ("abort", "u32", 1),
        ("error", "u32", 1),
        ("limit", "u32", 1),
        ("go", "u32", 1),
        ("fifo_head", "u32", 1),
    ),
    # Host-mapped memory: what the host tells (target, quit, abort) and what it reads.
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
    # What a device asks of the host's proxy: to copy `size` bytes (31 bits; bit 31 is the parity of
    # the lap), or with none to add the source's low word to the counter at target. high: bits 32 to
    # 47 of both addresses.
    "ArkTrigger": (
        ("source", "u32", 1),
        ("target", "u32", 1),
        ("high", "u32", 1),
        ("size", "u32", 1),
    ),
    # Host-mapped memory: triggers as words, and how many have been served.
    "ArkFifo": (
        ("done", "u32", 1),
        ("pad", "u32", 15),
        ("words", "u32", 4 * FIFO_SLOTS),
    ),
    # A copy engine's queue that the device writes itself: requests taken and told so far, what the
    # engine has completed (which it writes), requests that the ring holds (a power of two), and
    # addresses.
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
    # Kernel parameters; every address is valid on the device. first, end: the iterations of a
    # launch that goes on where the one before ended; end is 0 for others, which the limit ends.
    # barrier_step: signals that open the iteration barrier, some of them from peers if peers is 1.
    # queue: an ArkQueue, 0 where copies are asked of the proxy. multicast: how far behind an
    # address of symmetric memory lies the one that stands for it on all ranks, 0 where none does.
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

# Why a wait gave up, as ArkHost.error says it.
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
    """The form of stages that have so many pieces, which begin `pitch` bytes apart in memory and
    are contiguous in the stage (ark_stream_pieces on the device).
    """
    return (1 << 31) | (pieces - 1) << 24 | pitch // 16


def box_form(row: np.ndarray) -> np.ndarray:
    """The form of stages that are boxes, whose first row is this one of their map's; `bytes` are
    the box's, and above bit 16 its first place along the map's last dimension.
    """
    return (3 << 30) | row


def control(limit: int, ends: Sequence[int]) -> np.ndarray:
    """ArkControl before a launch of `limit` iterations, and behind it the ends of phases but the
    last, as words.
    """
    head = np.zeros(1, dtype("ArkControl"))
    head["limit"] = limit
    return np.concatenate([head.view(np.uint32), np.array(ends, np.uint32)])


def word(struct: str, member: str) -> int:
    """The place of a member of a shared structure, in words of 32 bits."""
    fields = dtype(struct).fields
    assert fields is not None
    return int(fields[member][1]) // 4


@cache
def dtype(name: str) -> np.dtype:
    """The NumPy dtype of a shared structure."""
    return np.dtype(
        [(m, _NUMPY[t], (n,)) if n > 1 else (m, _NUMPY[t]) for m, t, n in STRUCTS[name]]
    )


# What the loop keeps in shared memory beside a task's scratch: records, waits and signals of the
# tasks to come, and what bodies see of the loop (ArkLoop in task_slots.h).
LOOP_BYTES = 1536
FLOW_TASKS = 64  # that warps go through without meeting


def declarations() -> str:
    """What the loop's code needs: a constant, and the structures."""
    return f"constexpr ark_u32 ARK_SLOT_COUNTER_OPS = {SLOT_COUNTER_OPS}u;\n" + structures()


def structures() -> str:
    """The C structs, in the order in which they are defined; C as well as C++."""
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
