"""Part of the verifier: collects the waits for packets. A task that reads packets waits for all
tasks that write them, on its own rank or on a peer. ark.plan.verify passes these waits to the
abstract execution.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from ark.plan.access import Region
from ark.plan.verify.conflicts import LocalTouches, Touch
from ark.plan.verify.execution import Awaited
from ark.plan.verify.rank_set import RankSet


def awaited_packets(
    rank_set: RankSet,
    number: int,
    local: Mapping[int, LocalTouches],
    foreign: Mapping[int, Sequence[Touch]],
    bases: np.ndarray,
) -> list[Awaited]:
    """The readers and writers of all packets in the memory of the checked ranks, in one phase."""
    awaited: list[Awaited] = []
    for rank, touches in local.items():
        by_op = rank_set.listing(rank, number).by_op
        written: dict[Hashable, list[tuple[int, Region, np.ndarray]]] = defaultdict(list)
        for region in touches.packets:
            if region.write:
                written[region.memory].append((rank, region, by_op[region.op][0]))
        for touch in foreign[rank]:
            region = touch.region
            if region.packet and region.write and not region.pretended:
                nodes = touch.nodes - int(bases[touch.rank])
                written[region.memory].append((touch.rank, region, nodes))
        waits: dict[tuple[int, bytes], Awaited] = {}  # by op and its tasks
        for read in (r for r in touches.packets if not r.write):
            nodes = by_op[read.op][0]
            for maker, region, packets in written[read.memory]:
                met = read.tasks_after(region)
                for makers, readers, name in zip(met.theirs, met.mine, met.my_names, strict=True):
                    key = read.op, name
                    if key not in waits:
                        waits[key] = Awaited(rank, nodes[readers], [])
                    waits[key].makers.append((maker, packets[makers]))
        awaited += waits.values()
    return awaited
