"""The user's memory under placeholders: which tensors it may stand for, and that two names of one
memory are not in the way of a write. Called by ark.api.runtime.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ark.errors import InvalidUsageError
from ark.frontend.foreign import is_torch
from ark.frontend.tensor import Tensor
from ark.plan import kind as kinds
from ark.plan.types import Plan


def check_overlaps(plan: Plan, addresses: Mapping[int, int]) -> None:
    """Memory that is written may be under one name only: the planner cannot see addresses."""
    written = set()
    first = {t.op: t for phase in plan.phases for tasks in phase.processors for t in tasks}
    for op_id, task in first.items():
        op = plan.ops[op_id]
        for access in kinds.get(op.kind).accesses(kinds.signature(plan, op), task.coord):
            if access.write:
                written.add(plan.tensors[op.operands[access.operand]].buffer)
    spans = sorted((at, at + plan.buffers[i].nbytes, i) for i, at in addresses.items())
    for place, (_, end, a) in enumerate(spans):
        for begin, _, b in spans[place + 1 :]:
            if begin >= end:
                break
            if not {a, b} & written:
                continue
            raise InvalidUsageError(
                f"the memory of {plan.buffers[a].name!r} and {plan.buffers[b].name!r} overlaps, "
                "and the model writes one of them; bind one placeholder and take slices of it"
            )


def bind(mappings: Mapping[Tensor, Any] | None) -> None:
    """Binds placeholders to torch tensors."""
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
