"""Recomputes activations instead of keeping them (rematerialization), so that the activations alive
at the same time fit into a given number of bytes, the option `activation_bytes`.

A value that is read long after it was computed, such as a forward pass's value that the backward
pass reads, is dropped and computed again before its next reader, from values that are still in
memory. At the position where most bytes are alive, the value is chosen that frees the most bytes
per predicted microsecond of recomputation, as in XLA's rematerialization; this is repeated. For
chains of layers see Chen et al. 2016. The recomputed op is the same op on the same values, so
results are equal bit for bit. Listed in ark.lower.passes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from ark.errors import PlanError
from ark.ir.graph import Graph, Node
from ark.ir.values import Buffer, Tensor
from ark.lower import registry
from ark.lower.boxed import depth_of
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.pack_weights import writes
from ark.machine import Machine
from ark.plan import memory
from ark.tasks.custom import CUSTOM

MAX_SEGMENT_OPS = 16
"""Most ops that are recomputed for one value."""
MAX_STALLED_STEPS = 200
"""The search ends after this many consecutive recomputations that do not reduce the bytes that are
alive at once. A single recomputation may not reduce them, because several positions may have
equally many bytes alive.
"""


def recompute(graph: Graph, context: Context) -> Graph:
    """The graph with as many activations recomputed as the option requires; the graph itself if
    they fit. Raises PlanError if the search does not reach the limit.
    """
    limit = context.options.get("activation_bytes")
    if limit is None:
        return graph
    program = smallest = _Program(graph, list(graph.nodes), context)
    least, stalled = math.inf, 0
    while (size := program.bytes(limit)) > limit:
        stalled = stalled + 1 if size >= least else 0
        if size < least:
            least, smallest = size, program
        best = program.best()
        if best is None or stalled == MAX_STALLED_STEPS:
            reached = smallest.bytes(smallest.most)
            raise PlanError(
                f"activation_bytes={limit} is too small for this program: recomputation reaches "
                f"{reached} bytes; give at least as many, a smaller batch or more ranks"
            )
        program = _Program(graph, program.rewritten(best), context)
    return graph if program.nodes == graph.nodes else graph.with_nodes(program.nodes)


@dataclass(frozen=True)
class _Segment:
    """Ops to recompute before the node at index `place`. repeated: the indices of these ops, in
    order. freed: bytes that this frees at the index where most bytes are alive. us: predicted
    microseconds of the recomputation.
    """

    place: int
    repeated: tuple[int, ...]
    freed: int
    us: float


class _Program:
    """The activations of a list of nodes: for each, the index of the node that writes it and the
    indices of the nodes that use it.
    """

    def __init__(self, graph: Graph, nodes: Sequence[Node], context: Context) -> None:
        self.graph, self.nodes, self.context = graph, nodes, context
        self.sizes: dict[int, int] = {}  # bytes of this rank's activations, aligned
        self.written: dict[int, list[int]] = defaultdict(list)
        self.used: dict[int, list[int]] = defaultdict(list)
        for place, node in enumerate(nodes):
            if node.virtual:
                continue
            for number in dict.fromkeys(writes(node)):
                self.written[number].append(place)
            for tensor in (*node.inputs, *node.outputs, *node.after):
                buffer = tensor.buffer
                uses = self.used[buffer.id]
                if not uses or uses[-1] != place:
                    uses.append(place)
                local = buffer.rank < 0 or buffer.rank == graph.rank
                if buffer.arena == "activation" and local and buffer.id not in context.kept:
                    self.sizes[buffer.id] = memory.align(buffer.nbytes)
        changes = [0] * (len(nodes) + 1)
        for number, size in self.sizes.items():
            changes[self.used[number][0]] += size
            changes[self.used[number][-1] + 1] -= size
        alive = list(accumulate(changes))
        self.most = max(alive)
        self.peak = alive.index(self.most)

    def bytes(self, limit: int) -> int:
        """The largest number of bytes of activations that are alive at the same time. If this
        number is within the limit, the result is instead the size of the memory in which the
        activations are placed, which may be larger because of gaps.
        """
        if self.most > limit:
            return self.most
        lifetimes = {b: (self.used[b][0], self.used[b][-1]) for b in self.sizes}
        return memory.share(self.sizes, lifetimes)[1]

    def best(self) -> _Segment | None:
        """The ops whose recomputation frees the most bytes per microsecond at the index where most
        bytes are alive; None if no recomputation frees any there.
        """
        segments = [s for b in self.sizes if (s := self._segment(b)) is not None]
        return max(segments, key=lambda s: (s.freed / s.us, -s.place), default=None)

    def _segment(self, buffer: int) -> _Segment | None:
        """The ops that recompute a value before its first use after the peak (the index where most
        bytes are alive); None if that frees no memory at the peak.
        """
        uses = self.used[buffer]
        place = next((p for p in uses if p > self.peak), None)
        if place is None or uses[0] >= self.peak or self.peak in uses:
            return None
        repeated: set[int] = set()
        kept, waiting = 0, [buffer]
        while waiting:
            at = self._writer(waiting.pop(), place)
            if at is None or len(repeated) == MAX_SEGMENT_OPS:
                return None
            if at in repeated:
                continue
            repeated.add(at)
            for tensor in self.nodes[at].inputs:
                source = tensor.buffer.id
                if any(at < p < place for p in self.written[source]):
                    return None
                if source not in self.sizes or self.used[source][-1] >= self.peak:
                    continue
                if self._writer(source, place) is None:
                    kept += self.sizes[source]
                else:
                    waiting.append(source)
        outputs = self.nodes[max(repeated)].outputs
        freed = sum(self.sizes[b] for b in {t.buffer.id for t in outputs} if self._spans(b, place))
        us = sum(_us(self.nodes[p], self.context.machine) for p in repeated)
        return _Segment(place, tuple(sorted(repeated)), freed - kept, us) if freed > kept else None

    def _spans(self, buffer: int, place: int) -> bool:
        """True for a value that is alive but not used from the peak until index `place`."""
        uses = self.used[buffer]
        return uses[-1] >= place and not any(self.peak <= p < place for p in uses)

    def _writer(self, buffer: int, place: int) -> int | None:
        """The index of the only op that writes a value, if that op can be recomputed at index
        `place`; None otherwise.
        """
        written = self.written[buffer]
        if buffer not in self.sizes or len(written) != 1 or written[0] >= self.peak:
            return None
        node = self.nodes[written[0]]
        op = registry.get(node.type)
        outputs = {t.buffer.id for t in node.outputs}
        plain = (
            node.type != CUSTOM
            and not (op.names_ranks or op.iteration_barrier or op.all_ranks or node.after)
            and not outputs & {t.buffer.id for t in node.inputs}
            and outputs == set(writes(node))
            and all(b in self.sizes and self.written[b] == written for b in outputs)
            and node.phase == self.nodes[place].phase
        )
        return written[0] if plain else None

    def rewritten(self, segment: _Segment) -> list[Node]:
        """The program's nodes after copies of the segment's ops are inserted. Later ops read the
        results of these copies.
        """
        buffers: dict[int, Buffer] = {}
        ids: dict[int, int] = {}  # views of one tensor may share its id

        def moved(tensor: Tensor) -> Tensor:
            buffer = buffers.get(tensor.buffer.id)
            if buffer is None:
                return tensor
            number = ids.setdefault(tensor.id, len(self.graph.tensors))
            copy = replace(
                tensor, id=number, buffer=buffer, name=tensor.name and f"{tensor.name}.again"
            )
            if number == len(self.graph.tensors):
                self.graph.tensors.append(copy)
            return copy

        added = []
        number = max(n.id for n in self.nodes) + 1
        for place in segment.repeated:
            node = self.nodes[place]
            inputs = tuple(map(moved, node.inputs))
            for old in dict.fromkeys(t.buffer for t in node.outputs):
                buffers[old.id] = self.graph.buffer(old.arena, old.nbytes, old.rank, old.name)
            outputs = tuple(map(moved, node.outputs))
            name = f"{node.name}.again"
            added.append(replace(node, id=number, name=name, inputs=inputs, outputs=outputs))
            number += 1
        behind = [
            n
            if n.virtual or not any(t.buffer.id in buffers for t in (*n.inputs, *n.after))
            else replace(n, inputs=tuple(map(moved, n.inputs)), after=tuple(map(moved, n.after)))
            for n in self.nodes[segment.place :]
        ]
        return [*self.nodes[: segment.place], *added, *behind]


def _us(node: Node, machine: Machine) -> float:
    """The predicted microseconds of a node: the longer of the times of arithmetic and memory
    traffic, plus the fixed time of an op.
    """
    moved = sum(t.nbytes for t in (*node.inputs, *node.outputs))
    depth = depth_of(node) if node.type == "matmul" else 1
    work = 2.0 * depth * sum(t.elements for t in node.outputs)
    longest = max(moved / (machine.bandwidth_gbps * 1e3), work / (machine.tflops * 1e6))
    return machine.costs.op_us + longest
