"""The planner with the interface of ARK (microsoft/ark): it returns the class ark.Plan, and
supports rules that configure ops. `ark.planner` is this module.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

from ark import log
from ark.errors import InvalidUsageError
from ark.frontend.model import Model
from ark.ir.export import op_entry
from ark.ir.graph import Graph, Node
from ark.machine import Machine
from ark.runtime import planner
from ark.runtime.api.config import hints_of, read_config
from ark.runtime.api.context import PlannerContext as PlannerContext
from ark.runtime.api.plan import Plan as Plan
from ark.runtime.run import Ranks


class Planner(planner.Planner):
    """Makes the plan of the current (or a given) model for a device's machine, or for `machine`.

    ranks: the connection to the other ranks, if all ranks plan at the same time; they then use the
    measurements of `ark tune` of rank 0. Without `ranks` a rank uses its own measurements, and a
    launch rejects plans made with different ones. activation_bytes: a limit for the memory of
    activations; activations that do not fit are recomputed.

    Examples:
        >>> y = ark.relu(ark.tensor([64]))
        >>> plan = ark.Planner().plan()
        >>> plan.rank, plan.world_size
        (0, 1)
    """

    def __init__(
        self,
        device_id: int = 0,
        model: Model | None = None,
        machine: Machine | None = None,
        ranks: Ranks | None = None,
        activation_bytes: int | None = None,
    ) -> None:
        super().__init__(device_id, model, machine, ranks, activation_bytes)
        self._rules: list[Callable[[str, str], str]] = []

    def install_config_rule(self, rule: Callable[[str, str], str]) -> None:
        """Adds a rule that gives configurations of ops.

        rule: a function of (op as JSON, architecture) that returns a configuration as JSON, or ""
        for none. For each op that no PlannerContext configures, the rules are asked in the order in
        which they were added; the first configuration is used. It is checked and followed like a
        PlannerContext's config. A rule that raises an error is ignored for that op, with a warning.
        """
        if not callable(rule):
            raise InvalidUsageError(f"a config rule is a function, got {type(rule).__name__}")
        self._rules.append(rule)

    def plan(self) -> Plan:
        """The verified plan of this rank. Plans of several ranks are verified when they are
        launched.

        Tensors that Python still references have memory of their own; other tensors may share
        memory.
        """
        planned = super().plan()
        return Plan(planned.inner or planned.head, planned.model)

    def _configured(self, graph: Graph, arch: str) -> Graph:
        """The graph, with hints from the rules for ops that no context configures."""
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
                answer = rule(json.dumps(op_entry(node)), arch)
            except Exception as error:
                log.warn(f"a config rule failed for op {node.name!r} and is ignored: {error!r}")
                continue
            config = read_config(answer, f"the config rule for {node.name!r}")
            if config:
                return config
        return {}
