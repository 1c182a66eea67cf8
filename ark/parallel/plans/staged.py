"""Determines the stage and the pass of every op, for pipelines of graphs without scopes in their
names.

A graph is one step over all examples. Ops that are cut along the examples become micro-batches. The
forward pass is divided into stages of about equal time. All other ops are assigned to stages as
follows. An op that `ark.grad` created belongs to the stage of the op that it differentiates
(`Graph.undone`). An op that depends on the gradients of all micro-batches (sums, optimizers) runs
once, on the stage of its largest operand. An op that depends on no example runs on the stages that
read its result. Called by ark.parallel.plans.by_name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ark.errors import ModelError, UnsupportedError
from ark.ir.graph import Graph, Node
from ark.parallel.pipeline.named import FORWARD_PASSES
from ark.parallel.plans.blocks import ModelBlock, blocks_of
from ark.parallel.plans.stages import partition
from ark.parallel.transform import ParallelGraph

SHARED = "in"  # the block on all ranks (interlaced)
WAYS = "ghij"  # names of the forward passes before the last one


@dataclass(frozen=True)
class Staged:
    """The assignment of ops to a pipeline. blocks: for each op that runs once per micro-batch, its
    block, such as f0 (forward pass, stage 0) or b0 (backward pass). stages: for each other op, the
    stages whose ranks run it.
    """

    blocks: Mapping[int, str]
    stages: Mapping[int, tuple[int, ...]]


class Dependencies:
    """How ops depend on examples and gradients. cut: the ops that are cut along the examples; if
    empty, all ops except the updates.
    """

    def __init__(self, graph: ParallelGraph, undone: Mapping[int, int], cut: set[int]) -> None:
        self.nodes = graph.nodes
        self.twins = graph.twins
        self.versions = graph.versions
        self.writers: dict[int, list[Node]] = {}
        self.root: dict[int, int] = {}  # by op of a gradient: the differentiated buffer
        self.after: set[int] = set()  # ops that depend on a gradient
        self.follows: set[int] = set()  # ops that depend on examples
        known = bool(cut)
        self.cut = set(cut)
        for node in self.nodes:
            buffer = node.outputs[0].buffer.id
            while buffer in undone:
                buffer = undone[buffer]
            if buffer != node.outputs[0].buffer.id:
                self.root[node.id] = buffer
            read = [n.id for n in self.read(node)]
            if node.id in self.root or self.after.intersection(read):
                self.after.add(node.id)
            if not known and (node.id in self.root or node.id not in self.after):
                self.cut.add(node.id)
            if node.id in self.cut or self.follows.intersection(read):
                self.follows.add(node.id)
            for tensor in node.outputs:
                self.writers.setdefault(tensor.buffer.id, []).append(node)

    def read(self, node: Node) -> list[Node]:
        """The ops of the same iteration whose results a node reads."""
        return [n for t in node.inputs for n in self.writers.get(t.buffer.id, ()) if n.id < node.id]

    def forward(self) -> list[Node]:
        """The ops of the forward pass that run once for each micro-batch."""
        return [n for n in self.nodes if n.id in self.cut and n.id not in self.after]

    def check(self, backward: bool) -> None:
        """Raises UnsupportedError if an op of a micro-batch needs a result of all micro-batches.
        backward: True to allow this in the backward pass.
        """
        for node in self.nodes:
            if node.id not in self.cut or (backward and node.id in self.after):
                continue
            for other in self.read(node):
                if other.id in self.follows and other.id not in self.cut:
                    raise UnsupportedError(
                        f"{node.name} reads {other.name}, which is computed from all examples, "
                        "so micro-batches cannot follow each other through the pipeline; use "
                        "micro_batches=1, or a plan such as data"
                    )


def staged(
    graph: ParallelGraph,
    original: Graph,
    name: str,
    stages: int,
    cut: set[int],
    loads: Callable[[Node], float],
    bytes_per_us: float,
) -> Staged:
    """The blocks of the pipeline of that name.

    original: the graph before it was converted to normal form, in which it can be split. cut: the
    ops that were cut into micro-batches. loads: returns the time of an op. bytes_per_us: the
    bandwidth of a link between stages.

    Raises UnsupportedError if a micro-batch depends on other ones, ModelError for 3f1b if the graph
    does not have three forward passes, and InvalidUsageError if the graph has too few ops.
    """
    parts = Dependencies(graph, original.undone, cut)
    if any(len(graph.pieces(n)) > 1 for n in parts.nodes):
        parts.check(name == "gpipe")
    forward = parts.forward()
    trained = name == "3f1b" and parts.root
    passes = _passes(parts, forward) if trained else [forward]
    shared = _shared(parts, forward) if name == "interlaced" else set()
    stage_of: dict[int, int | str] = dict.fromkeys(shared, SHARED)
    way_of: dict[int, str] = {}
    for way, own in zip((*WAYS[: len(passes) - 1], "f"), passes, strict=True):
        rest = [n for n in own if n.id not in shared]
        stage_of.update(_stages(rest, stages, loads, bytes_per_us))
        way_of.update(dict.fromkeys((n.id for n in own), way))
    blocks: dict[int, str] = {}
    homes: dict[int, tuple[int, ...]] = {}
    for node in parts.nodes:
        stage = stage_of.get(node.id)
        if stage is None:
            stage = _stage(parts, node, stage_of)
        if stage is None:
            continue
        stage_of[node.id] = stage
        if node.id in parts.cut:
            blocks[node.id] = f"{way_of.get(node.id, 'b')}{stage}"
        else:
            homes[node.id] = (stage,) if isinstance(stage, int) else tuple(range(stages))
    _unplaced(parts, blocks, homes, stages)
    return Staged(blocks, homes)


def _stage(parts: Dependencies, node: Node, stage_of: Mapping[int, int | str]) -> int | str | None:
    """The stage of an op that does not belong to the forward pass. It follows from the ops on which
    it depends. None if the op depends on no example.
    """
    if node.id not in parts.follows:
        return None
    at = [stage_of.get(n.id) for n in parts.writers.get(parts.root.get(node.id, -1), ())]
    known = [stage for stage in at if stage is not None]
    if known:
        return max(known, key=lambda s: -1 if isinstance(s, str) else s)
    operands = [(t.elements, n.id) for t in node.inputs for n in parts.writers.get(t.buffer.id, ())]
    largest = sorted((-size, i) for size, i in operands if i in parts.follows and i in stage_of)
    return stage_of[largest[0][1]] if largest else None


def _unplaced(
    parts: Dependencies,
    blocks: Mapping[int, str],
    homes: dict[int, tuple[int, ...]],
    stages: int,
) -> None:
    """Assigns the ops that depend on no example to stages. An op runs on the stages that read its
    result or, if it writes memory that lasts, on the stages that read this memory.
    """
    readers: dict[int, set[int]] = {}  # by buffer: the stages that read it

    def of(node: Node) -> tuple[int, ...]:
        block = blocks.get(node.id)
        if block is None:
            return homes.get(node.id, ())
        return tuple(range(stages)) if block[1:] == SHARED else (int(block[1:]),)

    for node in parts.nodes:
        for tensor in node.inputs:
            readers.setdefault(tensor.buffer.id, set()).update(of(node))
    for node in reversed(parts.nodes):
        if node.id in blocks:
            continue
        if node.id not in homes:
            out = node.outputs[0].buffer.id
            twin, _ = parts.versions.get(out, (out, 0))
            homes[node.id] = tuple(sorted(readers.get(out, set()) | readers.get(twin, set()))) or (
                0,
            )
        for tensor in node.inputs:
            readers.setdefault(tensor.buffer.id, set()).update(homes[node.id])


def _stages(
    nodes: Sequence[Node], stages: int, loads: Callable[[Node], float], bytes_per_us: float
) -> dict[int, int]:
    """The stage of each op. The slowest stage takes the least possible time, including its wait for
    data. A stage consists of consecutive layers, or of consecutive ops if the model has fewer
    layers than stages.
    """
    blocks = blocks_of(nodes)
    if sum(block.numbered for block in blocks) < stages:
        blocks = [ModelBlock(n.name, (n,), False) for n in nodes]
    times = [sum(loads(node) for node in block.nodes) for block in blocks]
    place = {t.buffer.id: i for i, b in enumerate(blocks) for n in b.nodes for t in n.outputs}
    last: dict[int, int] = {}
    size: dict[int, int] = {}
    for i, block in enumerate(blocks):
        for tensor in (t for n in block.nodes for t in n.inputs if t.buffer.id in place):
            last[tensor.buffer.id] = i
            size[tensor.buffer.id] = tensor.buffer.nbytes
    crossing = [0.0] * (len(blocks) + 1)
    for buffer, end in last.items():
        for i in range(place[buffer] + 1, end + 1):
            crossing[i] += size[buffer] / bytes_per_us
    stage_of = partition(times, stages, [False] * len(blocks), crossing)
    pairs = zip(blocks, stage_of, strict=True)
    return {node.id: stage for block, stage in pairs for node in block.nodes}


def _shared(parts: Dependencies, forward: Sequence[Node]) -> set[int]:
    """The ops of the layer that all ranks share in an interlaced pipeline: the first op that has a
    parameter, and the ops on which it depends.
    """
    first = next((n for n in forward if _parameters(parts, n)), None)
    if first is None:
        raise ModelError(
            "an interlaced pipeline divides the first op with a parameter among all stages, but "
            "no op of the graph has a parameter"
        )
    shared = {first.id}
    for node in reversed(forward):
        if node.id in shared:
            shared.update(n.id for n in parts.read(node) if n.id in parts.cut)
    return shared


def _parameters(parts: Dependencies, node: Node) -> list[int]:
    """The parameters that an op reads, directly or through a copy or view."""
    parameters: list[int] = []
    for tensor in node.inputs:
        if tensor.buffer.arena == "parameter":
            parameters.append(parts.twins.get(tensor.buffer.id, tensor.buffer.id))
        for writer in parts.writers.get(tensor.buffer.id, ()):
            if writer.id not in parts.follows:
                parameters.extend(_parameters(parts, writer))
    return parameters


def _passes(parts: Dependencies, forward: Sequence[Node]) -> list[list[Node]]:
    """The forward passes of a model that recycles its results. The last one is differentiated;
    earlier ones read the same parameters.
    """
    undone = {n.id for buffer in parts.root.values() for n in parts.writers.get(buffer, ())}
    first = next((p for n in forward for p in _parameters(parts, n)), None)
    reads = Counter(n.id in undone for n in forward if first in _parameters(parts, n))
    count = (reads[True] + reads[False]) // max(1, reads[True])
    if count != FORWARD_PASSES or reads[False] % max(1, reads[True]):
        raise ModelError(
            f"3f1b is for models with {FORWARD_PASSES} forward passes, of which ark.grad "
            f"differentiates the last; this graph has {count}"
        )
    groups: list[list[Node]] = [[] for _ in range(count)]
    seen = 0
    for node in forward:
        seen += first in _parameters(parts, node)
        groups[max(0, seen - 1) // reads[True]].append(node)
    return groups
