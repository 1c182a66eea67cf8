"""Decides for which ops processors claim tiles at run time, by an atomic counter
(ark.tasks.claimed), instead of getting a fixed list of tiles. These are large ops that only move
bytes within a rank's memory. When the plan is made, it is not known which processor will compute a
tile. So each task of such an op waits for all tasks on which any tile depends, and later ops that
read the result wait for all tasks of the op. For a large op, these waits are a small part of the
time. Called by the pipeline, after the ops' own lowerings.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from ark.machine import Machine
from ark.machine.capability import Capability
from ark.plan import kind as kinds
from ark.plan.groups import Group
from ark.plan.kind import OperandType, Signature
from ark.tasks.claimed import MAX_TILES, ClaimedParams

MIN_TILES_PER_PROCESSOR = 4  # fewest tiles per processor
PLAIN = ("activation", "parameter", "state")  # arenas that neither peers nor the host access


def claimed(groups: Sequence[Group], machines: Sequence[Machine]) -> list[Group]:
    """The groups of tasks, one group per op. An op whose tiles are claimed at run time gets one
    task per processor instead of one per tile. machines: the machine of each phase, with the
    variant of that phase.
    """
    return [_claimed(group, machines[group.phase]) for group in groups]


def is_large(nbytes: float, machine: Machine) -> bool:
    """True if an op that moves `nbytes` bytes is large enough for its tiles to be claimed at run
    time.
    """
    return nbytes >= machine.costs.claim_bytes


def _claimed(group: Group, machine: Machine) -> Group:
    if not _able(group, machine):
        return group
    kind = kinds.get(group.kind)
    sig = _signature(group)
    if not is_large(kind.cost(sig, group.coords[0])[1] * len(group.coords), machine):
        return group
    params = kind.to_claim(sig, machine)
    if params is None:
        return group
    places = kind.places(replace(sig, params=params))
    if not MIN_TILES_PER_PROCESSOR * machine.processors <= places.count <= MAX_TILES:
        return group
    first = list(itertools.islice(itertools.product(*places.ranges), machine.processors))
    shared = ClaimedParams(group.kind, dict(params), machine.processors)
    return replace(group, kind="claimed", params=shared, coords=first)


def _able(group: Group, machine: Machine) -> bool:
    placed = group.processors or group.granularity is not None or group.placement
    paired = group.sends or group.awaits or group.received
    return (
        machine.has(Capability.CLAIMS)
        and machine.variant.name == "block"
        and kinds.get(group.kind).claimable
        and not placed
        and not paired
        and all(t.buffer.rank < 0 and t.buffer.arena in PLAIN for t in group.operands)
        and all(t.dtype.per_item == 1 for t in group.operands)
    )


def _signature(group: Group) -> Signature:
    operands = tuple(OperandType(t.dtype.name, t.shape, t.strides) for t in group.operands)
    return Signature(group.kind, group.params.to_plan(), operands)
