"""Fuses a matmul by a weight, the norm before it, the bias and the elementwise op after it into one
`linear` node. This applies if the input has so few rows that the time is that of reading the
weights; the weights are then streamed through a ring of stages in shared memory. Also fuses the
addition of a residual into an all-reduce.

Each task of a linear node computes the norm of the whole input again, because the input's rows are
short. The elementwise op is applied to the complete sums. Ops are fused only if no other op reads
the result between them. Listed in ark.lower.passes.
"""

from __future__ import annotations

from msgspec import structs

from ark.ir.attributes import (
    LinearAttributes,
    MatmulAttributes,
    NormAttributes,
    ProjectionAttributes,
)
from ark.ir.dtype import FLOATS, RowType, bf16, fp16, fp32, value_type
from ark.ir.epilogues import EPILOGUES, GATED_PAIRS
from ark.ir.graph import Graph, Node
from ark.ir.graph_view import GraphView
from ark.ir.values import Tensor
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.pack_weights import writes
from ark.lower.rewrite.unpack_rows import unpacked
from ark.machine import Machine
from ark.machine.variant import COMMUNICATE
from ark.plan.types import BOX_ALIGNMENT_BYTES, MAX_OPERANDS
from ark.tasks.linear_form import (
    most_of_codes,
    narrow_bytes,
    narrow_rows,
    on_units,
    row_nbytes,
    split_k,
)

EPILOGUE_OF = {form.op: name for name, form in EPILOGUES.items() if form.op}
"""The ops that can become the epilogue of a linear node, and the name of each as an epilogue."""
MAX_COPIED_ROWS = 512
"""A linear layer normalises its input itself, even if other ops also read the normalised rows, if
its weight has at most this number of rows (for example, a router of experts). This costs little
more time than handing data from one op to the next.
"""
FROM_MEMORY = ("attention", *GATED_PAIRS.values())
"""Ops whose result may be too large to be stored as packets. A linear layer then reads this input
from memory in pieces, instead of holding all of it in shared memory.
"""


def fuse_linear(graph: Graph, context: Context) -> Graph:
    """A copy of the graph in which products by weights and their neighbours are fused to linear
    nodes.
    """
    machine, kept = context.machine, context.kept
    view = graph.view
    makers, readers = view.makers, view.readers
    dropped: set[int] = set()
    replaced: dict[int, Node] = {}
    for node in graph.nodes:
        if node.type == "all_reduce":
            added = next(iter(readers.get(node.outputs[0].id, ())), None)
            if added is None or added.id in replaced:
                continue
            if _adds_residual(graph, node, added, kept):
                replaced[added.id] = _sum(node, added)
                dropped.add(node.id)
            continue
        if node.type != "matmul" or node.hints:
            continue
        maker = makers.get(node.inputs[0].id)
        if not _streams(node, machine, maker is not None and maker.type in FROM_MEMORY):
            continue
        if node.inputs[1].buffer.id in view.written or node.id in replaced:
            continue
        norm = makers.get(node.inputs[0].id)
        alone = _alone(view, node.inputs[0])
        if norm is not None and not (
            norm.type == "rmsnorm"
            and norm.hints is None
            and (alone or node.inputs[1].shape[0] <= MAX_COPIED_ROWS)
            and node.inputs[0].buffer.id not in kept
            and norm.inputs[0].shape == node.inputs[0].shape
        ):
            norm = None
        weight, product = node.inputs[1], node.outputs[0]
        last = next(iter(readers.get(product.id, ())), None)
        bias = None
        if last is not None and product.buffer.id not in kept and _adds_bias(last, product, view):
            bias, product = last, last.outputs[0]
            last = next(iter(readers.get(product.id, ())), None)
        if last is not None and (
            last.id in replaced  # the addition was already fused with its other operand
            or last.hints is not None
            or product.buffer.id in kept
            or not _epilogue(last, product, view)
        ):
            last = None
        if (
            last is not None
            and EPILOGUES[EPILOGUE_OF[last.type]].paired
            and not _holds_pairs(weight, machine)
        ):
            last = None
        while (norm or bias or last) and not operands_unchanged(graph, norm, node, bias, last):
            if last:
                last = None
            elif bias:
                bias = None
            else:
                norm = None
        if {node.inputs[0].buffer.id} & {t.buffer.id for t in node.outputs}:
            continue
        members = [n for n in (norm, node, bias, last) if n is not None]
        replaced[members[-1].id] = _linear(node, norm, bias, last)
        kept_norm = None if alone else norm
        dropped.update(n.id for n in members[:-1] if n is not kept_norm)
    fused = graph.with_nodes(replaced.get(n.id, n) for n in graph.nodes if n.id not in dropped)
    return unpacked(fused, 0, machine)


def _streams(node: Node, machine: Machine, from_memory: bool) -> bool:
    """True if the product's weight can be streamed through the ring in shared memory. from_memory:
    True if the layer may read its input from memory in pieces, so that the input need not fit in
    shared memory.
    """
    (x, weight), given = node.inputs, node.read(MatmulAttributes)
    rows = x.shape[0]
    few = rows <= most_of_codes(machine)
    return (
        weight.buffer.arena == "parameter"
        and weight.dense
        and x.dtype in FLOATS
        and (weight.dtype in FLOATS or (isinstance(weight.dtype, RowType) and few))
        and len(x.shape) == len(weight.shape) == 2
        and given.transposes == (False, True)
        and (on_units(rows, weight, machine) or _fits(rows, weight, machine, from_memory))
    )


def _fits(rows: int, weight: Tensor, machine: Machine, from_memory: bool) -> bool:
    """True if the input has few enough rows for streaming the weight, and fits in shared
    memory.
    """
    few = rows <= machine.costs.stream_rows and not _boxed(weight, machine)
    return few and _room(rows, weight, machine, from_memory)


def _boxed(weight: Tensor, machine: Machine) -> bool:
    """True if warpgroups can multiply by the weight. Then streaming the weight has no advantage,
    because the loading thread of the warpgroups' variant also copies weights before the input is
    ready.
    """
    return (
        machine.variant.name == "matrix"
        and weight.dtype in (bf16, fp16)
        and weight.shape[1] * weight.dtype.itemsize % BOX_ALIGNMENT_BYTES == 0
    )


def _room(rows: int, weight: Tensor, machine: Machine, from_memory: bool) -> bool:
    """True if a row of the weight can be streamed through the ring, and the input rows fit in
    the shared memory that the ring leaves free.
    """
    splits = split_k(rows, weight, machine)
    scratch = 4 * rows * weight.shape[1] + 4 * machine.warps
    if machine.variant.role(COMMUNICATE) and splits and narrow_rows(rows, weight, splits):
        most, size = machine.costs.rounded_elements, value_type(weight.dtype).itemsize
        wide = from_memory and rows > 1 and rows * weight.shape[1] > most
        held = 0 if wide else narrow_bytes(rows, weight.shape[1], size)
        return held <= machine.task_bytes
    return splits > 1 or (splits == 1 and scratch <= machine.task_bytes)


def _holds_pairs(weight: Tensor, machine: Machine) -> bool:
    """True if a stage (one slot of the ring in shared memory) has room for two whole rows of the
    weight, or the machine has no ring and rows are read in place.
    """
    return not machine.ring_bytes or 2 * row_nbytes(weight) <= machine.stage_bytes


def _alone(view: GraphView, tensor: Tensor) -> bool:
    """True if one node writes the tensor's buffer, and one node reads it, as a single input."""
    return view.reads[tensor.buffer.id] == 1 == len(view.writers.get(tensor.buffer.id, ()))


def _epilogue(node: Node, product: Tensor, view: GraphView) -> bool:
    if node.type not in EPILOGUE_OF or not _alone(view, product):
        return False
    # A norm of a head needs all of its columns, which several tasks compute.
    if node.type == "rope_kv" and node.read(ProjectionAttributes).head_eps:
        return False
    if node.type == "add":
        return len(node.inputs) == 2 and _others(node, product)[0].shape == product.shape
    return node.inputs[0].id == product.id


def _adds_bias(node: Node, product: Tensor, view: GraphView) -> bool:
    """True if the node's result is the product plus one number for each of its columns, which
    are a parameter.
    """
    if node.type != "add" or len(node.inputs) != 2 or node.hints or not _alone(view, product):
        return False
    bias, out = _others(node, product)[0], node.outputs[0]
    own = bias.dense and bias.buffer.arena == "parameter" and bias.dtype in FLOATS
    return own and bias.shape == product.shape[1:] and out.dtype == product.dtype == fp32


def _others(node: Node, product: Tensor) -> tuple[Tensor, ...]:
    """The inputs of the node except `product`, for example the residual of a sum, whose operands
    may be in either order.
    """
    return tuple(t for t in node.inputs if t.id != product.id)


def operands_unchanged(graph: Graph, *fused: Node | None) -> bool:
    """True if fusing a product with the nodes before and after it does not change results. No node
    between the fused nodes may write an operand of a fused node. The result must not share memory
    with the product's input, which all tasks read. fused: the nodes to fuse, in order; None for a
    node that the pattern does not have.
    """
    parts = [n for n in fused if n is not None]
    end = parts[-1]
    reads = {t.buffer.id for n in parts for t in n.inputs}
    between = [n for n in graph.nodes if parts[0].id <= n.id <= end.id and n not in parts]
    if any(buffer in reads for n in between for buffer in writes(n)):
        return False
    gathered = parts[0].inputs[0].buffer.id
    return all(t.buffer.id != gathered for t in end.outputs)


def _adds_residual(graph: Graph, node: Node, added: Node, kept: frozenset[int]) -> bool:
    """True if the only reader of the all-reduce's result is an addition of a dense tensor of the
    same shape and type (a residual).
    """
    return (
        added.type == "add"
        and node.hints is added.hints is None
        and graph.world_size + 2 <= MAX_OPERANDS
        and len(node.inputs) == 1
        and node.outputs[0].buffer.id not in kept
        and _epilogue(added, node.outputs[0], graph.view)
        and (residual := _others(added, node.outputs[0])[0]).dense
        and residual.dtype == added.outputs[0].dtype == node.outputs[0].dtype
        and operands_unchanged(graph, node, added)
    )


def _sum(node: Node, added: Node) -> Node:
    inputs = (node.inputs[0], *_others(added, node.outputs[0]))
    return added.fused(node.type, inputs, added.outputs, node.attrs, (node, added), node.name)


def _linear(node: Node, norm: Node | None, bias: Node | None, last: Node | None) -> Node:
    x, weight = node.inputs
    inputs = [norm.inputs[0] if norm else x, weight]
    attributes = LinearAttributes("none", "store")
    if norm:
        inputs.append(norm.inputs[1])
        eps = norm.read(NormAttributes).eps
        attributes = structs.replace(attributes, prologue="rmsnorm", eps=eps)
    if bias:
        inputs += _others(bias, node.outputs[0])
        attributes = structs.replace(attributes, bias=True)
    if last:
        inputs += _others(last, (bias or node).outputs[0])
        attributes = structs.replace(attributes, epilogue=EPILOGUE_OF[last.type], **last.attrs)
    members = [n for n in (norm, node, bias, last) if n is not None]
    end = members[-1]
    return end.fused("linear", inputs, end.outputs, attributes.to_node(), members, node.name)
