"""The table of ops. Its entry for an op has the NumPy function that defines the op's result, which
tests use, and the function that lowers a node to tile tasks, which ark.lower.nodes calls. The
shapes of results are determined by the users' functions in ark.ops. Importing ark.ops fills the
table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ark.errors import InternalError, UnsupportedError
from ark.ir.graph import Node
from ark.ir.late import LateTable
from ark.lower.context import Lowering

Aliasing = Literal["any", "exact", "first", "none"]
Reference = Callable[[Sequence[np.ndarray], Mapping[str, Any]], list[np.ndarray]]


@dataclass(frozen=True)
class OpDef:
    """The definition of an op. reference: takes float64 (or integer) arrays and returns the outputs
    as arrays, in order.

    aliasing: how outputs may share memory with inputs. "any": in any way, because the lowering
    orders the op's tasks. "exact": an output may be the same memory as an input, because each
    element of the output depends only on input elements at the same position. "first": an output
    may be the same memory as the first input, which is then updated in place. "none": outputs must
    not share memory with inputs. Lowering replaces an output that shares memory in another way by a
    temporary.

    iteration_barrier: True if all ranks must begin each iteration together, because peers write to
    this rank's memory. all_ranks: True if every rank takes part and writes to peers; a rank has
    read everything it received by the end of its iteration. names_ranks: True if the tasks depend
    on the rank's absolute number, not only on the distance to each peer (ark.lower.ranks).
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
