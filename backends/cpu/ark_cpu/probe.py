"""Looks at the CPU; there always is one."""

from __future__ import annotations

import os
import platform

from ark.backend.protocol import DeviceInfo, Probe
from ark_cpu import machines
from ark_cpu.compiler import find_compiler


def memory_bytes() -> int:
    """Physical memory, 0 if the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0


def available_bytes() -> int:
    """Memory that may be allocated now without swapping, as far as the system tells."""
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return memory_bytes()


def _name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def probe() -> Probe:
    """One device per call: the host's cores, with what compiles for them."""
    device = DeviceInfo(
        0, f"{_name()} ({machines.cores()} cores)", machines.host_arch(), memory_bytes()
    )
    found = find_compiler()
    if found is None:
        return Probe(
            reason="there is no C++ compiler and no ziglang package",
            remedy="pip install 'ark-gpu[cpu]'",
        )
    return Probe(devices=(device,), versions={"compiler": " ".join(found)})
