"""Hints: a user's requests to the planner for one op (tile size, number of tasks, processors).

Hints do not change results. ark.runtime.api.config makes them from ARK's configurations; the ops'
lowerings and the scheduler follow them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hints:
    """tile: the part of the result that a task computes, as sizes of the last dimensions; larger
    sizes are reduced to the result's. tasks: the number of tasks. granularity: the number of
    consecutive tasks that one processor gets before the next processor's turn. one_step: a
    reduction is not cut along the reduced dimension. product: the tile of a matrix product; it has
    precedence over `tile`.
    """

    tile: tuple[int, ...] | None = None
    tasks: int | None = None
    granularity: int | None = None
    one_step: bool = False
    product: tuple[int, int] | None = None

    @property
    def cuts(self) -> bool:
        """True if the hints say how the op is cut into tasks."""
        return self.one_step or any(h is not None for h in (self.tile, self.tasks, self.product))
