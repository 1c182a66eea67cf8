"""Machine models of CPUs: cpu-N has N processors, each a thread."""

from __future__ import annotations

import os
import platform
import re

from ark.machine import Machine
from ark.machine.capability import Capability
from ark.machine.costs import Costs
from ark.machine.variant import block


def host_arch() -> str:
    """The architecture that the host's compiler targets, for example `x86_64`."""
    return platform.machine() or "unknown"


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return max(1, os.cpu_count() or 1)


def model(processors: int, memory_bytes: int = 0) -> Machine:
    """The model of a CPU with the given number of processors. The cost model uses the figures of a
    common server core.
    """
    return Machine(
        name=f"cpu-{processors}",
        arch=host_arch(),
        backend="cpu",
        processors=processors,
        lanes=1,
        shared_bytes=1 << 30,
        variants=(block(1),),
        tile=(256, 512),
        memory_bytes=memory_bytes,
        bandwidth_gbps=12.0 * processors,
        tflops=0.05 * processors,
        costs=Costs(signal_us=0.3, cache_rate=12e3 * processors, scalar_rate=50e3, exact_rate=50e3),
        capabilities=(
            Capability.SINGLE_THREAD,
            Capability.ONE_PRODUCT_BODY,
            Capability.STARTS_PROCESSORS,
            Capability.HOST_MEMORY,
            Capability.PEER_PACKETS,
            Capability.PROXY,
        ),
    )


def by_name(name: str) -> Machine | None:
    """cpu (all cores of this machine) or cpu-N; None for other names."""
    if name == "cpu":
        return model(cores())
    match = re.fullmatch(r"cpu-([1-9]\d{0,3})", name)
    return model(int(match.group(1))) if match else None
