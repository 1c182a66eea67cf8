"""The parts of an attention that is written as single ops. Used by
ark.lower.rewrite.fuse_attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ark.ir.graph import Graph, Node
from ark.ir.values import Tensor
from ark.lower.rewrite.attention_gradients import Backward
from ark.lower.rewrite.masks import Mask
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.tasks.attention_gradient import MAX_UNIT_HEAD_ELEMENTS


@dataclass
class Recognised:
    """An attention that was recognised in the graph. query, key: the operands of the product that
    computes the scores. scale: the factor of the scores. weights: the ops between the scores and
    the second product. taken: ids of the nodes that the new op replaces. read: the positions in the
    graph of the first op that reads the queries, and of the first op that reads the keys.
    """

    query: Tensor
    key: Tensor
    flipped: bool  # True if the keys are (width, context)
    scale: float
    weights: Weights
    taken: list[int]
    read: tuple[int, ...]

    def followed(self, graph: Graph, product: Node, tensors: tuple[Tensor, Tensor, Tensor]) -> bool:
        """True if the ops that read the weights besides the product are the gradients of this
        attention, or if there are none. tensors: queries, keys and values.
        """
        backward = self.weights.backward
        if backward is None:
            return True
        nodes = [n for n in graph.nodes if n.id in set(self.taken)]
        hidden = all(m.form == "added" or m.fill == -math.inf for m in self.weights.masks)
        fits = (
            hidden and not self.flipped and product.outputs[0].shape[-1] <= MAX_UNIT_HEAD_ELEMENTS
        )
        return fits and backward.belongs(product, tensors, self.scale, nodes)


@dataclass
class Weights:
    """The ops that turn scores into attention weights: scale, masks and softmax. strict: True for a
    softmax that gives NaN if all keys are masked. masks: the masks that are operands; if there are
    several, all are added to the scores. backward: the ops that compute the gradients, if there are
    any.
    """

    scale: float = 1.0
    causal: bool = False
    strict: bool = False
    masks: list[Mask] = field(default_factory=list)
    backward: Backward | None = None


def multiplies(node: Node, machine: Machine) -> bool:
    """True if the machine's kernel variant has a fast body for this node, if it is attention or its
    gradients.
    """
    boxed = machine.has(Capability.WGMMA) or machine.has(Capability.ONE_PRODUCT_BODY)
    fast = machine.variant.name == "matrix" and boxed
    if node.type == "attention_gradient":
        return fast
    return fast or node.type != "attention" or machine.has(Capability.ATTENTION_UNITS)
