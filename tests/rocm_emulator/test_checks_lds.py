"""LDS words used as atomics and flags are not reported, although no bit of the instructions marks
their accesses as atomic; their broken variants are reported. Also tests floating-point atomics on
memory where MI200 ignores them.
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
#define LOAD(p, order) __hip_atomic_load(p, __ATOMIC_##order, GROUP)
#define STORE(p, v, order) __hip_atomic_store(p, v, __ATOMIC_##order, GROUP)

KERNEL load_then_cas(unsigned* out) {
  __shared__ unsigned best;
  unsigned t = threadIdx.x, value = t * 37 % 256;
  if (t == 0) best = 0;
  __syncthreads();
  unsigned old = LOAD(&best, RELAXED);
  while (value > old &&
         !__hip_atomic_compare_exchange_strong(&best, &old, value, __ATOMIC_RELAXED,
                                               __ATOMIC_RELAXED, GROUP)) {
  }
  __syncthreads();
  out[t] = best;
}
KERNEL load_then_add(unsigned* out) {
  __shared__ unsigned count;
  unsigned t = threadIdx.x;
  if (t == 0) count = 0;
  __syncthreads();
  if (LOAD(&count, RELAXED) < 100000u)
    __hip_atomic_fetch_add(&count, 1u, __ATOMIC_RELAXED, GROUP);
  __syncthreads();
  out[t] = count;
}
KERNEL add_then_read(unsigned* out) {   // a barrier is missing before the read
  __shared__ unsigned count;
  unsigned t = threadIdx.x;
  if (t == 0) count = 0;
  __syncthreads();
  __hip_atomic_fetch_add(&count, 1u, __ATOMIC_RELAXED, GROUP);
  out[t] = count;
}

KERNEL stored_flag(unsigned* out) {
  __shared__ unsigned data[64], ready;
  unsigned t = threadIdx.x;
  if (t == 0) ready = 0;
  __syncthreads();
  if (t < __builtin_amdgcn_wavefrontsize()) {
    data[t] = t + 1;
    STORE(&ready, 1u, RELEASE);
  } else {
    while (LOAD(&ready, ACQUIRE) == 0) {
    }
    out[t] = data[t % __builtin_amdgcn_wavefrontsize()];
  }
}
KERNEL stored_flag_unread(unsigned* out) {
  __shared__ unsigned data[64], ready;
  unsigned t = threadIdx.x;
  if (t == 0) ready = 0;
  __syncthreads();
  if (t < __builtin_amdgcn_wavefrontsize()) {
    data[t] = t + 1;
    STORE(&ready, 1u, RELEASE);
  } else {
    out[t] = data[t % __builtin_amdgcn_wavefrontsize()];
  }
}

KERNEL one_value(unsigned* out) {
  __shared__ unsigned found;
  unsigned t = threadIdx.x;
  if (t == 0) found = 0;
  __syncthreads();
  if (t % 3 == 0) STORE(&found, 1u, RELAXED);
  __syncthreads();
  out[t] = found;
}
KERNEL several_values(unsigned* out) {
  __shared__ unsigned found;
  unsigned t = threadIdx.x;
  if (t == 0) found = 0;
  __syncthreads();
  if (t % 64 == 0) found = t / 64 + 1;
  __syncthreads();
  out[t] = found;
}

#if defined(__gfx90a__)
KERNEL float_atomic(unsigned* out) {
  __builtin_amdgcn_global_atomic_fadd_f64((__attribute__((address_space(1))) double*)out, 1.0);
}
#endif
"""
)
SEEDS = range(5)


def results(arch: str, kernel: str, kind: str = "device") -> list[Any]:
    runs = []
    for seed in SEEDS:
        bench = checks_bench.Bench(arch, SOURCE)
        out = bench.buffer(np.zeros(256), kind=kind)
        runs.append(bench.run(kernel, out, lanes=256, seed=seed, max_slice=16))
    return runs


@pytest.mark.parametrize("arch", ALL)
@pytest.mark.parametrize("kernel", ["load_then_cas", "load_then_add", "stored_flag", "one_value"])
def test_sound_uses_raise_no_alarm(kernel: str, arch: str) -> None:
    for result in results(arch, kernel):
        assert result.ok, result.message


@pytest.mark.parametrize("arch", ALL)
@pytest.mark.parametrize("kernel", ["add_then_read", "stored_flag_unread", "several_values"])
def test_broken_uses_are_reported(kernel: str, arch: str) -> None:
    kinds = {result.kind for result in results(arch, kernel)}
    assert kinds & {"race", "uninitialised read"}, kinds


def test_float_atomic_that_mi200_ignores() -> None:
    assert all(result.ok for result in results("gfx90a", "float_atomic"))
    for kind in ("fine", "uncached", "host"):
        result = results("gfx90a", "float_atomic", kind)[0]
        assert result.kind == "race" and "no effect" in result.message
