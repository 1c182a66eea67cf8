// Replacements for CUDA's built-ins, so that a C++ compiler for a CPU compiles the device code. One
// thread runs at a time, number `host_thread` of its block: shuffles return a lane's own value, and
// threads do not wait for others. This suffices only to see which memory a thread reads before it
// waits; sums over lanes are wrong. If HOST_BLOCK is defined, the threads of a block synchronise
// (block_on_host.h).
#include <cmath>
#include <cstdint>
#include <cstring>

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
#define __shared__
#define __launch_bounds__(...)
#define __grid_constant__

struct HostIndex {
  unsigned x, y, z;
};
static HostIndex threadIdx, blockIdx;

struct uint2 {
  unsigned x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

#ifndef HOST_BLOCK
static uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  uint32_t chosen = 0u;
  for (int i = 0; i < 4; ++i) {
    chosen |= static_cast<uint32_t>(bytes >> 8 * (selector >> 4 * i & 7u) & 255u) << 8 * i;
  }
  return chosen;
}
template <typename T>
static T __shfl_sync(unsigned, T v, int, int = 32) {
  return v;
}
template <typename T>
static T __shfl_xor_sync(unsigned, T v, int, int = 32) {
  return v;
}
static unsigned __reduce_max_sync(unsigned, unsigned v) { return v; }
static unsigned __ballot_sync(unsigned, bool v) { return v ? 1u << (threadIdx.x & 31u) : 0u; }
static unsigned __match_any_sync(unsigned, unsigned) { return 1u << (threadIdx.x & 31u); }
static int __all_sync(unsigned, int v) { return v; }
static int __any_sync(unsigned, int v) { return v; }
static void __syncwarp(unsigned = 0xffffffffu) {}
static size_t __cvta_generic_to_shared(const void* p) { return reinterpret_cast<size_t>(p); }
#endif
static int __popc(unsigned v) { return __builtin_popcount(v); }
static int __ffs(int v) { return __builtin_ffs(v); }
static void __syncthreads() {}
static void __threadfence_block() {}
static void __threadfence() {}
static void __nanosleep(unsigned) {}
static float __uint_as_float(unsigned v) {
  float to;
  std::memcpy(&to, &v, 4);
  return to;
}
static unsigned __float_as_uint(float v) {
  unsigned to;
  std::memcpy(&to, &v, 4);
  return to;
}
static unsigned atomicAdd(unsigned* p, unsigned v) {
  const unsigned before = *p;
  *p += v;
  return before;
}
template <typename T>
static T atomicExch(T* p, T v) {
  const T before = *p;
  *p = v;
  return before;
}
template <typename T>
static T atomicCAS(T* p, T held, T v) {
  const T before = *p;
  if (before == held) *p = v;
  return before;
}

// Inline assembly. A load instruction reads as many bytes as its results have. Other instructions
// consume their operands and return zeros that the compiler does not know.
static volatile char host_taken;
static volatile int host_zero = 0;
template <typename... T>
static void host_take(const T&... given) {
  ((host_taken = reinterpret_cast<const volatile char&>(given)), ...);
}
template <typename P, typename... T>
static void host_load(P from, T&... to) {
  const char* at = reinterpret_cast<const char*>(from);
  ((std::memcpy(&to, at, sizeof(T)), at += sizeof(T)), ...);
}
template <typename... T>
static void host_give(T&... to) {
  ((to = static_cast<T>(host_zero)), ...);
}
