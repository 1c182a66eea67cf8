"""Part of the verifier: checks reads that happen before a task's waits are complete. Some kernel
variants have a separate warp that waits for counters. The computing warps then begin a task before
its waits are complete, and may already read the operands in `TaskKind.early`. No counter orders
such a read. So it must read packets (whose load is a wait), or memory that no earlier op of the
iteration writes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

from ark.machine.variant import COMMUNICATE
from ark.plan import kind as kinds
from ark.plan.access import Region
from ark.plan.serialize import machine_of
from ark.plan.verify.conflicts import Touch
from ark.plan.verify.rank_set import RankSet, refuse


def check_early(rank_set: RankSet, number: int, rank: int, foreign: Sequence[Touch]) -> None:
    """Raises PlanError for the first early read of memory that an earlier op of the rank, or a
    peer, writes in the same iteration.
    """
    plan = rank_set.plan(rank)
    if not machine_of(plan, number).variant.role(COMMUNICATE):
        return
    writes: dict[Hashable, list[tuple[str, Region]]] = defaultdict(list)
    for touch in foreign:
        if touch.region.write:
            writes[touch.region.memory].append((f"rank {touch.rank}", touch.region))
    for touched in rank_set.touches(rank, number):
        for region in touched:
            sig = rank_set.signatures(rank)[region.op]
            if region.write or region.packet or region.pretended:
                continue
            if region.boxes.operand not in kinds.get(sig.kind).early(sig):
                continue
            writer = "its owner" if region.space is None else _writer(writes[region.memory], region)
            if writer is not None:
                buffer = plan.buffers[int(region.memory)]  # type: ignore[call-overload]
                raise refuse(
                    f"tasks of op {plan.ops[region.op].name!r} read {buffer.name!r} before they "
                    f"wait, but {writer} writes it in the same iteration; plan for another variant "
                    f"than {plan.variant_of(number)!r}"
                )
        for region in touched:
            if region.write and not region.packet:
                writes[region.memory].append((f"op {plan.ops[region.op].name!r}", region))


def _writer(writes: Sequence[tuple[str, Region]], read: Region) -> str | None:
    for name, write in writes:
        if write.meets(read) and len(write.overlaps(read)[0]):
            return name
    return None
