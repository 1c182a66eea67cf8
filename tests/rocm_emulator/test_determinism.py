"""The same launch with the same seed gives the same result on one thread and on several: the
values, the failure and its message, and for a successful launch the number of instructions.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from ark_rocm_emulator.compile import compile_hip
from ark_rocm_emulator.engine import core

SOURCE = """
#define KERNEL extern "C" __global__ __launch_bounds__(128) void
KERNEL work(unsigned* out, unsigned n, unsigned bad) {
  unsigned i = blockIdx.x * blockDim.x + threadIdx.x, x = i;
  for (unsigned k = 0; k < n + blockIdx.x % 7; ++k) x = x * 1664525u + 1013904223u;
  if (blockIdx.x >= bad) i += 1u << 28;
  out[i] = x;
}
KERNEL race_for_places(unsigned* next, unsigned* log) {
  if (threadIdx.x % 32 == 0)
    log[__hip_atomic_fetch_add(next, 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT)] =
        blockIdx.x * 4 + threadIdx.x / 32;
}
"""
GRID, BLOCK = 96, 128
ROUNDS, BUDGET = 2000, 1_000_000  # the budget is spent in the middle of the grid


@lru_cache(maxsize=2)
def _code(arch: str) -> bytes:
    return compile_hip(SOURCE, arch, ("-O2",))


def _run(arch: str, kernel: str, tail: list[int], options: dict[str, Any]) -> tuple[Any, bytes]:
    machine = core().Machine([arch])
    loaded = machine.load(core().CodeObject(_code(arch)), 0)
    out = machine.allocate(0, "device", 4 * GRID * BLOCK, "out")
    machine.write(out, bytes(4 * GRID * BLOCK))
    if kernel == "work":
        arguments = np.array([out], np.uint64).tobytes() + np.array(tail, np.uint32).tobytes()
    else:
        arguments = np.array([out, out + 4], np.uint64).tobytes()
    launch = core().LaunchDesc(loaded, kernel, (GRID, 1, 1), (BLOCK, 1, 1), arguments, 0,
                               core().LaunchOptions(**options))  # fmt: skip
    result = machine.run(launch)
    return result, machine.read(out, 4 * GRID * BLOCK)


@pytest.mark.parametrize("arch", ["gfx942", "gfx1100"])
@pytest.mark.parametrize(("bad", "budget", "kind"), [
    (GRID, 0, "none"), (41, 0, "out of bounds"), (GRID, BUDGET, "budget"), (70, BUDGET, "budget"),
    (3, BUDGET, "out of bounds"),
])  # fmt: skip
def test_one_thread_and_several(arch: str, bad: int, budget: int, kind: str) -> None:
    results = []
    for parallel in (False, True, True):
        options = {"seed": 7, "parallel": parallel, "step_budget": budget}
        result, values = _run(arch, "work", [ROUNDS, bad], options)
        place = (list(result.where.workgroup), result.where.wave, result.where.line, result.lane)
        ended = (result.instructions, values) if result.ok or budget else None
        message = re.sub("0x[0-9a-f]{6,}", "<address>", result.message)
        # The system chooses the neighbours of an allocation.
        message = re.sub(
            "[0-9]+ bytes past the end of '.*?\\)", "past the end of <memory>", message
        )
        results.append((result.kind, place, message, ended))
    assert [r[0] for r in results] == [kind] * 3
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("arch", ["gfx942", "gfx1100"])
def test_seed_decides_the_order(arch: str) -> None:
    logs = {}
    for seed in (1, 1, 2):
        result, values = _run(arch, "race_for_places", [], {"seed": seed})
        assert result.ok, result.message
        order = values[4 : 4 + 4 * GRID * 4]
        assert logs.setdefault(seed, (order, result.instructions)) == (order, result.instructions)
    assert logs[1] != logs[2]
