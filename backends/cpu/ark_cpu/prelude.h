// The device ABI on a CPU: a processor is one thread, a warp has one lane, shared memory is the
// thread's own buffer. Only headers of C are included, because those of C++ take longer to compile
// than a small kernel.
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef uint32_t ark_u32;
typedef int32_t ark_i32;
typedef int64_t ark_i64;
typedef uint64_t ark_u64;
struct ark_f16 {
  uint16_t bits;
};
struct ark_bf16 {
  uint16_t bits;
};

#define ARK_DEVICE static inline
#define ARK_BODY static __attribute__((noinline))
#define ARK_COLD ARK_BODY
#define ARK_LINKED __attribute__((visibility("hidden")))  // of the loop and its bodies
#define ARK_SPIN_CHECK 0x3ffu
#define ARK_LOOSE_PACKS 1
#if defined(__clang__)
#define ARK_VECTOR_LOOP _Pragma("clang loop vectorize(assume_safety)")
#else
#define ARK_VECTOR_LOOP _Pragma("GCC ivdep")
#endif
// ARK_VECTOR_BYTES: the number of bytes of the widest vectors. ARK_PANEL_ROWS: the number of rows
// of a matrix product whose sums, two vectors per row, fit into registers.
#if defined(__AVX512F__)
#define ARK_VECTOR_BYTES 64
#define ARK_PANEL_ROWS 12
#elif defined(__AVX2__)
#define ARK_VECTOR_BYTES 32
#define ARK_PANEL_ROWS 6
#else
#define ARK_VECTOR_BYTES 16
#define ARK_PANEL_ROWS 8
#endif
#define ARK_HOST_CHECK 0u
// The compiler may reorder sums and products, except those that are written with these macros.
#if defined(__clang__)
#define ARK_ORDERED_SUM(T, a, b) ark_ordered_sum<T>(a, b)
#define ARK_ORDERED_PRODUCT(T, a, b) ark_ordered_product<T>(a, b)
template <typename T>
static inline T ark_ordered_sum(T a, T b) {
#pragma clang fp reassociate(off)
  return a + b;
}
template <typename T>
static inline T ark_ordered_product(T a, T b) {
#pragma clang fp reassociate(off)
  return a * b;
}
#elif defined(__FMA__) || defined(__ARM_FEATURE_FMA)
#define ARK_ORDERED_SUM(T, a, b) ark_ordered_sum(a, b)
#define ARK_ORDERED_PRODUCT(T, a, b) ark_ordered_product(a, b)
#elif defined(__has_builtin)
#if __has_builtin(__builtin_assoc_barrier)
#define ARK_ORDERED_SUM(T, a, b) __builtin_assoc_barrier((a) + (b))
#define ARK_ORDERED_PRODUCT(T, a, b) __builtin_assoc_barrier((a) * (b))
#endif
#endif
#if !defined(ARK_ORDERED_SUM)
#define ARK_ORDERED_SUM(T, a, b) ((a) + (b))
#define ARK_ORDERED_PRODUCT(T, a, b) ((a) * (b))
#endif

constexpr int ARK_THREADS = ARK_LANES * ARK_WARPS;

ARK_DEVICE constexpr int ark_tid() { return 0; }
ARK_DEVICE constexpr int ark_lane() { return 0; }
ARK_DEVICE constexpr int ark_warp() { return 0; }
ARK_DEVICE void ark_sync() {}
ARK_DEVICE void ark_warp_sync() {}
ARK_DEVICE bool ark_all(bool v) { return v; }
ARK_DEVICE float ark_warp_sum(float v) { return v; }
ARK_DEVICE float ark_warp_max(float v) { return v; }
ARK_DEVICE ark_u64 ark_ballot(bool v) { return v ? 1u : 0u; }
ARK_DEVICE float ark_shfl_xor(float v, int) { return v; }
ARK_DEVICE ark_u32 ark_shfl_xor(ark_u32 v, int) { return v; }

ARK_DEVICE ark_u32 ark_load_acquire(const ark_u32* p, bool) {
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
ARK_DEVICE void ark_add_release(ark_u32* p, ark_u32 v, bool) {
  __atomic_fetch_add(p, v, __ATOMIC_RELEASE);
}
ARK_DEVICE ark_u32 ark_cas(ark_u32* p, ark_u32 expected, ark_u32 desired) {
  __atomic_compare_exchange_n(p, &expected, desired, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
  return expected;
}
ARK_DEVICE ark_u32 ark_claim(ark_u32* p) { return __atomic_fetch_add(p, 1u, __ATOMIC_RELAXED); }
ARK_DEVICE ark_u32 ark_load_host(const ark_u32* p) { return ark_load_acquire(p, true); }
ARK_DEVICE ark_u32 ark_peek_host(const ark_u32* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
ARK_DEVICE void ark_post_host(ark_u32* p, ark_u32 v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
ARK_DEVICE void ark_store_host(ark_u32* p, ark_u32 v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
ARK_DEVICE ark_u32 ark_warp_load(const ark_u32* p) { return *p; }
ARK_DEVICE void ark_warp_store(ark_u32* p, ark_u32 v) { *p = v; }
ARK_DEVICE ark_u64 ark_packet_load(const ark_u64* p, bool) {
  return __atomic_load_n(p, __ATOMIC_RELAXED);
}
ARK_DEVICE void ark_packet_store(ark_u64* p, ark_u64 v, bool) {
  __atomic_store_n(p, v, __ATOMIC_RELAXED);
}
ARK_DEVICE ark_u64 ark_time_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<ark_u64>(now.tv_sec) * 1000000000u + static_cast<ark_u64>(now.tv_nsec);
}
// The clock for time limits. It does not advance while the process is stopped (SIGSTOP, a
// debugger). A waiting thread reads the clock about every tenth of a second. If two readings are
// more than one second apart, only one second is counted.
#define ARK_SPIN_TIME() ark_waited_ns()
ARK_DEVICE ark_u64 ark_waited_ns() {
  static thread_local ark_u64 last = 0u, stopped = 0u;
  const ark_u64 now = ark_time_ns();
  constexpr ark_u64 second = 1000000000u;
  if (last != 0u && now - last > second) stopped += now - last - second;
  last = now;
  return now - stopped;
}
// While the calling thread waits, it calls ark_look every 20 ms, if it is set. The function checks
// for other events, such as signals or a rank that has died.
inline ARK_LINKED __thread void (*ark_look)() = nullptr;
ARK_COLD void ark_look_around() {
  static thread_local ark_u64 looked = 0u;
  const ark_u64 now = ark_time_ns();
  if (now - looked < 20000000u) return;
  looked = now;
  ark_look();
}
constexpr ark_u32 ARK_SHORT_SPINS = 200u;
constexpr ark_u64 ARK_SHORT_NS = 100000u;
// Called in a wait: lets other threads use the core, because there may be more processors (threads)
// than cores. A thread that sleeps gets a shared core back sooner than one that calls sched_yield,
// and sched_yield has no effect between groups of processes (sessions, containers). So a long wait
// sleeps.
ARK_COLD void ark_give_way(ark_u32 spins) {
  static thread_local ark_u64 begun = 0u;
  if ((spins & 15u) == 0u && ark_look != nullptr) ark_look_around();
  const ark_u64 now = ark_time_ns();
  if (spins == ARK_SHORT_SPINS) begun = now;
  if (now - begun < ARK_SHORT_NS) {
    sched_yield();
    return;
  }
  // If the wait has lasted for more than 10 ms, the loop kernel is idle or a peer has not started
  // yet. Then the thread sleeps longer.
  const timespec nap{0, now - begun < 10000000u ? 1000 : 50000};
  nanosleep(&nap, nullptr);
}
ARK_DEVICE void ark_pause(ark_u32 spins) {
  if (spins >= ARK_SHORT_SPINS) {
    ark_give_way(spins);
  } else {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
}

ARK_DEVICE float ark_bits_float(ark_u32 bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
ARK_DEVICE ark_u32 ark_float_bits(float value) {
  ark_u32 bits;
  memcpy(&bits, &value, 4);
  return bits;
}
#if !defined(__clang__) && (defined(__FMA__) || defined(__ARM_FEATURE_FMA))
// Sums and products that the compiler must not reorder are written as fused multiply-adds. A sum is
// a fused multiply-add with a factor 1, and a product is one with a summand 0. The compiler does
// not know the values of this 1 and 0, so it cannot simplify the operation. (GCC 12 ignores the
// builtin for this purpose, __builtin_assoc_barrier, when it vectorises a loop.) The ones and zeros
// are stored as integers, because the compiler knows that stores of floats cannot change integers,
// and need not load them again.
static ark_u32 ark_one_bits, ark_zero_bits;
static ark_u64 ark_one_bits_64, ark_zero_bits_64;
__attribute__((constructor)) static void ark_set_bits() {
  volatile double one = 1.0;
  const double known = one, none = known - one;
  ark_one_bits = ark_float_bits(static_cast<float>(known));
  ark_zero_bits = ark_float_bits(static_cast<float>(none));
  memcpy(&ark_one_bits_64, &known, 8);
  memcpy(&ark_zero_bits_64, &none, 8);
}
ARK_DEVICE double ark_bits_double(ark_u64 bits) {
  double value;
  memcpy(&value, &bits, 8);
  return value;
}
ARK_DEVICE float ark_ordered_sum(float a, float b) {
  return __builtin_fmaf(a, ark_bits_float(ark_one_bits), b);
}
ARK_DEVICE double ark_ordered_sum(double a, double b) {
  return __builtin_fma(a, ark_bits_double(ark_one_bits_64), b);
}
ARK_DEVICE float ark_ordered_product(float a, float b) {
  return __builtin_fmaf(a, b, ark_bits_float(ark_zero_bits));
}
ARK_DEVICE double ark_ordered_product(double a, double b) {
  return __builtin_fma(a, b, ark_bits_double(ark_zero_bits_64));
}
#endif
ARK_DEVICE float ark_float(ark_bf16 v) {
  return ark_bits_float(static_cast<ark_u32>(v.bits) << 16);
}
ARK_DEVICE ark_bf16 ark_bfloat(float v) {
  const ark_u32 bits = ark_float_bits(v);
  const ark_u32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return ark_bf16{static_cast<uint16_t>(nan ? (bits >> 16) | 0x40u : rounded)};
}
// Converts half precision by exponent arithmetic on floats. This needs no compiler support and
// vectorises.
ARK_DEVICE float ark_float(ark_f16 v) {
  const ark_u32 magnitude = static_cast<ark_u32>(v.bits & 0x7fffu) << 13;
  float value = ark_bits_float(magnitude) * ark_bits_float(0x77800000u);
  const ark_u32 special = magnitude >= 0x0f800000u ? 0x7f800000u : 0u;
  const ark_u32 sign = static_cast<ark_u32>(v.bits & 0x8000u) << 16;
  return ark_bits_float(ark_float_bits(value) | special | sign);
}
ARK_DEVICE ark_f16 ark_half(float v) {
  const ark_u32 bits = ark_float_bits(v);
  const ark_u32 sign = (bits >> 16) & 0x8000u;
  const ark_u32 magnitude = bits & 0x7fffffffu;
  // All cases are computed and one is selected, so that the loop vectorises. For subnormal results,
  // adding 0.5 shifts the mantissa into place and rounds it to nearest even.
  const ark_u32 small = ark_float_bits(ark_bits_float(magnitude) + 0.5f) - 0x3f000000u;
  const ark_u32 normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const ark_u32 finite = magnitude < 0x38800000u ? small : normal;
  const ark_u32 large = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const ark_u32 half = magnitude >= 0x477ff000u ? large : finite;
  return ark_f16{static_cast<uint16_t>(half | sign)};
}

// a * b + c. The compiler may not split it into two steps where the processor has a fused
// instruction.
ARK_DEVICE float ark_fma(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}
// e^v within 2 units in the last place, without a branch, so that loops over it vectorise. v is
// split into n ln 2 + r with |r| <= ln 2 / 2. 2 e^r is a polynomial (the Taylor series in Horner's
// form). 2^(n-1) is a product of two factors, so that no partial product overflows unless the
// result does, in any order of multiplication.
ARK_DEVICE float ark_exp(float v) {
  const float high = v > 89.0f ? 89.0f : v;
  const float x = high < -104.0f ? -104.0f : high;
  const float scaled = x * 1.44269504f;
  const ark_i32 n = static_cast<ark_i32>(scaled + (scaled < 0.0f ? -0.5f : 0.5f));
  const float whole = static_cast<float>(n);
  const float r = ark_fma(whole, -1.42860677e-6f, ark_fma(whole, -0.693145752f, x));
  float p = 2.0f / 5040.0f;
  p = ark_fma(p, r, 2.0f / 720.0f);
  p = ark_fma(p, r, 2.0f / 120.0f);
  p = ark_fma(p, r, 2.0f / 24.0f);
  p = ark_fma(p, r, 2.0f / 6.0f);
  p = ark_fma(p, r, 1.0f);
  p = ark_fma(p, r, 2.0f);
  p = ark_fma(p, r, 2.0f);
  const ark_i32 half = (n - 1) >> 1;
  const float first = ark_bits_float(static_cast<ark_u32>(half + 127) << 23);
  const float second = ark_bits_float(static_cast<ark_u32>(n - 1 - half + 127) << 23);
  return p * first * second;
}
ARK_DEVICE float ark_log(float v) { return __builtin_logf(v); }
ARK_DEVICE float ark_sqrt(float v) { return __builtin_sqrtf(v); }
ARK_DEVICE float ark_rsqrt(float v) { return 1.0f / __builtin_sqrtf(v); }
// tanh(v). Near 0 a series is used, because the closed form loses digits there. Both are always
// computed and one is selected, so that the loop vectorises.
ARK_DEVICE float ark_tanh(float v) {
  const float a = v < 0.0f ? -v : v;
  const float s = v * v;
  float t = -1382.0f / 155925.0f;
  t = ark_fma(t, s, 62.0f / 2835.0f);
  t = ark_fma(t, s, -17.0f / 315.0f);
  t = ark_fma(t, s, 2.0f / 15.0f);
  t = ark_fma(t, s, -1.0f / 3.0f);
  const float near = ark_fma(v * s, t, v);
  const float e = ark_exp(-2.0f * a);
  const float far = (1.0f - e) / (1.0f + e);
  return a < 0.35f ? near : v < 0.0f ? -far : far;
}
ARK_DEVICE float ark_sin(float v) { return __builtin_sinf(v); }
ARK_DEVICE float ark_cos(float v) { return __builtin_cosf(v); }
ARK_DEVICE float ark_floor(float v) { return __builtin_floorf(v); }
ARK_DEVICE float ark_round(float v) { return __builtin_rintf(v); }
ARK_DEVICE float ark_inf() { return __builtin_inff(); }

ARK_DEVICE float ark_scalar(const float* p, int i) { return p[i]; }
ARK_DEVICE float ark_scalar(const ark_f16* p, int i) { return ark_float(p[i]); }
ARK_DEVICE float ark_scalar(const ark_bf16* p, int i) { return ark_float(p[i]); }

// A lane's share of the dot product of a row of k weights with x; sum it over the warp.
template <typename T>
ARK_DEVICE float ark_row_dot(const T* w, const float* x, int k) {
  float total = 0.0f;
  for (int i = 0; i < k; ++i) total += ark_scalar(w, i) * x[i];
  return total;
}

// Transposes square blocks of elements in 16-byte registers, with one row of the block in each
// register. Each round interleaves the rows of the upper half with those of the lower half, element
// by element.
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define ARK_HAS_BLOCKS 1
typedef uint8_t ark_u8x16 __attribute__((vector_size(16)));
typedef uint16_t ark_u16x8 __attribute__((vector_size(16)));
template <int BYTES>
struct ArkBlock;  // a square of elements of this size
template <>
struct ArkBlock<1> {
  typedef ark_u8x16 row;
  ARK_DEVICE row low(row a, row b) {
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  }
  ARK_DEVICE row high(row a, row b) {
    return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15,
                                   31);
  }
};
template <>
struct ArkBlock<2> {
  typedef ark_u16x8 row;
  ARK_DEVICE row low(row a, row b) {
    return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
  }
  ARK_DEVICE row high(row a, row b) {
    return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
  }
};
// Transposes a block of 16 / sizeof(T) rows and as many columns: from[r * from_row + c] is copied
// to to[c * to_row + r].
template <typename T>
ARK_DEVICE void ark_transpose_block(const T* from, ark_i64 from_row, T* to, ark_i64 to_row) {
  constexpr int N = 16 / static_cast<int>(sizeof(T));
  typedef ArkBlock<static_cast<int>(sizeof(T))> block;
  typename block::row row[N], mixed[N];
  for (int i = 0; i < N; ++i) memcpy(&row[i], from + i * from_row, 16);
  for (int rounds = 1; rounds < N; rounds *= 2) {
    for (int i = 0; i < N / 2; ++i) {
      mixed[2 * i] = block::low(row[i], row[i + N / 2]);
      mixed[2 * i + 1] = block::high(row[i], row[i + N / 2]);
    }
    for (int i = 0; i < N; ++i) row[i] = mixed[i];
  }
  for (int i = 0; i < N; ++i) memcpy(to + i * to_row, &row[i], 16);
}
#endif
#endif
