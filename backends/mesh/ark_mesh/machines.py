"""Machine models of simulated meshes: mesh-N has N cores, each with memory of its own."""

from __future__ import annotations

import platform
import re

from ark.machine import Machine
from ark.machine.capability import Capability
from ark.machine.variant import block

MOST_CORES = 64
CORE_BYTES = 16 << 20  # private memory of a core


def model(cores: int) -> Machine:
    """The model of a mesh with the given number of cores. It has no capability: cores can only
    exchange messages.
    """
    return Machine(
        name=f"mesh-{cores}",
        arch=platform.machine() or "unknown",
        backend="mesh",
        processors=cores,
        lanes=1,
        shared_bytes=1 << 20,
        variants=(block(1),),
        memory_bytes=cores * CORE_BYTES,
        bandwidth_gbps=12.0 * cores,
        tflops=0.05 * cores,
        capabilities=(
            Capability.SINGLE_THREAD,
            Capability.ONE_PRODUCT_BODY,
            Capability.STARTS_PROCESSORS,
            Capability.HOST_MEMORY,
        ),
    )


def by_name(name: str) -> Machine | None:
    """mesh-N with 1 to MOST_CORES cores; None for other names."""
    match = re.fullmatch(r"mesh-([1-9]\d?)", name)
    return model(int(match[1])) if match and int(match[1]) <= MOST_CORES else None
