"""The interface between lowering and scheduling: the tile tasks of each op, in program order, whose
operands are tensors of the graph. Created by ark.lower, read by ark.plan.schedule.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ark.ir.values import Tensor
from ark.plan.params import Params


@dataclass(frozen=True)
class RemoteSemaphore:
    """A counter of a rank, identified by its name, with which ranks synchronise. A task of this
    rank signals it (after writing to the peer) or waits for it.
    """

    rank: int
    name: str


@dataclass
class Group:
    """The tasks of one lowered op. sends, awaits: for each task, the counters of ranks that it
    signals and those that it waits for; empty if there are none. A wait with count 0 is for the
    previous iteration. granularity, context: see ark.ir. received: ids of the buffers between ranks
    that hold packets. placement: the processor of each task, if the lowering chose them.
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
