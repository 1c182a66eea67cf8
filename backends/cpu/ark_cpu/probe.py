"""Probes the CPU, which every machine has."""

from __future__ import annotations

import platform
from functools import cache

from ark.backend.native import find_compiler
from ark.backend.protocol import DeviceInfo, Probe
from ark.errors import SystemError
from ark_cpu import machines
from ark_cpu.memory import memory_bytes


@cache
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
    """One device: the host's cores, with the compiler for them."""
    device = DeviceInfo(
        0, f"{_name()} ({machines.cores()} cores)", machines.host_arch(), memory_bytes()
    )
    try:
        compiler = find_compiler()
    except SystemError as error:
        return Probe(reason=str(error), remedy="set CXX to a C++ compiler, or unset it")
    if compiler is None:
        return Probe(
            reason="there is no C++ compiler and no ziglang package",
            remedy="pip install 'ark-gpu[cpu]'",
        )
    return Probe(devices=(device,), versions={"compiler": " ".join(compiler)})
