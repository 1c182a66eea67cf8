"""Small decoders whose attention reads its caches by growing fetches: copies to shared memory of
all rows up to the current position. Also finds the tasks that have such fetches.
"""

from __future__ import annotations

import dataclasses

from ark.machine import Machine
from ark.machine.capability import Capability
from ark.machine.variant import COMMUNICATE, COMPUTE, LOAD, Role, Variant, block
from ark.plan.types import Plan, Task
from tests.unit.plan.shapes import CONFIG, machine

WIDE = dataclasses.replace(CONFIG, hidden_size=128, head_dim=32)
ROLES = Variant("roles", (Role(COMPUTE, 6), Role(COMMUNICATE, 1), Role(LOAD, 1)), 6, 4096, 2)
ROOM_POSITIONS = 64


def offers_roles() -> Machine:
    target = machine(4, Capability.PACKETS, warps=8)
    return dataclasses.replace(target, variants=(block(8, 1, stages=6, stage_bytes=4096), ROLES))


def growing(plan: Plan) -> list[tuple[tuple[int, int, int], Task]]:
    """Returns (phase, processor, position) of the tasks that load the cache rows up to the current
    position, whose number grows with each iteration.
    """
    return [
        ((number, processor, i), task)
        for number, phase in enumerate(plan.phases)
        for processor, own in enumerate(phase.processors)
        for i, task in enumerate(own)
        if any(f.growth for f in task.fetches)
    ]
