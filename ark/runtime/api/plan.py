"""The class Plan, with the properties of ARK's class of that name (microsoft/ark). It holds a plan
of ark, or a plan in ARK's file layout.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ark.errors import InvalidUsageError
from ark.frontend.model import Model
from ark.machine import Machine
from ark.plan import serialize
from ark.plan import types as inner
from ark.runtime.api import task_plan
from ark.runtime.api.task_schema import TaskPlan
from ark.runtime.api.task_schema import read as read_task_plan
from ark.runtime.planned import Planned
from ark.runtime.run import Ranks

_EMPTY: Mapping[str, Any] = {
    "Rank": 0,
    "WorldSize": 1,
    "Architecture": "ANY",
    "NumProcessors": 1,
    "NumWarpsPerProcessor": 1,
    "TaskInfos": [],
    "ProcessorGroups": [],
}


class Plan(Planned):
    """A plan, with the properties of ARK's class of that name (microsoft/ark).

    inner: the plan in ark's own form; None if the plan is empty or in ARK's layout.

    Plan(None) is empty; Plan(dict) reads ark's layout or ARK's. A plan in ARK's layout is converted
    to ark's when it is launched (`built`), for the device and the model at that time.

    Examples:
        >>> y = ark.relu(ark.tensor([64]))
        >>> plan = ark.Planner().plan()
        >>> ark.Plan.from_str(str(plan)).world_size
        1
    """

    def __init__(
        self, plan: inner.Plan | Mapping[str, Any] | None = None, model: Model | None = None
    ) -> None:
        super().__init__(None, model, dict(_EMPTY))
        self._tasks: TaskPlan | None = None
        if isinstance(plan, inner.Plan):
            self.inner = plan
        elif isinstance(plan, Mapping) and "Rank" in plan:
            self._tasks = read_task_plan(plan)
            self.head = {**_EMPTY, **plan}
        elif plan is not None:
            self.inner = serialize.from_dict(plan)

    @classmethod
    def from_str(cls, plan_str: str) -> Plan:
        """Reads a plan. Raises InvalidUsageError if the text is not JSON, PlanError if it is not a
        plan.
        """
        try:
            data = json.loads(plan_str)
        except (ValueError, RecursionError) as error:
            raise InvalidUsageError(f"not a valid plan: {error}; a plan is JSON") from error
        return cls(data)

    @classmethod
    def from_file(cls, file_path: str | Path) -> Plan:
        """Reads a plan from a file; errors as from_str."""
        try:
            text = Path(file_path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidUsageError(f"{file_path} cannot be read as a plan: {error}") from error
        return cls.from_str(text)

    def built(self, machine: Machine, members: Callable[[int], Ranks] | None = None) -> Plan:
        """The plan, converted to ark's own form for a machine. A plan that has this form or has no
        tasks is returned unchanged.

        Tensors of the current model keep their memory. members, errors: as for
        ark.runtime.api.task_plan.build.
        """
        if self.inner is not None or self._tasks is None or not self._tasks.task_infos:
            return self
        return Plan(task_plan.build(self._tasks, Model.get_model(), machine, members))

    @property
    def architecture(self) -> str:
        """The architecture for which the plan was made; ANY for an empty plan."""
        return str(self.inner.machine["arch"]) if self.inner else str(self.head["Architecture"])

    @property
    def num_processors(self) -> int:
        """The number of processors that have task lists in the plan."""
        return self.inner.processors if self.inner else int(self.head["NumProcessors"])

    @property
    def num_warps_per_processor(self) -> int:
        """The number of computing warps of a processor."""
        if self.inner:
            return serialize.machine_of(self.inner).warps
        return int(self.head["NumWarpsPerProcessor"])

    @property
    def task_infos(self) -> list[dict[str, Any]]:
        """An entry for each op that describes its tasks."""
        plan = self.inner
        if plan is None:
            return list(self.head["TaskInfos"])
        warps = self.num_warps_per_processor
        counts = self._task_counts(plan)
        return [
            {
                "Id": op.id,
                "NumWarps": warps,
                "SramBytes": 0,
                "Ops": [
                    {
                        "Type": op.kind,
                        "Name": op.name,
                        "Config": {**op.params, "NumTasks": counts[op.id]},
                    }
                ],
            }
            for op in plan.ops
            if op.operands  # the op that ends an iteration has no operands
        ]

    @property
    def processor_groups(self) -> list[dict[str, Any]]:
        """The processor groups, which show where ops run. Consecutive ops of the same
        PlannerContext, or of no context, form a group.

        There is no synchronisation between groups.
        """
        plan = self.inner
        if plan is None:
            return list(self.head["ProcessorGroups"])
        counts = self._task_counts(plan)
        ranges = plan.meta.get("processor_ranges") or [None] * len(plan.ops)
        contexts = plan.meta.get("contexts") or [None] * len(plan.ops)
        groups: list[dict[str, Any]] = []
        last: Any = ()
        for op, asked, context in zip(plan.ops, ranges, contexts, strict=True):
            if not op.operands:
                continue
            span = list(asked) if asked else [0, plan.processors]
            if context != last:
                groups.append({"ProcessorRange": span, "ResourceGroups": []})
                last = context
            resources = groups[-1]["ResourceGroups"]
            if not resources or resources[-1]["ProcessorRange"] != span:
                resources.append(
                    {
                        "ProcessorRange": span,
                        "WarpRange": [0, self.num_warps_per_processor],
                        "SramRange": [0, int(plan.machine["shared_bytes"])],
                        "TaskGroups": [],
                    }
                )
            covered = groups[-1]["ProcessorRange"]
            groups[-1]["ProcessorRange"] = [min(covered[0], span[0]), max(covered[1], span[1])]
            resources[-1]["TaskGroups"].append(
                {"TaskId": op.id, "TaskRange": [0, counts[op.id]], "Granularity": 1}
            )
        return groups

    @staticmethod
    def _task_counts(plan: inner.Plan) -> dict[int, int]:
        counts = {op.id: 0 for op in plan.ops}
        for phase in plan.phases:
            for tasks in phase.processors:
                for task in tasks:
                    counts[task.op] += 1
        return counts
