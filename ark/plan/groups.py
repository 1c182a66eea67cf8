"""The interface between lowering and scheduling: the tile tasks of each op, in program order, whose
operands are tensors of the graph. Created by ark.lower, read by ark.plan.schedule.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ark.ir.values import Tensor
from ark.plan.params import Params


@dataclass(frozen=True)
class RemoteSemaphore:
    """A counter on a rank, identified by name, that a put of this rank signals or that a task of
    this rank waits for.
    """

    rank: int
    name: str


@dataclass
class Group:
    """The tasks of one lowered op. sends, awaits: one entry per task, or empty lists. granularity,
    context: see ark.ir. received: ids of the buffers between ranks that hold packets. placement:
    the processor of each task, if the lowering chose them. A wait with count 0 is for the previous
    iteration.
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
