"""Shared code of the tests of CUDA's attention of one row: the device functions that the attention
code calls, for 32 threads of the host that are a warp's lanes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.declarations import cut

WARP = Path(__file__).parent / "warp_on_host.h"
HOST = (
    WARP.read_text()
    + r"""
#include <cmath>
typedef uint32_t ark_u32;
constexpr int ARK_WARPS = 4;
struct alignas(16) float4 { float x, y, z, w; };
struct float2 { float x, y; };
struct ArkCtx {};
struct ArkTask { ark_u32 fetch_begin; };
static thread_local int number;
static int ark_warp() { return number; }
static void __syncwarp() { together.arrive_and_wait(); }
static void ark_narrow(Half* to, float a, float b) {
  const float both[2] = {a, b};
  for (int i = 0; i < 2; ++i) {
    uint32_t bits;
    __builtin_memcpy(&bits, &both[i], 4);
    to[i].bits = static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
  }
}
static float2 ark_pair(const Half*, uint32_t word) { return {value(word), value(word >> 16)}; }
static void ark_unpack(float (&to)[8], const uint4& v, const Half*) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
  for (int i = 0; i < 8; ++i) to[i] = value(words[i / 2] >> i % 2 * 16);
}
static float ark_exp(float v) { return std::exp(v); }
static float ark_exp2(float v) { return std::exp2(v); }
static ark_u32 __byte_perm(ark_u32 low, ark_u32 high, ark_u32 selector) {
  const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
  ark_u32 made = 0u;
  for (ark_u32 i = 0u; i < 4u; ++i) {
    made |= static_cast<ark_u32>(both >> 8u * (selector >> 4u * i & 7u) & 0xffu) << 8u * i;
  }
  return made;
}
static bool __any_sync(unsigned, bool v) {
  bool any = false;
  for (int i = 0; i < 32; ++i) any |= __shfl_sync(0u, v ? 1.0f : 0.0f, i) != 0.0f;
  return any;
}
static void ark_mma(float (&d)[4], const uint4& a, uint32_t b0, uint32_t b1, const Half*) {
  multiply_tile(d, {a.x, a.y, a.z, a.w, b0, b1});
}
static char* ring;        // stages of keys and values, one behind the other
static ark_u32* arrived;  // by stage: for how many warps it has been given back
static const char* ark_stage(ArkCtx&, ark_u32 stage) { return ring + stage * 16384u; }
static void ark_stage_left(ArkCtx&, ark_u32 stage, ark_u32 warps) {
  together.arrive_and_wait();
  if (lane == 0) arrived[stage] += warps;
}
"""
)


def unfenced(text: str) -> str:
    """The text of a header without its only fence."""
    fence = 'asm volatile("fence.proxy.async.shared::cta;" ::: "memory");'
    assert text.count(fence) == 1
    return text.replace(fence, "{}")


def steps() -> str:
    """Returns the device code of the steps that both forms of attention over staged keys and values
    share.
    """
    from ark_cuda.tasks import inline

    return cut(inline.header("attention_staged.h"), "void ark_split_pair(", "void ark_staged_join(")


def bf16(values: np.ndarray) -> np.ndarray:
    """Rounds to bf16; the result is in fp32."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)
