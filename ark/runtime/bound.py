"""Binds a user's memory to placeholders (tensors without memory of their own), and checks that a
write through one placeholder does not affect another placeholder in the same memory. Called by
ark.runtime.runtime.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ark.errors import InvalidUsageError
from ark.frontend.foreign import is_torch
from ark.frontend.tensor import Tensor
from ark.machine.variant import COMMUNICATE
from ark.plan import kind as kinds
from ark.plan.serialize import machine_of
from ark.plan.types import Plan


def check_overlaps(plan: Plan, addresses: Mapping[int, int]) -> None:
    """Raises InvalidUsageError if two placeholders overlap in memory, the plan writes one of them,
    and it does not order the ops that use them.

    The planner does not know addresses, so it orders only ops that use the same tensor. Users can
    order ops on overlapping placeholders by ark.identity(tensor, deps=[the written tensor]).
    """
    spans = sorted((at, at + plan.buffers[i].nbytes, i) for i, at in addresses.items())
    pairs = []
    for place, (_, end, a) in enumerate(spans):
        for begin, _, b in spans[place + 1 :]:
            if begin >= end:
                break
            pairs.append((a, b))
    if not pairs:
        return
    uses = _Uses(plan)
    for a, b in pairs:
        if {a, b} & uses.written and not uses.ordered(a, b):
            raise InvalidUsageError(
                f"the memory of {plan.buffers[a].name!r} and {plan.buffers[b].name!r} overlaps, "
                "and the model writes one of the two; bind a single placeholder and take slices of "
                "it, or order the ops on the other placeholder by ark.identity(tensor, "
                "deps=[written tensor])"
            )


class _Uses:
    """For each buffer of a plan, the ops that read or write it."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._touched: dict[int, set[int]] = {}  # ops by buffer id
        self._written: dict[int, set[int]] = {}
        self._ahead: set[int] = set()  # buffers that a task may read before its waits end
        first = {t.op: t for phase in plan.phases for tasks in phase.processors for t in tasks}
        early = any(machine_of(plan, n).variant.role(COMMUNICATE) for n in range(len(plan.phases)))
        for number, task in first.items():
            op, sig = plan.ops[number], kinds.signature(plan, plan.ops[number])
            kind = kinds.get(op.kind)
            ahead = {f.operand for f in task.fetches} | (kind.early(sig) if early else set())
            self._ahead.update(plan.tensors[op.operands[i]].buffer for i in ahead)
            for access in kind.accesses(sig, task.coord):
                buffer = plan.tensors[op.operands[access.operand]].buffer
                self._touched.setdefault(buffer, set()).add(number)
                if access.write:
                    self._written.setdefault(buffer, set()).add(number)

    @property
    def written(self) -> set[int]:
        """The ids of the buffers that at least one op writes."""
        return set(self._written)

    def ordered(self, a: int, b: int) -> bool:
        """True if every op that writes one of the two buffers is ordered, before or after, with
        every op that accesses the other buffer.
        """
        if len(self._plan.phases) > 1 or self._plan.world_size > 1 or {a, b} & self._ahead:
            return False
        return all(
            self._ordered(min(writer, other), max(writer, other))
            for mine, theirs in ((a, b), (b, a))
            for writer in self._written.get(mine, ())
            for other in self._touched.get(theirs, ())
        )

    def _ordered(self, first: int, last: int) -> bool:
        """True if op `last` must follow op `first` because it depends explicitly on a whole tensor
        that `first` writes.
        """
        if first == last:
            return False
        plan = self._plan
        return any(
            plan.tensors[t].shape == plan.tensors[t].extents
            and first in self._written.get(plan.tensors[t].buffer, ())
            for t in plan.ops[last].after
        )


def bind(mappings: Mapping[Tensor, Any] | None) -> None:
    """Binds placeholders to the memory of torch tensors, so that the plan reads and writes this
    memory.
    """
    for tensor, data in (mappings or {}).items():
        if not isinstance(tensor, Tensor) or not tensor.is_external():
            raise InvalidUsageError(
                "tensor_mappings maps placeholders; make one with ark.placeholder"
            )
        if not is_torch(data):
            raise InvalidUsageError(
                f"tensor_mappings maps to torch tensors, got {type(data).__name__}; pass "
                "torch.from_numpy(...)"
            )
        tensor.bind(data)
