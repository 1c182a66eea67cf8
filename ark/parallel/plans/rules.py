"""Named plans within a graph: how a node's result may lie along an axis of the mesh.

A rule leaves open what it does not name; the search decides that (ark.parallel.plans.search).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ark.ir.graph import Node
from ark.parallel.plans.choices import Option
from ark.parallel.transform.carried import EXPERT, VALUE

Rule = Callable[[Node, str, str | None], bool]
"""From an op, how its result lies and by which letter that is, to whether it may."""
RESULTS = ("state", "external")  # arenas of what a caller reads


def _weights(node: Node) -> bool:
    """Is it a product with a parameter?"""
    return node.type == "matmul" and any(t.buffer.arena == "parameter" for t in node.inputs)


def _last(node: Node) -> str:
    """The last dimension of a node's result, as a state."""
    return str(len(node.outputs[0].shape) - 1)


def _replicated(node: Node, state: str, letter: str | None) -> bool:
    """Every rank computes everything."""
    return state == "R"


def _data(node: Node, state: str, letter: str | None) -> bool:
    """Each rank some rows of every result."""
    return state == "0"


def _column(node: Node, state: str, letter: str | None) -> bool:
    """Products with parameters by the columns of their result."""
    return state == _last(node) if _weights(node) else True


def _row(node: Node, state: str, letter: str | None) -> bool:
    """Products with parameters by what they sum over: partial sums."""
    return state == "V" if _weights(node) else True


def _megatron(node: Node, state: str, letter: str | None) -> bool:
    """Products with parameters by columns or as partial sums, the rest whole or by columns; sums
    of what is cut as partial sums too, as those of logits by vocabulary.

    What the caller reads is whole on every rank.
    """
    if node.outputs[0].buffer.arena in RESULTS and node.type != "kv_append":
        return state == "R"
    return state in (
        "V" if _weights(node) or (letter is not None and node.type == "reduce_sum") else "R",
        "0" if node.type == "kv_append" else _last(node),
    )


def _sequence(node: Node, state: str, letter: str | None) -> bool:
    """As megatron, but the rest is split too: what it would replicate on all ranks, by rows."""
    return state in ("V", _last(node)) if _weights(node) else state not in ("R", "V")


def _expert(node: Node, state: str, letter: str | None) -> bool:
    """Each rank some of the experts: of products with a parameter a matrix an expert; of the rest
    what has experts along its first dimension, sums over them as partial sums. Where rows go to
    experts of their own, what comes of these is a share until somebody adds it to something."""
    if node.type == "expert_linear" or letter == VALUE:
        return letter in (EXPERT, VALUE)
    experts = [t for t in node.inputs if t.buffer.arena == "parameter" and len(t.shape) == 3]
    if experts or (node.inputs and len(node.inputs[0].shape) == 3):
        return state == ("V" if len(node.outputs[0].shape) == 2 else "0")
    return state == "R"


def _auto(node: Node, state: str, letter: str | None) -> bool:
    """Whatever is fastest."""
    return True


PLANS: dict[str, Rule] = {
    "replicated": _replicated,
    "data": _data,
    "column": _column,
    "row": _row,
    "megatron": _megatron,
    "sequence": _sequence,
    "expert": _expert,
    "auto": _auto,
}
"""By name: may a node's result lie so along an axis of the mesh?"""


def allowed(node: Node, options: Sequence[Option], names: Sequence[str]) -> list[Option]:
    """The options that each axis' plan allows; where it allows none, the axis splits nothing."""
    kept = list(options)
    for axis, name in enumerate(names):
        able = [o for o in kept if PLANS[name](node, o.output[axis], o.choice[axis])]
        kept = able or [o for o in kept if o.choice[axis] is None]
    return kept
