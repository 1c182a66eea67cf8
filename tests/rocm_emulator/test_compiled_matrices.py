"""The code that clang generates for block-scaled and sparse products, run with the checks on.

Each kernel runs one wave. One kernel quantises f32 matrices to 4 bits on the device and multiplies
them with their scales, one multiplies with a B that is read by columns of LDS, and one computes a
sparse product. Layouts are from AMD's guide to matrix cores on CDNA3 and CDNA4; expected values are
from NumPy and ml_dtypes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ark_rocm_emulator.engine import core
from numpy.typing import NDArray

from tests.kept import compile_hip

# At -O0 clang 22 prints eight registers for 32 elements of 4 bits, which its assembler refuses.
BUILDS = (("gfx942", "-O0"), ("gfx942", "-O3"), ("gfx950", "-O3"))
HEAD = """
#define KERNEL extern "C" __global__ __launch_bounds__(64) void
typedef int i4 __attribute__((ext_vector_type(4)));
typedef int i8v __attribute__((ext_vector_type(8)));
typedef short s4 __attribute__((ext_vector_type(4)));
typedef float f4 __attribute__((ext_vector_type(4)));
typedef float f16v __attribute__((ext_vector_type(16)));
typedef _Float16 h4 __attribute__((ext_vector_type(4)));
typedef _Float16 h8 __attribute__((ext_vector_type(8)));
"""
SCALED = """
// 32 floats, `step` apart, to 4 bits each and the exponent that brings the largest below 8.
__device__ unsigned quantise(const float* from, int step, i8v& to) {
  float most = 0;
  for (int k = 0; k < 32; k++) most = __builtin_fmaxf(most, __builtin_fabsf(from[k * step]));
  unsigned exponent = (__builtin_bit_cast(unsigned, most) >> 23) - 2;
  float scale = __builtin_bit_cast(float, exponent << 23);
#pragma unroll
  for (int word = 0; word < 4; word++) {
    unsigned bits = 0;
#define PAIR(BYTE)                                                                          \\
  bits = __builtin_amdgcn_cvt_scalef32_pk_fp4_f32(bits, from[(8 * word + 2 * BYTE) * step], \\
                                                  from[(8 * word + 2 * BYTE + 1) * step],   \\
                                                  scale, BYTE)
    PAIR(0); PAIR(1); PAIR(2); PAIR(3);
    to[word] = (int)bits;
  }
  return exponent;
}

KERNEL scaled(float* d, const float* a, const float* b) {   // 32 x 64, 64 x 32
  int line = threadIdx.x % 32, half = threadIdx.x / 32;
  i8v x = {}, y = {};
  unsigned scale_a = quantise(a + line * 64 + half * 32, 1, x);
  unsigned scale_b = quantise(b + half * 32 * 32 + line, 32, y);
  f16v sum = {};
  sum = __builtin_amdgcn_mfma_scale_f32_32x32x64_f8f6f4(x, y, sum, 4, 4, 2, scale_a << 16, 1,
                                                        scale_b << 8);
  for (int k = 0; k < 16; k++) d[(8 * (k / 4) + 4 * half + k % 4) * 32 + line] = sum[k];
}

KERNEL columns(float* d, const _Float16* a, const _Float16* b) {   // 16 x 16, 16 x 16
  __shared__ _Float16 tile[256];
  int line = threadIdx.x % 16, group = threadIdx.x / 16;
  for (int k = 0; k < 4; k++) tile[threadIdx.x * 4 + k] = b[threadIdx.x * 4 + k];
  __syncthreads();
  h4 x = *(const h4*)(a + line * 16 + group * 4);
  // Four rows of B to each group of lanes, four lanes to a row.
  typedef __attribute__((address_space(3))) s4 shared_s4;
  s4 y = __builtin_amdgcn_ds_read_tr16_b64_v4i16((shared_s4*)(tile + threadIdx.x * 4));
  f4 sum = {};
  sum = __builtin_amdgcn_mfma_f32_16x16x16f16(x, __builtin_bit_cast(h4, y), sum, 0, 0, 0);
  for (int k = 0; k < 4; k++) d[(4 * group + k) * 16 + line] = sum[k];
}
"""
SPARSE = """
KERNEL sparse(float* d, const _Float16* a, const _Float16* b) {   // 16 x 32, 32 x 16
  int line = threadIdx.x % 16, group = threadIdx.x / 16;
  h4 x;
  h8 y;
  int index = 0;
  for (int four = 0; four < 2; four++) {
    int stored = 0;
    for (int k = 0; k < 4; k++) {
      _Float16 value = a[line * 32 + group * 8 + four * 4 + k];
      if (value == 0) continue;
      x[four * 2 + stored] = value;
      index |= k << (four * 4 + stored * 2);
      stored++;
    }
  }
  for (int k = 0; k < 8; k++) y[k] = b[(group * 8 + k) * 16 + line];
  f4 sum = {};
  sum = __builtin_amdgcn_smfmac_f32_16x16x32_f16(x, y, sum, index << 16, 0, 2);
  for (int k = 0; k < 4; k++) d[(4 * group + k) * 16 + line] = sum[k];
}
"""


@cache
def _loaded(arch: str, level: str) -> tuple[Any, Any]:
    machine = core().Machine([arch])
    source = HEAD + SPARSE + (SCALED if arch == "gfx950" else "")
    return machine, machine.load(core().CodeObject(compile_hip(source, arch, (level,))), 0)


def run(arch: str, level: str, kernel: str, a: NDArray, b: NDArray, size: int) -> NDArray:
    machine, code = _loaded(arch, level)
    addresses = [machine.allocate(0, "device", n) for n in (size * size * 4, a.nbytes, b.nbytes)]
    try:
        for address, data in zip(addresses[1:], (a, b), strict=True):
            machine.write(address, data.tobytes())
        options = core().LaunchOptions(seed=1, checks=True, step_budget=1_000_000)
        arguments = np.array(addresses, np.uint64).tobytes()
        launch = core().LaunchDesc(code, kernel, (1, 1, 1), (64, 1, 1), arguments, 0, options)
        result = machine.run(launch)
        assert result.ok, result.message
        raw = machine.read(addresses[0], size * size * 4)
    finally:
        for address in addresses:
            machine.release(address)
    return np.frombuffer(raw, np.float32).reshape(size, size)


def quantised(values: NDArray[np.float32]) -> NDArray[np.float64]:
    """Rounds each row of 32 elements to E2M1 and returns the rounded values. The scale of a row is
    the power of two that brings its largest element into [4, 8).
    """
    blocks = values.reshape(-1, 32)
    scale = np.exp2(np.floor(np.log2(np.abs(blocks).max(axis=1, keepdims=True))) - 2)
    small = np.clip(blocks / scale, -6, 6).astype(ml_dtypes.float4_e2m1fn)
    return (small.astype(np.float64) * scale).reshape(values.shape)


def test_product_of_quantised_blocks() -> None:
    rng = np.random.default_rng(1)
    a = (rng.normal(size=(32, 64)) * np.exp2(rng.integers(-5, 6, (32, 1)))).astype(np.float32)
    b = (rng.normal(size=(64, 32)) * np.exp2(rng.integers(-5, 6, (1, 32)))).astype(np.float32)
    exact = quantised(a) @ quantised(np.ascontiguousarray(b.T)).T
    got = run("gfx950", "-O3", "scaled", a, b, 32)
    assert np.abs(got - exact).max() <= 2**-20 * np.abs(exact).max()


def test_b_is_read_by_columns() -> None:
    a, b = np.random.default_rng(2).uniform(-2, 2, (2, 16, 16)).astype(np.float16)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    got = run("gfx950", "-O3", "columns", a, b, 16)
    assert np.abs(got - exact).max() <= 2**-20 * np.abs(exact).max()


@pytest.mark.parametrize(("arch", "level"), BUILDS)
def test_sparse_product(arch: str, level: str) -> None:
    rng = np.random.default_rng(3)
    keep = np.argsort(rng.random((16, 8, 4)), axis=2) < 2
    a = np.where(keep, rng.uniform(1, 2, (16, 8, 4)), 0).reshape(16, 32).astype(np.float16)
    b = rng.uniform(-2, 2, (32, 16)).astype(np.float16)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    got = run(arch, level, "sparse", a, b, 16)
    assert np.abs(got - exact).max() <= 2**-20 * np.abs(exact).max()
