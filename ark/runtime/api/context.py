"""PlannerContext, with which users set for some ops on which processors they run and how they are
divided into tasks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

from ark.errors import InvalidUsageError, PlanError, UnsupportedError
from ark.frontend.model import Model
from ark.runtime.api.config import check_config, hints_of

# The value of an argument of ark.PlannerContext: a range [begin, end] of processors, warps or
# bytes, a dictionary (`config`), or a bool (`sync`).
Setting: TypeAlias = "Sequence[int] | Mapping[str, object] | bool | None"
_NESTED = ("processor_range", "warp_range", "sram_range")


class PlannerContext:
    """A context manager for settings by which ops called in it are placed and divided into tasks.

    processor_range [begin, end]: the ops run on these processors; planning for a machine without
    them raises PlanError. config: see ark.runtime.api.config; inner contexts add to and override
    outer ones. sync=False shows the context's ops in one processor group of the plan. It does not
    affect results, because ark orders tasks by the data that they read and write. warp_range and
    sram_range are shown by `dump` and have no effect: a task has its processor to itself.

    Examples:
        >>> with ark.PlannerContext(processor_range=[0, 1]):
        ...     y = ark.relu(ark.tensor([64]))
        >>> ark.Planner().plan().processor_groups[0]["ProcessorRange"]
        [0, 1]
    """

    _stack: ClassVar[list[PlannerContext]] = []

    def __init__(self, **kwargs: Setting) -> None:
        unknown = sorted(set(kwargs) - {*_NESTED, "sync", "config"})
        if unknown:
            raise InvalidUsageError(
                f"PlannerContext has no {', '.join(unknown)}; it takes {', '.join(_NESTED)}, sync "
                "and config"
            )
        self.settings: dict[str, Any] = {k: v for k, v in kwargs.items() if v is not None}
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
                    f"{name}={mine} is not within {outer}, the range of the enclosing "
                    "PlannerContext"
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
        """True if the ops of the context are shown in one processor group of the plan. This is
        requested by a processor_range or by sync=False.
        """
        return "processor_range" in self.settings or self.settings.get("sync") is False

    def __exit__(self, *_: object) -> None:
        self._stack.remove(self)
        self._graph.processors, self._graph.hints, self._graph.context = self._before

    def dump(self) -> str:
        """The settings of all open contexts as JSON, outermost first."""
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
            f"{name} is {value!r}; a step between processors is not supported; give [begin, end]"
        )
    if name == "processor_range" and value[0] == value[1]:
        raise InvalidUsageError(f"{name} is {value!r}; it must name at least one processor")
    return [int(v) for v in value]
