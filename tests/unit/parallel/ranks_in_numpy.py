"""Runs the graphs of several ranks in NumPy. Each rank executes its nodes in order, as soon as
their data have arrived.
"""

from __future__ import annotations

from collections import defaultdict, deque

import numpy as np

from ark.collective.programs import Collective
from ark.collective.programs.attributes import program_of
from ark.ir.graph import Graph, Node
from ark.ir.values import Tensor
from tests.interpreter import Interpreter


class Ranks:
    """The memories of the ranks, and the messages in flight."""

    def __init__(self, graphs: list[Graph]) -> None:
        self.graphs = graphs
        self.memory = [Interpreter() for _ in graphs]
        self.mail: dict[tuple[int, int], deque[np.ndarray]] = defaultdict(deque)
        self.shares: dict[int, list[np.ndarray]] = defaultdict(list)

    def fill(self, rank: int, name: str, array: np.ndarray) -> None:
        self.memory[rank].view(self._named(rank, name))[...] = array

    def read(self, rank: int, name: str) -> np.ndarray:
        return self.memory[rank].view(self._named(rank, name)).copy()

    def _named(self, rank: int, name: str) -> Tensor:
        return next(t for t in self.graphs[rank].tensors if t.buffer.name == name == t.name)

    def run(self) -> None:
        """Runs one iteration. Raises AssertionError if all ranks wait."""
        at = [0] * len(self.graphs)
        reduced = [0] * len(self.graphs)
        self.shares.clear()
        while any(i < len(g.nodes) for i, g in zip(at, self.graphs, strict=True)):
            before = list(at)
            for rank, graph in enumerate(self.graphs):
                while at[rank] < len(graph.nodes) and self._step(
                    rank, graph.nodes[at[rank]], reduced
                ):
                    at[rank] += 1
            assert before != at, "all ranks wait for each other"

    def _step(self, rank: int, node: Node, reduced: list[int]) -> bool:
        """Executes a node of a rank's graph. Returns False if data that it receives have not
        arrived.
        """
        view = self.memory[rank].view
        if node.type == "send":
            self.mail[rank, node.attrs["remote_rank"]].append(view(node.inputs[0]).copy())
        elif node.type == "recv":
            arrived = self.mail[node.attrs["remote_rank"], rank]
            if not arrived:
                return False
            view(node.outputs[0])[...] = arrived.popleft()
        elif node.type in ("all_reduce", "collective"):
            given = self.shares[reduced[rank] * len(self.graphs) + rank]
            if not given:
                given.append(view(node.inputs[0]).copy())
            first = reduced[rank] * len(self.graphs)
            others = [self.shares[first + r] for r in range(len(self.graphs))]
            if not all(others):
                return False
            program = program_of(node)
            shares = [other[0] for other in others]
            if program is not None and program.collective is Collective.ALL_GATHER:
                total = np.concatenate(shares)
            else:
                total = sum(shares[1:], shares[0])
            if program is not None and program.collective is Collective.REDUCE_SCATTER:
                total = np.split(total, len(shares))[rank]
            view(node.outputs[0])[...] = total
            reduced[rank] += 1
        else:
            self.memory[rank].step(node)
        return True
