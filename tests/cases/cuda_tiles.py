"""Cases and helpers of tests/codegen/test_cuda_tiles.py, which other tests use too."""

from __future__ import annotations

HEAD = r"""
#include <cmath>
#define ARK_LANES 32
#define ARK_WARPS 1
using ark_u32 = uint32_t;
using ark_i32 = int32_t;
using ark_i64 = int64_t;
using ark_u64 = uint64_t;
struct ArkCtx {};
struct ArkTask { int coord[2]; };
template <typename T>
struct Operand { T* p; };
static int ark_tid() { return lane; }
static int ark_warp() { return 0; }
static void ark_sync() { together.arrive_and_wait(); }
static float ark_inf() { return INFINITY; }
static float ark_log(float v) { return logf(v); }
static float ark_bits_float(ark_u32 v) { float f; __builtin_memcpy(&f, &v, 4); return f; }
static ark_u32 ark_float_bits(float v) { ark_u32 u; __builtin_memcpy(&u, &v, 4); return u; }
static ark_u32 ark_shfl_xor(ark_u32 v, int mask) {
  return ark_float_bits(ark_shfl_xor(ark_bits_float(v), mask));
}
static void ark_post_host(ark_u32*, ark_u32) {}
struct Logits { float* p; int width; };
static void ark_publish(ArkCtx&, const Logits& x, int, int, int m, int n, float v) {
  x.p[m * x.width + n] = v;
}
template <class S, int M, int R>
static void ark_sums_ahead(ArkCtx&, const S&, int, int, int, float (&)[M][R]) {}
template <class S, int R>
static void ark_sums_store(ArkCtx&, S&, int, int, int, const float (&)[R], const float (&)[R]) {}
"""
