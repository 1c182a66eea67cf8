"""The interface between lowering and scheduling: the tile tasks of each op, in program order, with
operands as tensors of the graph. Made by ark.lower, read by ark.plan.schedule.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ark.ir.values import Tensor
from ark.plan.params import Params


@dataclass(frozen=True)
class RemoteSemaphore:
    """A counter by name on a rank: what a put signals there, or a task waits for here."""

    rank: int
    name: str


@dataclass
class Group:
    """The tasks of one lowered op. sends, awaits: one entry per task, or none at all. granularity,
    context: see ark.ir. received: ids of the buffers between ranks that hold packets.
    placement: the processor of each task, if the lowering chose them. A count of 0 waits for the
    iteration before.
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
