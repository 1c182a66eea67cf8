// The device ABI on AMD GPUs, without a single header: compiler builtins only, so that clang from
// any source can compile it. A processor is a workgroup, a warp is a wave of ARK_LANES lanes.
// ARK_TICKS_NS, the length of a tick of the steady counter, comes from the dialect.

typedef unsigned int ark_u32;
typedef int ark_i32;
typedef unsigned long long ark_u64;
typedef long long ark_i64;
typedef unsigned short ark_u16;
struct ark_f16 {
  ark_u16 bits;
};
struct ark_bf16 {
  ark_u16 bits;
};
typedef ark_u32 ark_u32x4 __attribute__((ext_vector_type(4)));
typedef float ark_f32x4 __attribute__((ext_vector_type(4)));

// Everything is inlined, since only then does the compiler see which pointers are shared memory,
// but for what a wait does when it goes on for long. Such a function calls none, which would need a
// stack; then a call costs the caller the few registers that the function uses and no scratch.
#define ARK_DEVICE static inline __attribute__((device, always_inline))
#define ARK_METHOD inline __attribute__((device, always_inline))
#define ARK_BODY ARK_DEVICE
#define ARK_COLD static __attribute__((device, noinline, cold))
#define ARK_SHARED static __attribute__((device, shared))
#define ARK_SPIN_CHECK 0x3fu

// Device memory never lies in shared memory; saying so saves loads and stores the flat path.
template <typename T>
using ark_global = __attribute__((address_space(1))) T;
template <typename T>
ARK_DEVICE ark_global<T>* ark_to_global(T* p) {
  return (ark_global<T>*)p;
}
#define ARK_POINTER(type, address) ((type*)(ark_global<type>*)(address))

// Word by word through a pointer that stays one of device memory: the compiler would make one flat
// load of a load from shared memory on one side of a branch and from device memory on the other.
template <typename T>
ARK_DEVICE T ark_device_copy(ark_u64 address) {
  static_assert(sizeof(T) % sizeof(ark_u64) == 0, "whole words");
  struct {
    ark_u64 word[sizeof(T) / sizeof(ark_u64)];
  } words;
  for (unsigned i = 0u; i < sizeof(T) / sizeof(ark_u64); ++i) {
    words.word[i] = ((const ark_global<ark_u64>*)address)[i];
  }
  return __builtin_bit_cast(T, words);
}
#define ARK_DEVICE_COPY(type, address) ark_device_copy<type>(address)

// Known without reading the context, so that the compiler sees shared memory as such.
extern __attribute__((device, shared, aligned(16))) char ark_lds[];
#define ARK_SCRATCH(ctx) (ark_lds + ARK_LOOP_BYTES)
#define ARK_PARAMS(ctx) (static_cast<const ArkParams*>(ark_kernel_params()))
// A called function knows neither, but which memory they are in. The low half of the address of
// shared memory is its place there.
#define ARK_GIVEN(ctx) \
  (*(ArkCtx*)(__attribute__((address_space(3))) ArkCtx*)(ark_u32)(ark_u64) & (ctx))
#define ARK_CALLS_WAIT true
#define ARK_GIVEN_PARAMS(p) ARK_POINTER(const ArkParams, (ark_u64)(p))

ARK_DEVICE const void* ark_kernel_params() {
  return (const void*)__builtin_amdgcn_kernarg_segment_ptr();
}

constexpr int ARK_THREADS = ARK_LANES * ARK_WARPS;
#define ARK_HOLDS_RECORDS 1
#if defined(__GFX9__)
static_assert(ARK_LANES == 64, "CDNA waves have 64 lanes");
#else
static_assert(ARK_LANES == 32, "RDNA waves have 32 lanes");
#endif

// The compiler must not know that two tests of the thread's number have the same outcome. It would
// thread the back edge of a loop that begins and ends with `if (ark_tid() == 0)`, and the other
// lanes of the wave would reach the next barrier without lane 0 and wait there for ever.
ARK_DEVICE int ark_tid() {
  int tid = static_cast<int>(__builtin_amdgcn_workitem_id_x());
  asm volatile("" : "+v"(tid));
  __builtin_assume(tid >= 0 && tid < ARK_THREADS);
  return tid;
}
ARK_DEVICE int ark_lane() { return ark_tid() & (ARK_LANES - 1); }
ARK_DEVICE int ark_warp() {
  const int warp = __builtin_amdgcn_readfirstlane(ark_tid() / ARK_LANES);
  __builtin_assume(warp >= 0 && warp < ARK_WARPS);
  return warp;
}

ARK_DEVICE void ark_sync() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

// This wave's stores have arrived where a release by another wave of the block covers them: the
// barrier's own fence orders them only within the block.
ARK_DEVICE void ark_drain() {
#if defined(__GFX9__)
  asm volatile("s_waitcnt vmcnt(0)" ::: "memory");
#else
  asm volatile("s_waitcnt_vscnt null, 0x0" ::: "memory");
#endif
}

ARK_DEVICE ark_u64 ark_ballot(bool v) {
#if defined(__GFX9__)
  return __builtin_amdgcn_ballot_w64(v);
#else
  return __builtin_amdgcn_ballot_w32(v);
#endif
}
ARK_DEVICE bool ark_warp_all(bool v) { return ark_ballot(!v) == 0u; }

ARK_SHARED ark_u32 ark_votes[ARK_WARPS];

// A vote of the block. ark_all waits for all that the wave has under way, so that a release behind
// it covers the block's stores; ark_agree leaves loads under way.
#define ARK_HAS_AGREE 1
ARK_DEVICE bool ark_agree(bool v) {
  const bool mine = ark_warp_all(v);
  if (ARK_WARPS == 1) {
    ark_sync();
    return mine;
  }
  if (ark_lane() == 0) ark_votes[ark_warp()] = mine ? 1u : 0u;
  ark_sync();
  ark_u32 all = 1u;
  for (int w = 0; w < ARK_WARPS; ++w) all &= ark_votes[w];
  ark_sync();
  return __builtin_amdgcn_readfirstlane(all) != 0u;
}
ARK_DEVICE bool ark_all(bool v) {
  ark_drain();
  return ark_agree(v);
}

ARK_DEVICE float ark_bits_float(ark_u32 bits) { return __builtin_bit_cast(float, bits); }
ARK_DEVICE ark_u32 ark_float_bits(float value) { return __builtin_bit_cast(ark_u32, value); }

ARK_DEVICE ark_u32 ark_shfl_xor(ark_u32 v, int mask) {
  const int from = (ark_lane() ^ mask) * 4;
  return static_cast<ark_u32>(__builtin_amdgcn_ds_bpermute(from, static_cast<int>(v)));
}
ARK_DEVICE float ark_shfl_xor(float v, int mask) {
  return ark_bits_float(ark_shfl_xor(ark_float_bits(v), mask));
}

// A value moved within rows of 16 lanes without passing through shared memory.
template <int CONTROL>
ARK_DEVICE float ark_row_move(float v) {
  const int bits = static_cast<int>(ark_float_bits(v));
  return ark_bits_float(
      static_cast<ark_u32>(__builtin_amdgcn_update_dpp(0, bits, CONTROL, 0xf, 0xf, true)));
}
ARK_DEVICE float ark_lane_value(float v, int lane) {
  return ark_bits_float(
      static_cast<ark_u32>(__builtin_amdgcn_readlane(static_cast<int>(ark_float_bits(v)), lane)));
}

struct ArkAdd {
  ARK_DEVICE float of(float a, float b) { return a + b; }
};
struct ArkMax {
  ARK_DEVICE float of(float a, float b) { return __builtin_fmaxf(a, b); }
};

// Pairs, quads, halves of a row, rows, then the rows of the wave; the same in every lane.
template <typename OP>
ARK_DEVICE float ark_warp_reduce(float v) {
  v = OP::of(v, ark_row_move<0xb1>(v));   // quad_perm 1 0 3 2
  v = OP::of(v, ark_row_move<0x4e>(v));   // quad_perm 2 3 0 1
  v = OP::of(v, ark_row_move<0x141>(v));  // row_half_mirror
  v = OP::of(v, ark_row_move<0x140>(v));  // row_mirror
  float total = OP::of(ark_lane_value(v, 0), ark_lane_value(v, 16));
  if (ARK_LANES == 64) {
    total = OP::of(total, OP::of(ark_lane_value(v, 32), ark_lane_value(v, 48)));
  }
  return total;
}
ARK_DEVICE float ark_warp_sum(float v) { return ark_warp_reduce<ArkAdd>(v); }
ARK_DEVICE float ark_warp_max(float v) { return ark_warp_reduce<ArkMax>(v); }

// Words in the assembly that emit nothing: a flag was read, an acquire has happened, what follows
// publishes, it has published, the stores of the whole block have arrived. The lint of the machine
// code asks at each for the waits and cache operations that it needs.
#define ARK_READ(scope) asm volatile("; ark.read " scope::: "memory")
#define ARK_ACQUIRED(scope) asm volatile("; ark.acquire " scope::: "memory")
#define ARK_RELEASES(scope) asm volatile("; ark.release " scope::: "memory")
#define ARK_RELEASED(scope) asm volatile("; ark.released " scope::: "memory")
#define ARK_BLOCK_ARRIVED() asm volatile("; ark.arrived workgroup" ::: "memory")

ARK_DEVICE ark_u32 ark_load_acquire(const ark_u32* p, bool system) {
  const auto* g = ark_to_global(p);
  ark_u32 value;
  if (system) {
    value = __hip_atomic_load(g, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM);
    ARK_READ("system");
    ARK_ACQUIRED("system");
  } else {
    value = __hip_atomic_load(g, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_AGENT);
    ARK_READ("agent");
    ARK_ACQUIRED("agent");
  }
  return value;
}
// An acquire invalidates the processor's caches: polls do without, the one that succeeds has a
// fence.
#define ARK_HAS_POLL 1
ARK_DEVICE ark_u32 ark_poll(const ark_u32* p, bool system) {
  const auto* g = ark_to_global(p);
  ark_u32 value;
  if (system) {
    value = __hip_atomic_load(g, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
    ARK_READ("system");
  } else {
    value = __hip_atomic_load(g, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    ARK_READ("agent");
  }
  return value;
}
ARK_DEVICE void ark_polled(bool system) {
  if (system) {
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "");
    ARK_ACQUIRED("system");
  } else {
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent");
    ARK_ACQUIRED("agent");
  }
}
// A release is written out as fence, wait and relaxed operation: clang 22 leaves out the wait
// behind a cache write-back when the wave itself has nothing under way (mended in llvm-project PR
// 178316), and the operation could overtake what it publishes.
ARK_DEVICE void ark_release_to_device() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent");
  ark_drain();
  ARK_RELEASES("agent");
}
ARK_DEVICE void ark_release_to_system() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "");
  ark_drain();
  ARK_RELEASES("system");
}
ARK_DEVICE void ark_add_release(ark_u32* p, ark_u32 v, bool system) {
  auto* g = ark_to_global(p);
  if (system) {
    ark_release_to_system();
    __hip_atomic_fetch_add(g, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
    ARK_RELEASED("system");
  } else {
    ark_release_to_device();
    __hip_atomic_fetch_add(g, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    ARK_RELEASED("agent");
  }
}
ARK_DEVICE ark_u32 ark_cas(ark_u32* p, ark_u32 expected, ark_u32 desired) {
  ark_release_to_device();
  __hip_atomic_compare_exchange_strong(ark_to_global(p), &expected, desired, __ATOMIC_ACQUIRE,
                                       __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_AGENT);
  ARK_RELEASED("agent");
  ARK_ACQUIRED("agent");
  return expected;
}
ARK_DEVICE ark_u32 ark_load_host(const ark_u32* p) { return ark_load_acquire(p, true); }
ARK_DEVICE ark_u32 ark_peek_host(const ark_u32* p) {
  return __hip_atomic_load(ark_to_global(p), __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
ARK_DEVICE void ark_post_host(ark_u32* p, ark_u32 v) {
  __hip_atomic_store(ark_to_global(p), v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
ARK_DEVICE void ark_store_host(ark_u32* p, ark_u32 v) {
  ark_release_to_system();
  __hip_atomic_store(ark_to_global(p), v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
  ARK_RELEASED("system");
}
// A word that the lanes of one wave share, with no order.
ARK_DEVICE ark_u32 ark_warp_load(const ark_u32* p) {
  return __hip_atomic_load(p, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WAVEFRONT);
}
ARK_DEVICE void ark_warp_store(ark_u32* p, ark_u32 v) {
  __hip_atomic_store(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WAVEFRONT);
}
ARK_DEVICE ark_u64 ark_packet_load(const ark_u64* p, bool system) {
  const auto* g = ark_to_global(p);
  return system ? __hip_atomic_load(g, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM)
                : __hip_atomic_load(g, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
ARK_DEVICE void ark_packet_store(ark_u64* p, ark_u64 v, bool system) {
  auto* g = ark_to_global(p);
  if (system) {
    __hip_atomic_store(g, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
  } else {
    __hip_atomic_store(g, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  }
}

// The counter runs at a constant rate and is one for the whole device. LLVM 18 (ROCm 6.2 and 6.3)
// has no builtin for it, only one for each instruction.
ARK_DEVICE ark_u64 ark_steady_ticks() {
#if __has_builtin(__builtin_readsteadycounter)
  return __builtin_readsteadycounter();
#elif defined(__GFX9__)
  return __builtin_amdgcn_s_memrealtime();
#else
  return __builtin_amdgcn_s_sendmsg_rtnl(0x83);  // the message that asks for it
#endif
}
ARK_DEVICE ark_u64 ark_time_ns() { return ark_steady_ticks() * ARK_TICKS_NS; }

ARK_DEVICE void ark_pause(ark_u32 spins) {
  if (spins < 64u) {
    __builtin_amdgcn_s_sleep(1);
  } else {
    __builtin_amdgcn_s_sleep(8);
  }
}

ARK_DEVICE float ark_float(ark_bf16 v) {
  return ark_bits_float(static_cast<ark_u32>(v.bits) << 16);
}
ARK_DEVICE float ark_float(ark_f16 v) {
  return static_cast<float>(__builtin_bit_cast(_Float16, v.bits));
}
ARK_DEVICE ark_bf16 ark_bfloat(float v) {
  return ark_bf16{__builtin_bit_cast(ark_u16, static_cast<__bf16>(v))};
}
ARK_DEVICE ark_f16 ark_half(float v) {
  return ark_f16{__builtin_bit_cast(ark_u16, static_cast<_Float16>(v))};
}

ARK_DEVICE float ark_inf() { return __builtin_huge_valf(); }
ARK_DEVICE float ark_exp(float v) { return __builtin_elementwise_exp(v); }
ARK_DEVICE float ark_log(float v) { return __builtin_elementwise_log(v); }
ARK_DEVICE float ark_sqrt(float v) { return __builtin_elementwise_sqrt(v); }
ARK_DEVICE float ark_rsqrt(float v) { return 1.0f / ark_sqrt(v); }
ARK_DEVICE float ark_tanh(float v) {
  const float a = __builtin_fabsf(v);
  if (a < 0.35f) {
    // Taylor series: the closed form below loses digits near 0.
    const float s = v * v;
    float t = -1382.0f / 155925.0f;
    t = t * s + 62.0f / 2835.0f;
    t = t * s - 17.0f / 315.0f;
    t = t * s + 2.0f / 15.0f;
    t = t * s - 1.0f / 3.0f;
    return v + v * s * t;
  }
  const float e = ark_exp(-2.0f * a);
  return __builtin_copysignf((1.0f - e) / (1.0f + e), v);
}

// sin of v + quarter * pi/2. The argument is reduced in double precision, since positions times
// frequencies reach 1e5; the rest is the Taylor series on [-pi/4, pi/4].
ARK_DEVICE float ark_sine(float v, int quarter) {
  const double turns = __builtin_rint(static_cast<double>(v) * 0.63661977236758134308);
  double rest = __builtin_fma(turns, -1.57079632679489655800, static_cast<double>(v));
  rest = __builtin_fma(turns, -6.12323399573676603587e-17, rest);
  const float r = static_cast<float>(rest);
  const float s = r * r;
  const int octant = static_cast<int>(turns) + quarter;
  float sine = -1.0f / 39916800.0f;
  sine = sine * s + 1.0f / 362880.0f;
  sine = sine * s - 1.0f / 5040.0f;
  sine = sine * s + 1.0f / 120.0f;
  sine = sine * s - 1.0f / 6.0f;
  sine = r + r * s * sine;
  float cosine = -1.0f / 3628800.0f;
  cosine = cosine * s + 1.0f / 40320.0f;
  cosine = cosine * s - 1.0f / 720.0f;
  cosine = cosine * s + 1.0f / 24.0f;
  cosine = cosine * s - 0.5f;
  cosine = 1.0f + s * cosine;
  const float value = (octant & 1) != 0 ? cosine : sine;
  return (octant & 2) != 0 ? -value : value;
}
ARK_DEVICE float ark_floor(float v) { return __builtin_floorf(v); }
ARK_DEVICE float ark_round(float v) { return __builtin_rintf(v); }
ARK_DEVICE float ark_sin(float v) { return ark_sine(v, 0); }
ARK_DEVICE float ark_cos(float v) { return ark_sine(v, 1); }

ARK_DEVICE float ark_scalar(const float* p, int i) { return p[i]; }
ARK_DEVICE float ark_scalar(const ark_f16* p, int i) { return ark_float(p[i]); }
ARK_DEVICE float ark_scalar(const ark_bf16* p, int i) { return ark_float(p[i]); }

// Products of 16 bytes of weights with as many floats at x.
ARK_DEVICE float ark_piece_dot(const float*, ark_u32x4 w, const float* x) {
  const ark_f32x4 a = __builtin_bit_cast(ark_f32x4, w);
  const ark_f32x4 b = *reinterpret_cast<const ark_f32x4*>(x);
  return a[0] * b[0] + a[1] * b[1] + a[2] * b[2] + a[3] * b[3];
}
ARK_DEVICE float ark_low(const ark_bf16*, ark_u32 pair) { return ark_bits_float(pair << 16); }
ARK_DEVICE float ark_high(const ark_bf16*, ark_u32 pair) {
  return ark_bits_float(pair & 0xffff0000u);
}
ARK_DEVICE float ark_low(const ark_f16*, ark_u32 pair) {
  return ark_float(ark_f16{static_cast<ark_u16>(pair)});
}
ARK_DEVICE float ark_high(const ark_f16*, ark_u32 pair) {
  return ark_float(ark_f16{static_cast<ark_u16>(pair >> 16)});
}
template <typename T>
ARK_DEVICE float ark_piece_dot(const T* type, ark_u32x4 w, const float* x) {
  const ark_f32x4 b = *reinterpret_cast<const ark_f32x4*>(x);
  const ark_f32x4 c = *reinterpret_cast<const ark_f32x4*>(x + 4);
  return ark_low(type, w[0]) * b[0] + ark_high(type, w[0]) * b[1] + ark_low(type, w[1]) * b[2] +
         ark_high(type, w[1]) * b[3] + ark_low(type, w[2]) * c[0] + ark_high(type, w[2]) * c[1] +
         ark_low(type, w[3]) * c[2] + ark_high(type, w[3]) * c[3];
}

// A lane's shares of the dot products of ROWS rows of k weights with x; sum them over the warp.
// Weights pass once: their loads bypass what the cache keeps, and the rows' loads are in flight
// together.
#define ARK_HAS_ROWS_DOT 1
template <int ROWS, typename T>
ARK_DEVICE void ark_rows_dot(const T* w, int stride, const float* x, int k, float* acc) {
  constexpr int PIECE = 16 / sizeof(T);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) acc[r] = 0.0f;
  if (k % 8 != 0 || stride % 8 != 0) {
    for (int i = ark_lane(); i < k; i += ARK_LANES) {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) acc[r] += ark_scalar(w + r * stride, i) * x[i];
    }
    return;
  }
#pragma unroll 2
  for (int i = ark_lane() * PIECE; i < k; i += ARK_LANES * PIECE) {
    ark_u32x4 piece[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      piece[r] = __builtin_nontemporal_load(
          reinterpret_cast<const ark_u32x4*>(w + static_cast<ark_i64>(r) * stride + i));
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) acc[r] += ark_piece_dot(w, piece[r], x + i);
  }
}
template <typename T>
ARK_DEVICE float ark_row_dot(const T* w, const float* x, int k) {
  float total;
  ark_rows_dot<1>(w, 0, x, k, &total);
  return total;
}
