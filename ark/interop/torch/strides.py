"""Gives a kernel's results the strides that torch's own shape propagation computes. So code that
reads the results by their strides (as_strided, in this graph or after a graph break) reads the same
elements as without ark.

A result that is a view of another tensor of the graph is returned as that view of the whole tensor.
Called by compile.py and program.py.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

READERS = ("aten::as_strided", "aten::as_strided_scatter")


@dataclass(frozen=True)
class Memory:
    """A new tensor that a kernel fills. order: the tensor's dimensions in memory order. None if the
    elements have gaps or overlap; then the kernel's result is copied to memory with these strides.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    order: tuple[int, ...] | None


@dataclass(frozen=True)
class Result:
    """A result of a graph: result number `of` of the kernel, or a view of it. view: shape, strides
    and offset, if they differ from those of the kernel's result.
    """

    of: int
    view: tuple[tuple[int, ...], tuple[int, ...], int] | None = None


def contiguous(shape: Sequence[int]) -> Memory:
    """Memory in which the last dimension varies fastest."""
    strides = torch.empty(tuple(shape), device="meta").stride()
    return Memory(tuple(shape), tuple(strides), tuple(range(len(shape))))


def memory_of(shape: Sequence[int], strides: Sequence[int]) -> Memory:
    """Memory with these strides."""
    order = sorted(range(len(shape)), key=lambda d: (-strides[d] if shape[d] > 1 else 0, d))
    step = 1
    for d in reversed(order):
        if shape[d] > 1:
            if strides[d] != step:
                return Memory(tuple(shape), tuple(strides), None)
            step *= shape[d]
    long = [d for d in order if shape[d] > 1]
    if long == sorted(long):
        order = list(range(len(shape)))
    return Memory(tuple(shape), tuple(strides), tuple(order))


def laid_out(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """The tensor, or a copy of it with these strides."""
    if tensor.stride() == tuple(strides):
        return tensor
    copied = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    elements, source = copied, tensor
    for d, step in enumerate(strides):
        if step == 0 and tensor.shape[d] > 1:  # all elements along d have one address
            elements, source = elements.narrow(d, 0, 1), source.narrow(d, 0, 1)
    elements.copy_(source)
    return copied


class Results:
    """Makes the results of a graph from the results of its kernel. The kernel may compute fewer
    results, because a result that is a view of another tensor is made from that tensor. ends: the
    nodes of the graph that the kernel computes, or constants. memory: the memory of each end, if it
    is a tensor. given: how each result of the graph is made from the ends.
    """

    def __init__(self, module: fx.GraphModule, visible: int | None = None) -> None:
        """visible: how many of the results a caller sees. The other results may share memory."""
        (output,) = (n for n in module.graph.nodes if n.op == "output")
        listed = output.args[0] if isinstance(output.args[0], (list, tuple)) else [output.args[0]]
        self.ends: list[Any] = []
        self.memory: list[Memory | None] = []
        self.given: list[Result] = []
        known: dict[fx.Node, int] = {}  # indices of kernel results that may be shared
        for place, end in enumerate(listed):
            value = end.meta.get("val") if isinstance(end, fx.Node) else None
            if not isinstance(value, torch.Tensor):
                self.given.append(self._new(end, None))
                continue
            base = base_of(end)
            if base.op != "call_function":  # a view of an input, which the kernel copies
                base = end
            shape, strides = tuple(value.shape), tuple(value.stride())
            offset = int(value.storage_offset())
            hidden = visible is not None and place >= visible
            if not hidden or base not in known:
                mine = memory_of(shape, strides)
                whole = value.numel() == base.meta["val"].numel() and offset == 0
                if base is end or (whole and mine.order is not None and not hidden):
                    self.given.append(self._new(end, mine))
                    if base is end:
                        known.setdefault(base, self.given[-1].of)
                    continue
                at = self._new(base, memory_of(base.meta["val"].shape, base.meta["val"].stride()))
                known.setdefault(base, at.of)
            else:
                at = Result(known[base])
            same = self.memory[at.of]
            assert same is not None
            alike = (same.shape, same.strides, 0) == (shape, strides, offset)
            self.given.append(at if alike else Result(at.of, (shape, strides, offset)))

    def _new(self, end: Any, memory: Memory | None) -> Result:
        self.ends.append(end)
        self.memory.append(memory)
        return Result(len(self.ends) - 1)

    @property
    def plain(self) -> bool:
        """True if the graph's results are exactly the kernel's results."""
        copied = any(m is not None and m.order is None for m in self.memory)
        return not copied and self.given == [Result(i) for i in range(len(self.ends))]

    def of(self, outputs: Sequence[Any]) -> list[Any]:
        """The graph's results. outputs: the kernel's results."""
        lie = list(outputs)
        for i, memory in enumerate(self.memory):
            if memory is not None and memory.order is None:
                lie[i] = laid_out(outputs[i], memory.strides)
        return [
            lie[r.of] if r.view is None else torch.as_strided(lie[r.of], *r.view)
            for r in self.given
        ]


def base_of(node: fx.Node) -> fx.Node:
    """The node of the tensor of which a node is a view in torch. The node itself if it is not a
    view.
    """
    base = node
    while base.op == "call_function" and base.args and isinstance(base.args[0], fx.Node):
        source = base.args[0]
        if base.target is operator.getitem and isinstance(source.args[0], fx.Node):
            source = source.args[0]  # for parts of a split
        if not _shares(node, source):
            break
        base = source
    return base


def _shares(view: fx.Node, node: fx.Node) -> bool:
    """True if both nodes are tensors of one type that share memory in torch."""
    a, b = view.meta.get("val"), node.meta.get("val")
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor) or a.dtype != b.dtype:
        return False
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


def read_by_strides(module: fx.GraphModule) -> set[fx.Node]:
    """The operators that read a tensor by its position in memory (as_strided), and the views that
    they read. These stay in torch. The tensor to which the views belong is returned by a kernel.
    """
    stay: set[fx.Node] = set()
    for reader in module.graph.nodes:
        if not isinstance(reader.target, torch._ops.OpOverload):
            continue
        if reader.target._schema.name not in READERS:
            continue
        stay.add(reader)
        view = reader.args[0]
        base = base_of(view)
        while view is not base:
            stay.add(view)
            view = view.args[0]
    return stay
