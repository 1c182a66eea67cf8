"""Keeps calls of scaled_dot_product_attention as single operators in the graphs of torch.compile.

torch decomposes such a call before a backend sees its graph. How it is decomposed depends on the
device and on torch's settings. Without a fused kernel, for example, products are computed in fp32
even for 16-bit tensors. So each call is replaced by an operator of ark with the same meaning, which
torch does not decompose. If ark does not support the call's arguments, the operator is replaced by
torch's call again. Called by compile.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

attend = torch._C._nn.scaled_dot_product_attention
ORDER = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    output: torch.Tensor = attend(
        query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return output


OPERATOR = torch.library.custom_op(
    "ark::attention",
    _attention,
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, bool is_causal=False,"
    " float? scale=None, bool enable_gqa=False) -> Tensor",
)
OPERATOR.register_fake(_attention)
_CALL = inspect.Signature(
    [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None) for n in ORDER]
)


def keep_attention(module: fx.GraphModule, examples: Sequence[Any]) -> None:
    """Replaces each attention call in a Dynamo graph by one operator. In training calls are not
    replaced, because the gradients need values that torch's own operators save.
    """
    tensors = [t for t in (*examples, *module.parameters()) if isinstance(t, torch.Tensor)]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                if node.op == "call_function" and node.target is attend:
                    _keep(node)
            part.recompile()


def _keep(node: fx.Node) -> None:
    """Replaces one call by ark's operator, unless the call has dropout."""
    given = _CALL.bind(*node.args, **node.kwargs).arguments
    if given.pop("dropout_p", 0.0):
        return
    shown = [given[name].meta.get("example_value") for name in ORDER[:3]]
    if not all(isinstance(t, torch.Tensor) and not t.is_nested and t.dim() >= 2 for t in shown):
        return
    lead = -3 if given.get("enable_gqa") else -2
    kinds = {(t.dtype, *map(str, t.shape[:lead])) for t in shown}  # sizes may be symbols
    if len(kinds) != 1:
        return
    if given.get("attn_mask") is not None and given.get("is_causal"):
        return
    node.args = tuple(given.pop(name) for name in ORDER[:3])
    node.target, node.kwargs = torch.ops.ark.attention.default, given
