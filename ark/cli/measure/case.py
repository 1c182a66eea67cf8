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
    """One case of `ark bench ops`. build, peer: functions that compute the same, `build` from ark's
    tensors of `shapes` and `peer` from torch's.

    flops, nbytes: the least arithmetic and memory traffic of the computation. on_cpu: True if the
    case is short enough for a CPU. scale: random inputs are between -scale and scale. indices:
    which inputs (by number) are indices, with their upper bound (exclusive); their type is
    `index_type`. calls: the number of the peer's calls in a captured graph. others: further peers
    by name. fuse: True if ark may fuse the case's ops.
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
