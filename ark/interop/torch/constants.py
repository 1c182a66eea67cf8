"""Computes constant tensors that a torch graph fills part by part. They are computed once, when the
graph is compiled. An example is the attention mask of shifted windows: a model fills it region by
region, with dozens of small ops for a few numbers. Constants that the graph computes from indices
(arange) stay in the graph, because the compiler recognises causal masks among them. Called by
compile.py.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ark.interop.torch.graph import held, name_of, results_of

MAX_BYTES = 1 << 20  # a larger constant is computed in each call, which needs no memory for it
# Operators that create a tensor in the shape of their argument and fill it with one value, with
# this value.
FILLS = {"new_zeros": 0, "zeros_like": 0, "new_ones": 1, "ones_like": 1}
# Operators that write to a part of a tensor.
WRITES = ("slice_scatter", "select_scatter", "diagonal_scatter", "index_put", "scatter")


def fold_constants(module: fx.GraphModule) -> None:
    """Replaces nodes by constant tensors of the module, if they depend on operators of WRITES and
    on no input. Single numbers and results of more than MAX_BYTES bytes are not replaced.
    """
    known: dict[fx.Node, torch.Tensor] = {}
    filled: dict[fx.Node, torch.Tensor] = {}
    with unset_fake_temporarily(), torch.no_grad():
        known.update(held(module))
        for node in module.graph.nodes:
            if node.op == "call_function" and _small(node):
                value = _filled(node)
                if value is None and _depends_on(node, known):
                    value = _value(node, known)
                    if _is_filled(node, filled):
                        filled[node] = value
                if value is not None:
                    known[node] = value
        ends = [n for n, value in filled.items() if value.dim() and _is_read(n, known)]
        for node in ends:
            _hold(module, node, filled[node].contiguous())
    if ends:
        module.graph.eliminate_dead_code()
        module.recompile()


def _small(node: fx.Node) -> bool:
    """True if the result is one tensor of at most MAX_BYTES."""
    (value, *others) = results_of(node) or [None]
    if others or not isinstance(value, torch.Tensor):
        return False
    return value.numel() * value.element_size() <= MAX_BYTES


def _filled(node: fx.Node) -> torch.Tensor | None:
    """The result of a node with an operator of FILLS; None for any other node."""
    value, number = results_of(node)[0], FILLS.get(name_of(node.target).partition(".")[0])
    if number is None:
        return None
    return torch.full(value.shape, number, dtype=value.dtype, device=value.device)


def _depends_on(node: fx.Node, known: dict[fx.Node, torch.Tensor]) -> bool:
    """True if the result of the node is constant, because it depends only on tensors in `known`."""
    if not name_of(node.target) or node.is_impure():
        return False
    random = torch.Tag.nondeterministic_seeded in cast(Any, node.target).tags
    return not random and all(n in known for n in node.all_input_nodes)


def _is_filled(node: fx.Node, filled: dict[fx.Node, torch.Tensor]) -> bool:
    """True if an operator of WRITES, which writes a part of a tensor, computes the node or a node
    on which it depends.
    """
    writes = name_of(node.target).partition(".")[0] in WRITES
    return writes or any(n in filled for n in node.all_input_nodes)


def _is_read(node: fx.Node, known: dict[fx.Node, torch.Tensor]) -> bool:
    """True if a node whose result is not constant reads this node. False if the node is a result of
    the graph: a caller may change a result, so it cannot be a constant.
    """
    readers = {n for n in node.users if n not in known}
    return bool(readers) and "output" not in {n.op for n in readers}


def _value(node: fx.Node, known: dict[fx.Node, torch.Tensor]) -> torch.Tensor:
    arguments: Any = (node.args, node.kwargs)
    args, kwargs = cast(Any, fx.node.map_arg(arguments, lambda n: known[n]))
    result: torch.Tensor = cast(Any, node.target)(*args, **kwargs)
    return result


def _hold(module: fx.GraphModule, node: fx.Node, value: torch.Tensor) -> None:
    """Replaces a node by a constant tensor, which the module holds from now on."""
    name = f"_folded_{node.name}"
    module.register_buffer(name, value)
    with module.graph.inserting_before(node):
        constant = module.graph.get_attr(name)
    constant.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(constant)
