"""Keeps linear recurrences y[t] = factor[t] * y[t - 1] + term[t], such as the selective scans of
Mamba (Gu and Dao 2023), as single operators. torch expresses them as associative scans. It
decomposes a scan into a tree, with a call of the function that joins two elements at each level,
which gives many operators. Called by compile.py.
"""

from __future__ import annotations

import operator as python
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx
from torch._higher_order_ops.associative_scan import associative_scan_op

from ark.interop.torch.graph import results_of

PERMUTE = torch.ops.aten.permute.default


def _recurrence(factors: torch.Tensor, terms: torch.Tensor, dim: int) -> torch.Tensor:
    pairs = zip(factors.unbind(dim), terms.unbind(dim), strict=True)
    totals: list[torch.Tensor] = []
    for factor, term in pairs:
        totals.append(factor * totals[-1] + term if totals else term)
    return torch.stack(totals, dim)


OPERATOR = torch.library.custom_op(
    "ark::recurrence",
    _recurrence,
    mutates_args=(),
    schema="(Tensor factors, Tensor terms, int dim) -> Tensor",
)
OPERATOR.register_fake(lambda factors, terms, dim: torch.empty_like(terms))


def keep_recurrences(module: fx.GraphModule) -> None:
    """Replaces associative scans of pairs (factor, term) whose function joins (a, b) and (c, d) to
    (a c, b c + d). The first result becomes the running products of the factors, the second one a
    linear recurrence. torch has moved the scan's dimension to the front by permutations; the
    recurrence is computed on the tensors before these permutations.
    """
    changed = False
    for node in module.graph.find_nodes(op="call_function", target=associative_scan_op):
        order = _order(node, module)
        if order is None or any(user.target is not python.getitem for user in node.users):
            continue
        factors, terms = (cast(Sequence[fx.Node], node.args[1])[i] for i in order)
        for user in list(node.users):
            if user.args[1] == order[0]:
                user.target, user.args = torch.ops.aten.cumprod.default, (factors, 0)
            else:
                _replace(user, factors, terms)
        changed = True
    if changed:
        module.graph.eliminate_dead_code()
        module.recompile()


def _replace(node: fx.Node, factors: fx.Node, terms: fx.Node) -> None:
    """Replaces an associative scan by one `recurrence` operator along the first dimension. If
    `factors` and `terms` are results of equal permutations, the operator reads the permutations'
    sources, and its own result is permuted instead.
    """
    target, order = torch.ops.ark.recurrence.default, _permutation(terms)
    if order is None or order != _permutation(factors):
        node.target, node.args = target, (factors, terms, 0)
        return
    sources = cast(Sequence[fx.Node], (factors.args[0], terms.args[0]))
    with node.graph.inserting_before(node):
        whole = node.graph.call_function(target, (*sources, order[0]))
    whole.meta["val"] = torch.empty_like(results_of(sources[1])[0])
    node.target, node.args = PERMUTE, (whole, order)
    for user in list(node.users):
        back = _permutation(user)
        if back is not None and [order[d] for d in back] == sorted(order):
            user.replace_all_uses_with(whole)


def _permutation(node: fx.Node) -> list[int] | None:
    """The order of the dimensions in the result of a permutation; None for other nodes."""
    order = cast(Sequence[int], node.args[1]) if node.target is PERMUTE else None
    return None if order is None else [d % len(order) for d in order]


def _order(node: fx.Node, module: fx.GraphModule) -> tuple[int, int] | None:
    """The positions of the factors and the terms among the operands of an associative scan, if it
    computes y[t] = factor[t] * y[t - 1] + term[t]; None for any other scan.
    """
    joined, operands, others = cast(Any, node.args)
    values = [v for n in operands for v in results_of(n)]
    if others or len(values) != 2 or len({(v.shape, v.dtype) for v in values}) > 1:
        return None
    if not values[0].is_floating_point():
        return None
    results = _written(getattr(module, str(joined.target)))
    for factors, terms in ((0, 1), (1, 0)):
        product = ("mul", frozenset({factors, factors + 2}))
        term = ("add", frozenset({("mul", frozenset({terms, factors + 2})), terms + 2}))
        if results == ((product, term) if factors == 0 else (term, product)):
            return factors, terms
    return None


def _written(joining: fx.GraphModule) -> tuple[Any, ...]:
    """The results of a graph of sums and products as expressions of the numbers of its inputs. A
    result of other operators is None.
    """
    names = {torch.ops.aten.mul.Tensor: "mul", torch.ops.aten.add.Tensor: "add"}
    known: dict[Any, Any] = {}
    for place, node in enumerate(joining.graph.nodes):
        name = names.get(cast(Any, node.target))
        if node.op == "placeholder":
            known[node] = place
        elif name and not node.kwargs and len(set(node.args)) == 2:
            parts = [known.get(n) for n in node.args]
            known[node] = None if None in parts else (name, frozenset(parts))
    (ends,) = next(n for n in joining.graph.nodes if n.op == "output").args
    return tuple(known.get(end) for end in cast(Sequence[Any], ends))
