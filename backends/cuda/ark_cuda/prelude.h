// The device ABI on NVIDIA GPUs (sm_80 and later). It is compiled by NVRTC and includes no headers.
// A processor is a block of ARK_WARPS computing warps. If the kernel has an operand ring, the block
// has one more warp, which only loads; it takes part in none of the barriers here.

typedef unsigned int ark_u32;
typedef int ark_i32;
typedef long long ark_i64;
typedef unsigned long long ark_u64;
struct ark_f16 {
  unsigned short bits;
};
struct ark_bf16 {
  unsigned short bits;
};

#define ARK_DEVICE static __device__ __forceinline__
#define ARK_DEVICE_MEMBER __device__ __forceinline__
#define ARK_BODY static __device__ __noinline__
#define ARK_COLD ARK_BODY
#if defined(ARK_PART)
#define ARK_LINKED __device__ __noinline__  // a body that another part of the text calls
#else
#define ARK_LINKED ARK_BODY
#endif
#define ARK_SPIN_CHECK 0x3fu

constexpr int ARK_THREADS = ARK_LANES * ARK_WARPS;

// All variables that a kernel declares in shared memory are in one static block. The block's size
// and alignment are multiples of ARK_SHARED_ALIGNMENT bytes, so that the dynamic memory
// `ark_shared` after it has the same alignment. The alignment declared for `ark_shared` itself does
// not suffice: in relocatable objects of NVRTC 13.0, an array without a length gets 16 bytes.
// alignment.py checks the binary, and entry.h checks the address at run time.
constexpr ark_u32 ARK_SHARED_ALIGNMENT = 1024u;  // of the operands of swizzled boxes
// The ring's barriers (stream.h) use bytes 192 to 512. If they need more, they use the space after
// the first 1024 bytes.
constexpr int ARK_RING_DEPTH = ARK_RING_BYTES > 0 ? ARK_RING_BYTES / ARK_STAGE_BYTES : 0;
constexpr int ARK_RING_STATE = 16 * ARK_RING_DEPTH + 4 * ARK_WARPS + 8;
constexpr int ARK_RING_BEGIN = ARK_RING_STATE <= 320 ? 192 : ARK_SHARED_ALIGNMENT;
constexpr int ARK_RING_END =
    ARK_RING_BEGIN == 192 ? 512 : ARK_RING_BEGIN + (ARK_RING_STATE + 15) / 16 * 16;
constexpr ark_u32 ARK_STATIC_BYTES =
    (ARK_RING_END + ARK_SHARED_ALIGNMENT - 1u) / ARK_SHARED_ALIGNMENT * ARK_SHARED_ALIGNMENT;
struct alignas(ARK_SHARED_ALIGNMENT) ArkStatic {
  char bytes[ARK_STATIC_BYTES];
};
#if !defined(ARK_PART) || ARK_PART == 0  // the part that has the loop
__shared__ ArkStatic ark_static;
// The variable of type T in bytes BEGIN to END of the block of static shared memory.
template <class T, int BEGIN, int END>
ARK_DEVICE T& ark_static_at() {
  static_assert(BEGIN % 16 == 0 && BEGIN + sizeof(T) <= END && END <= ARK_STATIC_BYTES,
                "static shared variables fit");
  return *reinterpret_cast<T*>(ark_static.bytes + BEGIN);
}
// The parameters have a constant address, at which entry.h stores them.
#define ARK_PARAMS(ctx) (&ark_static_at<const ArkParams, 0, 176>())
#else
#define ARK_PARAMS(ctx) ((ctx).p)
#endif

// Dynamic shared memory: the slots of the operand ring, then the loop's data (task records), then a
// task's scratch memory.
extern __shared__ __align__(1024) char ark_shared[];
#define ARK_SCRATCH(ctx) (ark_shared + ARK_RING_BYTES + ARK_LOOP_BYTES)

static_assert(ARK_LANES == 32, "a warp has 32 lanes");

ARK_DEVICE int ark_tid() { return static_cast<int>(threadIdx.x); }
ARK_DEVICE int ark_lane() { return static_cast<int>(threadIdx.x & 31u); }
ARK_DEVICE int ark_warp() { return static_cast<int>(threadIdx.x >> 5); }

// Synchronises the computing threads by hardware barrier 1. Barrier 0 (__syncthreads) would wait
// for the loading warp too. The lanes of a warp may arrive separately, after a loop of unequal
// length, so __syncwarp makes them converge first: on sm_90, the code that NVRTC 13.0 emits for a
// barrier in a diverged warp ends in an illegal instruction.
ARK_DEVICE void ark_sync() {
  __syncwarp();
  asm volatile("barrier.sync 1, %0;" ::"n"(ARK_THREADS) : "memory");
}
// Barriers for teams of TEAM neighbouring warps: hardware barrier 2 for the first team, 3 for the
// second, and so on.
#define ARK_HAS_TEAMS 1
template <int TEAM>
ARK_DEVICE void ark_team_sync() {
  __syncwarp();
  if constexpr (TEAM > 1) {
    static_assert(ARK_WARPS / TEAM <= 14, "a block has 16 barriers");
    asm volatile("barrier.sync %0, %1;" ::"r"(2 + ark_warp() / TEAM), "n"(32 * TEAM) : "memory");
  }
}
ARK_DEVICE bool ark_all(bool v) {
  __syncwarp();
  ark_u32 all;
  asm volatile(
      "{\n .reg .pred p, q;\n setp.ne.u32 p, %1, 0;\n"
      " barrier.red.and.pred q, 1, %2, p;\n selp.u32 %0, 1, 0, q;\n}"
      : "=r"(all)
      : "r"(static_cast<ark_u32>(v)), "n"(ARK_THREADS)
      : "memory");
  return all != 0u;
}

// Makes the lanes of a warp converge after one lane has polled memory alone. Without __syncwarp,
// NVRTC's code lets that lane run separately for the rest of the enclosing loop. Each instruction
// of the warp is then issued twice, and its shuffles wait for all loads.
#define ARK_HAS_REJOIN 1
ARK_DEVICE bool ark_rejoin(bool v) {
  __syncwarp();
  return __shfl_sync(0xffffffffu, static_cast<int>(v), 0) != 0;
}
ARK_DEVICE ark_u64 ark_ballot(bool v) { return __ballot_sync(0xffffffffu, v); }
ARK_DEVICE void ark_warp_sync() { __syncwarp(); }
#define ARK_HAS_WARP_LARGEST 1
ARK_DEVICE ark_u32 ark_warp_largest(ark_u32 v) { return __reduce_max_sync(0xffffffffu, v); }
#define ARK_HAS_SAME_BEFORE 1
template <int BITS>
ARK_DEVICE int ark_same_before(ark_u32 v) {
  return __popc(__match_any_sync(0xffffffffu, v) & ((1u << ark_lane()) - 1u));
}
ARK_DEVICE float ark_shfl_xor(float v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
ARK_DEVICE ark_u32 ark_shfl_xor(ark_u32 v, int mask) {
  return __shfl_xor_sync(0xffffffffu, v, mask);
}
ARK_DEVICE float ark_warp_sum(float v) {
#pragma unroll
  for (int mask = 16; mask > 0; mask >>= 1) v += ark_shfl_xor(v, mask);
  return v;
}
ARK_DEVICE float ark_warp_max(float v) {
#pragma unroll
  for (int mask = 16; mask > 0; mask >>= 1) v = fmaxf(v, ark_shfl_xor(v, mask));
  return v;
}
// Sums R values over the warp with R + log2(32 / R) - 1 exchanges. Lane l gets the total of value
// number l / (32 / R).
template <int R>
ARK_DEVICE float ark_warp_sums(float (&v)[R]) {
#pragma unroll
  for (int n = R / 2, mask = 16; n > 0; n /= 2, mask /= 2) {
    const bool upper = (ark_lane() & mask) != 0;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const float send = upper ? v[i] : v[i + n];
      v[i] = (upper ? v[i + n] : v[i]) + ark_shfl_xor(send, mask);
    }
  }
#pragma unroll
  for (int mask = 16 / R; mask > 0; mask /= 2) v[0] += ark_shfl_xor(v[0], mask);
  return v[0];
}

// Works around a fault of NVRTC 13.0 to 13.3 on sm_90 and sm_100: two minima (or maxima) of 32-bit
// signed integers become one three-operand instruction, which loses the negation of its second
// operand. The conversion to 64 bits and back emits no instruction, but prevents the combination.
#if defined(__CUDACC_VER_MAJOR__) && __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ < 1304
ARK_DEVICE ark_i32 ark_chosen(ark_i32 v) {
  ark_i32 same;
  asm("{\n .reg .b64 wide;\n cvt.s64.s32 wide, %1;\n cvt.u32.u64 %0, wide;\n}"
      : "=r"(same)
      : "r"(v));
  return same;
}
ARK_DEVICE ark_i64 ark_chosen(ark_i64 v) {  // LLVM would narrow both again
  ark_i64 same;
  asm("mov.b64 %0, %1;" : "=l"(same) : "l"(v));
  return same;
}
#endif

// Loads 16 bytes that are read only once, bypassing the L1 cache.
#define ARK_HAS_LOAD_ONCE 1
ARK_DEVICE void ark_load_once(const void* p, void* to) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  *static_cast<uint4*>(to) = v;
}
// Loads 16 bytes without allocating them in the L1 cache.
#define ARK_HAS_LOAD_PAST 1
ARK_DEVICE void ark_load_past(const void* p, void* to) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  *static_cast<uint4*>(to) = v;
}
// Stores 16 bytes in one access. NVRTC splits a store of a uint4 that was assembled from 16-bit
// values.
#define ARK_HAS_STORE_WORDS 1
ARK_DEVICE void ark_store_words(void* p, const ark_u32 (&v)[4]) {
  asm volatile("st.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v[0]), "r"(v[1]), "r"(v[2]),
               "r"(v[3])
               : "memory");
}
// Copies 8 bytes to shared memory asynchronously, while the task runs, and without registers for
// the data.
#define ARK_HAS_COPY_AHEAD 1
ARK_DEVICE void ark_copy_ahead(ark_u64* to, const ark_u64* from) {
  const ark_u32 shared = static_cast<ark_u32>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared), "l"(from) : "memory");
}
// Copies 16 bytes to shared memory asynchronously. If `here` is false, zeros are stored instead.
#define ARK_HAS_COPY_PACK 1
ARK_DEVICE void ark_copy_pack(void* to, const void* from, bool here) {
  const ark_u32 shared = static_cast<ark_u32>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(from),
               "r"(here ? 16 : 0)
               : "memory");
}
ARK_DEVICE void ark_copies_begun() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
ARK_DEVICE void ark_copies_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
ARK_DEVICE void ark_copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }
ARK_DEVICE ark_u64 ark_time_ns() {
  ark_u64 now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)::"memory");
  return now;
}
// Called between two polls of a memory location. The first polls follow each other without a sleep,
// because most waits are shorter than a sleep.
ARK_DEVICE void ark_pause(ark_u32 spins) {
  if (spins >= 8u) __nanosleep(spins < 4096u ? 20u : 500u);
}

// Makes the compiler keep a converted value in a register. Otherwise it repeats the conversion in
// each branch that uses the value.
#define ARK_HAS_KEEP 1
ARK_DEVICE void ark_keep(float& v) { asm volatile("" : "+f"(v)); }

ARK_DEVICE float ark_bits_float(ark_u32 bits) { return __uint_as_float(bits); }
ARK_DEVICE ark_u32 ark_float_bits(float value) { return __float_as_uint(value); }
ARK_DEVICE float ark_float(ark_bf16 v) {
  return ark_bits_float(static_cast<ark_u32>(v.bits) << 16);
}
ARK_DEVICE ark_bf16 ark_bfloat(float v) {
  ark_bf16 result;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(v));
  return result;
}
ARK_DEVICE float ark_float(ark_f16 v) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(v.bits));
  return result;
}
ARK_DEVICE ark_f16 ark_half(float v) {
  ark_f16 result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(v));
  return result;
}

ARK_DEVICE float ark_exp(float v) { return expf(v); }
ARK_DEVICE float ark_log(float v) { return logf(v); }
ARK_DEVICE float ark_sqrt(float v) { return sqrtf(v); }
ARK_DEVICE float ark_fma(float a, float b, float c) { return fmaf(a, b, c); }
ARK_DEVICE float ark_rsqrt(float v) { return 1.0f / sqrtf(v); }
#define ARK_HAS_RECIPROCAL 1
ARK_DEVICE float ark_reciprocal(float v) {
  float result;
  asm("rcp.approx.f32 %0, %1;" : "=f"(result) : "f"(v));
  return result;
}
#define ARK_HAS_RECIPROCAL_FLUSHED 1
ARK_DEVICE float ark_reciprocal_flushed(float v) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(v));
  return result;
}
#define ARK_HAS_POWER_OF_TWO 1
ARK_DEVICE float ark_power_of_two(float v) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(v));
  return result;
}
#define ARK_HAS_LOG2_FLUSHED 1
ARK_DEVICE float ark_log2_flushed(float v) {
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(v));
  return result;
}
#define ARK_HAS_SQRT_FLUSHED 1
ARK_DEVICE float ark_sqrt_flushed(float v) {
  float result;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(v));
  return result;
}
#define ARK_HAS_ERF 1
ARK_DEVICE float ark_erf(float v) { return erff(v); }
// tanh(v) without branches, so that the instructions of several elements can overlap: a polynomial
// near 0 (like those of ark/backend/codegen/device/math.h), the definition elsewhere.
ARK_DEVICE float ark_tanh(float v) {
  const float a = fabsf(v), s = v * v;
  float p = -0.00627422938f;
  p = fmaf(p, s, 0.0210716724f);
  p = fmaf(p, s, -0.0538523085f);
  p = fmaf(p, s, 0.13332586f);
  p = fmaf(p, s, -0.333333164f);
  const float far = fmaf(-2.0f, ark_reciprocal(ark_exp(2.0f * a) + 1.0f), 1.0f);
  return a < 0.55f ? fmaf(v * s, p, v) : copysignf(far, v);
}
// Subtracts multiples of a quarter turn from an angle until at most an eighth of a turn remains, in
// three steps, because pi/2 is represented as the sum of three floats (Cody and Waite, "Software
// Manual for the Elementary Functions", 1980).
ARK_DEVICE float ark_reduced(float v, int& quarters) {
  const float turns = rintf(v * 0.636619772f);
  quarters = static_cast<int>(turns);
  const float rest = fmaf(turns, 4.37113883e-8f, fmaf(turns, -1.57079637f, v));
  return fmaf(turns, 1.71512451e-15f, rest);
}
ARK_DEVICE float ark_sine_near(float r, float s) {
  const float p = fmaf(fmaf(-0.000195087399f, s, 0.0083321128f), s, -0.166666538f);
  return fmaf(r * s, p, r);
}
ARK_DEVICE float ark_cosine_near(float s) {
  const float p = fmaf(fmaf(2.44256789e-5f, s, -0.00138872513f), s, 0.0416666466f);
  return fmaf(s * s, p, fmaf(-0.5f, s, 1.0f));
}
constexpr float ARK_FAR_ANGLE = 1e5f;  // beyond this the number of quarters has too many digits
ARK_COLD float ark_sin_far(float v) { return sinf(v); }
ARK_COLD float ark_cos_far(float v) { return cosf(v); }
ARK_COLD float ark_tan_far(float v) { return tanf(v); }
ARK_DEVICE float ark_sine(float v, int turned) {
  int quarters;
  const float r = ark_reduced(v, quarters), s = r * r;
  quarters += turned;
  const float made = (quarters & 1) != 0 ? ark_cosine_near(s) : ark_sine_near(r, s);
  return (quarters & 2) != 0 ? -made : made;
}
ARK_DEVICE float ark_sin(float v) {
  return fabsf(v) > ARK_FAR_ANGLE ? ark_sin_far(v) : ark_sine(v, 0);
}
ARK_DEVICE float ark_cos(float v) {
  return fabsf(v) > ARK_FAR_ANGLE ? ark_cos_far(v) : ark_sine(v, 1);
}
#define ARK_HAS_TAN 1
ARK_DEVICE float ark_tan(float v) {
  if (fabsf(v) > ARK_FAR_ANGLE) return ark_tan_far(v);
  int quarters;
  const float r = ark_reduced(v, quarters), s = r * r;
  const float sine = ark_sine_near(r, s), cosine = ark_cosine_near(s);
  const bool odd = (quarters & 1) != 0;
  return (odd ? -cosine : sine) * ark_reciprocal(odd ? sine : cosine);
}
// Sine and cosine of v for up to about 10,000 turns, with an error of at most 2^-21, which is less
// than the error from rounding the angle.
#define ARK_HAS_SINCOS 1
ARK_DEVICE void ark_sincos(float v, float& sine, float& cosine) {
  const float turns = rintf(v * 0.159154943f);
  const float rest = fmaf(turns, 1.74845553e-7f, fmaf(turns, -6.28318548f, v));
  sine = __sinf(rest);
  cosine = __cosf(rest);
}
ARK_DEVICE float ark_floor(float v) { return floorf(v); }
ARK_DEVICE float ark_round(float v) { return rintf(v); }
ARK_DEVICE float ark_inf() { return __uint_as_float(0x7f800000u); }

ARK_DEVICE float ark_scalar(const float* p, int i) { return p[i]; }
ARK_DEVICE float ark_scalar(const ark_f16* p, int i) { return ark_float(p[i]); }
ARK_DEVICE float ark_scalar(const ark_bf16* p, int i) { return ark_float(p[i]); }

// Converts the two 16-bit weights in word `w` to floats. The pointer only selects the weights'
// type.
ARK_DEVICE float2 ark_pair(const ark_bf16*, ark_u32 w) {
  return make_float2(ark_bits_float(w << 16), ark_bits_float(w & 0xffff0000u));
}
ARK_DEVICE float2 ark_pair(const ark_f16*, ark_u32 w) {
  return make_float2(ark_float(ark_f16{static_cast<unsigned short>(w)}),
                     ark_float(ark_f16{static_cast<unsigned short>(w >> 16)}));
}

// Converts two floats to neighbouring elements of a type, in one word (ark_pack_pair) or in memory
// (ark_narrow).
ARK_DEVICE ark_u32 ark_pack_pair(ark_bf16*, float low, float high) {
  ark_u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
ARK_DEVICE ark_u32 ark_pack_pair(ark_f16*, float low, float high) {
  ark_u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
ARK_DEVICE void ark_narrow(float* to, float a, float b) { to[0] = a, to[1] = b; }
ARK_DEVICE void ark_narrow(ark_bf16* to, float a, float b) {
  *reinterpret_cast<ark_u32*>(to) = ark_pack_pair(to, a, b);
}
ARK_DEVICE void ark_narrow(ark_f16* to, float a, float b) {
  *reinterpret_cast<ark_u32*>(to) = ark_pack_pair(to, a, b);
}

// Converts 16 bytes of elements to floats. The pointer only selects the element type.
ARK_DEVICE void ark_unpack(float (&to)[4], const uint4& v, const float*) {
  to[0] = ark_bits_float(v.x);
  to[1] = ark_bits_float(v.y);
  to[2] = ark_bits_float(v.z);
  to[3] = ark_bits_float(v.w);
}
template <typename T>
ARK_DEVICE void ark_unpack(float (&to)[8], const uint4& v, const T* type) {
  const ark_u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = ark_pair(type, words[i]);
    to[2 * i] = pair.x;
    to[2 * i + 1] = pair.y;
  }
}

ARK_DEVICE float ark_dot4(const float4& x, const float2& a, const float2& b, float sum) {
  return fmaf(x.w, b.y, fmaf(x.z, b.x, fmaf(x.y, a.y, fmaf(x.x, a.x, sum))));
}

// Each lane's share of the dot products of ROWS rows of weights with x. A lane reads 16 bytes of
// weights at a time; x is read once for all rows.
template <int ROWS>
ARK_DEVICE void ark_rows_dot_wide(const float* w, int stride, const float* x, int k, float* acc) {
#pragma unroll 2
  for (int i = ark_lane() * 4; i < k; i += ARK_LANES * 4) {
    const float4 b = *reinterpret_cast<const float4*>(x + i);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const float4 a = *reinterpret_cast<const float4*>(w + r * stride + i);
      acc[r] = ark_dot4(b, make_float2(a.x, a.y), make_float2(a.z, a.w), acc[r]);
    }
  }
}
template <int ROWS, typename T>
ARK_DEVICE void ark_rows_dot_wide(const T* w, int stride, const float* x, int k, float* acc) {
  // Neighbouring lanes read addresses of x that are 32 bytes apart, as two halves of 16 bytes.
  // Every second group of four lanes reads its second half first, so that eight lanes access each
  // bank of shared memory once.
  const int swap = (ark_lane() >> 2) & 1;
#pragma unroll 2
  for (int i = ark_lane() * 8; i < k; i += ARK_LANES * 8) {
    const float4 b = *reinterpret_cast<const float4*>(x + i + 4 * swap);
    const float4 c = *reinterpret_cast<const float4*>(x + i + 4 - 4 * swap);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const uint4 a = *reinterpret_cast<const uint4*>(w + r * stride + i);
      const float sum =
          ark_dot4(b, ark_pair(w, swap ? a.z : a.x), ark_pair(w, swap ? a.w : a.y), acc[r]);
      acc[r] = ark_dot4(c, ark_pair(w, swap ? a.x : a.z), ark_pair(w, swap ? a.y : a.w), sum);
    }
  }
}

// Each lane's share of the dot products of ROWS rows of k weights, `stride` apart, with x.
#define ARK_HAS_ROWS_DOT 1
template <int ROWS, typename T>
ARK_DEVICE void ark_rows_dot(const T* w, int stride, const float* x, int k, float* acc) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) acc[r] = 0.0f;
  if ((k & 7) == 0 && (stride & 7) == 0) {
    ark_rows_dot_wide<ROWS>(w, stride, x, k, acc);
    return;
  }
  for (int i = ark_lane(); i < k; i += ARK_LANES) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) acc[r] = fmaf(ark_scalar(w, r * stride + i), x[i], acc[r]);
  }
}

// A lane's share of the dot product of a row of k weights with x. The caller sums it over the warp.
template <typename T>
ARK_DEVICE float ark_row_dot(const T* w, const float* x, int k) {
  float sum;
  ark_rows_dot<1>(w, k, x, k, &sum);
  return sum;
}
