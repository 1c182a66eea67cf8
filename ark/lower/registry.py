"""The table of ops: for each its NumPy reference and how it becomes tile tasks.

Shape rules live beside the user's functions in the op families' modules, because they decide which
tensor a call returns. Importing ark.ops fills the table. Lowering asks for `lower`, tests for
`reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ark._late import LateTable
from ark.errors import InternalError, UnsupportedError
from ark.ir.graph import Node
from ark.lower.context import Lowering

Aliasing = Literal["any", "exact", "first", "none"]
Reference = Callable[[Sequence[np.ndarray], Mapping[str, Any]], list[np.ndarray]]


@dataclass(frozen=True)
class OpDef:
    """reference: float64 (or integer) arrays in, the outputs in program order out.

    aliasing: how its outputs may lie on its inputs' memory. "any": the op orders its own accesses.
    "exact": an output may be exactly an input, because each element depends on its own place only.
    "first": it may be exactly the first input, which is then updated in place.
    "none": outputs lie elsewhere. Lowering sends other outputs through temporaries.
    iteration_barrier: what peers write of it is safe only if all ranks begin an iteration together.
    all_ranks: every rank takes part, and writes to peers; what a peer has received is read by then
    when its iteration ends.
    names_ranks: its lowering depends on the rank otherwise than by counting peers from there
    (ark.lower.ranks).
    """

    name: str
    reference: Reference | None
    lower: Callable[[Lowering, Node], None]
    aliasing: Aliasing = "any"
    names_ranks: bool = False
    iteration_barrier: bool = False
    all_ranks: bool = False


_OPS: LateTable[OpDef] = LateTable("ops")


def register(
    name: str,
    reference: Reference | None,
    lower: Callable[..., None],
    aliasing: Aliasing = "any",
    names_ranks: bool = False,
    iteration_barrier: bool = False,
    all_ranks: bool = False,
) -> OpDef:
    if name in _OPS:
        raise InternalError(f"the op {name!r} is registered twice")
    definition = OpDef(name, reference, lower, aliasing, names_ranks, iteration_barrier, all_ranks)
    _OPS[name] = definition
    return definition


def get(name: str) -> OpDef:
    """The op of that name; UnsupportedError if there is none."""
    if name not in _OPS and name not in _OPS.filled():
        raise UnsupportedError(
            f"the op {name!r} is not supported; ark has {', '.join(sorted(_OPS))}"
        )
    return _OPS[name]


def names() -> tuple[str, ...]:
    return tuple(sorted(_OPS.filled()))
