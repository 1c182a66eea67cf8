"""Rewrites concatenations of growing lists of tensors, as in DenseNet (Huang et al. 2017), so that
each concatenation begins with the result of the previous one: cat(a, b, c) after x = cat(a, b)
becomes cat(x, c). Fewer tensors must then be kept from one kernel to the next (parts.py), and all
of these concatenations can be stored in one buffer (ark.lower.rewrite.image_concats). Called by
compile.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx

from ark.interop.torch.graph import results_of


def nest_concats(module: fx.GraphModule) -> None:
    """Replaces the first tensors of each concatenation by the longest earlier concatenation of
    exactly these tensors along the same dimension.
    """
    earlier: dict[tuple[Any, ...], fx.Node] = {}
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default):
        tensors, dim = _read(node)
        if not tensors:
            continue
        lengths = range(len(tensors) - 1, 1, -1)
        prefixes = ((n, earlier.get((dim, *tensors[:n]))) for n in lengths)
        count, first = next(((n, c) for n, c in prefixes if c is not None), (0, None))
        if first is not None:
            node.args = ([first, *tensors[count:]], *node.args[1:])
        earlier.setdefault((dim, *tensors), node)


def _read(node: fx.Node) -> tuple[Sequence[fx.Node], int]:
    """The tensors that a node concatenates, and the dimension along which it concatenates them. The
    list is empty if the element types differ, or if a tensor has only one dimension, because torch
    skips such a tensor if it has no elements.
    """
    tensors = cast(Sequence[fx.Node], node.args[0])
    values = [v for n in tensors for v in results_of(n)]
    rank = min((v.dim() for v in values), default=0)
    if rank < 2 or len({v.dtype for v in values}) > 1:
        return (), 0
    dim = cast(int, node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0))
    return tuple(tensors), dim % rank
