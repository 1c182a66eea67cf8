"""Prepares a graph for lowering: runs the passes and chooses the kernel variant of each phase
(entry point of the model). Called by ark.lower.pipeline, and by ark.lower.ranks for ranks that
share a plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ark.errors import InvalidUsageError, PlanError
from ark.ir.graph import Graph, Node
from ark.log import shows
from ark.lower.choose import choices, with_movers
from ark.lower.explain_variants import show_variants
from ark.lower.nodes import begins_alone, meets_peers
from ark.lower.observe import observer, show_pass
from ark.lower.passes import PASSES, Stage
from ark.lower.products import JOINED
from ark.lower.rewrite.context import Context
from ark.machine import Machine

OPTIONS = (
    "activation_bytes",
    "cuts",
    "engines",
    "external",
    "fuse",
    "hosts",
    "overlap",
    "pack",
    "packets",
    "lockstep",
    "variant",
)


@dataclass(frozen=True)
class Prepared:
    """A graph that is ready to be lowered. machines: for each phase, the machine with only the
    phase's kernel variant. alone: True if the rank may begin an iteration before its peers have
    ended the preceding one. ended: True if peers wait for the end of this rank's iterations.
    reordered: True if small ops were moved from their places in program order.
    """

    graph: Graph
    machines: tuple[Machine, ...]
    options: Mapping[str, Any]
    alone: bool
    ended: bool
    reordered: bool = False


def prepare(graph: Graph, machine: Machine, options: Mapping[str, Any] | None = None) -> Prepared:
    """Runs the passes and chooses the kernel variants. The options and the errors raised are those
    of ark.lower.pipeline.plan.
    """
    chosen = _checked(options or {}, graph.world_size)
    _check_ranges(graph, machine)
    external = frozenset(chosen.get("external", ()))
    context = Context(machine, chosen, external)
    private = _run(Stage.GRAPH, _private_copy(graph), context)
    chosen_variants = choices(private, context)
    if shows("lower"):
        show_variants(private, context, chosen_variants)
    machines = tuple(choice.machine for choice in chosen_variants)
    alone = begins_alone(private) and not chosen.get("lockstep", False)
    ended = alone and meets_peers(private)
    nodes: list[Node] = []
    received = private.received
    for part, target, kept in _kernels(private, machines, external):
        part = _run(Stage.KERNEL, part, Context(target, chosen, kept, machines))
        nodes += part.nodes
        received |= part.received
    if len(machines) == 1 and any(n.type in JOINED for n in nodes):
        machines = (with_movers(machines[0], machine),)
    joined = private.with_nodes(nodes)  # observers may keep the graphs that they are given
    joined.received = received
    context = Context(machine, chosen, external, machines, alone)
    ordered = _run(Stage.ORDER, joined, context)
    last = _run(Stage.CUT, ordered, context)
    return Prepared(last, machines, chosen, alone, ended, ordered is not joined)


def _run(stage: Stage, graph: Graph, context: Context) -> Graph:
    """The graph after all passes of a stage. Passes that cannot change the graph, and passes that
    an option turns off, are not run.
    """
    tell = observer()
    for step in PASSES:
        allowed = not step.option or context.options.get(step.option, True)
        if step.stage is not stage or not allowed or not step.applies(graph):
            continue
        before = graph
        graph = step.run(before, context)
        if tell is not None:
            tell(step.name, before, graph, context)
        if shows("passes"):
            show_pass(step.name, before, graph)
    return graph


def _checked(options: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    """The planner's options. Raises InvalidUsageError for an unknown option or an invalid value."""
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise InvalidUsageError(
            f"the planner has no option {unknown[0]!r}; its options are {', '.join(OPTIONS)}"
        )
    hosts = options.get("hosts") or ()
    if hosts and len(hosts) != world_size:
        raise InvalidUsageError(
            f"the option hosts has {len(hosts)} numbers for {world_size} ranks; give the number "
            "of a host for each rank"
        )
    limit = options.get("activation_bytes")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise InvalidUsageError(
            f"activation_bytes={limit!r} is not valid; give a whole number of bytes of at least 1"
        )
    return dict(options)


def _kernels(
    graph: Graph, machines: Sequence[Machine], external: frozenset[int]
) -> Iterator[tuple[Graph, Machine, frozenset[int]]]:
    """Divides the graph by kernels. A kernel runs consecutive phases with the same variant. Yields
    for each kernel a graph with only its phases, the machine with only its variant, and the ids of
    the buffers that the caller or other kernels access.
    """
    for machine, run in itertools.groupby(range(len(machines)), machines.__getitem__):
        phases = set(run)
        part = graph.with_nodes(n for n in graph.nodes if n.phase in phases)
        others = (n for n in graph.nodes if n.phase not in phases)
        touched = {t.buffer.id for n in others for t in (*n.inputs, *n.outputs)}
        yield part, machine, external | touched


def _check_ranges(graph: Graph, machine: Machine) -> None:
    """Raises PlanError for an op that is restricted to processors which the machine does not
    have.
    """
    for node in graph.nodes:
        if node.processors and not node.virtual and node.processors[1] > machine.processors:
            raise PlanError(
                f"op {node.name!r} is restricted to processors {node.processors[0]} to "
                f"{node.processors[1] - 1}, but {machine.name} has {machine.processors}, from 0 to "
                f"{machine.processors - 1}; give PlannerContext a range within these"
            )


def _private_copy(graph: Graph) -> Graph:
    copied = graph.with_nodes(graph.nodes)
    copied.rank = graph.rank if graph.world_size > 1 else 0  # without peers the rank is 0
    copied.tensors = list(graph.tensors)
    copied.buffers = list(graph.buffers)
    return copied
