"""Checks of invalid memory accesses: unwritten LDS, reads past the kernel arguments, lanes of one
store that write different values to one address.

Each defect is tested together with the most similar correct kernel. Without the checks every launch
must succeed, because the emulator's memory has some contents everywhere.
"""

from __future__ import annotations

import numpy as np
import pytest
from checks_bench import ALL, COMMON, Bench

LDS = (
    COMMON
    + """
KERNEL fill(unsigned* out, long written, long read) {
  __shared__ unsigned tile[256];
  if (threadIdx.x < written) tile[threadIdx.x] = threadIdx.x;
  __syncthreads();
  out += blockIdx.x * 256;
  if (threadIdx.x < read) out[threadIdx.x] = ((volatile unsigned*)tile)[threadIdx.x];
}
KERNEL bytes(unsigned* out, long written) {
  __shared__ unsigned char tile[256];
  volatile unsigned char* p = tile;
  if (threadIdx.x < written) p[4 * threadIdx.x] = p[4 * threadIdx.x + 1] = 1;
  __syncthreads();
  unsigned short two = ((volatile unsigned short*)tile)[2 * threadIdx.x];
  out[threadIdx.x] = two;
}
KERNEL whole_words(unsigned* out) {
  __shared__ unsigned char tile[256];
  ((volatile unsigned char*)tile)[4 * threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = ((volatile unsigned*)tile)[threadIdx.x];
}
KERNEL count(unsigned* out, long zeroed) {
  __shared__ unsigned bins[64];
  if (zeroed) bins[threadIdx.x] = 0;
  __syncthreads();
  __hip_atomic_fetch_add(bins + threadIdx.x, 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
  __syncthreads();
  out[threadIdx.x] = bins[threadIdx.x];
}
#if defined(__GFX9__)
KERNEL direct(unsigned* out, unsigned* in, long lanes) {
  __shared__ unsigned tile[64];
  if (threadIdx.x < lanes)
    __builtin_amdgcn_global_load_lds(
        (__attribute__((address_space(1))) unsigned*)(in + threadIdx.x),
        (__attribute__((address_space(3))) unsigned*)tile, 4, 0, 0);
  __builtin_amdgcn_s_waitcnt(0);
  __builtin_amdgcn_wave_barrier();
  out[threadIdx.x] = ((volatile unsigned*)tile)[threadIdx.x];
}
#endif
"""
)

ARGUMENTS = (
    COMMON
    + """
typedef __attribute__((address_space(4))) const unsigned arg;
KERNEL scalar_peek(unsigned* out, long word) {
  arg* words = (arg*)__builtin_amdgcn_kernarg_segment_ptr();
  out[threadIdx.x] = words[word];
}
KERNEL vector_peek(unsigned* out, long word) {
  arg* words = (arg*)__builtin_amdgcn_kernarg_segment_ptr();
  out[threadIdx.x] = words[word + threadIdx.x];
}
"""
)

LANES = (
    COMMON
    + """
typedef unsigned uint4 __attribute__((ext_vector_type(4)));
KERNEL same_place(unsigned* out, long stride, long value) {
  out[threadIdx.x * stride] = threadIdx.x * value;
}
KERNEL same_vector(uint4* out, long stride, long value) {
  unsigned v = threadIdx.x * value;
  out[threadIdx.x * stride] = uint4{1, 2, 3, v};
}
KERNEL atomic_store(unsigned* out) {
  __hip_atomic_store(out, threadIdx.x, __ATOMIC_RELAXED, AGENT);
}
KERNEL overlapping(unsigned char* out, long step) {
  *(unsigned __attribute__((aligned(1)))*)(out + threadIdx.x * step) = 0x01010101u * threadIdx.x;
}
KERNEL lds_place(unsigned* out, long stride, long value) {
  __shared__ unsigned tile[64];
  ((volatile unsigned*)tile)[threadIdx.x * stride] = threadIdx.x * value;
  __syncthreads();
  out[0] = tile[0];
}
"""
)
UNWRITTEN = "uninitialised read"


@pytest.mark.parametrize("arch", ALL)
def test_reads_of_unwritten_lds_are_reported(arch: str) -> None:
    bench = Bench(arch, LDS)
    out = bench.buffer()
    result = bench.run("fill", out, 200, 200, grid=3, lanes=256)
    assert result.ok, result.message
    result = bench.run("fill", out, 200, 201, grid=3, lanes=256)
    assert result.kind == UNWRITTEN and "LDS byte 800" in result.message
    assert result.address == 800
    assert bench.run("fill", out, 200, 201, lanes=256, checks=False).ok


@pytest.mark.parametrize("arch", ALL)
def test_lds_is_followed_to_the_byte(arch: str) -> None:
    bench = Bench(arch, LDS)
    out = bench.buffer()
    assert bench.run("bytes", out, 64).ok
    assert bench.run("bytes", out, 63).kind == UNWRITTEN
    result = bench.run("whole_words", out)
    assert result.kind == UNWRITTEN and result.address == 1


@pytest.mark.parametrize("arch", ALL)
def test_lds_atomic_reads(arch: str) -> None:
    bench = Bench(arch, LDS)
    assert bench.run("count", bench.buffer(), 1).ok
    assert bench.run("count", bench.buffer(), 0).kind == UNWRITTEN


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950"])
def test_load_to_lds_writes_it(arch: str) -> None:
    bench = Bench(arch, LDS)
    out, data = bench.buffer(), bench.buffer(np.arange(64))
    assert bench.run("direct", out, data, 64).ok
    result = bench.run("direct", out, data, 40)
    assert result.kind == UNWRITTEN and result.address == 160


@pytest.mark.parametrize("arch", ALL)
@pytest.mark.parametrize("kernel", ["scalar_peek", "vector_peek"])
def test_end_of_the_kernel_arguments(arch: str, kernel: str) -> None:
    bench = Bench(arch, ARGUMENTS)
    size = next(k for k in bench.code.kernels if k.name == kernel).kernarg_size
    lanes = 1 if kernel == "scalar_peek" else 3
    last = size // 4 - lanes
    assert bench.run(kernel, bench.buffer(), last, lanes=lanes).ok
    result = bench.run(kernel, bench.buffer(), last + 1, lanes=lanes)
    assert result.kind == "out of bounds" and f"arguments, which are {size} bytes" in result.message
    assert bench.run(kernel, bench.buffer(), last + 1, lanes=lanes, checks=False).ok


@pytest.mark.parametrize("arch", ALL)
@pytest.mark.parametrize("kernel", ["same_place", "same_vector", "lds_place"])
def test_lanes_that_contradict_each_other(arch: str, kernel: str) -> None:
    bench = Bench(arch, LANES)
    for stride, value in ((1, 3), (0, 0)):  # each lane its own address; one address, the same value
        result = bench.run(kernel, bench.buffer(), stride, value, lanes=32)
        assert result.ok, result.message
    result = bench.run(kernel, bench.buffer(), 0, 3, lanes=4)
    if arch in ("gfx90a", "gfx1100") and kernel == "same_place":
        assert result.ok  # a store of up to 8 bytes may be an atomic one there
        return
    assert result.kind == "race" and "lanes 0 and 1" in result.message
    assert bench.run(kernel, bench.buffer(), 0, 3, lanes=4, checks=False).ok


@pytest.mark.parametrize("arch", ALL)
def test_lanes_may_store_different_values_atomically(arch: str) -> None:
    bench = Bench(arch, LANES)
    assert bench.run("atomic_store", bench.buffer(), lanes=32).ok


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_lanes_that_overlap_in_part(arch: str) -> None:
    bench = Bench(arch, LANES)
    assert bench.run("overlapping", bench.buffer(), 4).ok
    result = bench.run("overlapping", bench.buffer(), 3)
    assert result.kind == "race" and "lanes 0 and 1" in result.message
