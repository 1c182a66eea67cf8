"""The interface between lowering and scheduling. For each op, in program order, a `Group` has its
tile tasks, with operands that are tensors of the graph. Groups are created by ark.lower and read by
ark.plan.schedule.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ark.ir.values import Tensor
from ark.plan.params import Params


@dataclass(frozen=True)
class RemoteSemaphore:
    """A counter in the memory of a rank, identified by a name, with which ranks synchronise. A task
    signals it after it has written to that rank's memory, or a task of that rank waits for it.
    """

    rank: int
    name: str


@dataclass
class Group:
    """The tasks of one lowered op. sends: for each task, the counters between ranks that the task
    signals. awaits: for each task, the counters between ranks for which it waits, with the number
    of signals. A wait for 0 signals is a wait for all signals of the previous iteration. Both are
    empty if the op needs no such counters. granularity, context: see ark.ir. received: the ids of
    buffers into which peers write packets. placement: the processor of each task, if the lowering
    chose the processors.
    """

    name: str
    kind: str
    params: Params
    operands: tuple[Tensor, ...]
    coords: list[tuple[int, ...]]
    after: tuple[Tensor, ...]
    phase: int
    processors: tuple[int, int] | None = None
    granularity: int | None = None
    context: int | None = None
    received: frozenset[int] = frozenset()
    placement: list[int] = field(default_factory=list)
    sends: list[tuple[RemoteSemaphore, ...]] = field(default_factory=list)
    awaits: list[tuple[tuple[RemoteSemaphore, int], ...]] = field(default_factory=list)
