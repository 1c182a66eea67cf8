"""Hints: a user's settings for how the planner divides one op into tasks and places them (tile
size, number of tasks, processors). Hints do not change results. ark.runtime.api.config makes them
from ARK's configurations; the ops' lowerings and the scheduler follow them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hints:
    """The settings for one op. None means that the planner decides.

    tile: the part of the result that a task computes, as sizes of the last dimensions; sizes that
    exceed the result's are reduced to these. tasks: the number of tasks. granularity: tasks are
    assigned to processors in turn; a processor gets this many consecutive tasks at a time.
    one_step: True if the reduced dimension of a reduction must not be divided. product: the tile of
    a matrix product, which has precedence over `tile`.
    """

    tile: tuple[int, ...] | None = None
    tasks: int | None = None
    granularity: int | None = None
    one_step: bool = False
    product: tuple[int, int] | None = None

    @property
    def cuts(self) -> bool:
        """True if the hints determine how the op is divided into tasks."""
        return self.one_step or any(h is not None for h in (self.tile, self.tasks, self.product))
