"""The type of plan that is passed to a launch: a plan of ark, together with the model whose tensors
it uses.

`ark.Plan` (ark.runtime.api.plan) adds ARK's properties and ARK's plan format. Called by
ark.runtime.planner and ark.runtime.runtime.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ark.frontend.model import Model
from ark.machine import Machine
from ark.plan import serialize
from ark.plan import types as inner
from ark.runtime.run import Ranks


class Planned:
    """A plan. inner: ark's own plan; None if there is nothing to run, or if the plan is still in
    ARK's format.

    head: for a plan without an inner one, the entries Rank, WorldSize and task infos of ARK's
    format.
    """

    def __init__(
        self,
        plan: inner.Plan | None,
        model: Model | None = None,
        head: dict[str, Any] | None = None,
    ) -> None:
        self.inner = plan
        self.model = model
        self.head = head or {"Rank": 0, "WorldSize": 1}

    def __str__(self) -> str:
        return serialize.to_json(self.inner) if self.inner else json.dumps(self.head)

    def built(self, machine: Machine, members: Callable[[int], Ranks] | None = None) -> Planned:
        """Returns a plan whose `inner` is set: if it is None, the plan is converted from ARK's
        format for this machine. Returns the same object if `inner` is set or the plan has no tasks.
        """
        return self

    @property
    def rank(self) -> int:
        """The rank that the plan is for, from 0."""
        return self.inner.rank if self.inner else int(self.head["Rank"])

    @property
    def world_size(self) -> int:
        """The number of ranks for which the plan was made."""
        return self.inner.world_size if self.inner else int(self.head["WorldSize"])
