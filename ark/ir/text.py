"""Writes a graph as text, one line per node, for people, tests of passes and comparisons.

Called by ark.cli.pass_pages and by tests. The same graph gives the same text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from ark.ir.graph import Graph, Node
from ark.ir.values import Tensor

MAX_VALUE_LENGTH = 160  # the longest text of an attribute, in characters
MAX_GAP_ELEMENTS = 16  # a longer gap after each row belongs to another tensor, such as a slice


def to_text(graph: Graph) -> str:
    """The graph's nodes in program order, by phase, without virtual nodes, which make no task.

    >>> print(to_text(graph))
    phase main
      y fp32[4, 8] = add(x fp32[4, 8], b fp32[8])
    """
    return "\n".join(_lines(graph)) + "\n"


def _lines(graph: Graph) -> Iterator[str]:
    names = _Names()
    phase = -1
    for node in graph.nodes:
        if node.virtual:
            continue
        if node.phase != phase:
            phase = node.phase
            yield f"phase {graph.phases[phase]}"
        yield f"  {_node(node, names)}"


class _Names:
    """A name for each buffer: the name of its first tensor, with a number if several buffers have
    the same one.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}  # by buffer id
        self._uses: Counter[str] = Counter()

    def __call__(self, tensor: Tensor) -> str:
        if tensor.buffer.id not in self._names:
            name = tensor.name or tensor.buffer.name or f"%{tensor.buffer.id}"
            number = self._uses[name]
            self._uses[name] += 1
            self._names[tensor.buffer.id] = f"{name}#{number}" if number else name
        return self._names[tensor.buffer.id]


def _node(node: Node, names: _Names) -> str:
    """One node, as `results = type(operands) attributes`."""

    def listed(tensors: Iterable[Tensor]) -> str:
        return ", ".join(f"{names(t)} {_layout(t)}" for t in tensors)

    operands = listed(node.inputs)  # before the outputs, so that operands get their names first
    attrs = "".join(f" {k}={_value(v)}" for k, v in sorted(node.attrs.items()) if v is not None)
    after = f" after {', '.join(map(names, node.after))}" if node.after else ""
    kept = f" on processors {node.processors[0]}:{node.processors[1]}" if node.processors else ""
    return f"{listed(node.outputs) or '()'} = {node.type}({operands}){attrs}{after}{kept}"


def _layout(tensor: Tensor) -> str:
    """A tensor's data type and shape as text. If the tensor is a part of its buffer, its offsets
    follow. If gaps follow its rows, the distance between rows follows.
    """
    part = f" at {list(tensor.offsets)}" if any(tensor.offsets) else ""
    rank = f" of rank {tensor.buffer.rank}" if tensor.buffer.rank >= 0 else ""
    gap = 0 < tensor.extents[-1] - tensor.shape[-1] < MAX_GAP_ELEMENTS and not part
    rows = f" in rows of {tensor.extents[-1]}" if gap else ""
    return f"{tensor.dtype.name}{list(tensor.shape)}{rows}{part}{rank}"


def _value(value: Any) -> str:
    """An attribute's value as text. Expression trees are written as calls, for example add($0,
    mul($1, 2)), in which $i is operand i.
    """
    text = _tree(value)
    return text if len(text) <= MAX_VALUE_LENGTH else text[:MAX_VALUE_LENGTH] + "..."


def _tree(value: Any) -> str:
    match value:
        case ["input", int(number), *_]:
            return f"${number}"
        case ["number", float() | int() as number]:
            return f"{number:g}"
        case [str(head), *rest]:
            return f"{head}({', '.join(map(_tree, rest))})"
        case list() | tuple():
            return f"[{', '.join(map(_tree, value))}]"
        case dict():
            return "{" + ", ".join(f"{k}: {_tree(v)}" for k, v in sorted(value.items())) + "}"
        case float():
            return f"{value:g}"
    return str(getattr(value, "name", value))
