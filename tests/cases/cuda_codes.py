"""Functions for the host in place of the instructions that convert codes of quantised rows on a
GPU: conversions of 16-bit floats, and products of matrix units in fp16.
"""

from __future__ import annotations

PAIRS = r"""
#include <algorithm>
struct ark_f16 { uint16_t bits; };
using ark_bf16 = Half;
static float ark_float(ark_bf16 v) { return value(v.bits); }
static float ark_float(ark_f16 v) {
  _Float16 f;
  __builtin_memcpy(&f, &v, 2);
  return static_cast<float>(f);
}
static float ark_get(const float* p, ark_i64 i) { return p[i]; }
static float ark_get(const ark_bf16* p, ark_i64 i) { return ark_float(p[i]); }
static float ark_get(const ark_f16* p, ark_i64 i) { return ark_float(p[i]); }
static uint16_t rounded(float v) {
  const _Float16 f = static_cast<_Float16>(v);
  uint16_t bits;
  __builtin_memcpy(&bits, &f, 2);
  return bits;
}
template <class F>
static ark_u32 both(F f) {
  return rounded(f(0)) | static_cast<ark_u32>(rounded(f(16))) << 16;
}
static float half(ark_u32 word, int shift) {
  return ark_float(ark_f16{static_cast<uint16_t>(word >> shift)});
}
static ark_u32 ark_kept(ark_u32 v) { return v; }
static ark_u32 ark_pair_sum(ark_u32 a, ark_u32 b) {
  return both([=](int n) { return half(a, n) + half(b, n); });
}
static ark_u32 ark_pair_fma(ark_u32 a, ark_u32 b, ark_u32 c) {
  return both([=](int n) { return half(a, n) * half(b, n) + half(c, n); });
}
// As multiply_tile of warp_on_host.h, of fp16.
static void ark_mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                    uint32_t b1, const ark_f16*) {
  together.arrive_and_wait();
  const uint32_t own[6] = {a0, a1, a2, a3, b0, b1};
  for (int i = 0; i < 6; ++i) operands[lane][i] = own[i];
  together.arrive_and_wait();
  for (int e = 0; e < 4; ++e) {
    const int row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
    for (int k = 0; k < 16; ++k) {
      const uint32_t a = operands[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
      const uint32_t b = operands[column * 4 + k % 8 / 2][4 + k / 8];
      d[e] += half(a, k % 2 * 16) * half(b, k % 2 * 16);
    }
  }
}
static ark_u32 __byte_perm(ark_u32 a, ark_u32 b, ark_u32 selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  ark_u32 made = 0u;
  for (int i = 0; i < 4; ++i) {
    made |= static_cast<ark_u32>(bytes >> 8 * (selector >> 4 * i & 7u) & 255u) << 8 * i;
  }
  return made;
}
struct uint2 { uint32_t x, y; };
static uint64_t ark_packet_load(const ark_u64* p, bool) { return *p; }
static void ark_packet_store(ark_u64* p, ark_u64 v, bool) { *p = v; }
template <typename T>
struct ArkShort {};
"""
# Conversions of small floats. GPUs have instructions for them, which a host lacks. These functions
# compute the same by the portable source, which ark compiles for GPUs without the instructions.
CONVERTED = r"""
static ark_u32 ark_pair_of_e4m3(ark_u32 word) {
  return both([=](int n) { return ark_small_float<3, 7>(word >> n / 2 & 255u); });
}
"""
