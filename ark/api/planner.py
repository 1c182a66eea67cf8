"""ARK's planner and plan, thin over ark.plan: Planner, PlannerContext, Plan.

Planning needs no device: without one, `plan_script` and `Planner` plan for a machine model.
"""

from __future__ import annotations

import dataclasses
import json
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ark import log
from ark.api import task_plan
from ark.api.config import check_config, hints_of, read_config
from ark.api.session import device
from ark.api.task_schema import TaskPlan
from ark.api.task_schema import read as read_task_plan
from ark.errors import InvalidUsageError, PlanError, UnsupportedError
from ark.frontend.model import Model
from ark.ir.export import op_entry
from ark.ir.graph import Graph, Node
from ark.lower.pipeline import plan as make_plan
from ark.machine import Machine
from ark.plan import serialize
from ark.plan import types as inner
from ark.plan.verify import verify
from ark.runtime import tuned
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


class Plan:
    """A plan with ARK's properties. `inner` is ark's own plan, None for an empty one of ARK's.

    Plan(None) is empty; Plan(dict) reads ark's layout or ARK's. A plan in ARK's layout becomes one
    of ark's when it is launched (`built`), for the device and the model of that moment.
    """

    def __init__(self, plan: Any = None, model: Model | None = None) -> None:
        self.inner: inner.Plan | None = None
        self.model = model
        self._head = dict(_EMPTY)
        self._tasks: TaskPlan | None = None
        if isinstance(plan, inner.Plan):
            self.inner = plan
        elif isinstance(plan, Mapping) and "Rank" in plan:
            self._tasks = read_task_plan(plan)
            self._head = {**_EMPTY, **plan}
        elif plan is not None:
            self.inner = serialize.from_dict(plan)

    @classmethod
    def from_str(cls, plan_str: str) -> Plan:
        """Reads a plan; InvalidUsageError if it is no JSON, PlanError if it is no plan."""
        try:
            data = json.loads(plan_str)
        except (ValueError, RecursionError) as error:
            raise InvalidUsageError(f"this is no plan: {error}; a plan is JSON") from error
        return cls(data)

    @classmethod
    def from_file(cls, file_path: str | Path) -> Plan:
        """Reads a plan from a file; errors as from_str."""
        try:
            text = Path(file_path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidUsageError(f"{file_path} cannot be read as a plan: {error}") from error
        return cls.from_str(text)

    def __str__(self) -> str:
        return serialize.to_json(self.inner) if self.inner else json.dumps(self._head)

    def built(self, machine: Machine, members: Callable[[int], Ranks] | None = None) -> Plan:
        """The plan as one of ark's for a machine; itself where it is one, or has no tasks.

        Tensors of the current model keep their memory. members, errors: as ark.api.task_plan.build.
        """
        if self.inner is not None or self._tasks is None or not self._tasks.task_infos:
            return self
        return Plan(task_plan.build(self._tasks, Model.get_model(), machine, members))

    @property
    def rank(self) -> int:
        """The rank that the plan is for, from 0."""
        return self.inner.rank if self.inner else int(self._head["Rank"])

    @property
    def world_size(self) -> int:
        """Ranks that run the plan together."""
        return self.inner.world_size if self.inner else int(self._head["WorldSize"])

    @property
    def architecture(self) -> str:
        """What the plan was made for; ANY for an empty one."""
        return str(self.inner.machine["arch"]) if self.inner else str(self._head["Architecture"])

    @property
    def num_processors(self) -> int:
        """Processors that the plan has task lists for."""
        return self.inner.processors if self.inner else int(self._head["NumProcessors"])

    @property
    def num_warps_per_processor(self) -> int:
        """Computing warps of a processor."""
        if self.inner:
            return serialize.machine_of(self.inner).warps
        return int(self._head["NumWarpsPerProcessor"])

    @property
    def task_infos(self) -> list[dict[str, Any]]:
        """One entry per op: what its tasks compute."""
        plan = self.inner
        if plan is None:
            return list(self._head["TaskInfos"])
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
            if op.operands  # not what ends an iteration, which computes nothing
        ]

    @property
    def processor_groups(self) -> list[dict[str, Any]]:
        """Consecutive ops of one PlannerContext, or of none; their ranges are resource groups.
        Nothing waits at the borders of groups.
        """
        plan = self.inner
        if plan is None:
            return list(self._head["ProcessorGroups"])
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


_NESTED = ("processor_range", "warp_range", "sram_range")


class PlannerContext:
    """Within it, ops are placed and cut as asked. A context manager.

    processor_range [begin, end] is kept; planning for a machine that has no such processors raises
    PlanError. config: see ark.api.config; inner contexts add to and override what outer ones say.
    sync=False keeps the context's ops in one processor group of the plan; results are right either
    way, because ark orders tasks by what they read and write. warp_range and sram_range are shown
    by `dump` and change nothing: a task has all of its processor.
    """

    _stack: ClassVar[list[PlannerContext]] = []

    def __init__(self, **kwargs: Any) -> None:
        unknown = sorted(set(kwargs) - {*_NESTED, "sync", "config"})
        if unknown:
            raise InvalidUsageError(
                f"PlannerContext has no {', '.join(unknown)}; it takes {', '.join(_NESTED)}, sync "
                "and config"
            )
        self.settings = {k: v for k, v in kwargs.items() if v is not None}
        for name in _NESTED:
            if name in self.settings:
                self.settings[name] = _span(name, self.settings[name])
        if not isinstance(self.settings.get("sync", True), bool):
            raise InvalidUsageError(f"sync is {self.settings['sync']!r}; it must be True or False")
        if "config" in self.settings:
            self.settings["config"] = check_config(self.settings["config"], "config")

    def __enter__(self) -> PlannerContext:
        for name in _NESTED:
            outer = next(
                (c.settings[name] for c in reversed(self._stack) if name in c.settings), None
            )
            mine = self.settings.get(name)
            if outer and mine and not (outer[0] <= mine[0] and mine[1] <= outer[1]):
                raise PlanError(
                    f"{name} {mine} does not lie inside of {outer} of the context around it"
                )
        graph = self._graph = Model.get_model().graph
        self._before = graph.processors, graph.hints, graph.context
        if "processor_range" in self.settings:
            begin, end = self.settings["processor_range"][:2]
            graph.processors = (begin, end)
        self._stack.append(self)
        configs = (c.settings.get("config", {}) for c in self._stack)
        graph.hints = hints_of({key: value for one in configs for key, value in one.items()})
        if graph.context is None and self._joins():
            graph.context = graph.new_context()
        return self

    def _joins(self) -> bool:
        """Are its ops shown in one processor group, as ARK shows them?"""
        return "processor_range" in self.settings or self.settings.get("sync") is False

    def __exit__(self, *_: object) -> None:
        self._stack.remove(self)
        self._graph.processors, self._graph.hints, self._graph.context = self._before

    def dump(self) -> str:
        """The settings in force, outermost first, as JSON."""
        stack = self._stack if self in self._stack else [*self._stack, self]
        return json.dumps([c.settings for c in stack])


def _span(name: str, value: Any) -> list[int]:
    numbers = (
        isinstance(value, Sequence)
        and len(value) in (2, 3)
        and all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in value)
    )
    if not numbers or value[0] > value[1] or (len(value) == 3 and value[2] < 1):
        raise InvalidUsageError(
            f"{name} is {value!r:.80}; it must be [begin, end] or [begin, end, step], whole "
            "numbers from 0 on with begin <= end"
        )
    if name == "processor_range" and len(value) == 3 and value[2] != 1:
        raise UnsupportedError(
            f"{name} is {value!r}; processors in steps are not built, give [begin, end]"
        )
    if name == "processor_range" and value[0] == value[1]:
        raise InvalidUsageError(f"{name} is {value!r}; it must name at least one processor")
    return [int(v) for v in value]


class Planner:
    """Makes the plan of the current (or a given) model for a device's machine, or for `machine`."""

    machine_override: Machine | None = None

    def __init__(
        self, device_id: int = 0, model: Model | None = None, machine: Machine | None = None
    ) -> None:
        self.device_id = device_id
        self.model = model
        self.machine = machine
        self._rules: list[Callable[..., Any]] = []

    def install_config_rule(self, rule: Callable[..., Any]) -> None:
        """Adds a rule: a function of (op as JSON, architecture) that returns a configuration as
        JSON, or "" for none. Rules are asked, in the order in which they were added, for each op
        that no PlannerContext configures; the first answer counts. What it says is checked and
        followed as a PlannerContext's config is. A rule that raises is left out, with a warning.
        """
        if not callable(rule):
            raise InvalidUsageError(f"a config rule is a function, got {type(rule).__name__}")
        self._rules.append(rule)

    def plan(self) -> Plan:
        """The verified plan of this rank. Plans of several ranks are verified when they launch.

        Tensors that Python still holds keep their memory; others may share theirs.
        """
        model = self.model or Model.get_model()
        graph = model.graph
        if not any(not n.virtual for n in graph.nodes):
            return Plan({**_EMPTY, "Rank": graph.rank, "WorldSize": graph.world_size}, model)
        machine = self.machine or Planner.machine_override or device(self.device_id).machine
        graph = self._configured(graph, machine.arch)
        options: dict[str, Any] = {"external": sorted(model.storages.keys())}
        if graph.world_size == 1:
            options |= tuned.options(machine)
        made = make_plan(graph, machine, options)
        if graph.world_size == 1:
            verify([made])
        return Plan(made, model)

    def _configured(self, graph: Graph, arch: str) -> Graph:
        """The graph with the rules' hints where no context gave any."""
        if not self._rules:
            return graph
        return graph.with_nodes(
            n
            if n.virtual or n.hints is not None
            else dataclasses.replace(n, hints=hints_of(self._ask(n, arch)))
            for n in graph.nodes
        )

    def _ask(self, node: Node, arch: str) -> dict[str, Any]:
        for rule in self._rules:
            try:
                said = rule(json.dumps(op_entry(node)), arch)
            except Exception as error:
                log.warn(f"a config rule failed for op {node.name!r} and is left out: {error!r}")
                continue
            found = read_config(said, f"the config rule for {node.name!r}")
            if found:
                return found
        return {}


class _Planned(BaseException):
    """Ends a script at its first launch, with the plan that it would have launched."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan


def capture(plan: Plan | None) -> None:
    """Called by a launch: ends the script where a script is only being planned."""
    if Planner.machine_override is not None:
        raise _Planned(plan or Planner().plan())


def plan_script(path: str, machine: Machine) -> list[inner.Plan]:
    """The verified plan of the model that a Python script builds, up to its first launch.

    Nothing is run on a device. PlanError if the script builds nothing.
    """
    Model.reset()
    Planner.machine_override = machine
    arguments = sys.argv
    sys.argv = [path]
    try:
        try:
            names = runpy.run_path(path, run_name="__main__")
            made = Planner().plan().inner
            del names  # until here they held the tensors that keep their memory
        except _Planned as planned:
            made = planned.plan.built(machine).inner
        except OSError as error:
            raise InvalidUsageError(f"{path} cannot be read: {error}") from error
        except SyntaxError as error:
            raise InvalidUsageError(f"{path} is no Python script: {error}") from error
    finally:
        Planner.machine_override = None
        sys.argv = arguments
    if made is None:
        raise PlanError(f"{path} builds no model; call ops such as ark.add")
    return [made]
