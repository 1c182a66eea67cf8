"""Defects that happens-before clocks cannot detect give wrong values, or a wait without end, in
stale mode.

Each broken kernel has a correct variant, which gives the right values on the same seeds.
"""

from __future__ import annotations

from typing import Any

import checks_bench
import numpy as np
import pytest
from checks_bench import ALL, COMMON

SOURCE = (
    COMMON
    + """
#define GROUP __HIP_MEMORY_SCOPE_WORKGROUP
#define LOAD(p, order, scope) __hip_atomic_load(p, __ATOMIC_##order, scope)
#define STORE(p, v, order, scope) __hip_atomic_store(p, v, __ATOMIC_##order, scope)
#if defined(__GFX9__)
#define DRAIN asm volatile("s_waitcnt vmcnt(0)" ::: "memory")
#else
#define DRAIN asm volatile("s_waitcnt_vscnt null, 0x0" ::: "memory")
#endif

// Both try to enter; whoever sees the other one's flag gives up. Mutual exclusion needs seq_cst.
#define DEKKER(NAME, WRITE, READ)                                                              \\
  KERNEL NAME(unsigned* state, unsigned* entered, long rounds) {                               \\
    if (threadIdx.x != 0) return;                                                              \\
    unsigned me = blockIdx.x, other = 1 - me;                                                  \\
    for (int r = 0; r < rounds; ++r) {                                                         \\
      unsigned* flags = state + 128 * r;                                                       \\
      __hip_atomic_fetch_add(state + 128 * rounds, 1u, __ATOMIC_RELAXED, AGENT);               \\
      while (LOAD(state + 128 * rounds, RELAXED, AGENT) < 2 * (r + 1)) {}                      \\
      STORE(flags + 64 * me, 1u, WRITE, AGENT);                                                \\
      if (LOAD(flags + 64 * other, READ, AGENT) == 0)                                          \\
        __hip_atomic_fetch_add(entered + r, 1u, __ATOMIC_RELAXED, AGENT);                      \\
    }                                                                                          \\
  }
DEKKER(dekker, SEQ_CST, SEQ_CST)
DEKKER(dekker_release_acquire, RELEASE, ACQUIRE)

// The last wave of block 0 writes, its first one signals: the barrier in between does not make the
// stores of the others arrive.
#define HAND(NAME, ARRIVE, SCOPE)                                                              \\
  KERNEL NAME(unsigned* flag, unsigned* data, long rounds) {                                   \\
    unsigned t = threadIdx.x, n = blockDim.x;                                                  \\
    for (int r = 0; r < rounds; ++r) {                                                         \\
      if (blockIdx.x == 0) {                                                                   \\
        if (t >= n / 2) data[r * n + t] = r + t;                                               \\
        ARRIVE;                                                                                \\
        __syncthreads();                                                                       \\
        if (t == 0) {                                                                          \\
          __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent");                                   \\
          DRAIN;                                                                               \\
          STORE(flag, r + 1u, RELAXED, SCOPE);                                                 \\
        }                                                                                      \\
      } else {                                                                                 \\
        while (LOAD(flag, RELAXED, SCOPE) < r + 1u) {}                                         \\
        __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent");                                     \\
        if (t >= n / 2) data[(rounds + r) * n + t] = data[r * n + t];                          \\
      }                                                                                        \\
    }                                                                                          \\
  }
HAND(hand_over, DRAIN, AGENT)
HAND(hand_over_no_drain, , AGENT)
HAND(hand_over_group_scope, DRAIN, GROUP)

// Device 0 signals device 1.
KERNEL signal(unsigned* flag, unsigned* data, long) {
  if (threadIdx.x != 0) return;
  STORE(data, 7u, RELAXED, SYSTEM);
  STORE(flag, 1u, RELEASE, SYSTEM);
}
KERNEL await(unsigned* flag, unsigned* data, long) {
  if (threadIdx.x != 0) return;
  while (LOAD(flag, ACQUIRE, SYSTEM) == 0) __builtin_amdgcn_s_sleep(1);
  data[64] = data[0];
}
"""
)
LITMUS_ROUNDS = 60
SEEDS = range(10)


def words(bench: checks_bench.Bench, address: int, count: int) -> np.ndarray[Any, Any]:
    return np.frombuffer(bench.machine.read(address, 4 * count), np.uint32)


def run(arch: str, kernel: str, seed: int, lanes: int = 64) -> tuple[Any, np.ndarray[Any, Any]]:
    bench = checks_bench.Bench(arch, SOURCE)
    size = 128 * (LITMUS_ROUNDS + 1) * 4
    state = bench.buffer(np.zeros(size // 4), size=size)
    data = bench.buffer(np.zeros(2 * LITMUS_ROUNDS * lanes), size=2 * LITMUS_ROUNDS * lanes * 4)
    more = {"checks": False, "stale": True, "max_slice": 8, "lanes": lanes, "seed": seed}
    result = bench.run(kernel, state, data, LITMUS_ROUNDS, grid=2, **more)
    return result, words(bench, data, 2 * LITMUS_ROUNDS * lanes)


def excludes(arch: str, kernel: str, seed: int) -> bool:
    result, entered = run(arch, kernel, seed)
    assert result.ok, result.message
    return bool((entered[:LITMUS_ROUNDS] <= 1).all())


@pytest.mark.parametrize("arch", ALL)
def test_dekker_needs_more_than_release_and_acquire(arch: str) -> None:
    assert all(excludes(arch, "dekker", seed) for seed in SEEDS)
    assert not all(excludes(arch, "dekker_release_acquire", seed) for seed in SEEDS)


def hands_over(arch: str, kernel: str, seed: int) -> bool:
    lanes = 256
    result, data = run(arch, kernel, seed, lanes)
    if not result.ok:
        assert result.kind == "deadlock", result.message
        return False
    rows = data.reshape(2, LITMUS_ROUNDS, lanes)[:, :, lanes // 2 :]
    return bool((rows[0] == rows[1]).all())


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950"])
def test_stores_of_other_waves_must_arrive_before_the_barrier(arch: str) -> None:
    assert all(hands_over(arch, "hand_over", seed) for seed in SEEDS)
    assert not all(hands_over(arch, "hand_over_no_drain", seed) for seed in range(100))


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_flag_of_workgroup_scope_does_not_leave_its_chiplet(arch: str) -> None:
    assert not hands_over(arch, "hand_over_group_scope", 1)


def signals(arch: str, kind: str, seed: int) -> bool:
    bench = checks_bench.Bench(arch, SOURCE, devices=2)
    flag = bench.buffer(np.zeros(64), kind=kind, device=1)
    data = bench.buffer(np.zeros(128), kind=kind, device=1)
    for address in (flag, data):
        bench.machine.set_access(address, 3)
    more = {"checks": False, "stale": True, "external_wait_ms": 300}
    launches = [
        bench.launch("signal", flag, data, 0, device=0, **more),
        bench.launch("await", flag, data, 0, device=1, **more),
    ]
    _, waiting = bench.machine.run_together(launches, seed)
    return bool(waiting.ok) and words(bench, data, 65)[64] == 7


@pytest.mark.parametrize("arch", ALL)
def test_flag_in_coarse_memory_of_a_peer_is_not_seen(arch: str) -> None:
    assert all(signals(arch, "uncached", seed) for seed in SEEDS)
    assert not all(signals(arch, "device", seed) for seed in SEEDS)
