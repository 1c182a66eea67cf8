"""The type of a case of `ark bench ops`: an op over given shapes, with its arithmetic, its memory
traffic and the peer (the same computation in torch). Used by ark.cli.measure.cases and
ark.cli.measure.ops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ark.ir.dtype import DataType, int32


@dataclass(frozen=True)
class OpCase:
    """One case of `ark bench ops`. build, peer: two functions for the same computation, on inputs
    of `shapes`. `build` takes ark's tensors, `peer` takes torch's.

    flops, nbytes: the least arithmetic and memory traffic of the computation. on_cpu: True if the
    case is short enough for a CPU. scale: random inputs are between -scale and scale. indices: the
    inputs that are indices, by number, each with the exclusive upper bound of its values; their
    type is `index_type`. calls: how many calls of the peer one captured graph contains. others:
    functions of further peers, by name. fuse: True if ark may fuse the case's ops.
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
