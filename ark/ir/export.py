"""Writes a graph as JSON in the layout of ARK's model files: nodes with producers, consumers,
tensors and arguments. The text is for people and tools that read ARK's files; ark itself does not
read it. An all-reduce is written as in ARK's files: as one node AllReducePacketFused, or as a ring
of Send, Recv and Add. These nodes describe the result of the all-reduce, not the way in which ark
computes it. Called by ark.frontend.model.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterator
from itertools import count
from typing import Any

from ark.ir.attribute_forms import PartialAttributes
from ark.ir.dtype import fp16
from ark.ir.graph import Graph, Node
from ark.ir.values import Buffer, Tensor

PREFILL = "all_reduce_prefill"
# On 2 to 8 ranks, ARK's format writes an all-reduce of one of these numbers of fp16 elements as one
# node of the given name.
FUSED_NAMES = {4096: "all_reduce_packet", 2048 * 4096: PREFILL}


def arks_name(tensor: Tensor, world: int) -> str:
    """The name of the single node by which ARK's format represents an all-reduce of this tensor; ""
    if ARK represents it as a ring of sends and receives.
    """
    if tensor.dtype != fp16 or not 2 <= world <= 8 or tensor.elements % (4 * world):
        return ""
    return FUSED_NAMES.get(tensor.elements, "")


def to_json(graph: Graph, pretty: bool = True) -> str:
    """The graph as text; the same graph gives the same text."""
    data = {
        "Rank": graph.rank,
        "WorldSize": graph.world_size,
        "Nodes": _nodes(graph),
    }
    return json.dumps(data, indent=2 if pretty else None)


def _nodes(graph: Graph) -> list[dict[str, Any]]:
    """The entries of all nodes in the JSON text. A node's producers in it are the last writers of
    the tensors and buffers that it reads.
    """
    nodes = [dataclasses.replace(n, id=i) for i, n in enumerate(_spelled_out(graph))]
    producers: dict[int, list[int]] = {}
    consumers: dict[int, list[int]] = defaultdict(list)
    writer: dict[int, int] = {}
    for node in nodes:
        writers = {writer[t.buffer.id] for t in node.inputs if t.buffer.id in writer}
        producers[node.id] = sorted(writers)
        for producer in writers:
            consumers[producer].append(node.id)
        writer.update({t.buffer.id: node.id for t in node.outputs})
    return [
        {
            "Id": node.id,
            "ProducerNodeIds": producers[node.id],
            "ConsumerNodeIds": consumers[node.id],
            "Op": op_entry(node),
        }
        for node in nodes
    ]


class _Exported(PartialAttributes, frozen=True):
    """Attributes that appear in the exported graph. tag: the tag of a message. packet: True for an
    all-reduce that is a single node in ARK's layout.
    """

    tag: int = 0
    packet: bool = False


def _spelled_out(graph: Graph) -> Iterator[Node]:
    """The nodes, in which each all-reduce that ARK does not write as one node is replaced by a ring
    of sends, receives and additions.
    """
    fresh = count(len(graph.tensors))
    buffers = count(len(graph.buffers))
    tags = count(1 + max((_Exported.of(n.attrs).tag for n in graph.nodes), default=0))

    def like(tensor: Tensor, buffer: Buffer | None = None) -> Tensor:
        """A new tensor with the type and shape of `tensor`, on `buffer` or, if that is None, on a
        buffer of its own.
        """
        own = buffer or dataclasses.replace(tensor.buffer, id=next(buffers))
        return dataclasses.replace(tensor, id=next(fresh), buffer=own)

    def part(type: str, inputs: tuple[Tensor, ...], output: Tensor | None, **attrs: int) -> Node:
        return Node(0, type, type, inputs, (output,) if output else (), attrs)

    for node in graph.nodes:
        if node.type != "all_reduce" or _Exported.of(node.attrs).packet:
            yield node
            continue
        fused = arks_name(node.inputs[0], graph.world_size)
        if fused:
            name = fused if node.name == node.type else node.name
            yield dataclasses.replace(node, name=name, attrs={**node.attrs, "packet": True})
            continue
        source, out = node.inputs[0], node.outputs[0]
        rank, world = graph.rank, graph.world_size

        in_place = source.buffer.id == out.buffer.id
        total = out if world == 1 else like(out, None if in_place else out.buffer)
        yield part("copy", (source,), total)
        sent, total = (total, source) if in_place and world > 1 else (source, total)
        own_tags = [next(tags) for _ in range(world)]
        for step in range(1, world):
            to, origin = (rank + step) % world, (rank - step) % world
            yield part("send", (sent,), None, remote_rank=to, tag=own_tags[rank])
            received = like(out)
            yield part("recv", (), received, remote_rank=origin, tag=own_tags[origin])
            written = out if step == world - 1 else like(out, out.buffer)
            yield part("add", (total, received), written)
            total = written


def op_entry(node: Node) -> dict[str, Any]:
    """The entry of a graph's node in the JSON text of the exported plan."""
    fused = node.type == "all_reduce" and _Exported.of(node.attrs).packet
    words = node.type.split("_")
    return {
        "Type": "AllReducePacketFused" if fused else "".join(w.capitalize() for w in words),
        "Name": node.name,
        "IsVirtual": node.virtual,
        "ReadTensors": [_tensor(t) for t in node.inputs],
        "WriteTensors": [_tensor(t) for t in node.outputs],
        "ResultTensors": [_tensor(t) for t in node.outputs],
        "Args": {key: _argument(value) for key, value in sorted(node.attrs.items())},
    }


def _argument(value: Any) -> dict[str, Any]:
    for types, name in ((bool, "BOOL"), (int, "INT"), (float, "FLOAT")):
        if isinstance(value, types):
            return {name: value}
    if isinstance(value, (list, tuple)):
        return {"DIMS": list(value)}
    return {"STRING": str(value)}


def _tensor(tensor: Tensor) -> dict[str, Any]:
    return {
        "Id": tensor.id,
        "DataType": tensor.dtype.name.upper(),
        "Shape": list(tensor.shape),
        "Strides": list(tensor.extents),
        "Offsets": list(tensor.offsets),
        "PaddedShape": list(tensor.padded),
        "Buffer": {
            "Id": tensor.buffer.id,
            "Rank": tensor.buffer.rank,
            "SendTags": [],
            "RecvTags": [],
        },
    }
