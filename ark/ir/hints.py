"""What a front end asks of the planner for an op: how it is cut into tasks and how they are dealt.

None of it changes a result. ark.api.config makes hints of ARK's configurations, the ops' lowerings
and the scheduler follow them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hints:
    """tile: sizes of the result's last dimensions that a task computes, larger ones are clipped.
    tasks: the number of tasks. granularity: consecutive tasks that go to one processor before the
    next one has its turn. one_step: a reduction is not cut along the reduced dimension. product:
    the tile of a matrix product, before `tile`.
    """

    tile: tuple[int, ...] | None = None
    tasks: int | None = None
    granularity: int | None = None
    one_step: bool = False
    product: tuple[int, int] | None = None

    @property
    def cuts(self) -> bool:
        """True where they say how an op is cut into tasks."""
        return self.one_step or any(h is not None for h in (self.tile, self.tasks, self.product))
