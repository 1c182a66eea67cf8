"""What reads a tensor's memory and not its elements (as_strided) stays in torch, and finds memory
laid out as torch's own shape propagation says: results of kernels are contiguous, whatever strides
torch would have given them. Called by compile.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

READERS = ("aten::as_strided", "aten::as_strided_scatter")


def laid_out(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """The tensor, or a copy of it that has these strides."""
    if tensor.stride() == tuple(strides):
        return tensor
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)


def keep_strides(module: fx.GraphModule) -> set[fx.Node]:
    """Puts a `laid_out` before the views that such operators read. Returns it, the operators and
    the views, all of which stay in torch.
    """
    stay: set[fx.Node] = set()
    for reader in list(module.graph.nodes):
        if not isinstance(reader.target, torch._ops.OpOverload):
            continue
        if reader.target._schema.name not in READERS:
            continue
        user, stays = reader, {reader}
        while _is_view(user.args[0]):
            user = user.args[0]
            stays.add(user)
        base = user.args[0]
        if base.op == "call_function" and base not in stay:
            with module.graph.inserting_before(user):
                strides = tuple(base.meta["val"].stride())
                between = module.graph.call_function(laid_out, (base, strides))
            between.meta["val"] = base.meta["val"]
            user.replace_input_with(base, between)
            stays.add(between)
        stay |= stays
    if stay:
        module.recompile()
    return stay


def _is_view(node: fx.Node) -> bool:
    """Is the node's result on the memory of its first input?"""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    own, source = node.meta.get("val"), node.args[0].meta.get("val")
    if not isinstance(own, torch.Tensor) or not isinstance(source, torch.Tensor):
        return False
    return own.untyped_storage()._cdata == source.untyped_storage()._cdata
