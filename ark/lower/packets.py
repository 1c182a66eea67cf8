"""Decides which activations are stored as packets {value, epoch}. The epoch is the number of the
iteration that wrote the value. A reader polls a packet until its epoch is that of the current
iteration, so the dependence needs no counter. Called by ark.lower.pipeline if the machine supports
packets.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from ark.ir.dtype import fp32
from ark.ir.values import Tensor
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.machine.variant import COMMUNICATE
from ark.plan.boxes import Templates
from ark.plan.groups import Group
from ark.plan.kind import OperandType, Signature
from ark.plan.kind import get as task_kind
from ark.tasks.linear_form import MAX_UNIT_INPUT_ROWS

# Task kinds that support packets only on machines with the capability PACKET_GATE.
GATED_KINDS = ("row_norm", "topk")

# A row can be sent as short packets (16 bits of data and 16 bits of epoch) only if its length is a
# multiple of this number of elements.
SHORT_PACKET_ROW_ELEMENTS = 8


def takes_short(machine: Machine) -> bool:
    """True if 16-bit elements can be stored as packets. This requires a machine with such packets,
    and a kernel variant in which each warp reads whole stages of weights: one without a ring, or
    with communicating warps.
    """
    slices = machine.ring_bytes > 0 and not machine.variant.role(COMMUNICATE)
    return machine.has(Capability.SHORT_PACKETS) and not slices


def choose_packets(
    groups: Sequence[Group],
    machines: Sequence[Machine],
    options: Mapping[str, Any],
    templates: Templates,
    received: frozenset[int],
) -> set[int]:
    """Ids of the tensors that are stored as packets: small activations whose readers and writers
    all support packets.

    A buffer qualifies if all its tensors are dense views of fp32 (or of 16-bit types, if packets of
    16-bit elements are supported), it is small, and no task reads many of its elements. The last
    two conditions exist because a packet takes 8 bytes per element (4 for 16-bit elements) and must
    be polled. machines: one for each phase. received: ids of buffers between ranks that hold
    packets in any case.
    """
    chosen: set[int] = set()
    barred: set[int] = set(options.get("external", ()))
    written: dict[int, list[Tensor]] = defaultdict(list)  # by buffer
    touched: dict[int, list[Tensor]] = {}
    kinds: dict[int, set[str]] = defaultdict(set)  # by buffer, kinds of its tasks
    for group in groups:
        kind, sig = task_kind(group.kind), _signature(group)
        gated = machines[group.phase].has(Capability.PACKET_GATE)
        able = kind.packets(sig) if gated or group.kind not in GATED_KINDS else frozenset()
        boxes = templates.boxes(sig, tuple(group.coords))
        given = {b.operand for b in boxes if b.write}
        short = takes_short(machines[group.phase])
        for tensor in (group.operands[i] for i in given):
            # If a buffer's bytes were written twice in an iteration, readers could not distinguish
            # both writes, because they have the same epoch. Such a buffer is not stored as packets.
            if any(_meet(tensor, other) for other in written[tensor.buffer.id]):
                barred.add(tensor.buffer.id)
            written[tensor.buffer.id].append(tensor)
        for i, tensor in enumerate(group.operands):
            touched.setdefault(tensor.buffer.id, []).append(tensor)
            kinds[tensor.buffer.id].add(group.kind)
            types = kind.packet_types if short else ()
            fits = tensor.dtype == fp32 or (tensor.dtype.bits == 16 and tensor.dtype.name in types)
            if i not in able or not tensor.dense or not fits:
                barred.add(tensor.buffer.id)
        limit = _most_read(group, machines[group.phase])
        for access in kind.accesses(sig, group.coords[0]):
            size = math.prod(h - lo for lo, h in zip(access.lo, access.hi, strict=True))
            if not access.write and size > limit:
                barred.add(group.operands[access.operand].buffer.id)
        barred.update(t.buffer.id for t in group.after)
    for buffer, tensors in touched.items():
        source, most = tensors[0].buffer, machines[0].costs.packet_tensor_bytes
        small = source.nbytes <= most
        # If only collectives use a buffer, each element is read on the processor that wrote it.
        # Packets would then save no wait.
        stays = kinds[buffer] == {"combine"}
        local = source.arena == "activation" and small and buffer not in barred and not stays
        if local or buffer in received:
            chosen.update(t.id for t in tensors)
    return chosen


def _most_read(group: Group, machine: Machine) -> int:
    """The largest number of elements that one task may read as packets."""
    costs = machine.costs
    if group.kind == "choose":  # its tasks wait for the logits' counter in any case
        return costs.packet_elements if machine.has(Capability.PACKET_GATE) else 0
    if group.kind == "expert_linear":
        return costs.polled_elements if machine.has(Capability.PACKET_GATE) else 0
    if group.kind not in ("linear", "linear_rows"):
        return costs.packet_elements
    leads = machine.variant.role(COMMUNICATE) > 0
    most = MAX_UNIT_INPUT_ROWS if leads else 1 if machine.has(Capability.PACKET_GATE) else 0
    few = group.operands[2].shape[0] <= most
    return costs.polled_elements if few else costs.packet_elements


def _meet(a: Tensor, b: Tensor) -> bool:
    """True if two dense views of a buffer may have bytes in common."""
    return a.shape[1:] != b.shape[1:] or abs(a.offsets[0] - b.offsets[0]) < a.shape[0]


def _signature(group: Group) -> Signature:
    """The group's signature (kind, parameters and operand types), as if no operand were stored as
    packets, because packets are not chosen yet.
    """
    operands = tuple(
        OperandType(t.dtype.name, t.shape, t.strides, t.buffer.id in group.received)
        for t in group.operands
    )
    return Signature(group.kind, group.params.to_plan(), operands)
