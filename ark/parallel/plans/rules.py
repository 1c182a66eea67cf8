"""The rules of named plans: which layouts a node's result may have along an axis of the mesh.

A layout is a string: "R" (replicated: every rank has the whole tensor), "V" (every rank has a
partial sum), or the number of the dimension that is cut. A letter names a dimension of an op, such
as m, n or k of a matmul (ark.parallel.transform.annotations). If a rule allows several layouts,
ark.parallel.plans.search decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ark.errors import UnsupportedError
from ark.ir.graph import Node
from ark.parallel.plans.choices import Option
from ark.parallel.transform import annotate
from ark.parallel.transform.carried import EXPERT, VALUE

RESULTS = ("state", "external", "host")  # arenas of results that the caller reads
PRODUCTS = ("matmul", "quantized_linear")


@dataclass(frozen=True)
class Roles:
    """The roles of buffers.

    weights: the buffers whose values depend on parameters only. features: the feature dimension of
        each buffer. It is the dimension that counts the outputs of a matmul with weights. If a
        buffer is not computed from such a matmul, it is the last dimension.
    """

    weights: frozenset[int]
    features: Mapping[int, int]

    def product(self, node: Node) -> bool:
        """True if the node is a matmul with weights."""
        return node.type in PRODUCTS and any(t.buffer.id in self.weights for t in node.inputs)

    def constant(self, node: Node) -> bool:
        """True if the node's result depends on parameters only."""
        return node.outputs[0].buffer.id in self.weights

    def feature(self, node: Node) -> str:
        """The layout of a node's result that is cut along its feature dimension."""
        return str(self.features[node.outputs[0].buffer.id])


Rule = Callable[[Roles, Node, str, str | None], bool]
"""A rule: the buffers' roles, a node, a layout of the node's result, and the letter along which the
op is split to get that layout (None if it is not split). Returns True if the plan allows it.
"""


def roles_of(nodes: Sequence[Node]) -> Roles:
    """The roles of a graph's buffers: which depend only on parameters, and the feature dimension of
    each.
    """
    weights = {t.buffer.id for node in nodes for t in node.inputs if t.buffer.arena == "parameter"}
    features: dict[int, int] = {}
    for node in nodes:
        read = [t.buffer.id for t in node.inputs]
        if read and node.type not in PRODUCTS and weights.issuperset(read):
            weights.update(t.buffer.id for t in node.outputs)
        last = len(node.outputs[0].shape) - 1
        for tensor in node.outputs:
            features[tensor.buffer.id] = _feature(node, weights, features, last)
    return Roles(frozenset(weights), features)


def _feature(node: Node, weights: set[int], features: Mapping[int, int], last: int) -> int:
    """The feature dimension of a node's result."""
    try:
        operands = annotate(node).operands
    except UnsupportedError:
        return last
    pairs = list(zip(node.inputs, operands, strict=False))
    if node.type in PRODUCTS:
        others = {x for t, letters in pairs if t.buffer.id not in weights for x in letters}
        own = [x for t, letters in pairs if t.buffer.id in weights for x in letters]
        letters = [x for x in own if x not in others]
    else:
        letters = [
            names[features[t.buffer.id]]
            for t, names in pairs
            if features.get(t.buffer.id, -1) != len(names) - 1 and t.buffer.id in features
        ]
    kept = [operands[-1].index(x) for x in letters if x != "1" and x in operands[-1]]
    return kept[0] if kept else last


def _replicated(roles: Roles, node: Node, layout: str, letter: str | None) -> bool:
    """The rule of the plan `replicated`: every rank computes everything."""
    return layout == "R"


def _data(roles: Roles, node: Node, layout: str, letter: str | None) -> bool:
    """The rule of data parallelism: each rank has some rows of every result. Results that are the
    same for all rows are computed completely by all ranks.
    """
    return layout == ("R" if roles.constant(node) else "0")


def _column(roles: Roles, node: Node, layout: str, letter: str | None) -> bool:
    """The rule of the plan `column`: matmuls with parameters are split by the columns of their
    result.
    """
    return layout == roles.feature(node) if roles.product(node) else True


def _row(roles: Roles, node: Node, layout: str, letter: str | None) -> bool:
    """The rule of the plan `row`: matmuls with parameters are split along the summed dimension and
    give partial sums.
    """
    return layout == "V" if roles.product(node) else True


def _megatron(roles: Roles, node: Node, layout: str, letter: str | None) -> bool:
    """The rule of Megatron's tensor parallelism. Matmuls with parameters are split by columns or
    give partial sums. Other results are whole or split by columns. Reductions over cut dimensions,
    such as those of logits over the vocabulary, also give partial sums.

    Results that the caller reads are whole on every rank. A result that depends only on parameters
    may have any layout, which its readers determine.
    """
    if roles.constant(node):
        return True
    if node.outputs[0].buffer.arena in RESULTS and node.type != "kv_append":
        return layout == "R"
    return layout in (
        "V" if roles.product(node) or (letter is not None and node.type == "reduce_sum") else "R",
        "0" if node.type == "kv_append" else roles.feature(node),
    )


def _sequence(roles: Roles, node: Node, layout: str, letter: str | None) -> bool:
    """The rule of sequence parallelism: like megatron, but ops that megatron would replicate are
    split by rows.
    """
    if roles.constant(node):
        return True
    return layout in ("V", roles.feature(node)) if roles.product(node) else layout not in ("R", "V")


def _expert(roles: Roles, node: Node, layout: str, letter: str | None) -> bool:
    """The rule of expert parallelism: each rank has some of the experts.

    A matmul with one matrix per expert is split by experts. Other ops are split along their first
    dimension of experts, and sums over it give partial sums. If rows are routed to experts, results
    stay partial sums until they are added to another value.
    """
    if node.type == "expert_linear" or letter == VALUE:
        return letter in (EXPERT, VALUE)
    experts = [t for t in node.inputs if t.buffer.arena == "parameter" and len(t.shape) == 3]
    if experts or (node.inputs and len(node.inputs[0].shape) == 3):
        return layout == ("V" if len(node.outputs[0].shape) == 2 else "0")
    return layout == "R"


def _auto(roles: Roles, node: Node, layout: str, letter: str | None) -> bool:
    """The rule of the plan `auto`: any choice is allowed, and the search finds the fastest one."""
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
"""The rule of each plan name."""


def allowed(
    roles: Roles, node: Node, options: Sequence[Option], names: Sequence[str]
) -> list[Option]:
    """The options that the plans of all axes allow. If an axis's plan allows none, this axis does
    not split the node.
    """
    kept = list(options)
    for axis, name in enumerate(names):
        able = [o for o in kept if PLANS[name](roles, node, o.output[axis], o.choice[axis])]
        kept = able or [o for o in kept if o.choice[axis] is None]
    return kept
