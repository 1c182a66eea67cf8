"""The model graph: nodes over tensors, in program order, as front ends build it.

Program order defines the meaning of the graph. The planner keeps every dependence that follows from
it and may change the order otherwise. Called by ark.ops, ark.models and the planner.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ark.errors import ModelError
from ark.ir.dtype import DataType
from ark.ir.graph_view import GraphView
from ark.ir.hints import Hints
from ark.ir.node import Node
from ark.ir.packing import Packing
from ark.ir.values import Buffer, Tensor, check_layout

__all__ = ["Graph", "Node"]


class Graph:
    """The model of one rank: its nodes in program order, their tensors, and the buffers that hold
    the tensors.
    """

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank = rank
        self.world_size = world_size
        self.nodes: list[Node] = []
        self.tensors: list[Tensor] = []
        self.buffers: list[Buffer] = []
        self.phases: tuple[str, ...] = ("main",)
        self.phase = 0
        self.processors: tuple[int, int] | None = None
        self.hints: Hints | None = None
        self.context: int | None = None
        self.scopes: list[str] = []
        self.detached: set[int] = set()  # ids of tensors through which no gradient passes
        # For gradient ops. Key: the id of the buffer of a gradient op's result. Value: the id of
        # the buffer of the forward op's result.
        self.undone: dict[int, int] = {}
        self.packings: tuple[Packing, ...] = ()  # how packed parameters are made from the model's
        self.received: frozenset[int] = frozenset()  # ids of buffers in which packets arrive
        self._depends: dict[int, tuple[Tensor, ...]] = {}
        self._view = GraphView(())

    @property
    def view(self) -> GraphView:
        """Lookup tables of the graph's nodes (readers and writers of tensors). They are computed
        again if the nodes have changed.
        """
        known = self._view.nodes
        if len(known) != len(self.nodes) or not all(map(operator.is_, known, self.nodes)):
            self._view = GraphView(self.nodes)
        return self._view

    def state(self) -> dict[str, object]:
        """The graph's own data by name, without the lookup tables, which are computed from it."""
        return {name: value for name, value in vars(self).items() if name != "_view"}

    def with_nodes(self, nodes: Iterable[Node]) -> Graph:
        """A copy of the graph with these nodes. Tensors, buffers and everything else are shared
        with this graph.
        """
        graph = copy.copy(self)
        graph.nodes = list(nodes)
        return graph

    def in_arenas(self, arenas: Mapping[int, str]) -> Graph:
        """A copy of the graph with buffers in other arenas. arenas: by the buffer's number."""
        moved = {i: replace(self.buffers[i], arena=arena) for i, arena in arenas.items()}

        def on(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
            return tuple(replace(t, buffer=moved.get(t.buffer.id, t.buffer)) for t in tensors)

        graph = self.with_nodes(
            replace(n, inputs=on(n.inputs), outputs=on(n.outputs), after=on(n.after))
            for n in self.nodes
        )
        graph.buffers = [moved.get(b.id, b) for b in self.buffers]
        graph.tensors = list(on(self.tensors))
        return graph

    @contextmanager
    def placed(self, processors: tuple[int, int] | None) -> Iterator[None]:
        """A context that restricts the nodes added in it to a range of processors, (first, end)
        with `end` exclusive. If contexts are nested, the outer one has precedence. None adds no
        restriction.
        """
        if processors is None or self.processors is not None:
            yield
            return
        before = self.context
        self.processors = processors
        self.context = self.new_context() if before is None else before
        try:
            yield
        finally:
            self.processors, self.context = None, before

    def new_context(self) -> int:
        """A new number for a PlannerContext, whose nodes the planner keeps together."""
        return sum(1 for c in {n.context for n in self.nodes} if c is not None)

    @contextmanager
    def entry(self, name: str) -> Iterator[None]:
        """A context that opens a phase of the loop (an entry point of the model). Nodes that are
        added in it belong to the phase.

        Their names begin with the phase's name. Raises ModelError if another phase or scope is
        open, or if the model already has a phase of that name.
        """
        if self.scopes:
            raise ModelError(
                f"the entry {name!r} is opened within {self.scopes[0]!r}; close that scope first"
            )
        if self.nodes and name in self.phases:
            raise ModelError(f"the model has an entry {name!r} already; choose another name")
        self.phases = (*self.phases, name) if self.nodes else (name,)
        self.phase = len(self.phases) - 1
        with self.scope(name):
            yield

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """A context in which the names of new nodes and tensors begin with `name`."""
        self.scopes.append(name)
        try:
            yield
        finally:
            self.scopes.pop()

    def scoped(self, name: str) -> str:
        """The name, preceded by the names of the open scopes."""
        return ".".join((*self.scopes, name))

    def buffer(
        self, arena: str, nbytes: int, rank: int = -1, name: str = "", address: int = 0
    ) -> Buffer:
        """Adds a buffer of `nbytes` in `arena`."""
        buffer = Buffer(len(self.buffers), arena, nbytes, rank, name, address)
        self.buffers.append(buffer)
        return buffer

    def tensor(
        self,
        shape: Sequence[int],
        dtype: DataType,
        *,
        arena: str = "activation",
        buffer: Buffer | None = None,
        extents: Sequence[int] = (),
        offsets: Sequence[int] = (),
        padded: Sequence[int] = (),
        rank: int = -1,
        name: str = "",
        address: int = 0,
    ) -> Tensor:
        """Adds a tensor, on a new buffer unless one is given."""
        dims = tuple(int(s) for s in shape)
        pad = tuple(padded) or dims
        ext = tuple(extents) or dtype.whole_rows(pad)
        off = tuple(offsets) or (0,) * len(dims)
        check_layout(dims, ext, off, pad)
        if dtype.packed and (ext[-1] % dtype.per_item or off[-1] % dtype.per_item):
            raise ModelError(
                f"a tensor of {dtype.name} begins at element {off[-1]} of rows of {ext[-1]}; both "
                f"must be multiples of {dtype.per_item}, the elements that share a byte: "
                "ark.cast it to int8 or fp32 first"
            )
        if buffer is None:
            buffer = self.buffer(arena, dtype.nbytes(math.prod(ext)), rank, name, address)
        tensor = Tensor(len(self.tensors), dtype, dims, ext, off, pad, buffer, name)
        self.tensors.append(tensor)
        return tensor

    def tensor_like(self, like: Tensor, buffer: Buffer, name: str = "") -> Tensor:
        """Adds a tensor on `buffer` with the type and layout of `like`, whose buffer may differ."""
        return self.tensor(
            like.shape,
            like.dtype,
            buffer=buffer,
            extents=like.extents,
            offsets=like.offsets,
            padded=like.padded,
            name=name,
        )

    def rewrite(self, target: Tensor, name: str = "") -> Tensor:
        """A new tensor on the memory of `target`. It represents the values that the memory has
        after a write into `target`.
        """
        rewritten = self.tensor_like(target, target.buffer, name or target.name)
        self.depend(rewritten, self.depends(target))
        return rewritten

    def inherit(self, view: Tensor, source: Tensor) -> None:
        """Copies two properties of a tensor to a view of it: the tensors that must be written
        before it is used, and whether gradients pass through it.
        """
        self.depend(view, self.depends(source))
        if source.id in self.detached:
            self.detached.add(view.id)

    def depend(self, tensor: Tensor, on: Sequence[Tensor]) -> None:
        """Records a dependence: ops that use `tensor` must run after `on` has been written."""
        if on:
            self._depends[tensor.id] = tuple(on) + self._depends.get(tensor.id, ())

    def depends(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return self._depends.get(tensor.id, ())

    def add(
        self,
        type: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        attrs: Mapping[str, Any] | None = None,
        name: str = "",
        virtual: bool = False,
    ) -> Node:
        """Appends a node and returns it. The order of the calls is the program order, which defines
        the meaning of the graph.
        """
        after = tuple(d for t in (*inputs, *outputs) for d in self.depends(t))
        node = Node(
            len(self.nodes),
            type,
            self.scoped(name or type),
            tuple(inputs),
            tuple(outputs),
            dict(attrs or {}),
            after,
            virtual,
            self.phase,
            self.processors,
            self.hints,
            self.context,
        )
        self.nodes.append(node)
        return node
