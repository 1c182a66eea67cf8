"""The planner: creates a plan from a graph and a machine. It lowers the graph, lays out memory,
assigns tasks to processors and adds counters. ark.lower.prepare rewrites the graph before, and the
verifier checks the plan afterwards.

Dependences follow from program order and from the memory that tasks access. A wait is placed only
if the order is not already implied by program order on a processor or by earlier waits, so no plan
has a redundant wait.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ark.ir.graph import Graph
from ark.log import show, show_noted, shows
from ark.lower.claims import claimed
from ark.lower.contents import Contents
from ark.lower.list_scheduling import list_scheduled
from ark.lower.nodes import lower_nodes
from ark.lower.observe import cuts_text, plan_text
from ark.lower.packets import choose_packets
from ark.lower.prepare import Prepared, prepare
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.plan import kind as kinds
from ark.plan.boxes import Templates
from ark.plan.collector import paused
from ark.plan.groups import Group
from ark.plan.packing import to_meta
from ark.plan.params import Params
from ark.plan.schedule import Schedule
from ark.plan.serialize import machine_entry
from ark.plan.types import Phase, Plan

# In a training step, the memory of an activation is not used again by the next ops after its last
# reader. They would have to wait for it.
LAG_OPS = 12


def plan(
    graph: Graph,
    machine: Machine,
    options: Mapping[str, Any] | None = None,
    meta: Mapping[str, Any] | None = None,
) -> Plan:
    """The plan of one rank. It is not verified here, because the plans of all ranks are verified as
    a set.

    options:
    - `external`: ids of buffers whose memory the caller provides and may read and write between
      launches.
    - `packets`: False makes tasks wait for each other by counters only, never by packets.
    - `fuse`: False disables the passes that fuse ops.
    - `pack`: False disables concatenating weights that multiply the same input.
    - `variant`: the name of the kernel variant to use.
    - `cuts`: tile sizes and parts of k of products, by shape (ark.lower.cuts).
    - `engines`: by collective, a list of sizes, each with the engine that was measured as fastest
      for each algorithm at this size (ark.lower.engines).
    - `hosts`: a number for each rank, equal where ranks share memory; by default all are equal.
    - `lockstep`: True makes all ranks begin an iteration at the same time, also where each could
      begin without its peers.
    - `overlap`: True fuses products with the collectives before or after them, so that tiles are
      sent while others are computed; the name of an engine by which the host's proxy copies
      (ark.lower.engines.COPIED) does the same with its copies.
    - `activation_bytes`: the most bytes of activations that are alive at once
      (ark.lower.rewrite.recompute).
    Raises InvalidUsageError for any other option.
    """
    return plan_prepared(prepare(graph, machine, options), meta)


@paused()
def plan_prepared(
    prepared: Prepared,
    meta: Mapping[str, Any] | None = None,
    drafted: Callable[[Plan], None] | None = None,
) -> Plan:
    """Lowers a prepared graph to tasks, places its buffers and schedules the tasks. drafted: a
    function that is called before the tasks are scheduled, so that the kernel can be compiled
    meanwhile. It gets a plan that has everything on which the kernel's source depends, and one task
    list per phase.
    """
    lowered = _lowered(prepared, meta)
    if drafted is not None:
        drafted(lowered.unscheduled())
    return lowered.scheduled()


@paused()
def draft(graph: Graph, machine: Machine, options: Mapping[str, Any] | None = None) -> Draft:
    """The first part of `plan`, with everything on which the kernel's source depends."""
    return _lowered(prepare(graph, machine, options), None)


@paused()
def unscheduled(prepared: Prepared, meta: Mapping[str, Any] | None = None) -> Plan:
    """The plan of a prepared graph before scheduling: it has ops and memory, but no phases and no
    counters.
    """
    return _lowered(prepared, meta).plan


@dataclass(frozen=True)
class Draft:
    """A plan that is not scheduled yet. plan: the plan without phases and counters. names: the
    names of the phases. schedule: the object that builds the phases and counters. groups: for each
    phase, its groups of tasks, each with its index in program order. variants: for each phase, the
    index of its kernel variant.
    """

    plan: Plan
    names: Sequence[str]
    schedule: Schedule
    groups: list[list[tuple[int, Group]]]
    variants: list[int]

    def unscheduled(self) -> Plan:
        """The plan before scheduling, with one task list per phase. It suffices to compile the
        kernel. Call this method before `scheduled`.
        """
        phases = [
            Phase(name, (self.schedule.unscheduled(groups, self.plan.ops),), variant)
            for name, groups, variant in self._phases()
        ]
        return dataclasses.replace(self.plan, phases=tuple(phases))

    @paused()
    def scheduled(self) -> Plan:
        """The plan. May be called once."""
        phases = [
            Phase(name, self.schedule.phase(number, groups, self.plan.ops), variant)
            for number, (name, groups, variant) in enumerate(self._phases())
        ]
        counters = self.schedule.counters()
        plan = dataclasses.replace(self.plan, phases=tuple(phases), counters=counters)
        if shows("plan"):
            show("plan", plan_text(plan))
        return plan

    def _phases(self) -> list[tuple[str, list[tuple[int, Group]], int]]:
        return list(zip(self.names, self.groups, self.variants, strict=True))


def _lowered(prepared: Prepared, meta: Mapping[str, Any] | None) -> Draft:
    """Lowers the graph and places its buffers."""
    private, machines, chosen = prepared.graph, prepared.machines, prepared.options
    groups = lower_nodes(private, machines, chosen, prepared.alone)
    if not any(kinds.get(group.kind).streams for group in groups):
        machines = tuple(machine.without_ring() for machine in machines)
    groups = claimed(groups, machines)
    limit = chosen.get("activation_bytes")
    single = private.world_size == 1 and len(machines) == 1 and limit is None
    listed = list_scheduled(groups, machines[0]) if single else None
    groups = groups if listed is None else listed
    if shows("lower"):
        show_noted("lower")
        show("lower", cuts_text(groups))
    if private.world_size > 1 or len(private.phases) > 1:
        groups = _ended(groups)
    packed = machines[-1].has(Capability.PACKETS) and chosen.get("packets", True)
    templates = Templates()
    packets: set[int] = set()
    if packed:
        packets = choose_packets(groups, machines, chosen, templates, private.received)
    packets |= {t.id for g in groups for t in g.operands if t.buffer.id in g.received}
    external = frozenset(chosen.get("external", ()))
    lag = 0 if listed is None else LAG_OPS
    little = machines[-1].cooperative
    contents = Contents(private, groups, packets, external, prepared.reordered, limit, lag, little)
    schedule = Schedule(
        machines,
        contents.tensors,
        contents.buffers,
        private.rank,
        private.world_size,
        templates,
        1 if prepared.alone else private.world_size,
        prepared.ended,
        len(private.phases),
    )
    by_phase: list[list[tuple[int, Group]]] = [[] for _ in private.phases]
    for i, group in enumerate(groups):
        by_phase[group.phase].append((i, group))
    variants = tuple(dict.fromkeys(m.variant for m in reversed(machines)))
    plan = Plan(
        rank=private.rank,
        world_size=private.world_size,
        machine=machine_entry(dataclasses.replace(machines[-1], variants=variants)),
        buffers=tuple(contents.buffers),
        tensors=tuple(contents.tensors),
        ops=tuple(schedule.claimed(op) for op in contents.ops),
        counters=(),
        phases=(),
        arenas=contents.arenas,
        meta={**(meta or {}), **to_meta(private.packings), **_ranges(groups), **_chosen(chosen)},
    )
    indices = [variants.index(m.variant) for m in machines]
    return Draft(plan, private.phases, schedule, by_phase, indices)


def _chosen(options: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata of the plan that follows from the options: the number of each rank's host if there
    are several hosts, and the measured engines if there are any.
    """
    hosts = options.get("hosts") or ()
    meta: dict[str, Any] = {"hosts": list(hosts)} if len(set(hosts)) > 1 else {}
    if options.get("engines"):
        meta["engines"] = options["engines"]
    return meta


def _ended(groups: Sequence[Group]) -> list[Group]:
    """The groups of tasks, changed so that each phase ends with a single task, which ends the
    iteration. If the last group of a phase has several tasks, a group with one `iteration_end` task
    is added after it.
    """
    last = {group.phase: place for place, group in enumerate(groups)}
    result: list[Group] = []
    for place, group in enumerate(groups):
        result.append(group)
        if place == last[group.phase] and len(group.coords) > 1:
            result.append(_end(group))
    return result


def _end(group: Group) -> Group:
    end = Group("end", "iteration_end", Params(), (), [(0,)], (), group.phase, group.processors)
    end.context = group.context
    return end


def _ranges(groups: Sequence[Group]) -> dict[str, Any]:
    """Metadata of the plan: for each op that the user has restricted to some processors, the range
    of processors and the number of the PlannerContext that set it. Empty if the user set none.
    """
    ranges: dict[str, Any] = {}
    if any(g.processors for g in groups):
        ranges["processor_ranges"] = [list(g.processors) if g.processors else None for g in groups]
    if any(g.context is not None for g in groups):
        ranges["contexts"] = [g.context for g in groups]
    return ranges
