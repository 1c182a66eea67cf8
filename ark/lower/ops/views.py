"""Lowering of reshapes that must copy, because the memory layout of the input cannot be viewed in
the new shape.
"""

from __future__ import annotations

from ark.ir.graph import Node
from ark.lower.context import Lowering
from ark.lower.registry import get
from ark.lower.unpack import convert, unpacked


def lower_reshape(lowering: Lowering, node: Node) -> None:
    """Emits a copy of the input. The output is a new dense tensor, so it can be viewed in the
    input's shape for the copy.
    """
    source, out = node.inputs[0], node.outputs[0]
    if source.dtype.packed:
        convert(lowering, lowering.view(unpacked(lowering, source), out.shape), out)
        return
    target = lowering.view(out, source.shape)
    get("copy").lower(
        lowering,
        Node(node.id, "copy", node.name, (source,), (target,), {}, node.after, phase=node.phase),
    )
