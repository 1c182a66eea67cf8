"""One case of `ark bench ops`: an op over given shapes, its arithmetic and memory traffic, its
peer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ark.ir.dtype import DataType, int32


@dataclass(frozen=True)
class OpCase:
    """build, peer: the same computation on ark's and on torch's tensors of `shapes`.

    flops, nbytes: the minimum of arithmetic and of memory traffic. on_cpu: True if it is short
    enough for a CPU. scale: the random inputs lie between -scale and scale. indices: for each input
    of indices, by number, their upper bound (exclusive); they have `index_type`. calls: the number
    of the peer's calls in a graph. others: further peers by name. fuse: True if ark may fuse the
    case's ops.
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
