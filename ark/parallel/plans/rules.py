"""Named plans within a graph: the allowed layouts of a node's result along an axis of the mesh.

A rule does not restrict choices that it does not name; ark.parallel.plans.search decides those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ark.ir.graph import Node
from ark.parallel.plans.choices import Option
from ark.parallel.transform.carried import EXPERT, VALUE

Rule = Callable[[Node, str, str | None], bool]
"""From an op, its result's state and the letter that gives it, to whether the plan allows it."""
RESULTS = ("state", "external")  # arenas that a caller reads


def _weights(node: Node) -> bool:
    """True for a matmul with a parameter."""
    return node.type == "matmul" and any(t.buffer.arena == "parameter" for t in node.inputs)


def _last(node: Node) -> str:
    """The last dimension of a node's result, as a state."""
    return str(len(node.outputs[0].shape) - 1)


def _replicated(node: Node, state: str, letter: str | None) -> bool:
    """Every rank computes everything."""
    return state == "R"


def _data(node: Node, state: str, letter: str | None) -> bool:
    """Each rank has some rows of every result."""
    return state == "0"


def _column(node: Node, state: str, letter: str | None) -> bool:
    """Matmuls with parameters by the columns of their result."""
    return state == _last(node) if _weights(node) else True


def _row(node: Node, state: str, letter: str | None) -> bool:
    """Matmuls with parameters along the summed dimension: partial sums."""
    return state == "V" if _weights(node) else True


def _megatron(node: Node, state: str, letter: str | None) -> bool:
    """Matmuls with parameters by columns or as partial sums, the rest whole or by columns;
    reductions over cut dimensions as partial sums too, such as those of logits over the vocabulary.

    Results that the caller reads are whole on every rank.
    """
    if node.outputs[0].buffer.arena in RESULTS and node.type != "kv_append":
        return state == "R"
    return state in (
        "V" if _weights(node) or (letter is not None and node.type == "reduce_sum") else "R",
        "0" if node.type == "kv_append" else _last(node),
    )


def _sequence(node: Node, state: str, letter: str | None) -> bool:
    """Like megatron, but ops that it would replicate on all ranks are split by rows."""
    return state in ("V", _last(node)) if _weights(node) else state not in ("R", "V")


def _expert(node: Node, state: str, letter: str | None) -> bool:
    """Each rank has some of the experts: of matmuls with a parameter a matrix per expert; of other
    ops the experts along their first dimension, and sums over these as partial sums. Where rows are
    routed to experts, results stay partial sums until they are added to another value.
    """
    if node.type == "expert_linear" or letter == VALUE:
        return letter in (EXPERT, VALUE)
    experts = [t for t in node.inputs if t.buffer.arena == "parameter" and len(t.shape) == 3]
    if experts or (node.inputs and len(node.inputs[0].shape) == 3):
        return state == ("V" if len(node.outputs[0].shape) == 2 else "0")
    return state == "R"


def _auto(node: Node, state: str, letter: str | None) -> bool:
    """Any choice; the fastest is searched."""
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
"""By name: True if a node's result may have that state along an axis of the mesh."""


def allowed(node: Node, options: Sequence[Option], names: Sequence[str]) -> list[Option]:
    """The options that each axis's plan allows; an axis for which it allows none splits nothing."""
    kept = list(options)
    for axis, name in enumerate(names):
        able = [o for o in kept if PLANS[name](node, o.output[axis], o.choice[axis])]
        kept = able or [o for o in kept if o.choice[axis] is None]
    return kept
