"""Synchronisation by stores that look like plain ones: correct idioms are not reported, their
broken variants are.

On gfx90a and gfx1100 an atomic store to global memory has the same encoding as a plain store. The
checks distinguish them by how other accesses use the same word.
"""

from __future__ import annotations

from typing import Any

import checks_bench
import numpy as np
import pytest
from checks_bench import ALL

SOURCE = """
#define KERNEL extern "C" __global__ __launch_bounds__(256) void
#define AGENT __HIP_MEMORY_SCOPE_AGENT
#define LOAD(p, order, scope) __hip_atomic_load(p, __ATOMIC_##order, scope)
#define STORE(p, v, order, scope) __hip_atomic_store(p, v, __ATOMIC_##order, scope)
#define PAUSE __builtin_amdgcn_s_sleep(1)

#define TICKET(NAME, RELEASE, ACQUIRE)                                                         \\
  KERNEL NAME(unsigned* state, unsigned* value, long rounds) {                                 \\
    if (threadIdx.x != 0) return;                                                              \\
    for (int r = 0; r < rounds; ++r) {                                                         \\
      unsigned mine = __hip_atomic_fetch_add(state, 1u, __ATOMIC_RELAXED, AGENT);              \\
      while (LOAD(state + 32, ACQUIRE, AGENT) != mine) PAUSE;                                  \\
      value[0] += 1;                                                                           \\
      STORE(state + 32, mine + 1, RELEASE, AGENT);                                             \\
    }                                                                                          \\
  }
TICKET(ticket, RELEASE, ACQUIRE)
TICKET(ticket_no_release, RELAXED, ACQUIRE)
TICKET(ticket_no_acquire, RELEASE, RELAXED)

KERNEL ring(unsigned* token, unsigned* value, long rounds) {
  if (threadIdx.x != 0) return;
  for (unsigned r = 0; r < rounds; ++r) {
    while (LOAD(token, ACQUIRE, AGENT) != r * gridDim.x + blockIdx.x) PAUSE;
    value[0] += 1;
    STORE(token, r * gridDim.x + blockIdx.x + 1, RELEASE, AGENT);
  }
}

KERNEL peterson(unsigned* state, unsigned* value, long rounds) {
  if (threadIdx.x != 0) return;
  unsigned me = blockIdx.x, other = 1 - me, *turn = state + 64;
  for (int r = 0; r < rounds; ++r) {
    STORE(state + 32 * me, 1u, SEQ_CST, AGENT);
    STORE(turn, other, SEQ_CST, AGENT);
    while (LOAD(state + 32 * other, SEQ_CST, AGENT) && LOAD(turn, SEQ_CST, AGENT) == other) PAUSE;
    value[0] += 1;
    STORE(state + 32 * me, 0u, SEQ_CST, AGENT);
  }
}

KERNEL both_write(unsigned* value, unsigned*, long) { value[threadIdx.x] = blockIdx.x; }
"""
FLAGGED = ("gfx90a", "gfx942", "gfx1100")
SEEDS = range(4)


def run(arch: str, kernel: str, seed: int, number: int, **more: Any) -> Any:
    bench = checks_bench.Bench(arch, SOURCE)
    state = bench.buffer(np.zeros(256))
    value = bench.buffer(np.zeros(256))
    result = bench.run(kernel, state, value, number, seed=seed, max_slice=16, **more)
    return result, np.frombuffer(bench.machine.read(value, 1024), np.uint32)


@pytest.mark.parametrize("arch", FLAGGED)
@pytest.mark.parametrize(("kernel", "grid"), [("ticket", 4), ("ring", 4), ("peterson", 2)])
def test_sound_locks_raise_no_alarm(kernel: str, grid: int, arch: str) -> None:
    for seed in SEEDS:
        result, value = run(arch, kernel, seed, 3, grid=grid)
        assert result.ok, (seed, result.message)
        assert value[0] == 3 * grid


@pytest.mark.parametrize("arch", FLAGGED)
@pytest.mark.parametrize("kernel", ["ticket_no_release", "ticket_no_acquire"])
def test_locks_without_order_are_races(kernel: str, arch: str) -> None:
    kinds = {run(arch, kernel, seed, 3, grid=4)[0].kind for seed in SEEDS}
    assert "race" in kinds, kinds


@pytest.mark.parametrize("arch", ALL)
def test_two_writers_of_a_word_that_is_no_flag_race(arch: str) -> None:
    for seed in SEEDS:
        result, _ = run(arch, "both_write", seed, 0, grid=2)
        assert result.kind == "race" and "both_write" in result.message
