"""The expressions of elementwise ops, as trees (ark.tasks.expression). Called by the lowering and
its passes, and by the gradients of ops.
"""

from __future__ import annotations

import numpy as np

from ark.ir.dtype import FLOATS, SMALL_FLOATS, DataType, fp32
from ark.ir.graph import Node
from ark.tasks import expression
from ark.tasks.functions import FUNCTIONS


def is_elementwise(node: Node) -> bool:
    """True if each element of the result depends only on the elements of the inputs at the same
    index.
    """
    known = node.type in FUNCTIONS or node.type in ("cast", "constant")
    return known or node.elementwise.expr is not None


def expression_of(node: Node) -> expression.Tree:
    """The expression tree that an elementwise node computes from its inputs. It includes a cast to
    the result's type if the node converts types.
    """
    tree, dtype = _function_of(node), node.outputs[0].dtype
    return expression.typed(tree, [t.dtype.name for t in node.inputs], dtype.name)


def _function_of(node: Node) -> expression.Tree:
    given, dtype = node.elementwise, node.outputs[0].dtype
    if given.expr is not None:
        return given.expr
    arguments: list[expression.Tree] = [expression.leaf(i) for i in range(len(node.inputs))]
    if given.scalar is not None:
        arguments.append(expression.number(given.scalar))
    if node.type == "cast" or (node.type == "constant" and _rounds(given.scalar or 0.0, dtype)):
        # A result with several elements per byte needs no cast in the expression, because the store
        # converts to its type.
        return arguments[0] if dtype.packed else ["cast", dtype.name, *arguments]
    return arguments[0] if node.type in ("copy", "constant") else [node.type, *arguments]


def _rounds(value: float, dtype: DataType) -> bool:
    """True if `value` is not exactly representable in a floating-point type of less than 32
    bits.
    """
    if dtype == fp32 or dtype not in (*FLOATS, *SMALL_FLOATS):
        return False
    with np.errstate(over="ignore"):
        return float(np.asarray(value, np.float64).astype(dtype.numpy)) != value
