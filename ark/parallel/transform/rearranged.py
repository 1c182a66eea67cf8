"""Splits ops that depend on the index of an element: remap, and expressions that read indices.

A rank computes a part of such an op's result as a tensor of its own. Indices of that tensor begin
at 0, but the op's rules and expressions use indices of the whole result. So `local_attrs` adds the
position of the part to these indices. It is called by ark.parallel.transform.materialise.
"""

from __future__ import annotations

import math
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ark.ir.attributes import AttentionAttributes, RemapAttributes
from ark.ir.graph import Node
from ark.ir.values import Tensor
from ark.parallel.transform.views import View
from ark.tasks.expression import Tree, index, number, rebuilt

LETTERS = string.ascii_lowercase


def remap(node: Node) -> str:
    """The annotation of a remap. Every dimension of the result may be cut.

    If a dimension of the input is copied unchanged to a dimension of the result, the two are cut
    together. One dimension of the input may also correspond to several consecutive dimensions of
    the result. Any other dimension of the input is needed completely.
    """
    out = node.outputs[0].shape
    names = list(LETTERS[: len(out)])
    rules = node.read(RemapAttributes).rules
    uses = Counter(d for terms, *_ in rules for d, _ in terms if out[d] > 1)
    words = []
    for i, ((terms, shift, divide, _), size) in enumerate(
        zip(rules, node.inputs[0].shape, strict=True)
    ):
        run = sorted(((f, d) for d, f in terms if out[d] > 1), reverse=True)
        steps = [f for f, _ in run]
        want = [math.prod(out[d] for _, d in run[k + 1 :]) for k in range(len(run))]
        whole = math.prod(out[d] for _, d in run) == size
        alone = all(uses[d] == 1 for _, d in run)
        if run and steps == want and whole and alone and shift == 0 and divide == 1:
            words.append(names[run[0][1]] + (f"/{steps[0]}" if steps[0] > 1 else ""))
        else:
            words.append("1" if size == 1 else f"{LETTERS[len(out) + i]}^")
    return f"{' '.join(words)} -> {' '.join(names)}"


def local_attrs(node: Node, inputs: Sequence[View], output: View) -> Mapping[str, Any]:
    """The attributes of a node for a piece of it. inputs, output: the views that the piece reads
    and writes.
    """
    if node.type == "expert_linear":
        experts = node.inputs[1].shape[0]
        first, last = inputs[1].box[0]
        own = {"first": first, "of": experts} if last - first < experts else {}
        return {**node.attrs, **own}
    if node.type in ("attention", "paged_attention"):
        heads = output.shape[-1] // node.read(AttentionAttributes).head_dim
        return {**node.attrs, "heads": heads}
    begin = _begin(node.outputs[0], output)
    changed: dict[str, Any] = {}
    given = node.elementwise
    if given.shape is not None:
        changed["shape"] = output.shape
    if given.expr is not None:
        changed["expr"] = _shifted(given.expr, begin)
    if node.type == "remap":
        changed["rules"] = [
            [terms, shift + sum(f * begin[d] for d, f in terms) - divide * first, divide, edge]
            for (terms, shift, divide, edge), first in zip(
                node.read(RemapAttributes).rules, _begin(node.inputs[0], inputs[0]), strict=True
            )
        ]
    return {**node.attrs, **changed}


def _begin(tensor: Tensor, view: View) -> list[int]:
    """The index in a tensor at which a view of it begins, in each dimension."""
    return [first - origin for (first, _), origin in zip(view.box, tensor.offsets, strict=True)]


def _shifted(tree: Tree, begin: Sequence[int]) -> Tree:
    """The expression for a part of a result. begin: the position of the part, which is added to the
    indices in the expression.
    """

    def moved(part: Tree) -> Tree | None:
        first = begin[part[1]] if part[0] == "index" else 0
        return ["add", index(part[1]), number(first)] if first else None

    return rebuilt(tree, moved)
