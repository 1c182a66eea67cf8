"""Products with chosen experts' weights (experts_*.h of CUDA). The device code runs on the host:
128 threads are the lanes of four warps. Results are compared with NumPy.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

pytest.importorskip("ark_cuda")

from ark_cuda.tasks import inline

from ark.ir.dtype import DataType, RowType, bf16, fp4, int4, int8, row_type
from ark.ir.rows import row_bytes, row_values
from ark.tasks import text
from ark.tasks.row_values import HEADER

HOST = r"""
#include <array>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>
#define ARK_DEVICE static inline
#define ARK_DEVICE_MEMBER inline
typedef uint32_t ark_u32;
typedef uint64_t ark_u64;
typedef int32_t ark_i32;
typedef int64_t ark_i64;
constexpr int ARK_WARPS = 4, ARK_LANES = 32, ARK_THREADS = 128;
struct alignas(16) uint4 { ark_u32 x, y, z, w; };
struct uint2 { ark_u32 x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct ark_bf16 { uint16_t bits; };
struct ark_f16 { uint16_t bits; };
struct ark_int4 {};
struct ark_uint4 {};
struct ark_fp4 {};
struct ark_e4m3 {};
struct ark_e5m2 {};
static thread_local int thread;
static int ark_tid() { return thread; }
static int ark_lane() { return thread % 32; }
static int ark_warp() { return thread / 32; }
static std::barrier<> whole(ARK_THREADS);
static std::barrier<> warps[ARK_WARPS] = {std::barrier<>(32), std::barrier<>(32),
                                          std::barrier<>(32), std::barrier<>(32)};
static void ark_sync() { whole.arrive_and_wait(); }
static void __syncwarp() { warps[ark_warp()].arrive_and_wait(); }
static float ark_bits_float(ark_u32 bits) { float v; std::memcpy(&v, &bits, 4); return v; }
static ark_u32 ark_float_bits(float v) { ark_u32 bits; std::memcpy(&bits, &v, 4); return bits; }
static int shown[ARK_WARPS][32];
static int __shfl_sync(unsigned, int v, int from) {
  __syncwarp();
  shown[ark_warp()][ark_lane()] = v;
  __syncwarp();
  return shown[ark_warp()][from];
}
static float ark_shfl_xor(float v, int mask) {
  return ark_bits_float(__shfl_sync(~0u, static_cast<int>(ark_float_bits(v)), ark_lane() ^ mask));
}
static float ark_warp_max(float v) { return v; }
static float ark_warp_sum(float v) {
  static float each[ARK_WARPS][32];
  __syncwarp();
  each[ark_warp()][ark_lane()] = v;
  __syncwarp();
  v = 0.0f;
  for (int i = 0; i < 32; ++i) v += each[ark_warp()][i];
  return v;
}
static float ark_block_factor(float, float& back) { return back = 1.0f; }
static ark_u32 rounded(float v) {
  const ark_u32 bits = ark_float_bits(v);
  return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}
static ark_u32 ark_pack_pair(ark_bf16*, float low, float high) {
  return rounded(low) | rounded(high) << 16;
}
static float2 ark_pair(const ark_bf16*, ark_u32 w) {
  return {ark_bits_float(w << 16), ark_bits_float(w & 0xffff0000u)};
}
static ark_u32 ark_both_fma(const ark_bf16* type, ark_u32 a, ark_u32 b, ark_u32 c) {
  const float2 x = ark_pair(type, a), y = ark_pair(type, b), z = ark_pair(type, c);
  return ark_pack_pair(nullptr, std::fma(x.x, y.x, z.x), std::fma(x.y, y.y, z.y));
}
static ark_u32 __byte_perm(ark_u32 a, ark_u32 b, ark_u32 by) {
  const uint64_t all = static_cast<uint64_t>(b) << 32 | a;
  ark_u32 r = 0;
  for (int i = 0; i < 4; ++i) r |= (all >> 8 * (by >> 4 * i & 7u) & 255u) << 8 * i;
  return r;
}
static float ark_get(const ark_bf16* p, int i) { return ark_bits_float(p[i].bits << 16); }
template <typename T>
static T __ldcs(const T* p) {
  return *p;
}
static ark_u32 operands[ARK_WARPS][32][6];
static void ark_mma(float (&d)[4], ark_u32 a0, ark_u32 a1, ark_u32 a2, ark_u32 a3, ark_u32 b0,
                    ark_u32 b1, const ark_bf16*) {
  auto& all = operands[ark_warp()];
  const int lane = ark_lane();
  __syncwarp();
  const ark_u32 own[6] = {a0, a1, a2, a3, b0, b1};
  for (int i = 0; i < 6; ++i) all[lane][i] = own[i];
  __syncwarp();
  const auto half = [](ark_u32 word, int k) {
    return ark_bits_float(k % 2 ? word & 0xffff0000u : word << 16);
  };
  for (int e = 0; e < 4; ++e) {
    const int row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
    for (int k = 0; k < 16; ++k) {
      d[e] += half(all[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k) *
              half(all[column * 4 + k % 8 / 2][4 + k / 8], k);
    }
  }
}
static bool __any_sync(unsigned, bool v) { return v; }
struct ArkCtx { char* scratch; };
struct ArkTask { int coord[4]; };
#define ARK_SCRATCH(c) (c).scratch
template <int N, typename T, typename There, typename At>
static void ark_load_pairs(ArkCtx&, const T*, const There& there, const At& at, float (&v)[2 * N],
                           bool) {
  for (int i = 0; i < 2 * N; ++i) v[i] = there(i / 2) ? at(i / 2)[i % 2] : 0.0f;
}
template <typename T, int SLOTS, int COLUMNS>
struct Rows {
  static constexpr bool system = false;
  T* p;
};
template <typename T, int SLOTS, int COLUMNS>
static T* ark_address(const Rows<T, SLOTS, COLUMNS>& x, int, int n1, int n2, int n3) {
  return x.p + (static_cast<ark_i64>(n1) * (SLOTS == 1 ? 0 : SLOTS) + n2) * COLUMNS + n3;
}
static bool failed;
static void ark_fail(ArkCtx&, ark_u32, ark_u32, ark_u32, ark_u32) { failed = true; }
"""


class Case(NamedTuple):
    """A task: rows of an expert, columns, slots, first and last+1 output, weights per output, units
    and outputs of a chunk as ark_cuda.tasks.experts chooses them. total: True if slots are added.
    """

    dtype: DataType
    rows: int
    columns: int
    slots: int
    begin: int
    end: int
    weights: int
    units: int
    chunk: int
    total: bool


EXPERT_COUNT = 5
CASES = {
    "bf16-gate": Case(bf16, 80, 200, 3, 16, 67, 2, 3, 64, False),
    "bf16-down": Case(bf16, 64, 96, 3, 5, 22, 1, 2, 32, True),
    "bf16-two-chunks": Case(bf16, 96, 136, 2, 3, 80, 2, 1, 32, True),
    "mxfp4-gate": Case(
        row_type(fp4, 416, 32, bf16, False, bf16), 64, 416, 2, 0, 40, 2, 1, 48, False
    ),
    "mxfp4-units-behind": Case(
        row_type(fp4, 416, 32, bf16, False, bf16), 64, 416, 2, 0, 40, 2, 3, 48, False
    ),
    "mxfp4-down": Case(
        row_type(fp4, 288, 32, bf16, False, bf16), 48, 288, 4, 7, 30, 1, 2, 32, True
    ),
    "int8-one-scale": Case(
        row_type(int8, 144, 144, bf16, False, bf16), 48, 144, 2, 0, 33, 1, 2, 48, True
    ),
    "mxfp4-even": Case(
        row_type(fp4, 448, 32, bf16, False, bf16), 64, 448, 2, 0, 40, 2, 1, 48, False
    ),
    "int4-even": Case(
        row_type(int4, 448, 32, bf16, False, bf16), 48, 448, 2, 0, 33, 1, 1, 48, False
    ),
    "mxfp4-units": Case(
        row_type(fp4, 320, 32, bf16, False, bf16), 48, 320, 4, 7, 30, 1, 2, 32, True
    ),
    "fp4-scales-after": Case(
        row_type(fp4, 512, 128, bf16, False, bf16), 48, 512, 2, 0, 33, 1, 1, 48, False
    ),
}


def call(case: Case, rows_alone: bool, along: bool) -> str:
    """The C++ text of a function that runs the task. rows_alone: whether warps read whole rows of
    one expert (experts_ahead.h). along: whether warps move along rows (experts_along.h).
    """
    row = case.dtype.storage
    if not isinstance(case.dtype, RowType):
        row = f"ArkFloatRow<ark_bf16, {case.columns}>"
    total = case.slots if case.total else 0
    sizes = (row, "ark_bf16", case.rows, "true" if case.total else "false", EXPERT_COUNT)
    constants = ", ".join(map(str, (*sizes, case.weights, total, case.units, case.chunk)))
    body = "ark_expert_units"
    if along:
        constants = ", ".join(map(str, (*sizes, case.weights, total, case.units, case.chunk, 2)))
        body = "ark_expert_along"
    elif rows_alone:
        parts = (case.rows, "false", EXPERT_COUNT, case.weights, 3 - case.weights, case.units)
        constants = ", ".join(map(str, ("ark_bf16", case.columns, *parts)))
        body = "ark_expert_ahead"
    value = "sum[0] * (1.0f + sum[1])" if case.weights == 2 else "sum[0]"
    return f"""
extern "C" int run(int slot, const float* x, const unsigned char* first,
                   const unsigned char* second, const int* experts, const float* bias,
                   const float* residual, float* out) {{
  std::vector<char> scratch(1 << 20, 1);
  std::vector<std::thread> lanes;
  failed = false;
  for (int i = 0; i < ARK_THREADS; ++i) {{
    lanes.emplace_back([&, i] {{
      thread = i;
      ArkCtx c{{scratch.data()}};
      const ArkTask t{{{{0, slot, {case.begin}, {case.end}}}}};
      const auto ahead = [&](int, int slot, int expert, int n, float (&to)[1]) {{
        to[0] = bias[expert * {case.rows} + n] + slot;
      }};
      const auto term = [&](const float (&sum)[{case.weights}], const float (&with)[1]) {{
        return {value} + with[0];
      }};
      const auto left = [&](int, int n) {{ return residual[n]; }};
      const auto store = [&](int, int slot, int n, float v) {{
        out[slot * {case.rows} + n] = v;
      }};
      const auto finish = ark_expert_finish<1>(ahead, term, left, store);
      const Rows<const float, {case.slots if case.total else 1}, {case.columns}> input{{x}};
      const auto numbers = Rows<const int, 1, 1>{{experts}};
      {body}<{constants}>(c, t, input, first, second, numbers, finish);
    }});
  }}
  for (auto& each : lanes) each.join();
  return failed;
}}
"""


def library(case: Case, folder: Path, rows_alone: bool, along: bool) -> ctypes.CDLL:
    rows = HEADER[: HEADER.index("// The number of codes that a lane reads")]
    experts = text.header("experts.h")
    finish = experts[
        experts.index("template <int COUNT") : experts.index("constexpr int ARK_EXPERT")
    ]
    source, built = folder / "experts.cpp", folder / "experts.so"
    pairs = inline.header("code_pairs.h")
    kept = pairs[pairs.index("// Converts unsigned or signed 4-bit codes to bf16.") :]
    body = "".join(inline.header(f"experts_{name}.h") for name in ("ahead", "units", "along"))
    source.write_text(HOST + rows + kept + finish + body + call(case, rows_alone, along))
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread"]
    subprocess.run([*command, "-Wno-unknown-pragmas", source, "-o", built], check=True)
    return ctypes.CDLL(str(built))


def weights(case: Case, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of all experts' weights, and their values (experts, rows, columns)."""
    shape = (EXPERT_COUNT, case.rows, case.columns)
    if not isinstance(case.dtype, RowType):
        exact = rng.standard_normal(shape).astype(bf16.numpy)
        return exact.view(np.uint8), exact.astype(np.float64)
    rows, dtype = EXPERT_COUNT * case.rows, case.dtype
    codes = rng.integers(-6, 7, (rows, case.columns)).astype(np.float32)
    scales = np.exp2(rng.integers(-9, 3, (rows, dtype.groups)).astype(np.float32))
    scales[case.end :: case.rows] = np.inf  # not read, although it lies behind the last row
    if dtype.codes is int4:
        # A scale that is too large for the codes of the other groups.
        codes.reshape(rows, dtype.groups, -1)[:, -2] = 0
        scales[:, -2] = np.exp2(np.float32(127))
    data = row_bytes(dtype, codes, scales)
    with np.errstate(invalid="ignore"):
        return data, row_values(dtype, data).reshape(shape).astype(np.float64)


ROWS = {
    "bf16-gate-rows": Case(bf16, 80, 520, 3, 16, 67, 2, 2, 0, False),
    "bf16-rows": Case(bf16, 40, 96, 2, 3, 40, 1, 1, 0, False),
}
# Here the field `units` has the number of parts of a row.
ALONG = {
    "along-gate": Case(
        row_type(fp4, 448, 32, bf16, False, bf16), 64, 448, 2, 3, 31, 2, 1, 32, False
    ),
    "along-down": Case(
        row_type(fp4, 320, 32, bf16, False, bf16), 48, 320, 4, 7, 30, 1, 2, 32, True
    ),
    "along-parts": Case(
        row_type(int4, 640, 32, bf16, False, bf16), 48, 640, 3, 0, 13, 1, 4, 16, True
    ),
}


@pytest.mark.parametrize("name", [*CASES, *ROWS, *ALONG])
def test_products_with_chosen_experts_equal_numpy(name: str, tmp_path: Path) -> None:
    case = {**CASES, **ROWS, **ALONG}[name]
    run = library(case, tmp_path, name in ROWS, name in ALONG).run
    rng = np.random.default_rng(len(name))
    slots, columns = case.slots, case.columns
    x = rng.standard_normal((slots if case.total else 1, columns)).astype(np.float32)
    (first, one), (second, two) = weights(case, rng), weights(case, rng)
    experts = rng.permutation(EXPERT_COUNT)[:slots].astype(np.int32)
    bias = rng.standard_normal((EXPERT_COUNT, case.rows)).astype(np.float32)
    residual = rng.standard_normal(case.rows).astype(np.float32)
    out = np.zeros((slots, case.rows), np.float32)
    arrays = (x, first, second, experts, bias, residual, out)
    given = [ctypes.c_void_p(np.ascontiguousarray(a).ctypes.data) for a in arrays]
    for slot in range(1 if case.total else slots):
        assert run(slot, *given) == 0
    want = np.zeros((slots, case.rows))
    for slot, expert in enumerate(experts):
        own = x[slot if case.total else 0].astype(np.float64)
        sums = one[expert, : case.end] @ own
        sums = sums * (1 + two[expert, : case.end] @ own) if case.weights == 2 else sums
        want[slot, : case.end] = sums + bias[expert, : case.end] + slot
    if case.total:
        want[0], want[1:] = want.sum(0) + residual, 0
    want[:, : case.begin] = want[:, case.end :] = 0
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())
