"""Pipelines of graphs without scopes in their names.

A training step is cut into micro-batches along the dimension of examples. The micro-batches run
through the stages that ark.parallel.plans.staged determines. Called by ark.parallel.plans.by_name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ark.errors import InvalidUsageError
from ark.ir.graph import Graph, Node
from ark.parallel.pipeline import Schedule
from ark.parallel.pipeline.named import STAGES_PER_DEVICE, list_schedule, named
from ark.parallel.plans.pipelined import in_order
from ark.parallel.plans.spread import seeds, split_along
from ark.parallel.plans.staged import SHARED, Staged, staged
from ark.parallel.transform import ParallelGraph, Piece

Loads = Callable[[Node], float]


@dataclass(frozen=True)
class Pipeline:
    """A pipeline for a graph.

    cuts: the dimension of examples, by buffer name. micro_batches: the number of micro-batches;
    None for the largest number, up to twice the ranks, that divides all batches. width: the number
    of neighbouring ranks of a stage; they share ops that were split into `width` pieces. loads: a
    function that returns the predicted time of an op. bytes_per_us: the bandwidth of a link between
    stages.
    """

    name: str
    cuts: Mapping[str, int]
    micro_batches: int | None
    loads: Loads
    bytes_per_us: float = math.inf
    width: int = 1
    pairs: int = field(init=False, default=1)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pairs", 2 if self.name == "chimera" else 1)

    def place(self, graph: ParallelGraph, original: Graph) -> None:
        """Splits, assigns and orders all pieces of the graph. original: see `staged`."""
        long = graph.ranks // self.width
        stages = long * (STAGES_PER_DEVICE if self.name == "interleaved" else 1)
        count = self._count(graph, long)
        cut = seeds(graph, self.cuts, count, f"into {count} micro-batches")
        split = set()
        for node in graph.nodes if self.cuts else ():
            if split_along(graph, graph.pieces(node)[0], cut, (count,)):
                split.add(node.id)
        parts = staged(graph, original, self.name, stages, split, self.loads, self.bytes_per_us)
        handing = None
        if self.name == "zero-bubble":
            handing = handed_on(graph.nodes, parts.blocks)
        sent = named(self.name, long, inference=not any(b[0] == "b" for b in parts.blocks.values()))
        schedule = widened(list_schedule(sent, count // self.pairs), self.width)
        devices = {(e.block, e.micro_batch): e.devices for e in schedule.entries}
        pieces: dict[tuple[str, int], list[Piece]] = {}
        shared = self._shared(graph, parts)
        for node in graph.nodes:
            if node.id not in parts.blocks:
                ranks = self._ranks(parts.stages[node.id], long)
                for piece in graph.pieces(node):
                    graph.op_assign(piece, *ranks)
                continue
            block = parts.blocks[node.id]
            if handing is not None and block[0] == "b" and node.id not in handing:
                block = f"w{block[1:]}"
            whole = graph.pieces(node)
            for number, piece in enumerate(whole):
                batch = number * count // len(whole) if node.id in split else 0
                key = directed(block, batch, long) if self.pairs == 2 else (block, batch)
                at = devices[key]
                own = [piece]
                if node.id in shared:
                    own = split_along(graph, piece, shared[node.id], (graph.ranks,)) or own
                for i, part in enumerate(own):
                    if len(own) == len(at):
                        graph.op_assign(part, at[i])
                    elif self.width > 1 and len(whole) == len(at):
                        graph.op_assign(part, at[number])
                    else:
                        graph.op_assign(part, *at)
                pieces.setdefault(key, []).extend(own)
        in_order(graph, schedule, pieces)

    def _count(self, graph: ParallelGraph, long: int) -> int:
        """The number of micro-batches. long: the number of stages."""
        if not self.cuts:
            if self.micro_batches not in (None, 1) or self.pairs == 2:
                raise InvalidUsageError(
                    f"{self.name} divides the batch into micro-batches; name the tensors that hold "
                    'it and their batch dimension, as in cuts={"tokens": 0}, or write each '
                    "micro-batch in scopes such as f0-3"
                )
            return 1
        sizes = [
            t.extents[self.cuts[t.buffer.name]]
            for n in graph.nodes
            for t in n.inputs
            if self.cuts.get(t.buffer.name, -1) in range(len(t.extents))
        ]
        able = [
            n
            for n in range(self.pairs, 2 * graph.ranks + 1, self.pairs)
            if all(size % n == 0 for size in sizes)
        ]
        count = self.micro_batches
        if count is None:
            count = max(able, default=self.pairs)
        if count < 1 or count % self.pairs:
            raise InvalidUsageError(
                f"micro_batches={count} does not fit {self.name}; use a positive "
                f"{'even ' if self.pairs == 2 else ''}number"
            )
        return count

    def _ranks(self, stages: Sequence[int], long: int) -> list[int]:
        """The ranks that run an op which runs once per step and belongs to the given stages."""
        at = {stage % long for stage in stages}
        if self.pairs == 2:
            at |= {long - 1 - rank for rank in at}
        return [rank * self.width + i for rank in sorted(at) for i in range(self.width)]

    def _shared(self, graph: ParallelGraph, parts: Staged) -> dict[int, dict[int, int]]:
        """For each op of the block that all ranks share: the dimension, by buffer, along which its
        operands are cut over the ranks. It follows from the cut of the block's parameter.
        """
        own = [n for n in graph.nodes if parts.blocks.get(n.id, "")[1:] == SHARED]
        forward = [n for n in own if parts.blocks[n.id][0] == "f"]
        if not forward:
            return {}
        first = forward[-1]
        (annotation,) = {p.annotation for p in graph.pieces(first)}
        assert annotation is not None
        cut: dict[int, int] = {}
        result = annotation.operands[-1]
        examples = {
            letter
            for tensor, letters in zip(first.inputs, annotation.operands, strict=False)
            if tensor.buffer.arena != "parameter"
            for letter in letters
        }
        size = first.outputs[0].shape
        columns = [
            d
            for d, x in enumerate(result)
            if x not in examples | annotation.frozen | {"1"} and size[d] % graph.ranks == 0
        ]
        if not columns:
            return {}
        for tensor, letters in zip(first.inputs, annotation.operands, strict=False):
            if result[columns[0]] in letters:
                cut[tensor.buffer.id] = letters.index(result[columns[0]])
        cut[first.outputs[0].buffer.id] = columns[0]
        inside = {t.buffer.id for n in own for t in n.outputs}
        for node in own:
            for tensor in node.inputs:
                given = tensor.buffer.id not in inside and tensor.shape == size
                if parts.blocks[node.id][0] == "b" and given:
                    cut[tensor.buffer.id] = columns[0]
        return {n.id: cut for n in own}


def directed(block: str, number: int, long: int) -> tuple[str, int]:
    """The name of Chimera's block for a micro-batch. Even micro-batches run through the pipeline in
    one direction, odd ones in the other.
    """
    pair, up = divmod(number, 2)
    stage = int(block[1:])
    at = long - 1 - stage if up else stage
    return f"{block[0]}{at}.{'up' if up else 'down'}", pair


def widened(schedule: Schedule, width: int) -> Schedule:
    """The schedule for stages of `width` ranks each: each device of the given schedule is replaced
    by `width` devices.
    """
    entries = (
        replace(e, devices=tuple(d * width + i for d in e.devices for i in range(width)))
        for e in schedule.entries
    )
    return replace(schedule, entries=tuple(entries))


def handed_on(nodes: Sequence[Node], blocks: Mapping[int, object]) -> set[int]:
    """The ops of the backward pass whose results another block needs. The other ops of the backward
    pass compute gradients of weights.

    blocks: the block (b0, f1) of each op that runs once per micro-batch. Ops that are not in it are
        updates.
    """
    writers = {t.buffer.id: blocks.get(n.id) for n in nodes for t in n.outputs}
    wanted: set[int] = set()
    awaited: set[int] = set()
    for node in reversed(nodes):
        block = blocks.get(node.id)
        if block is None or str(block)[0] != "b":
            continue
        if any(t.buffer.id in wanted for t in node.outputs):
            awaited.add(node.id)
            wanted |= {t.buffer.id for t in node.inputs}
        else:
            wanted |= {t.buffer.id for t in node.inputs if writers.get(t.buffer.id, block) != block}
    return awaited
