"""Plans kernels that work on torch's tensors. Called by program.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import ark
from ark.errors import PlanError
from ark.interop.torch.values import Value
from ark.ir.graph import Graph
from ark.lower.pipeline import draft
from ark.lower.pipeline import plan as make_plan
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.machine.variant import COMPUTE, LOAD, MOVE, block
from ark.plan.cost import busied, phase_us
from ark.plan.serialize import machine_of
from ark.plan.signature import EXTERNAL_ALIGNMENT
from ark.plan.types import BOX_ALIGNMENT_BYTES, Plan
from ark.plan.verify import verify
from ark.runtime import tuned, tuned_collectives
from ark.runtime.planned import Planned
from ark.runtime.planner import Planner, capture
from ark.runtime.run import Ranks


class Planning:
    """Plans a model for a machine, in two steps. The kernel's source depends on the first step
    only, so it can already be compiled during the second step.

    places: inputs and results, whose memory belongs to the caller. boxes: True if the addresses of
    this memory are aligned for copies of memory boxes. compare: True to choose the kernel variant
    by the predicted time of all ops. kept: inputs that are the same tensors in nearly every call;
    if a script is run only to make its plan, they count as parameters. fresh: the names of results
    whose memory is allocated for each call, so that it overlaps no other memory. loose: True if the
    caller may later move some external buffers to unaligned addresses.
    """

    def __init__(
        self,
        model: ark.Model,
        places: Sequence[Value],
        machine: Machine,
        members: Ranks | None = None,
        boxes: bool = True,
        compare: bool = False,
        kept: Sequence[Value] = (),
        fresh: Collection[str] = (),
        loose: bool = False,
    ) -> None:
        if Planner.machine_override is not None:
            arenas = {v.tensor.ir.buffer.id: "parameter" for v in kept}
            model.graph = model.graph.in_arenas(arenas)
            capture(Planned(None, model))
        external = sorted({v.tensor.ir.buffer.id for v in places})
        options: dict[str, Any] = {"external": external, **tuned.options(machine)}
        options |= tuned_collectives.options(machine, model.graph.world_size, members)
        self._graph, self._options, self._members = model.graph, options, members
        self._machine, self._compare = _counting_on(machine, boxes), compare
        self._loose, self._fresh = loose, sorted(fresh)
        self._draft = draft(model.graph, self._machine, options)

    def drafted(self) -> Plan | None:
        """The plan before it is scheduled; None if `finish` may choose another variant or number of
        processors.
        """
        loads = machine_of(self._draft.plan).variant.role(LOAD)
        starts = self._machine.has(Capability.STARTS_PROCESSORS)
        if starts or (self._compare and not loads):
            return None
        return self._placed(self._draft.unscheduled())

    def finish(self) -> Plan:
        """The plan. It is verified if there is a single rank; the plans of several ranks are
        verified when they are loaded. May be called once.
        """
        plan, options, machine = self._draft.scheduled(), self._options, self._machine
        if self._compare:
            plan, options = _faster(plan, self._graph, machine, options)
        dealt = self._members is not None or any(node.processors for node in self._graph.nodes)
        busy = machine.processors if dealt else busied(plan, machine)
        if busy < machine.processors:
            plan = make_plan(self._graph, machine.with_processors(busy), options)
        if self._members is None:
            verify([plan])
        return self._placed(plan)

    def _placed(self, plan: Plan) -> Plan:
        """Returns the plan with two additions: the names of results that are allocated for each
        call and, if its kernel loads boxes, the alignment of external buffers. A kernel that loads
        boxes can read torch's tensors in place only if they have this alignment.
        """
        meta = dict(plan.meta)
        if self._fresh:
            meta["fresh"] = self._fresh
        if not self._loose and machine_of(plan).variant.role(LOAD):
            meta[EXTERNAL_ALIGNMENT] = BOX_ALIGNMENT_BYTES
        return dataclasses.replace(plan, meta=meta)


def _faster(
    plan: Plan, graph: Graph, machine: Machine, options: dict[str, Any]
) -> tuple[Plan, dict[str, Any]]:
    """Compares the predicted times of the given plan and of a plan with the kernel variant that has
    loading warps. Returns the faster plan and its planner options. The planner itself chooses a
    variant by the matmuls of a graph only. In a part of a network, however, matmuls may take less
    time than transposes that only one of the variants needs.
    """
    loading = next((v.name for v in machine.variants if v.role(LOAD)), None)
    if loading is None or machine_of(plan).variant.role(LOAD):
        return plan, options
    asked = {**options, "variant": loading}
    try:
        other = make_plan(graph, machine, asked)
    except PlanError:
        return plan, options
    return (other, asked) if phase_us(other, 0) < phase_us(plan, 0) else (plan, options)


def _counting_on(machine: Machine, boxes: bool) -> Machine:
    """The machine with only those kernel variants whose launches can continue from one another.
    These are the variants without an operand stream (copies of weights that run ahead across
    iterations): `block`, if it reads operands in place, and `matrix`, which loads boxes of
    matrices.
    """
    first = block(machine.variants[0].role(COMPUTE))
    loads = [v for v in machine.variants if v.role(LOAD) and not v.stages and not v.role(MOVE)]
    return dataclasses.replace(machine, variants=(first, *(loads if boxes else ())))
