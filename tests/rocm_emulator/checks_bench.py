"""Compiles small kernels, edits their code, and runs them on the emulator core with its checks.
Used by the tests of these checks.
"""

from __future__ import annotations

import re
import struct
from functools import lru_cache
from typing import Any

import numpy as np
from ark_rocm_emulator.engine import core

from tests.kept import assemble, to_assembly

COMMON = """
#define KERNEL extern "C" __global__ __launch_bounds__(256) void
#define AGENT __HIP_MEMORY_SCOPE_AGENT
#define SYSTEM __HIP_MEMORY_SCOPE_SYSTEM
"""
ALL = ("gfx90a", "gfx942", "gfx950", "gfx1100")


@lru_cache(maxsize=32)
def assembly(arch: str, source: str) -> str:
    """Compiles a program at -O3. Returns the assembler text."""
    return to_assembly(source, arch, ("-O3",))[0]


@lru_cache(maxsize=64)
def binary(arch: str, source: str, kernel: str, old: str, new: str, nth: int) -> bytes:
    """Compiles a program and returns its code object. If `old` and `new` are given, the nth match
    of `old` inside `kernel` is replaced by `new`.
    """
    text = assembly(arch, source)
    if old:
        start = text.index(f"\n{kernel}:")
        end = text.index(".Lfunc_end", start)
        places = list(re.finditer(old, text[start:end]))
        assert len(places) > nth, f"{old} is not {nth + 1} times in {kernel}"
        at = places[nth]
        text = text[: start + at.start()] + new + text[start + at.end() :]
    return assemble(text, arch)


class Bench:
    """Emulated devices with one loaded program. Buffers are uninitialised unless they are
    filled.
    """

    def __init__(self, arch: str, source: str, edit: Any = ("", "", "", 0), devices: int = 1):
        self.machine = core().Machine([arch] * devices)
        self.code = core().CodeObject(binary(arch, source, *edit))
        self.loaded = [self.machine.load(self.code, d) for d in range(devices)]

    def buffer(
        self, data: Any = None, size: int = 4096, kind: str = "device", device: int = 0
    ) -> int:
        """Allocates a buffer of `size` bytes and returns its address. The buffer begins with
        `data`, as 32-bit words.
        """
        address: int = self.machine.allocate(device, kind, size, "buffer")
        if data is not None:
            self.machine.write(address, np.asarray(data, np.uint32).tobytes())
        return address

    def launch(
        self, kernel: str, *arguments: int, grid: int = 1, lanes: int = 64, **more: Any
    ) -> Any:
        """Returns the description of a launch of `grid` workgroups of `lanes` lanes. Arguments are
        64-bit words.
        """
        packed = b"".join(struct.pack("<Q", a) for a in arguments)
        lds, device = more.pop("dynamic_lds", 0), more.pop("device", 0)
        options = core().LaunchOptions(**{"checks": True, "external_wait_ms": 2000, **more})
        code = self.loaded[device]
        shape, block = (grid, 1, 1), (lanes, 1, 1)
        return core().LaunchDesc(code, kernel, shape, block, packed, lds, options)

    def run(self, kernel: str, *arguments: int, **more: Any) -> Any:
        """Launches a kernel, waits for its end, and returns the emulator's result."""
        return self.machine.run(self.launch(kernel, *arguments, **more))
