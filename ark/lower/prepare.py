"""From a graph to one that can be lowered: packed, rewritten, and every phase with its variant.

Called by ark.lower.pipeline, and by ark.lower.ranks where ranks share a plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ark.errors import InvalidUsageError, PlanError
from ark.ir.graph import Graph, Node
from ark.lower.choose import choose, with_movers
from ark.lower.nodes import begins_alone, meets_peers
from ark.lower.rewrite.attend import attend
from ark.lower.rewrite.chains import join_chains
from ark.lower.rewrite.channels import channels_last
from ark.lower.rewrite.epilogues import join_epilogues
from ark.lower.rewrite.factors import take_factors_out
from ark.lower.rewrite.fuse import fuse
from ark.lower.rewrite.gathers import own_first
from ark.lower.rewrite.narrow import narrow
from ark.lower.rewrite.normed import join_norms
from ark.lower.rewrite.overlap import JOINED, overlap
from ark.lower.rewrite.pack import pack
from ark.lower.rewrite.regions import join_regions
from ark.lower.rewrite.rounded import round_rows
from ark.lower.rewrite.rows import take_rows_early
from ark.lower.rewrite.scales import join_scales
from ark.lower.rewrite.sides import lay_sides
from ark.lower.rewrite.slices import read_boxes
from ark.lower.rewrite.spread import spread
from ark.lower.rewrite.terms import join_terms
from ark.lower.rewrite.transposes import read_transposed
from ark.lower.rewrite.waves import in_waves
from ark.lower.rewrite.windows import read_windows
from ark.machine import Machine
from ark.plan.packing import Packing

OPTIONS = (
    "cuts",
    "engines",
    "external",
    "fuse",
    "hosts",
    "overlap",
    "pack",
    "packets",
    "together",
    "variant",
)


@dataclass(frozen=True)
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
    if chosen.get("fuse", True):
        private = channels_last(private, machine, external)
    packings: list[Packing] = []
    if chosen.get("pack", True):
        private, packings = pack(private, external)
    _check_ranges(private, machine)
    private, machines = _attending(private, machine, chosen, external)
    received: frozenset[int] = frozenset()
    alone = begins_alone(private) and not chosen.get("together", False)
    ended = alone and meets_peers(private)
    nodes: list[Node] = []
    for part, target, kept in _kernels(private, machines, external):
        part = lay_sides(part, target)
        if chosen.get("fuse", True):
            handed = not target.has("single_thread")
            part = read_boxes(fuse(part, target, kept), kept)
            part = join_regions(part, kept, handed)
            part = narrow(join_chains(part, kept), target, kept)
            part = round_rows(part, target, kept)
            part = take_rows_early(part, target, kept)
            part = take_factors_out(join_epilogues(join_scales(part, kept), target, kept))
            part = own_first(join_terms(part, kept), kept)
            part = read_windows(part, target, kept)
            part = join_norms(overlap(part, target, chosen, kept))
        part, more = spread(part, target, chosen, kept)
        nodes += part.nodes
        received |= more
    if len(machines) == 1 and any(n.type in JOINED for n in nodes):
        machines = (with_movers(machines[0], machine),)
    private.nodes = in_waves(nodes, machines) if chosen.get("fuse", True) else nodes
    waves = private.nodes != nodes
    return Prepared(private, machines, chosen, tuple(packings), received, alone, ended, waves)


def _attending(
    graph: Graph, machine: Machine, options: Mapping[str, Any], external: frozenset[int]
) -> tuple[Graph, tuple[Machine, ...]]:
    """The graph with its variants; with attention in the place of products and softmax where it
    then runs on matrix units, or where a processor has one thread and executes such a plan.
    """
    made = attend(graph, external) if options.get("fuse", True) else graph
    if made is not graph:
        machines = choose(made, machine, options, external)
        if all(
            _multiplies_attention(machines[n.phase]) for n in made.nodes if n.type == "attention"
        ):
            return made, machines
    return graph, choose(graph, machine, options, external)


def _multiplies_attention(machine: Machine) -> bool:
    boxed = machine.has("wgmma") or machine.has("single_thread")
    return machine.has("attention_units") or (machine.variant.name == "matrix" and boxed)


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


def _check_ranges(graph: Graph, machine: Machine) -> None:
    """PlanError for an op that was asked to stay on processors which the machine does not have."""
    for node in graph.nodes:
        if node.processors and not node.virtual and node.processors[1] > machine.processors:
            raise PlanError(
                f"op {node.name!r} was asked to run on processors {node.processors[0]} to "
                f"{node.processors[1] - 1}, but {machine.name} has {machine.processors}, from 0 to "
                f"{machine.processors - 1}; give PlannerContext a range within these"
            )


def _private_copy(graph: Graph) -> Graph:
    made = graph.with_nodes(graph.nodes)
    made.rank = graph.rank if graph.world_size > 1 else 0  # alone, whatever its number
    made.tensors = list(graph.tensors)
    made.buffers = list(graph.buffers)
    return made
