"""Tests each check alone: the smallest kernel that it must report, and the most similar correct
one.

clang compiles the kernels for every architecture to which they apply. Machine code is edited where
the compiler would not make the mistake. The emulator without checks gives the right values for all
of them, so without the checks every launch must succeed.
"""

from __future__ import annotations

import re
from typing import Any

import checks_bench
import numpy as np
import pytest
from checks_bench import ALL, assembly

SOURCE = """
#define KERNEL extern "C" __global__ __launch_bounds__(256) void
#define AGENT __HIP_MEMORY_SCOPE_AGENT
#define SYSTEM __HIP_MEMORY_SCOPE_SYSTEM
#define GROUP __HIP_MEMORY_SCOPE_WORKGROUP
#define WAIT(flag, scope, order) \\
  while (__hip_atomic_load(flag, order, scope) == 0) __builtin_amdgcn_s_sleep(1)

KERNEL copy(unsigned* out, const unsigned* in) { out[threadIdx.x] = in[threadIdx.x]; }
KERNEL bytes(unsigned* out, const unsigned char* in) { out[threadIdx.x] = in[threadIdx.x]; }
KERNEL add(unsigned* out) { atomicAdd(out + threadIdx.x, 1u); }

template <bool BARRIER>
static __device__ __forceinline__ void mirror(unsigned* out) {
  __shared__ unsigned tile[256];
  tile[threadIdx.x] = threadIdx.x;
  if (BARRIER) __syncthreads();
  out[threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x];
}
KERNEL mirror_sound(unsigned* out) { mirror<true>(out); }
KERNEL mirror_race(unsigned* out) { mirror<false>(out); }

// One workgroup writes, the other reads once it has seen the flag.
template <int SCOPE, int RELEASE, int ACQUIRE>
static __device__ __forceinline__ void hand_over(unsigned* data, unsigned* flag, unsigned* out,
                                                 bool sender) {
  if (sender) {
    data[threadIdx.x] = threadIdx.x + 1;
    __syncthreads();
    if (threadIdx.x == 0) __hip_atomic_store(flag, 1u, RELEASE, SCOPE);
  } else {
    if (threadIdx.x == 0) WAIT(flag, SCOPE, ACQUIRE);
    __syncthreads();
    out[threadIdx.x] = data[threadIdx.x];
  }
}
#define HAND_OVER(NAME, SCOPE, RELEASE, ACQUIRE)                                     \\
  KERNEL NAME(unsigned* data, unsigned* flag, unsigned* out, long sender) {          \\
    hand_over<SCOPE, RELEASE, ACQUIRE>(data, flag, out, blockIdx.x == sender);       \\
  }
HAND_OVER(agent_sound, AGENT, __ATOMIC_RELEASE, __ATOMIC_ACQUIRE)
HAND_OVER(agent_no_release, AGENT, __ATOMIC_RELAXED, __ATOMIC_ACQUIRE)
HAND_OVER(agent_no_acquire, AGENT, __ATOMIC_RELEASE, __ATOMIC_RELAXED)
HAND_OVER(system_sound, SYSTEM, __ATOMIC_RELEASE, __ATOMIC_ACQUIRE)

// The flag passes through a third workgroup that only counts: a release sequence.
KERNEL through_counter(unsigned* data, unsigned* flag, unsigned* out) {
  if (blockIdx.x == 0) {
    data[threadIdx.x] = threadIdx.x;
    __syncthreads();
    if (threadIdx.x == 0) __hip_atomic_fetch_add(flag, 1u, __ATOMIC_RELEASE, AGENT);
  } else if (blockIdx.x == 1) {
    if (threadIdx.x == 0) __hip_atomic_fetch_add(flag, 1u, __ATOMIC_RELAXED, AGENT);
  } else {
    if (threadIdx.x == 0)
      while (__hip_atomic_load(flag, __ATOMIC_ACQUIRE, AGENT) < 2) __builtin_amdgcn_s_sleep(1);
    __syncthreads();
    out[threadIdx.x] = data[threadIdx.x];
  }
}

// Workgroup 1 overwrites what workgroup 0 may still read.
KERNEL overwrite(unsigned* data, unsigned* out) {
  if (blockIdx.x == 0) out[threadIdx.x] = data[threadIdx.x];
  if (blockIdx.x == 1) data[threadIdx.x] = 7;
}
KERNEL own_bytes(unsigned char* data) { data[blockIdx.x * blockDim.x + threadIdx.x] = blockIdx.x; }
KERNEL odd_lds(unsigned* out, long shift) {
  extern __shared__ unsigned char raw[];
  *(unsigned*)(raw + 4 * threadIdx.x + shift) = threadIdx.x;
  out[threadIdx.x] = *(unsigned*)(raw + 4 * threadIdx.x + shift);
}
"""

DMA = """
#define KERNEL extern "C" __global__ __launch_bounds__(256) void
KERNEL direct(unsigned* out, unsigned* in) {
  __shared__ unsigned tile[64];
  __builtin_amdgcn_global_load_lds(
      (__attribute__((address_space(1))) unsigned*)(in + threadIdx.x),
      (__attribute__((address_space(3))) unsigned*)tile, 4, 0, 0);
  __builtin_amdgcn_s_waitcnt(0);
  __builtin_amdgcn_wave_barrier();
  out[threadIdx.x] = ((volatile unsigned*)tile)[63 - threadIdx.x];
}
"""


class Bench(checks_bench.Bench):
    """Emulated devices with the kernels of this file loaded."""

    def __init__(self, arch: str, source: str = SOURCE, edit: Any = ("", "", "", 0), devices=1):
        super().__init__(arch, source, edit, devices)


@pytest.mark.parametrize("arch", ALL)
def test_reads_of_unwritten_memory_are_reported(arch: str) -> None:
    bench = Bench(arch)
    out = bench.buffer()
    half = bench.buffer(np.arange(32), size=256)
    assert bench.run("copy", out, half, lanes=32).ok
    result = bench.run("copy", out, half, lanes=64)
    assert result.kind == "uninitialised read" and result.lane == (32 if arch != "gfx1100" else 0)
    assert result.address == half + 128
    assert bench.run("copy", out, half, lanes=64, checks=False).ok
    # Each byte counts as initialised once a kernel has written it.
    assert bench.run("bytes", out, half, lanes=64).ok
    assert bench.run("copy", bench.buffer(), out, lanes=64).ok
    assert bench.run("add", bench.buffer()).kind == "uninitialised read"


@pytest.mark.parametrize("arch", ALL)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_lds_without_a_barrier(arch: str, seed: int) -> None:
    bench = Bench(arch)
    out = bench.buffer()
    assert bench.run("mirror_sound", out, lanes=256, seed=seed).ok
    result = bench.run("mirror_race", out, lanes=256, seed=seed)
    # The report depends on the schedule: a race at the second of two accesses or, if the read comes
    # first, a read of uninitialised memory.
    assert result.kind in ("race", "uninitialised read") and "LDS" in result.message
    one_wave = 32 if arch == "gfx1100" else 64
    assert bench.run("mirror_sound", out, lanes=one_wave).ok


def hand_over(bench: Bench, kernel: str, seed: int = 0, checks: bool = True) -> Any:
    data, flag, out = bench.buffer(), bench.buffer([0]), bench.buffer()
    return bench.run(kernel, data, flag, out, 0, grid=2, lanes=64, seed=seed, checks=checks)


@pytest.mark.parametrize("arch", ALL)
@pytest.mark.parametrize("kernel", ["agent_no_release", "agent_no_acquire"])
def test_fence_left_out_of_a_hand_over(arch: str, kernel: str) -> None:
    bench = Bench(arch)
    for seed in range(3):
        sound = hand_over(bench, "agent_sound", seed)
        assert sound.ok, sound.message
        broken = hand_over(bench, kernel, seed)
        if arch == "gfx1100" and kernel == "agent_no_release":
            assert broken.ok  # the barrier before it already waits for the stores there
            continue
        assert broken.kind == "race" and f"seed {seed}" in broken.message
    assert hand_over(bench, kernel, checks=False).ok


@pytest.mark.parametrize(
    ("arch", "old"),
    [
        ("gfx942", r"buffer_wbl2 sc1"),
        ("gfx942", r"buffer_inv sc1"),
        ("gfx950", r"buffer_wbl2 sc1"),
        ("gfx90a", r"buffer_wbinvl1_vol"),
        ("gfx1100", r"buffer_gl0_inv"),
        ("gfx1100", r"buffer_gl1_inv"),
    ],
)
def test_cache_operation_left_out_of_the_machine_code(arch: str, old: str) -> None:
    text = assembly(arch, SOURCE)
    part = text[text.index("\nagent_sound:") :]
    count = len(re.findall(old, part[: part.index(".Lfunc_end")]))
    kinds = set()
    for nth in range(count):
        bench = Bench(arch, edit=("agent_sound", old, "s_nop 0", nth))
        for seed in range(4):
            kinds.add(hand_over(bench, "agent_sound", seed).kind)
    assert "race" in kinds and kinds <= {"race", "none"}


@pytest.mark.parametrize("arch", ALL)
def test_atomic_by_a_third_wave_keeps_the_release(arch: str) -> None:
    bench = Bench(arch)
    for seed in range(4):
        data, flag, out = bench.buffer(), bench.buffer([0]), bench.buffer()
        result = bench.run("through_counter", data, flag, out, grid=3, seed=seed)
        assert result.ok, result.message


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx1100"])
def test_between_devices_only_system_scope_orders(arch: str) -> None:
    bench = Bench(arch, devices=2)
    kinds = {}
    for kernel in ("system_sound", "agent_sound"):
        data, flag, out = (bench.buffer(kind="fine") for _ in range(3))
        bench.machine.write(flag, bytes(4))
        for address in (data, flag, out):
            bench.machine.set_access(address, 3)
        # One workgroup on each device; only the first device has the sender, workgroup 0.
        launches = [
            bench.launch(kernel, data, flag, out, sender, device=d, seed=1)
            for d, sender in ((0, 0), (1, 5))
        ]
        results = bench.machine.run_together(launches, seed=1)
        kinds[kernel] = {r.kind for r in results}
    assert kinds["system_sound"] == {"none"}
    if arch != "gfx1100":  # RDNA3's fences are the same for both scopes
        assert "race" in kinds["agent_sound"]


@pytest.mark.parametrize("arch", ALL)
def test_writes_over_reads_of_other_workgroups_are_reported(arch: str) -> None:
    bench = Bench(arch)
    data, out = bench.buffer(np.arange(64)), bench.buffer()
    result = bench.run("overwrite", data, out, grid=2)
    assert result.kind == "race"
    # If the same two accesses are made in two consecutive launches, they are ordered, and nothing
    # is reported.
    assert bench.run("overwrite", data, out, grid=1).ok
    assert bench.run("copy", data, out).ok


@pytest.mark.parametrize("arch", ALL)
def test_neighbouring_bytes_are_no_race(arch: str) -> None:
    bench = Bench(arch)
    result = bench.run("own_bytes", bench.buffer(), grid=5, lanes=33)
    assert result.ok, result.message


@pytest.mark.parametrize("arch", ["gfx942", "gfx1100"])
def test_lds_words_must_be_aligned(arch: str) -> None:
    bench = Bench(arch)
    out = bench.buffer()
    assert bench.run("odd_lds", out, 0, dynamic_lds=512).ok
    assert bench.run("odd_lds", out, 1, dynamic_lds=512).kind == "misaligned"


@pytest.mark.parametrize(
    ("arch", "wait"),
    [
        ("gfx90a", r"s_waitcnt vmcnt\(0\)"),
        ("gfx942", r"s_waitcnt vmcnt\(0\)"),
        ("gfx942", r"s_waitcnt lgkmcnt\(0\)"),
        ("gfx1100", r"s_waitcnt vmcnt\(0\)"),
        ("gfx1100", r"s_waitcnt lgkmcnt\(0\)"),
    ],
)
def test_register_used_before_its_load_is_waited_for(arch: str, wait: str) -> None:
    data = np.arange(64)
    sound, broken = Bench(arch), Bench(arch, edit=("copy", wait, "s_nop 0", 0))
    assert sound.run("copy", sound.buffer(), sound.buffer(data)).ok
    result = broken.run("copy", broken.buffer(), broken.buffer(data))
    assert result.kind == "missing wait" and "s_waitcnt" in result.message
    out = broken.buffer()
    assert broken.run("copy", out, broken.buffer(data), checks=False).ok
    assert np.array_equal(np.frombuffer(broken.machine.read(out, 256), np.uint32), data)


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950"])
def test_load_to_lds_must_be_waited_for(arch: str) -> None:
    data = np.arange(64)
    sound = Bench(arch, DMA)
    out = sound.buffer()
    result = sound.run("direct", out, sound.buffer(data))
    assert result.ok, result.message
    assert np.array_equal(np.frombuffer(sound.machine.read(out, 256), np.uint32), data[::-1])
    broken = Bench(arch, DMA, ("direct", r"s_waitcnt vmcnt\(0\)[^\n]*", "s_nop 0", 0))
    result = broken.run("direct", broken.buffer(), broken.buffer(data))
    assert result.kind == "missing wait" and "LDS" in result.message
