"""Memory of the CPU as a device."""

from __future__ import annotations

import re
from pathlib import Path
from unittest.mock import Mock

import pytest
from ark_cpu import device as cpu
from ark_cpu.device import CpuDevice

from ark.errors import SystemError

HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def _flags(address: int) -> list[str]:
    """Returns the kernel's flags of the mapping that contains an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            first, last = (int(bound, 16) for bound in bounds.groups())
            inside = first <= address < last
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []


@pytest.mark.skipif(not HUGE.exists(), reason="this system has no huge pages to ask for")
def test_device_memory_asks_for_huge_pages() -> None:
    device = CpuDevice(0)
    memory = device.alloc(8 << 20, "device")
    flags = _flags(memory.address)
    assert "hg" in flags and "sh" not in flags
    device.free(memory)
    device.close()


def test_memory_that_is_not_free_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allocations larger than the free memory are refused. The sizes of small allocations are added
    up, and the sum is compared with the free memory each time it has reached 1 MiB.
    """
    device, free = CpuDevice(0), Mock(return_value=1 << 30)
    monkeypatch.setattr(cpu, "available_bytes", free)
    for _ in range(8 * 4):
        device.alloc(1 << 18, "device")
    assert free.call_count == 8
    with pytest.raises(SystemError, match=r"1075 MB of memory are needed, but only 1074 MB"):
        device.alloc((1 << 30) + (1 << 20), "device")
    device.close()
