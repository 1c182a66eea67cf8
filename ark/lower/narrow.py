"""Types of what matrix units read: they multiply two operands of one 16-bit type, where a model has
fp32 activations and weights of 16 bits.

In the variant for large products the input of such a product, and the queries of attention over
caches of such a type, are rounded to the weights' type where they are made, or by a cast of their
own. Sums stay in fp32. Called by ark.lower.pipeline.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter

from ark.ir.dtype import DataType, bf16, fp16, fp32
from ark.ir.graph import Graph, Node
from ark.ir.values import Tensor
from ark.machine import Machine

ROUNDS = ("attention", "layernorm", "rmsnorm", "rope_kv", "rotary_embedding", "swiglu_pairs")
"""Ops whose first result may be of another type than its inputs."""


def narrow(graph: Graph, machine: Machine, kept: frozenset[int] = frozenset()) -> Graph:
    """A copy of the graph in which such products read 16-bit inputs. kept: ids of buffers that
    somebody else reads.
    """
    if machine.variant.name != "matrix":
        return graph
    made = copy.copy(graph)
    made.nodes = list(graph.nodes)
    uses = Counter(t.id for n in graph.nodes for t in (*n.inputs, *n.after))
    touched = Counter(t.buffer.id for n in graph.nodes for t in (*n.inputs, *n.outputs))
    wanted: dict[int, list[Node]] = {}  # by tensor: the nodes that read it so
    tensors: dict[int, Tensor] = {}
    for node in graph.nodes:
        if _dtype(node) is not None:
            wanted.setdefault(node.inputs[0].id, []).append(node)
            tensors[node.inputs[0].id] = node.inputs[0]
    makers = {t.id: place for place, n in enumerate(made.nodes) for t in n.outputs}
    casts: dict[int, list[Node]] = {}  # by place: what is put before it
    changed: dict[tuple[int, DataType], Tensor] = {}
    number = max((n.id for n in graph.nodes), default=0)
    places = {n.id: place for place, n in enumerate(made.nodes)}
    for key, readers in wanted.items():
        old, kinds = tensors[key], {_dtype(n) for n in readers}
        place = makers.get(key)
        maker = made.nodes[place] if place is not None else None
        alone = (
            len(kinds) == 1
            and uses[key] == len(readers)
            and touched[old.buffer.id] == len(readers) + 1
            and old.buffer.arena == "activation"
            and old.buffer.id not in kept
        )
        for reader in readers:
            dtype = _dtype(reader)
            assert dtype is not None
            new = changed.get((key, dtype))
            if new is None:
                new = changed[key, dtype] = made.tensor(old.shape, dtype, name=old.name)
                if alone and place is not None and maker is not None and maker.type in ROUNDS:
                    outputs = (new, *maker.outputs[1:])
                    made.nodes[place] = dataclasses.replace(maker, outputs=outputs)
                else:
                    number += 1
                    cast = dataclasses.replace(
                        reader,
                        id=number,
                        type="cast",
                        name=f"{reader.name}.cast",
                        inputs=(old,),
                        outputs=(new,),
                        attrs={},
                        after=(),
                    )
                    casts.setdefault(places[reader.id], []).append(cast)
            at = places[reader.id]
            now = made.nodes[at]
            made.nodes[at] = dataclasses.replace(now, inputs=(new, *now.inputs[1:]))
    made.nodes = [n for place, old in enumerate(made.nodes) for n in (*casts.get(place, ()), old)]
    return made


def _dtype(node: Node) -> DataType | None:
    """The type to which the node's first input, which is fp32, is to be rounded, if it is."""
    if node.type not in ("matmul", "attention") or node.inputs[0].dtype != fp32:
        return None
    other = node.inputs[1].dtype
    return other if other in (bf16, fp16) else None
