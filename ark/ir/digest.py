"""Computes a hash of everything in a graph that lowering reads, under which the graph's plans are
cached.

Called by ark.models.plans. Two graphs with the same hash have the same nodes, tensors and buffers.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from ark.errors import InternalError
from ark.ir.dtype import DataType
from ark.ir.graph import Graph, Node
from ark.ir.values import Buffer, Tensor


def digest(graph: Graph) -> str:
    """The SHA-256 hash of a graph as hexadecimal digits. Raises InternalError for an attribute of a
    type that this module cannot encode.
    """
    sha256 = hashlib.sha256()
    after = {t.id: [d.id for d in graph.depends(t)] for t in graph.tensors if graph.depends(t)}
    head = (graph.rank, graph.world_size, graph.phases, graph.detached, after)
    for part in (head, graph.buffers, graph.tensors, graph.nodes):
        sha256.update(_text(part).encode())
    return sha256.hexdigest()


def _text(value: Any) -> str:
    """The value as text; different values give different texts. Nodes, tensors and buffers of the
    graph are represented by their numbers.
    """
    match value:
        case Tensor():
            box = (value.id, value.shape, value.extents, value.offsets, value.padded)
            return f"t{box}{value.dtype.name},{value.buffer.id},{value.name!r}"
        case Buffer():
            return f"b{dataclasses.astuple(value)}"
        case Node():
            ids = [
                [t.id for t in tensors] for tensors in (value.inputs, value.outputs, value.after)
            ]
            own = (value.id, value.type, value.name, value.virtual, value.phase, value.processors)
            return f"n{own}{ids}{value.context}{_text(value.attrs)}{_text(value.hints)}"
        case DataType():
            return f"d{value.name!r}"
        case enum.Enum():
            return f"{type(value).__qualname__}.{value.name}"
        case None | bool() | int() | float() | str() | bytes() | complex():
            return f"{type(value).__name__[0]}{value!r}"
        case np.generic() | np.ndarray():
            array = np.ascontiguousarray(value)
            data = hashlib.sha256(array.tobytes()).hexdigest()
            return f"a{array.dtype.str}{array.shape}{data}"
        case tuple() | list():
            return f"({','.join(map(_text, value))})"
        case set() | frozenset():
            return f"{{{','.join(sorted(map(_text, value)))}}}"
        case Mapping():
            return f"[{','.join(f'{_text(k)}:{_text(v)}' for k, v in value.items())}]"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return type(value).__qualname__ + _text(parts)
    raise InternalError(
        f"a graph has an attribute of type {type(value).__qualname__}, which ark.ir.digest cannot "
        "encode"
    )
