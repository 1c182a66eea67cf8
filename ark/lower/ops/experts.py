"""Lowering of the choice of experts, and of linear layers of the chosen experts."""

from __future__ import annotations

from msgspec import structs

from ark.ir.attributes import ExpertLinearAttributes, TopKAttributes
from ark.ir.fold import split
from ark.ir.graph import Node
from ark.lower.context import Lowering
from ark.machine.capability import Capability
from ark.tasks.expert_epilogue import ExpertLinearParams
from ark.tasks.experts import TopKParams, task_parts


def lower_topk(lowering: Lowering, node: Node) -> None:
    rows = node.inputs[0].shape[0]
    each = -(-rows // lowering.machine.processors)
    coords = [(r,) for r in range(0, rows, each)]
    given = node.read(TopKAttributes)
    params = TopKParams(**structs.asdict(given), rows=each)
    group = lowering.emit("topk", params, [*node.inputs, *node.outputs], coords)
    # One task that polls packets chooses the experts of all rows. It runs on a processor without
    # other tasks, so that it does not delay them.
    if lowering.machine.has(Capability.PACKET_GATE) and group.processors is None:
        group.processors = (0, lowering.machine.processors)


def lower_expert_linear(lowering: Lowering, node: Node) -> None:
    """Emits the linear layers of the chosen experts. A task computes some outputs of one row: for
    one of the row's experts or, if the results of a row's experts are added up, for all of them.
    """
    given = node.read(ExpertLinearAttributes)
    (rows, slots), n = node.inputs[2].shape, node.outputs[0].shape[-1]
    slots = 1 if given.total else slots
    parts = split(n, task_parts(rows * slots, n, lowering.machine))
    coords = [(r, s, a, b) for r in range(rows) for s in range(slots) for a, b in parts]
    operands = [*node.inputs[:3], *node.outputs, *node.inputs[3:]]
    lowering.emit("expert_linear", ExpertLinearParams(**structs.asdict(given)), operands, coords)
