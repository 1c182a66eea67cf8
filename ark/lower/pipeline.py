"""The planner: graph + machine -> plan. Lowers, lays out memory, deals tasks to processors, places
counters, and has the verifier check the result.

Program order gives every dependence; what a task must wait for follows from where tasks touch
memory. A wait is placed only where the order is not already implied (program order on a processor,
earlier waits), so no plan has a redundant one.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ark.errors import InvalidUsageError, PlanError
from ark.ir.graph import Graph, Node
from ark.ir.values import Tensor
from ark.lower.chains import join_chains
from ark.lower.choose import choose, with_movers
from ark.lower.epilogues import join_epilogues
from ark.lower.fuse import fuse
from ark.lower.gathers import own_first
from ark.lower.narrow import narrow
from ark.lower.nodes import begins_alone, lower_nodes, meets_peers
from ark.lower.normed import join_norms
from ark.lower.overlap import JOINED, overlap
from ark.lower.pack import pack
from ark.lower.packets import choose_packets
from ark.lower.regions import join_regions
from ark.lower.rounded import round_rows
from ark.lower.slices import read_boxes
from ark.lower.spread import spread
from ark.lower.transposes import read_transposed
from ark.lower.waves import in_waves
from ark.lower.windows import read_windows
from ark.machine import Machine
from ark.plan import kind as kinds
from ark.plan import memory
from ark.plan.boxes import Templates
from ark.plan.collector import paused
from ark.plan.groups import Group
from ark.plan.packing import Packing, to_meta
from ark.plan.schedule import Schedule
from ark.plan.signature import packet_bytes
from ark.plan.types import INITIAL, Phase, Plan, PlanBuffer, PlanOp, PlanTensor

OPTIONS = ("cuts", "external", "fuse", "hosts", "overlap", "pack", "packets", "together", "variant")


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A graph as it will be lowered. received: ids of the buffers between ranks that hold packets.

    machines: by phase, with the one variant that it runs under. alone: the rank begins iterations
    by itself. ended: its peers wait for the end of an iteration. waves: some ops are in waves.
    """

    graph: Graph
    machines: tuple[Machine, ...]
    options: Mapping[str, Any]
    packings: tuple[Packing, ...]
    received: frozenset[int]
    alone: bool
    ended: bool
    waves: bool = False


def prepare(graph: Graph, machine: Machine, options: Mapping[str, Any] | None = None) -> Prepared:
    """Packs and fuses a graph and chooses the kernel variant; options and errors as for plan."""
    chosen = dict(options or {})
    unknown = sorted(set(chosen) - set(OPTIONS))
    if unknown:
        raise InvalidUsageError(
            f"the planner has no option {unknown[0]!r}; its options are {', '.join(OPTIONS)}"
        )
    hosts = chosen.get("hosts") or ()
    if hosts and len(hosts) != graph.world_size:
        raise InvalidUsageError(
            f"hosts names {len(hosts)} of {graph.world_size} ranks; give a number for each"
        )
    external = frozenset(chosen.get("external", ()))
    private = read_transposed(_private_copy(graph), external)
    packings: list[Packing] = []
    if chosen.get("pack", True):
        private, packings = pack(private, external)
    _check_ranges(private, machine)
    machines = choose(private, machine, chosen, external)
    received: frozenset[int] = frozenset()
    alone = begins_alone(private) and not chosen.get("together", False)
    ended = alone and meets_peers(private)
    nodes: list[Node] = []
    for part, target, kept in _kernels(private, machines, external):
        if chosen.get("fuse", True):
            handed = not target.has("single_thread")
            part = read_boxes(fuse(part, target, kept), kept)
            part = join_regions(part, kept, handed)
            part = narrow(join_chains(part, kept), target, kept)
            part = round_rows(part, target, kept)
            part = own_first(join_epilogues(part, target, kept), kept)
            part = read_windows(part, target, kept)
            part = join_norms(overlap(part, chosen, kept))
        part, more = spread(part, target, chosen, kept)
        nodes += part.nodes
        received |= more
    if len(machines) == 1 and any(n.type in JOINED for n in nodes):
        machines = (with_movers(machines[0], machine),)
    private.nodes = in_waves(nodes, machines) if chosen.get("fuse", True) else nodes
    waves = private.nodes != nodes
    return Prepared(private, machines, chosen, tuple(packings), received, alone, ended, waves)


def _kernels(
    graph: Graph, machines: Sequence[Machine], external: frozenset[int]
) -> Iterator[tuple[Graph, Machine, frozenset[int]]]:
    """The phases of each kernel as a graph of their own, with the machine that they run on and the
    ids of the buffers that somebody else reads.
    """
    for machine, run in itertools.groupby(range(len(machines)), machines.__getitem__):
        phases = set(run)
        part = graph.with_nodes(n for n in graph.nodes if n.phase in phases)
        others = (n for n in graph.nodes if n.phase not in phases)
        touched = {t.buffer.id for n in others for t in (*n.inputs, *n.outputs)}
        yield part, machine, external | touched


def plan(
    graph: Graph,
    machine: Machine,
    options: Mapping[str, Any] | None = None,
    meta: Mapping[str, Any] | None = None,
) -> Plan:
    """Makes the plan of one rank. Does not verify: all ranks' plans are verified together.

    options: `external` (ids of buffers whose memory the caller provides and may read and write
    between launches), `packets` (False keeps every dependence on counters), `fuse` (False keeps
    every op apart from its neighbours), `pack` (False keeps the model's weights as they are),
    `variant` (the kernel variant by name), `cuts` (how products are cut, by shape: ark.lower.cuts),
    `hosts` (a number for each rank, equal where ranks share memory; all by default), `together`
    (True: all ranks begin an iteration together, also where each could do so by itself), `overlap`
    (True joins products with the collectives that they meet; "dma": with copies by the proxy).
    Raises InvalidUsageError for any other.
    """
    return plan_prepared(prepare(graph, machine, options), meta)


@paused()
def plan_prepared(
    prepared: Prepared,
    meta: Mapping[str, Any] | None = None,
    drafted: Callable[[Plan], None] | None = None,
) -> Plan:
    """Lowers, places and schedules a graph that is prepared.

    drafted: is given the plan before it is scheduled, with all that its source depends on and each
    phase's tasks on one processor; a compiler may begin.
    """
    draft, schedule, members, places = _lowered(prepared, meta)
    listed = list(zip(prepared.graph.phases, members, places, strict=True))
    if drafted is not None:
        unscheduled = [
            Phase(name, (schedule.unscheduled(groups, draft.ops),), place)
            for name, groups, place in listed
        ]
        drafted(dataclasses.replace(draft, phases=tuple(unscheduled)))
    phases = [
        Phase(name, schedule.phase(number, groups, draft.ops), place)
        for number, (name, groups, place) in enumerate(listed)
    ]
    return dataclasses.replace(draft, phases=tuple(phases), counters=schedule.counters())


@paused()
def unscheduled(prepared: Prepared, meta: Mapping[str, Any] | None = None) -> Plan:
    """The plan of a graph that is prepared, without phases and counters."""
    return _lowered(prepared, meta)[0]


_Members = list[list[tuple[int, Group]]]  # by phase, with each group's place in the program


def _lowered(
    prepared: Prepared, meta: Mapping[str, Any] | None
) -> tuple[Plan, Schedule, _Members, list[int]]:
    """Lowers and places: the plan without phases, what makes them, and each one's variant."""
    private, machines, chosen = prepared.graph, prepared.machines, prepared.options
    groups = lower_nodes(private, machines, chosen, prepared.alone)
    if not any(kinds.get(group.kind).streams for group in groups):
        machines = tuple(machine.without_ring() for machine in machines)
    if private.world_size > 1 or len(private.phases) > 1:
        groups = _ended(groups)
    packed = machines[-1].has("packets") and chosen.get("packets", True)
    templates = Templates()
    packets: set[int] = set()
    if packed:
        packets = choose_packets(groups, machines, chosen, templates, prepared.received)
    packets |= {t.id for g in groups for t in g.operands if t.buffer.id in g.received}
    external = frozenset(chosen.get("external", ()))
    tables = _Tables(private, groups, packets, external, prepared.waves)
    schedule = Schedule(
        machines,
        tables.tensors,
        tables.buffers,
        private.rank,
        private.world_size,
        templates,
        1 if prepared.alone else private.world_size,
        prepared.ended,
        len(private.phases),
    )
    members: _Members = [[] for _ in private.phases]
    for i, group in enumerate(groups):
        members[group.phase].append((i, group))
    variants = tuple(dict.fromkeys(m.variant for m in reversed(machines)))
    places = [variants.index(m.variant) for m in machines]
    draft = Plan(
        rank=private.rank,
        world_size=private.world_size,
        machine=_machine_entry(dataclasses.replace(machines[-1], variants=variants)),
        buffers=tuple(tables.buffers),
        tensors=tuple(tables.tensors),
        ops=tuple(tables.ops),
        counters=(),
        phases=(),
        arenas=tables.arenas,
        meta={**(meta or {}), **to_meta(prepared.packings), **_ranges(groups), **_hosts(chosen)},
    )
    return draft, schedule, members, places


def _hosts(options: Mapping[str, Any]) -> dict[str, Any]:
    """Which ranks share a host, if not all do."""
    hosts = options.get("hosts") or ()
    return {"hosts": list(hosts)} if len(set(hosts)) > 1 else {}


def _ended(groups: Sequence[Group]) -> list[Group]:
    """The groups, and behind a phase's last one, if it has several tasks, the iteration's end."""
    last = {group.phase: place for place, group in enumerate(groups)}
    made: list[Group] = []
    for place, group in enumerate(groups):
        made.append(group)
        if place == last[group.phase] and len(group.coords) > 1:
            made.append(_end(group))
    return made


def _end(group: Group) -> Group:
    end = Group("end", "iteration_end", {}, (), [(0,)], (), group.phase, group.processors)
    end.context = group.context
    return end


def _check_ranges(graph: Graph, machine: Machine) -> None:
    """PlanError for an op that was asked to stay on processors which the machine does not have."""
    for node in graph.nodes:
        if node.processors and not node.virtual and node.processors[1] > machine.processors:
            raise PlanError(
                f"op {node.name!r} was asked to run on processors {node.processors[0]} to "
                f"{node.processors[1] - 1}, but {machine.name} has {machine.processors}, from 0 to "
                f"{machine.processors - 1}; give PlannerContext a range within these"
            )


def _ranges(groups: Sequence[Group]) -> dict[str, Any]:
    """The processors that each op was asked to stay on, and in which context, if any was."""
    found: dict[str, Any] = {}
    if any(g.processors for g in groups):
        found["processor_ranges"] = [list(g.processors) if g.processors else None for g in groups]
    if any(g.context is not None for g in groups):
        found["contexts"] = [g.context for g in groups]
    return found


def _machine_entry(machine: Machine) -> dict[str, Any]:
    entry = dataclasses.asdict(machine)
    entry["capabilities"] = list(machine.capabilities)
    entry["tile"] = list(machine.tile)
    entry["large_tiles"] = [list(t) for t in machine.large_tiles]
    entry["variants"] = [{**v, "roles": list(v["roles"])} for v in entry["variants"]]
    return entry


def _private_copy(graph: Graph) -> Graph:
    made = graph.with_nodes(graph.nodes)
    made.rank = graph.rank if graph.world_size > 1 else 0  # alone, whatever its number
    made.tensors = list(graph.tensors)
    made.buffers = list(graph.buffers)
    return made


class _Tables:
    """Numbers the tensors and buffers that the groups use, and places the buffers."""

    def __init__(
        self,
        graph: Graph,
        groups: Sequence[Group],
        packets: set[int],
        external: frozenset[int],
        waves: bool,
    ) -> None:
        self.rank = graph.rank
        self.packets = packets
        self._external = external
        self.buffers: list[PlanBuffer] = []
        self.tensors: list[PlanTensor] = []
        self.ops: list[PlanOp] = []
        self.arenas: dict[str, int] = {}
        self._tensor_ids: dict[tuple[Any, ...], int] = {}
        self._buffer_ids: dict[int, int] = {}
        self._lifetimes: dict[int, tuple[int, int]] = {}
        for i, group in enumerate(groups):
            operands = tuple(self._tensor(t, i) for t in group.operands)
            after = tuple(self._tensor(t, i) for t in group.after)
            self.ops.append(PlanOp(i, group.name, group.kind, group.params, operands, after))
        self._place(waves)

    def _tensor(self, tensor: Tensor, op: int) -> int:
        packet = tensor.id in self.packets
        key = (tensor.buffer.id, tensor.dtype.name, tensor.shape, tensor.extents, tensor.offsets)
        found = self._tensor_ids.get(key)
        buffer = self._buffer(tensor, packet)
        first, last = self._lifetimes.get(buffer, (op, op))
        self._lifetimes[buffer] = (min(first, op), max(last, op))
        if found is None:
            found = len(self.tensors)
            self._tensor_ids[key] = found
            self.tensors.append(
                PlanTensor(
                    found,
                    tensor.name or f"t{found}",
                    tensor.dtype.name,
                    tensor.shape,
                    tensor.extents,
                    tensor.offsets,
                    buffer,
                    packet,
                )
            )
        return found

    def _buffer(self, tensor: Tensor, packet: bool) -> int:
        source = tensor.buffer
        found = self._buffer_ids.get(source.id)
        if found is None:
            found = len(self.buffers)
            self._buffer_ids[source.id] = found
            rank = self.rank if source.rank < 0 else source.rank
            arena = "external" if source.id in self._external else source.arena
            self.buffers.append(
                PlanBuffer(
                    id=found,
                    name=source.name or tensor.name or f"b{source.id}",
                    arena="packet" if packet and arena != "symmetric" else arena,
                    nbytes=source.nbytes // tensor.dtype.itemsize * packet_bytes(tensor.dtype.name)
                    if packet
                    else source.nbytes,
                    rank=rank,
                    initial=arena in INITIAL,
                )
            )
        return found

    def _place(self, waves: bool) -> None:
        """Offsets: activations share memory, everything else lies one behind the other.

        Where ops stand side by side (waves), or come after each other by packets, which order no
        other memory, they would wait for each other if they shared memory: where all activations
        are few bytes each has its own then.
        """
        local = [b for b in self.buffers if b.rank == self.rank]
        sharing = [b for b in local if b.arena == "activation"]
        apart = waves or any(b.arena == "packet" for b in local)
        if apart and sum(memory.align(b.nbytes) for b in sharing) <= memory.FEW:
            everywhere = 0, len(self.ops)
            self._lifetimes.update({b.id: everywhere for b in sharing})
        offsets, total = memory.share(
            {b.id: b.nbytes for b in sharing}, {b.id: self._lifetimes[b.id] for b in sharing}
        )
        self.arenas["activation"] = total
        for arena in ("parameter", "state", "symmetric", "host", "packet"):
            members = [(b.id, b.nbytes) for b in local if b.arena == arena]
            placed, size = memory.lay_out(members)
            offsets.update(placed)
            self.arenas[arena] = size
        self.buffers = [
            dataclasses.replace(
                b,
                offset=offsets.get(b.id, -1 if b.rank != self.rank else 0),
            )
            for b in self.buffers
        ]
