"""The check of the scalar cache, which is not updated by stores and may keep stale lines.

Each defect is tested together with the most similar correct kernel. Without the checks every launch
must succeed, because the emulator's memory has no caches.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from checks_bench import ALL, COMMON, Bench

SCALAR = (
    COMMON
    + """
#if defined(__GFX11__)
#define S_LOAD "s_load_b32"
#else
#define S_LOAD "s_load_dword"
#endif
#define LOAD(BITS)                                                                        \\
  static __device__ __forceinline__ unsigned s_load##BITS(const unsigned* p) {            \\
    unsigned value;                                                                       \\
    asm volatile(S_LOAD " %0, %1, 0x0 " #BITS "\\n\\ts_waitcnt lgkmcnt(0)"                  \\
                 : "=&s"(value) : "s"(p) : "memory");                                     \\
    return value;                                                                         \\
  }
LOAD()
LOAD(glc)
#define WAIT_LGKM() asm volatile("s_waitcnt lgkmcnt(0)" ::: "memory")
#define CLEAR() (__builtin_amdgcn_s_dcache_inv(), ({ WAIT_LGKM(); }))
#define SIGNAL(flag, scope) \\
  __syncthreads(); \\
  if (threadIdx.x == 0) __hip_atomic_fetch_add(flag, 1u, __ATOMIC_RELEASE, scope)
#define WAIT(flag, least, scope) \\
  if (threadIdx.x == 0) \\
    while (__hip_atomic_load(flag, __ATOMIC_ACQUIRE, scope) < least) __builtin_amdgcn_s_sleep(1)

// Workgroup 0 reads word 1 of a line; then workgroup 1 writes word 0, which workgroup 0 reads.
#define MAILBOX(NAME, FIRST, BEFORE, AFTER, READ)                          \\
  KERNEL NAME(unsigned* line, unsigned* flags, unsigned* out) {            \\
    if (blockIdx.x == 1) {                                                 \\
      WAIT(flags, 1u, AGENT);                                              \\
      __syncthreads();                                                     \\
      if (threadIdx.x == 0) line[0] = 7;                                   \\
      SIGNAL(flags + 32, AGENT);                                           \\
    } else if (blockIdx.x == 0) {                                          \\
      unsigned first = FIRST;                                              \\
      SIGNAL(flags, AGENT);                                                \\
      BEFORE;                                                              \\
      WAIT(flags + 32, 1u, AGENT);                                         \\
      __syncthreads();                                                     \\
      AFTER;                                                               \\
      out[threadIdx.x] = first + READ;                                     \\
    } else {                                                               \\
      out[64 + threadIdx.x] = s_load(line + 2);                            \\
    }                                                                      \\
  }
#define NOTHING ({})
MAILBOX(cleared, s_load(line + 1), NOTHING, CLEAR(), s_load(line))
MAILBOX(not_cleared, s_load(line + 1), NOTHING, NOTHING, s_load(line))
MAILBOX(cleared_early, 0, CLEAR(); first = s_load(line + 1), NOTHING, s_load(line))
MAILBOX(cleared_for_good, s_load(line + 1), CLEAR(), NOTHING, s_load(line))
MAILBOX(not_waited, s_load(line + 1), NOTHING, __builtin_amdgcn_s_dcache_inv(), s_load(line))
MAILBOX(same_word, s_load(line + 1), NOTHING, NOTHING, s_load(line + 1))
MAILBOX(other_line, s_load(line + 16), NOTHING, NOTHING, s_load(line))
MAILBOX(by_vector, s_load(line + 1), NOTHING, NOTHING, line[0])
MAILBOX(coherent, s_load(line + 1), NOTHING, NOTHING, s_loadglc(line))
MAILBOX(leader, s_load(line + 1), NOTHING, if (threadIdx.x < 64) CLEAR(); __syncthreads(),
        s_load(line))
KERNEL unordered(unsigned* line, unsigned* out) {
  if (blockIdx.x == 1 && threadIdx.x == 0) line[0] = 7;
  if (blockIdx.x == 0) out[threadIdx.x] = s_load(line);
}

// A wave's own store goes another way than its scalar loads.
#define OWN(NAME, FIRST, BETWEEN)                          \\
  KERNEL NAME(unsigned* line, unsigned* out) {             \\
    unsigned first = FIRST;                                \\
    if (threadIdx.x == 0) line[0] = 7;                     \\
    BETWEEN;                                               \\
    out[threadIdx.x] = first + s_load(line);               \\
  }
#define ARRIVED() __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent")
OWN(own_sound, s_load(line + 1), ARRIVED(); CLEAR())
OWN(rotate_logits, 1, ARRIVED())
OWN(own_held, s_load(line + 1), ARRIVED())
OWN(own_in_flight, 1, NOTHING)

// The host writes `line` once flags[0] is raised, then raises flags[16].
#define SERVER(NAME, AFTER)                                                \\
  KERNEL NAME(unsigned* line, unsigned* flags, unsigned* out) {            \\
    unsigned before = s_load(line);                                        \\
    SIGNAL(flags, SYSTEM);                                                 \\
    WAIT(flags + 16, 1u, SYSTEM);                                          \\
    __syncthreads();                                                       \\
    AFTER;                                                                 \\
    out[threadIdx.x] = before + s_load(line);                              \\
  }
SERVER(server_sound, CLEAR())
SERVER(server_stale, NOTHING)

// Device 1 writes what device 0 has in its scalar cache.
#define PEER(NAME, AFTER)                                                  \\
  KERNEL NAME(unsigned* line, unsigned* flags, unsigned* out, long rank) { \\
    if (rank == 1) {                                                       \\
      WAIT(flags, 1u, SYSTEM);                                             \\
      __syncthreads();                                                     \\
      if (threadIdx.x == 0) line[0] = 7;                                   \\
      SIGNAL(flags + 16, SYSTEM);                                          \\
      return;                                                              \\
    }                                                                      \\
    unsigned before = s_load(line + 1);                                    \\
    SIGNAL(flags, SYSTEM);                                                 \\
    WAIT(flags + 16, 1u, SYSTEM);                                          \\
    __syncthreads();                                                       \\
    AFTER;                                                                 \\
    out[threadIdx.x] = before + s_load(line);                              \\
  }
PEER(peer_sound, CLEAR())
PEER(peer_stale, NOTHING)
"""
)

ONE_WAVE = {arch: 32 if arch == "gfx1100" else 64 for arch in ALL}
STALE = "stale scalar read"


def mailbox(arch: str, kernel: str, seed: int, grid: int = 2, **more: Any) -> Any:
    bench = Bench(arch, SCALAR)
    line, flags, out = bench.buffer(np.arange(32)), bench.buffer(np.zeros(64)), bench.buffer()
    return bench.run(kernel, line, flags, out, grid=grid, seed=seed, **more)


@pytest.mark.parametrize("arch", ALL)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_line_in_the_scalar_cache_follows_no_store(arch: str, seed: int) -> None:
    sound = ("cleared", "cleared_for_good", "same_word", "other_line", "by_vector", "coherent")
    for kernel in sound:
        result = mailbox(arch, kernel, seed)
        assert result.ok, (kernel, result.message)
    for kernel in ("not_cleared", "cleared_early", "not_waited"):
        result = mailbox(arch, kernel, seed)
        assert result.kind == STALE, (kernel, result.message)
        assert "s_dcache_inv" in result.message and f"seed {seed}" in result.message
        assert mailbox(arch, kernel, seed, checks=False).ok


@pytest.mark.parametrize("arch", ALL)
def test_any_workgroup_may_share_the_scalar_cache(arch: str) -> None:
    """A third workgroup that loads the cache line may fill the scalar cache of the reading
    workgroup, because it may run on a compute unit that shares this cache.
    """
    for seed in range(3):
        result = mailbox(arch, "cleared", seed, grid=3)
        assert result.ok, result.message
    kinds = {mailbox(arch, "other_line", seed, grid=3).kind for seed in range(6)}
    assert STALE in kinds and kinds <= {STALE, "none"}


@pytest.mark.parametrize("arch", ALL)
def test_workgroup_has_one_scalar_cache(arch: str) -> None:
    for seed in range(3):
        result = mailbox(arch, "leader", seed, lanes=256)
        assert result.ok, result.message


@pytest.mark.parametrize("arch", ALL)
def test_unordered_scalar_load_is_a_race(arch: str) -> None:
    bench = Bench(arch, SCALAR)
    for seed in range(3):
        line, out = bench.buffer(np.arange(32)), bench.buffer()
        assert bench.run("unordered", line, out, grid=2, seed=seed).kind == "race"


@pytest.mark.parametrize("arch", ALL)
def test_grid_starts_with_an_empty_scalar_cache(arch: str) -> None:
    bench = Bench(arch, SCALAR)
    line, out = bench.buffer(np.arange(32)), bench.buffer()
    for round_ in range(4):
        result = bench.run("own_sound", line, out, lanes=ONE_WAVE[arch])
        assert result.ok, result.message
        bench.machine.write(line, np.full(32, round_, np.uint32).tobytes())


@pytest.mark.parametrize("arch", ALL)
def test_wave_reads_its_own_store(arch: str) -> None:
    kinds = {}
    for kernel in ("own_sound", "rotate_logits", "own_held", "own_in_flight"):
        bench = Bench(arch, SCALAR)
        line, out = bench.buffer(np.arange(32)), bench.buffer()
        kinds[kernel] = bench.run(kernel, line, out, lanes=ONE_WAVE[arch]).kind
    assert kinds == {
        "own_sound": "none",
        "rotate_logits": "none",
        "own_held": STALE,
        "own_in_flight": "missing wait",
    }


@pytest.mark.parametrize("arch", ["gfx942", "gfx1100"])
@pytest.mark.parametrize("kind", ["host", "fine"])
def test_host_writes_during_the_kernel_are_checked(arch: str, kind: str) -> None:
    for kernel, expected in (("server_sound", "none"), ("server_stale", STALE)):
        bench = Bench(arch, SCALAR)
        line, out = bench.buffer(np.arange(32), kind=kind), bench.buffer()
        flags = bench.buffer(np.zeros(64), kind="host")
        running = bench.machine.launch(bench.launch(kernel, line, flags, out))
        end = time.monotonic() + 10
        while bench.machine.read(flags, 4) != b"\1\0\0\0" and time.monotonic() < end:
            time.sleep(0.001)
        bench.machine.write(line, np.uint32(5).tobytes())
        bench.machine.write(flags + 64, np.uint32(1).tobytes())
        result = running.wait()
        assert result.kind == expected, result.message


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx1100"])
def test_peer_writes_during_the_kernel_are_checked(arch: str) -> None:
    for kernel, expected in (("peer_sound", "none"), ("peer_stale", STALE)):
        bench = Bench(arch, SCALAR, devices=2)
        line, flags, out = (bench.buffer(np.zeros(64), kind="fine") for _ in range(3))
        for address in (line, flags, out):
            bench.machine.set_access(address, 3)
        launches = [bench.launch(kernel, line, flags, out, d, device=d, seed=1) for d in (0, 1)]
        results = bench.machine.run_together(launches, seed=1)
        assert results[0].kind == expected, results[0].message
