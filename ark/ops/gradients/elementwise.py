"""The gradient rule of elementwise ops. The gradient of each input is computed by an elementwise op
whose expression contains the derivative.
"""

from __future__ import annotations

from collections.abc import Sequence

from ark.errors import ModelError
from ark.frontend.tensor import Tensor
from ark.ir.dtype import FLOATS, DataType, bool_, fp32, int32, int64
from ark.ir.graph import Node
from ark.ops.base import result
from ark.ops.elementwise import add, cast
from ark.ops.gradients.derivatives import ONE, ZERO, derivative, mul, partials, reads
from ark.ops.gradients.table import Call, Gradients, rule
from ark.ops.reductions import reduce_sum
from ark.ops.views import reshape
from ark.tasks.expression import MAX_NODES, Tree, check, leaf, size, substitute
from ark.tasks.node_expressions import expression_of


def unbroadcast(gradient: Tensor, shape: Sequence[int], dtype: DataType) -> Tensor:
    """The gradient of a tensor that an op broadcast: the gradient of the broadcast tensor, summed
    over the broadcast dimensions and cast to `dtype`. shape: the tensor's shape before it was
    broadcast.
    """
    wide = gradient.ir.shape
    lead = len(wide) - len(shape)
    axes = [d for d, n in enumerate(wide) if d < lead or (shape[d - lead] == 1 and n > 1)]
    if axes:
        gradient = reduce_sum(gradient, axes)
    if gradient.ir.shape != tuple(shape):
        gradient = reshape(gradient, shape)
    return gradient if gradient.ir.dtype == dtype else cast(gradient, dtype)


def computed(
    tree: Tree, operands: Sequence[Tensor], shape: Sequence[int], dtype: DataType
) -> Tensor:
    """Adds an elementwise op that computes the expression `tree`. Its inputs are the operands that
    the expression reads.
    """
    read = [i for i in range(len(operands)) if reads(tree, i)]
    places = {old: leaf(new) for new, old in enumerate(read)}
    packed = substitute(tree, [places.get(i, leaf(0)) for i in range(len(operands))])
    attrs = {"expr": packed, "shape": tuple(shape)}
    return result("elementwise", [operands[i] for i in read], shape, dtype, attrs=attrs)


def has_simple_gradients(node: Node) -> bool:
    """True if one op can compute the gradient of each input of an elementwise node from the node's
    inputs. A condition may only select the whole gradient, not a factor of it, because a factor 0
    times an infinite one gives NaN. False also if the gradients read no input, so that nothing
    would be stored for them in any case.
    """
    tree, count = expression_of(node), len(node.inputs)
    slopes = [derivative(tree, i) for i, t in enumerate(node.inputs) if t.dtype in FLOATS]
    chosen = [part for slope in slopes for part in (slope[2:] if slope[0] == "where" else [slope])]
    short = all(size(_selected(leaf(count), slope)) <= MAX_NODES for slope in slopes)
    return short and any(map(reads, slopes)) and not any(map(_has_condition, chosen))


def _has_condition(tree: Tree) -> bool:
    return tree[0] == "where" or any(
        _has_condition(part) for part in tree[1:] if isinstance(part, list | tuple)
    )


def _selected(given: Tree, slope: Tree) -> Tree:
    """The tree for given * slope. If the slope is 0 depending on a condition, the product is not
    computed there.
    """
    if slope[0] != "where" or ZERO not in slope[2:]:
        return mul(given, slope)
    return ["where", slope[1], *(mul(given, part) for part in slope[2:])]


@rule("elementwise")
def _pointwise(call: Call) -> Gradients:
    tree, given = expression_of(call.node), call.gradient()
    gradients: list[Tensor | None] = []
    for place, (tensor, used) in enumerate(zip(call.node.inputs, call.wanted, strict=True)):
        slope = derivative(tree, place) if used else ZERO
        if slope == ZERO:
            gradients.append(None)
            continue
        gradient = _weighted(
            call, slope, given, fp32 if tensor.shape != given.ir.shape else tensor.dtype
        )
        if gradient is None:
            gradient = _by_function(call, tree, place, given)
        gradients.append(unbroadcast(gradient, tensor.shape, tensor.dtype))
    return gradients


@rule("relu")
def _relu(call: Call) -> Gradients:
    """The gradient of a relu, by its result if this still exists. An op before the relu can then be
    fused with it, because no gradient reads the tensor between them.
    """
    try:
        result = call.output()
    except ModelError:  # a later op has overwritten it
        return _pointwise(call)
    positive: Tree = ["where", ["greater", leaf(0), ZERO], leaf(1), ZERO]
    shape, dtype = call.shape(0), call.node.inputs[0].dtype
    return [unbroadcast(computed(positive, [result, call.gradient()], shape, dtype), shape, dtype)]


def _weighted(call: Call, slope: Tree, given: Tensor, dtype: DataType) -> Tensor | None:
    """The gradient `given` of a node's result times a slope, which is an expression of the node's
    inputs. None if the expression is too large for one op.
    """
    if slope == ONE:
        return given
    count = len(call.node.inputs)
    full = _selected(leaf(count), slope)
    if size(full) > MAX_NODES:
        return None
    operands = [call.input(i) if reads(full, i) else given for i in range(count)]
    return computed(full, [*operands, given], given.ir.shape, dtype)


def _by_function(call: Call, tree: Tree, place: int, given: Tensor) -> Tensor:
    """The gradient of input `place` of an elementwise node, computed with a separate op for each
    function of the node's expression. Used if one op cannot compute it.
    """
    inputs = [call.input(i) if reads(tree, i) else given for i in range(len(call.node.inputs))]
    shape = given.ir.shape

    def visit(part: Tree, gradient: Tensor) -> Tensor | None:
        if part[0] == "input":
            return gradient if part[1] == place else None
        values: list[Tensor] = []
        local = list(part)
        for at, argument in enumerate(part):
            if isinstance(argument, list | tuple) and reads(argument):
                values.append(computed(argument, inputs, shape, _kind(argument, inputs)))
                local[at] = leaf(len(values) - 1)
        total: Tensor | None = None
        for at, slope in partials(local):
            if reads(part[at], place):
                weighted = mul(leaf(len(values)), slope)
                inner = visit(part[at], computed(weighted, [*values, gradient], shape, fp32))
                total = add(total, inner) if total is not None and inner is not None else inner
        return total

    summed = visit(tree, given if given.ir.dtype == fp32 else cast(given, fp32))
    assert summed is not None
    return summed


def _kind(tree: Tree, operands: Sequence[Tensor]) -> DataType:
    """The data type for the value of an expression over these operands."""
    kinds = {"bool": bool_, "ark_i32": int32, "ark_i64": int64}
    return kinds.get(check(tree, [t.ir.dtype.name for t in operands]), fp32)
