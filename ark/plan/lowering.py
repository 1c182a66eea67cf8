"""From graph nodes to ops with tile tasks: the context that the ops' lowerings write into.

A lowering names a task kind, its static parameters, its operands and one coordinate per task; who
runs a task, what it waits for and where its memory lies is decided later by ark.plan.planner.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ark.errors import PlanError
from ark.ir.dtype import DataType
from ark.ir.model import Graph, Node
from ark.ir.tensor import Tensor, dense_view
from ark.ops import registry
from ark.plan.boxes import Templates
from ark.plan.machine import Machine
from ark.tasks.kind import OperandType, Signature
from ark.tasks.kind import get as task_kind

PACKET_LIMIT = 1 << 18  # bytes of fp32 activations that may travel as packets
PACKET_READ = 1 << 12  # elements of one that a task may read; beyond, a counter is faster


@dataclass(frozen=True)
class Mail:
    """A counter by name on a rank: what a put signals there, or a task waits for here."""

    rank: int
    name: str


@dataclass
class Group:
    """The tasks of one lowered op. sends, awaits: one entry per task, or none at all."""

    name: str
    kind: str
    params: dict[str, Any]
    operands: tuple[Tensor, ...]
    coords: list[tuple[int, ...]]
    after: tuple[Tensor, ...]
    phase: int
    processors: tuple[int, int] | None = None
    sends: list[tuple[Mail, ...]] = field(default_factory=list)
    awaits: list[tuple[tuple[Mail, int], ...]] = field(default_factory=list)


class Lowering:
    """Collects groups in program order. `graph` is a private copy: temporaries may be added."""

    def __init__(
        self, graph: Graph, machine: Machine, options: Mapping[str, Any], templates: Templates
    ) -> None:
        self.graph = graph
        self.templates = templates
        self.machine = machine
        self.options = options
        self.groups: list[Group] = []
        self.packets: set[int] = set()  # ids of tensors whose elements carry their epoch
        self._node: Node | None = None
        self._numbers: dict[str, int] = {}

    def run(self) -> list[Group]:
        """Lowers every node that makes tasks."""
        for node in list(self.graph.nodes):
            if node.virtual:
                continue
            self._node = node
            op = registry.get(node.type)
            if op.apart is None:
                op.lower(self, node)
                continue
            private, moves = self._untangle(node, op.apart)
            op.lower(self, private)
            for source, target in moves:
                registry.get("copy").lower(
                    self,
                    dataclasses.replace(
                        node, type="copy", inputs=(source,), outputs=(target,), attrs={}
                    ),
                )
        if self.machine.has("packets") and self.options.get("packets", True):
            self._choose_packets()
        return self.groups

    def _untangle(self, node: Node, pointwise: bool) -> tuple[Node, list[tuple[Tensor, Tensor]]]:
        """Sends outputs that lie on an input's memory through temporaries.

        Tasks of one op are not ordered among themselves, so none may overwrite what another still
        reads. Where each output element depends on its own place only (`pointwise`), an output that
        is exactly an input is safe.
        """
        outputs, moves = [], []
        for out in node.outputs:
            tangled = any(
                t.buffer.id == out.buffer.id and not (pointwise and _same_place(t, out))
                for t in node.inputs
            )
            if tangled:
                temp = self.temp(out.shape, out.dtype, f"{node.name}.apart")
                moves.append((temp, out))
                out = temp
            outputs.append(out)
        return dataclasses.replace(node, outputs=tuple(outputs)), moves

    def _choose_packets(self) -> None:
        """Small activations carry their epoch where everybody who touches them can read that.

        A buffer qualifies if all its tensors are whole dense fp32 views, its bytes stay small, and
        no task reads much of it: a packet costs 8 bytes an element, and polls more.
        """
        barred: set[int] = set(self.options.get("external", ()))
        written: set[int] = set()
        touched: dict[int, list[Tensor]] = {}
        for group in self.groups:
            kind, sig = task_kind(group.kind), self.signature(group)
            able = kind.packets(sig)
            boxes = self.templates.boxes(sig, tuple(group.coords))
            given = {b.operand for b in boxes if b.write}
            again = {group.operands[i].buffer.id for i in given} & written
            barred |= again  # a second write in an iteration would carry the same epoch
            written.update(group.operands[i].buffer.id for i in given)
            for i, tensor in enumerate(group.operands):
                touched.setdefault(tensor.buffer.id, []).append(tensor)
                whole = tensor.dense and tensor.nbytes == tensor.buffer.nbytes
                if i not in able or not whole or tensor.dtype.name != "fp32":
                    barred.add(tensor.buffer.id)
            for access in kind.accesses(sig, group.coords[0]):
                size = math.prod(h - lo for lo, h in zip(access.lo, access.hi, strict=True))
                if not access.write and size > PACKET_READ:
                    barred.add(group.operands[access.operand].buffer.id)
            barred.update(t.buffer.id for t in group.after)
        for buffer, tensors in touched.items():
            source = tensors[0].buffer
            small = source.nbytes <= PACKET_LIMIT
            if source.arena == "activation" and small and buffer not in barred:
                self.packets.update(t.id for t in tensors)

    def signature(self, group: Group) -> Signature:
        """The group's signature as far as it is known before packets are chosen."""
        operands = tuple(OperandType(t.dtype.name, t.shape, t.strides) for t in group.operands)
        return Signature(group.kind, group.params, operands)

    def emit(
        self,
        kind: str,
        params: Mapping[str, Any],
        operands: Sequence[Tensor],
        coords: Sequence[tuple[int, ...]],
        suffix: str = "",
    ) -> Group:
        """Adds a group for the node being lowered."""
        node = self._node
        if node is None:
            raise PlanError("a lowering emitted tasks outside of a node")
        group = Group(
            node.name + suffix,
            kind,
            dict(params),
            tuple(operands),
            [tuple(int(v) for v in c) for c in coords],
            node.after,
            node.phase,
            node.processors,
        )
        self.groups.append(group)
        return group

    def mail(self, rank: int, name: str) -> Mail:
        """The counter called `name` on `rank`."""
        return Mail(rank, name)

    def number(self, key: str) -> int:
        """How often `key` was asked for before: pairs up what ranks name alike."""
        count = self._numbers.get(key, 0)
        self._numbers[key] = count + 1
        return count

    def temp(
        self, shape: Sequence[int], dtype: DataType, name: str, arena: str = "activation"
    ) -> Tensor:
        """A temporary of the op being lowered."""
        return self.graph.tensor(shape, dtype, arena=arena, name=name)

    def flat(self, tensor: Tensor) -> Tensor:
        """A dense tensor seen as one dimension."""
        return self.view(tensor, (tensor.elements,))

    def view(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        """A dense tensor seen in another shape of as many elements; PlanError if it cannot be."""
        layout = dense_view(tensor, shape)
        if layout is None:
            raise PlanError(f"tensor {tensor.name!r} cannot be viewed as {list(shape)}")
        extents, offsets = layout
        dims = tuple(shape)
        return dataclasses.replace(
            tensor, shape=dims, extents=extents, offsets=offsets, padded=dims
        )


def _same_place(a: Tensor, b: Tensor) -> bool:
    return (a.shape, a.extents, a.offsets, a.dtype) == (b.shape, b.extents, b.offsets, b.dtype)
