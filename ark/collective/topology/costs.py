"""The costs of a put (one-sided write) and of a reduction beyond the time on the topology's links.
These costs dominate for small messages. A measured topology has its own `CostModel` (`ark topo
measure`); `TYPICAL` is for other topologies. The simulator adds these costs. Without a cost model,
only the time on links is counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction


@dataclass(frozen=True)
class Protocol:
    """A format in which the data of a put and its signal are sent, such as data with flags in every
    word. share: the fraction of the sent bytes that are data. latency_us: the latency in addition
    to that of the links.
    """

    name: str
    share: float = 1.0
    latency_us: float = 0.0


@dataclass(frozen=True)
class CostModel:
    """Costs of puts and reductions beyond the time on links.

    Attributes: put_overhead_us: the microseconds for which every put occupies its channel before
    its first byte. local_gbps: GB/s at which a rank copies and reduces, counting bytes read and
    written; None if this takes no time. protocols: every put uses the one that is fastest on its
    links. ports: for each node id, the most GB/s that may enter the node and the most that may
    leave it.
    """

    put_overhead_us: float = 0.0
    local_gbps: float | None = None
    protocols: tuple[Protocol, ...] = (Protocol("simple"),)
    ports: Mapping[str, Fraction | float] = field(default_factory=dict)

    def protocol(self, nbytes: float, gbps: float) -> Protocol:
        """Returns the fastest protocol for a put of `nbytes` over links of `gbps` GB/s."""
        return min(self.protocols, key=lambda p: p.latency_us + nbytes / p.share / gbps / 1e3)


# Typical costs of NCCL's three protocols: data with flags in 8-byte words (LL), data with flags in
# 128-byte lines (LL128), and data with a signal after a fence (Simple). The shares of data in the
# bytes sent follow from these formats. The latencies are the differences between the three in the
# tuning tables of NCCL 2, for a hop of a ring on NVLink (0.6, 1.9 and 3.4 us); the latency of links
# already includes the first one. The overhead of a put and the speed of sums (per element two reads
# and a write of memory, by a part of the processors) are round figures for current accelerators;
# they were not measured.
TYPICAL = CostModel(
    put_overhead_us=0.1,
    local_gbps=1000.0,
    protocols=(
        Protocol("LL", 0.5, 0.0),
        Protocol("LL128", 120 / 128, 1.3),
        Protocol("simple", 1.0, 2.8),
    ),
)
