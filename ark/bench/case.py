"""One case of `ark bench ops`: an op over given shapes, what it computes and moves, its peer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ark.ir.dtype import DataType, int32


@dataclass(frozen=True)
class OpCase:
    """build, peer: the same computation over ark's and over torch's tensors, of `shapes`.

    flops, nbytes: the least that must be computed and moved. on_cpu: short enough for a CPU.
    scale: of the random inputs, which lie between -scale and scale. indices: by number, the inputs
    that are numbers of `index_type` from 0 up to below that. calls: of the peer in a graph.
    others: further peers by name. fuse: may ark join its ops?
    """

    name: str
    dtype: DataType
    shapes: tuple[tuple[int, ...], ...]
    build: Callable[..., Any]
    peer: Callable[..., Any]
    flops: float
    nbytes: float
    on_cpu: bool = True
    scale: float = 1.0
    indices: Mapping[int, int] = field(default_factory=dict)
    index_type: DataType = int32
    calls: int = 10
    others: tuple[tuple[str, Callable[..., Any]], ...] = ()
    fuse: bool = True
