"""If a thread stores a value that depends on its load from memory, the value proves that the load
is complete. Another thread that receives the value, by any chain of relaxed stores, may overwrite
the memory that was loaded. But the value does not make earlier writes of the loading thread
visible.
"""

from __future__ import annotations

from typing import Any

import checks_bench
import numpy as np
import pytest
from checks_bench import ALL

SOURCE = """
#define KERNEL extern "C" __global__ __launch_bounds__(256) void
#define LOAD(p) __hip_atomic_load(p, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM)
#define STORE(p, v) __hip_atomic_store(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM)
#define PAUSE __builtin_amdgcn_s_sleep(1)

__device__ void pass_on(unsigned* flags, unsigned from, unsigned to) {
  while (LOAD(flags + 32 * from) == 0) PAUSE;
  STORE(flags + 32 * to, 1u);
}
__device__ void overwrite(unsigned* flags, unsigned from, unsigned* value) {
  if (threadIdx.x == 0) {
    while (LOAD(flags + 32 * from) == 0) PAUSE;
  }
  __syncthreads();
  value[threadIdx.x] = 7;
}

// Block 0 reads and tells block 1, which tells block 2, which overwrites; all waves have read when
// one lane tells it.
KERNEL read_then_tell(unsigned* flags, unsigned* value, unsigned* kept) {
  if (blockIdx.x == 0) {
    kept[threadIdx.x] = value[threadIdx.x] + 1;
    __syncthreads();
    if (threadIdx.x == 0) STORE(flags, 1u);
  }
  if (blockIdx.x == 1 && threadIdx.x == 0) pass_on(flags, 0, 1);
  if (blockIdx.x == 2) overwrite(flags, 1, value);
}
KERNEL tell_then_read(unsigned* flags, unsigned* value, unsigned* kept) {
  if (blockIdx.x == 0) {
    if (threadIdx.x == 0) STORE(flags, 1u);
    __syncthreads();
    kept[threadIdx.x] = value[threadIdx.x] + 1;
  }
  if (blockIdx.x == 1 && threadIdx.x == 0) pass_on(flags, 0, 1);
  if (blockIdx.x == 2) overwrite(flags, 1, value);
}
// Of two waves one tells before the other one need have read.
KERNEL one_wave_tells(unsigned* flags, unsigned* value, unsigned* kept) {
  if (blockIdx.x == 0) {
    kept[threadIdx.x] = value[threadIdx.x] + 1;
    if (threadIdx.x == 0) STORE(flags, kept[threadIdx.x] | 1u);
  }
  if (blockIdx.x == 1 && threadIdx.x == 0) pass_on(flags, 0, 1);
  if (blockIdx.x == 2) overwrite(flags, 1, value);
}
// The chain proves nothing to a block that did not wait for it.
KERNEL nobody_waits(unsigned* flags, unsigned* value, unsigned* kept) {
  if (blockIdx.x == 0) {
    kept[threadIdx.x] = value[threadIdx.x] + 1;
    __syncthreads();
    if (threadIdx.x == 0) STORE(flags, 1u);
  }
  if (blockIdx.x == 2) value[threadIdx.x] = 7;
}
KERNEL write_then_tell(unsigned* flags, unsigned* value, unsigned*) {
  if (blockIdx.x == 0) {
    value[threadIdx.x] = 5;
    __syncthreads();
    if (threadIdx.x == 0) STORE(flags, 1u);
  }
  if (blockIdx.x == 1 && threadIdx.x == 0) pass_on(flags, 0, 1);
  if (blockIdx.x == 2) overwrite(flags, 1, value);
}
"""
LANE_COUNT = 128
SEEDS = range(6)


def run(arch: str, kernel: str, seed: int) -> Any:
    bench = checks_bench.Bench(arch, SOURCE)
    buffers = [bench.buffer(np.zeros(LANE_COUNT)) for _ in range(3)]
    return bench.run(kernel, *buffers, grid=3, lanes=LANE_COUNT, seed=seed, max_slice=16)


@pytest.mark.parametrize("arch", ALL)
def test_reads_before_a_relaxed_chain_may_be_overwritten(arch: str) -> None:
    for seed in SEEDS:
        result = run(arch, "read_then_tell", seed)
        assert result.ok, (seed, result.message)


@pytest.mark.parametrize("arch", ALL)
@pytest.mark.parametrize("kernel", ["tell_then_read", "one_wave_tells", "nobody_waits"])
def test_pending_reads_may_not_be_overwritten(kernel: str, arch: str) -> None:
    assert "race" in {run(arch, kernel, seed).kind for seed in SEEDS}


@pytest.mark.parametrize("arch", ALL)
def test_relaxed_chain_orders_no_stores(arch: str) -> None:
    for seed in SEEDS:
        assert run(arch, "write_then_tell", seed).kind == "race", seed
