"""A graph as JSON in ARK's layout: nodes with producers, consumers, tensors and arguments.

For people and tools that read ARK's model files; ark itself plans from the graph. Called by
ark.model.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

from ark.ir.graph import Graph, Node
from ark.ir.values import Tensor


def to_json(graph: Graph, pretty: bool = True) -> str:
    """The graph as text; the same graph gives the same text."""
    data = {
        "Rank": graph.rank,
        "WorldSize": graph.world_size,
        "Nodes": _nodes(graph),
    }
    return json.dumps(data, indent=2 if pretty else None)


def _nodes(graph: Graph) -> list[dict[str, Any]]:
    """Producers are the last writers of what a node reads, by tensor and by buffer."""
    producers: dict[int, list[int]] = {}
    consumers: dict[int, list[int]] = defaultdict(list)
    writer: dict[int, int] = {}
    for node in graph.nodes:
        found = {writer[t.buffer.id] for t in node.inputs if t.buffer.id in writer}
        producers[node.id] = sorted(found)
        for producer in found:
            consumers[producer].append(node.id)
        writer.update({t.buffer.id: node.id for t in node.outputs})
    return [
        {
            "Id": node.id,
            "ProducerNodeIds": producers[node.id],
            "ConsumerNodeIds": consumers[node.id],
            "Op": op_entry(node),
        }
        for node in graph.nodes
    ]


def op_entry(node: Node) -> dict[str, Any]:
    """An op as a node's entry describes it."""
    return {
        "Type": "".join(part.capitalize() for part in node.type.split("_")),
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
