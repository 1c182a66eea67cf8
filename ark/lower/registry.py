"""The table of ops: for each op its NumPy reference and its lowering to tile tasks.

Shape rules are beside the user's functions in the modules of ark.ops, because they determine the
tensor that a call returns. Importing ark.ops fills the table. Lowering uses `lower`, tests use
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
    """The definition of an op. reference: takes float64 (or integer) arrays and returns the outputs
    in program order.

    aliasing: how outputs may share memory with inputs. "any": the op orders its own accesses.
    "exact": an output may be exactly an input, because each element depends only on elements at its
    own position. "first": it may be exactly the first input, which is then updated in place.
    "none": outputs must not share memory with inputs. Lowering replaces other outputs by
    temporaries.

    iteration_barrier: True if peers' writes for this op are safe only if all ranks begin each
    iteration together. all_ranks: True if every rank takes part and writes to peers; a rank has
    read everything it received by the end of its iteration. names_ranks: True if its lowering
    depends on the rank in another way than by counting peers from it (ark.lower.ranks).
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
    """The op of that name. Raises UnsupportedError if it does not exist."""
    if name not in _OPS and name not in _OPS.filled():
        raise UnsupportedError(
            f"the op {name!r} is not supported; ark has {', '.join(sorted(_OPS))}"
        )
    return _OPS[name]


def names() -> tuple[str, ...]:
    return tuple(sorted(_OPS.filled()))
