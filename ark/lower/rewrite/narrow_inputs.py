"""Rounds fp32 inputs of products with 16-bit weights to the weights' type, because matrix units
multiply two operands of one type. The node that computes an input rounds it, or a cast is added.
Sums stay in fp32. Listed in ark.lower.passes.

Which inputs are rounded depends on the kernel variant and the machine:

- Under the variant `matrix`: inputs of all products with 16-bit weights, and queries of attention
  over keys and values of a 16-bit type.
- On machines whose matrix units work in every variant: inputs of products of many rows, and queries
  of attention whose result is rounded for such a product.
- For linear layers, whose tasks would each round the input: an input of a few rows that is large
  for packets, or of one row that is stored as 16-bit packets, if its producer can round it.
"""

from __future__ import annotations

import dataclasses

from ark.ir.attributes import LinearAttributes
from ark.ir.dtype import DataType, bf16, fp16, fp32, value_type
from ark.ir.epilogues import EPILOGUES, GATED_PAIRS
from ark.ir.graph import Graph, Node
from ark.ir.values import Tensor
from ark.lower.packets import SHORT_PACKET_ROW_ELEMENTS, takes_short
from ark.lower.rewrite.context import Context
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.machine.variant import COMMUNICATE
from ark.tasks.linear_form import MAX_UNIT_INPUT_ROWS

ROUNDS = {
    *("attention", "layernorm", "rmsnorm", "rope_kv", "rotary_embedding"),
    *GATED_PAIRS.values(),
}
"""Ops whose first result may have another type than their inputs, so that they can round it."""
ROUNDED = ("matmul", "attention", "paged_attention")  # ops whose first input may be rounded


def narrow_inputs(graph: Graph, context: Context) -> Graph:
    """A copy of the graph in which products with 16-bit weights read 16-bit inputs."""
    machine, kept = context.machine, context.kept
    matrix, short = machine.variant.name == "matrix", takes_short(machine)
    units = machine.has(Capability.K_PARTS)
    few = short or machine.variant.role(COMMUNICATE) > 0
    if not (matrix or units or few):
        return graph

    narrowed = graph.with_nodes(graph.nodes)
    uses, touches = graph.view.uses, graph.view.touches
    products: dict[int, list[Node]] = {}  # products of many rows, by their first input
    for node in graph.nodes:
        if units and _many(node, machine) and _dtype(node):
            products.setdefault(node.inputs[0].id, []).append(node)

    def alone(tensor: Tensor, readers: list[Node], kinds: set[DataType | None]) -> bool:
        """True if only `readers` read the tensor, and all of them need the same type. kinds: the
        types that they need.
        """
        return (
            len(kinds) == 1
            and uses[tensor.id] == len(readers)
            and touches[tensor.buffer.id] == len(readers) + 1
            and tensor.buffer.arena == "activation"
            and tensor.buffer.id not in kept
        )

    def wants(node: Node) -> DataType | None:
        if matrix or (units and _many(node, machine)):
            return _dtype(node)
        if node.type == "attention" and machine.has(Capability.ATTENTION_UNITS):
            result, behind = node.outputs[0], products.get(node.outputs[0].id, [])
            kinds = {_dtype(n) for n in (node, *behind)}
            return _dtype(node) if behind and alone(result, behind, kinds) else None
        return _few(node, machine, short) if few else None

    wanted: dict[int, list[Node]] = {}  # by tensor: the nodes that read it rounded
    tensors: dict[int, Tensor] = {}
    for node in graph.nodes:
        if wants(node) is not None:
            wanted.setdefault(node.inputs[0].id, []).append(node)
            tensors[node.inputs[0].id] = node.inputs[0]
    makers, places, writers = graph.view.makers, graph.view.places, graph.view.writers
    casts: dict[int, list[Node]] = {}  # by index: casts to insert before
    changed: dict[tuple[object, ...], tuple[Tensor, int]] = {}  # with the place of the cast
    number = max((n.id for n in graph.nodes), default=0)
    for key, readers in wanted.items():
        old, kinds = tensors[key], {wants(n) for n in readers}
        place = places[makers[key].id] if key in makers else None
        maker = narrowed.nodes[place] if place is not None else None
        rounds = maker is not None and _rounds(maker, matrix) and alone(old, readers, kinds)
        for reader in readers if matrix or units or rounds else ():
            dtype = wants(reader)
            assert dtype is not None
            at, which = places[reader.id], (key, dtype, reader.phase)
            new, since = changed.get(which, (old, at))
            written = writers.get(old.buffer.id, ())
            if new is old or any(since <= places[n.id] < at for n in written):
                new = narrowed.tensor(old.shape, dtype, name=old.name)
                changed[which] = new, at
                if rounds and place is not None and maker is not None:
                    outputs = (new, *maker.outputs[1:])
                    narrowed.nodes[place] = dataclasses.replace(maker, outputs=outputs)
                else:
                    number += 1
                    name = f"{reader.name}.cast"
                    cast = reader.beside(number, "cast", [old], new, {}, name, waits=False)
                    casts.setdefault(at, []).append(cast)
            now = narrowed.nodes[at]
            narrowed.nodes[at] = dataclasses.replace(now, inputs=(new, *now.inputs[1:]))
    narrowed.nodes = [
        n for place, old in enumerate(narrowed.nodes) for n in (*casts.get(place, ()), old)
    ]
    return narrowed


def _rounds(maker: Node, matrix: bool) -> bool:
    """True if the node can round its first result to another type. matrix: True in the variant
    `matrix`, where attention over pages rounds, too.
    """
    if maker.type == "linear":
        return EPILOGUES[maker.read(LinearAttributes).epilogue].gated
    return maker.type in ROUNDS or (matrix and maker.type == "paged_attention")


def _many(node: Node, machine: Machine) -> bool:
    """True for a product by a two-dimensional weight whose result is large enough for matrix
    units.
    """
    if node.type != "matmul" or len(node.inputs[1].shape) != 2:
        return False
    rows, columns = node.outputs[0].shape[-2:]
    return rows >= machine.large_product[0] and columns >= machine.large_product[1]


def _few(node: Node, machine: Machine, short: bool) -> DataType | None:
    """The type to which the input of a linear layer is rounded: the type of its weight. None if the
    input is not rounded. An input of several rows is rounded if it is large: then waiting for a
    counter and loading 16-bit elements takes less time than polling packets, which have four times
    the bytes. An input of one row is rounded if the machine supports packets of 16-bit elements,
    which have half the bytes.
    """
    if node.type != "linear" or node.read(LinearAttributes).prologue != "none":
        return None
    x, weight = node.inputs[:2]
    plain = x.dtype == fp32 and x.shape[0] <= MAX_UNIT_INPUT_ROWS and x.dense
    row = short and x.shape[0] == 1 and x.elements % SHORT_PACKET_ROW_ELEMENTS == 0
    many = x.shape[0] > 1 and x.elements > machine.costs.rounded_elements
    dtype = value_type(weight.dtype)
    return dtype if plain and (many or row) and dtype in (bf16, fp16) else None


def _dtype(node: Node) -> DataType | None:
    """The type to which the node's first input, an fp32 tensor, is rounded; None if the input is
    not rounded.
    """
    if node.type not in ROUNDED or node.inputs[0].dtype != fp32:
        return None
    other = value_type(node.inputs[1].dtype)
    return other if other in (bf16, fp16) else None
