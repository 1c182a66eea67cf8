"""Caches results that the predictions of many plans of one graph share: splits of its ops, costs of
blocks, and orders of pipelines. Called by ark.parallel.plans.predict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ark.ir.graph import Graph
from ark.parallel.pipeline.named import (
    Named,
    list_schedule,
    named,
)
from ark.parallel.pipeline.schedule import Schedule
from ark.parallel.plans.blocks import blocks_of, isomorphic
from ark.parallel.plans.choices import Costs, Option
from ark.parallel.plans.prediction import BlockCost, Work
from ark.parallel.plans.rules import allowed, roles_of
from ark.parallel.plans.search import Change, Memory, changes, search
from ark.parallel.plans.stages import partition
from ark.parallel.transform.normal import normal


class Splits:
    """The splits of a graph's ops over some axes of the mesh, cached by the arguments of the
    request. Ops are those of the graph's normal form, in which each tensor has one shape.

    itemsize: bytes of an element of the largest parameter; 4 if there are no parameters.
    """

    def __init__(self, graph: Graph) -> None:
        self.nodes = normal(graph).graph.nodes
        self.blocks = blocks_of(self.nodes)
        self.same = isomorphic(self.blocks)
        self.roles = roles_of(self.nodes)
        parameters = [t for n in self.nodes for t in n.inputs if t.buffer.arena == "parameter"]
        largest = max(parameters, key=lambda t: t.nbytes, default=None)
        self.itemsize = largest.dtype.itemsize if largest else 4
        self._chosen: dict[tuple[object, ...], tuple[dict[int, Option], list[Change], bool]] = {}
        self._costs: dict[tuple[object, ...], list[BlockCost]] = {}
        self._orders: dict[tuple[object, ...], tuple[Named, Schedule]] = {}
        self._stages: dict[tuple[object, ...], list[int]] = {}

    def find(
        self, costs: Costs, names: Sequence[str], work: Work, memory: Memory | None = None
    ) -> tuple[dict[int, Option], list[BlockCost], bool]:
        """Returns the option of each node, the costs of blocks, and True if the options are proven
        to be the fastest.
        """
        key = (costs.mesh, costs.links, costs.training, tuple(names), memory)
        if key not in self._chosen:
            first = [n for n in self.nodes if self.same[n.id] == n.id]
            able = {n.id: allowed(self.roles, n, costs.options(n), names) for n in first}
            result = search(self.nodes, able, costs, memory, self.same)
            chosen = {
                n.id: next(o for o in able[self.same[n.id]] if o.choice == result.choices[n.id])
                for n in self.nodes
            }
            self._chosen[key] = (chosen, changes(self.nodes, chosen, costs), result.optimal)
        chosen, moved, optimal = self._chosen[key]
        how = (*key, work.recompute)
        if how not in self._costs:
            self._costs[how] = block_costs(self, chosen, moved, costs, work)
        return chosen, self._costs[how], optimal

    def order(
        self, pipeline: str, depth: int, count: int, inference: bool
    ) -> tuple[Named, Schedule]:
        """A pipeline with stages of equal time, and its schedule. For stages with other times, the
        order on each device is reused.
        """
        key = (pipeline, depth, count, inference)
        if key not in self._orders:
            plan = named(pipeline, depth, inference=inference)
            self._orders[key] = (plan, list_schedule(plan, count))
        return self._orders[key]

    def stages(self, loads: tuple[float, ...], count: int, shared: tuple[bool, ...]) -> list[int]:
        """The stage of each block, as computed by `partition`."""
        key = (loads, count, shared)
        if key not in self._stages:
            self._stages[key] = partition(loads, count, shared)
        return self._stages[key]


def block_costs(
    splits: Splits,
    chosen: Mapping[int, Option],
    changed: Sequence[Change],
    costs: Costs,
    work: Work,
) -> list[BlockCost]:
    """The cost of each block under the options of its nodes. The cost of a conversion is added to
    the block that reads the converted value.
    """
    by_reader: dict[int, list[Change]] = {}
    for change in changed:
        by_reader.setdefault(change.reader, []).append(change)
    seen: set[tuple[int, object]] = set()
    blocks = []
    for block in splits.blocks:
        moved = tuple(c for n in block.nodes for c in by_reader.get(n.id, ()))
        computed = sum(chosen[n.id].us for n in block.nodes)
        forward = computed + sum(c.us for c in moved if not c.backward)
        backward = 0.0
        if work.training:
            backward = 2 * computed + sum(c.us for c in moved if c.backward)
            backward += forward if work.recompute else 0.0
        held = 0
        for node in block.nodes:
            for tensor, want in zip(node.inputs, chosen[node.id].inputs, strict=True):
                key = (tensor.buffer.id, want)
                if tensor.buffer.arena == "parameter" and key not in seen:
                    seen.add(key)
                    held += costs.local(tensor, want) * tensor.dtype.itemsize
        saved = sum(chosen[n.id].saved for n in block.nodes)
        last = chosen[block.nodes[-1].id].saved
        blocks.append(BlockCost(block, forward, backward, held, saved, last, moved))
    return blocks
