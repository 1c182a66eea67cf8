// Definitions that a HIP kernel may use without any installed header: qualifiers, the built-in
// variables, barriers, fences, lane operations and atomics, over clang's __builtin_amdgcn_* and
// __hip_atomic_*. hiprtc programs and the package's own compile step include it first, as AMD's
// hiprtc does with its own header.
#pragma once

#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __host__ __attribute__((host))
#define __shared__ __attribute__((shared))
#define __constant__ __attribute__((constant))
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
// The attributes for __launch_bounds__: the number of threads in a block, and if there is a second
// argument, the least number of waves per SIMD.
#define ARK_BOUNDS_1(THREADS) __attribute__((amdgpu_flat_work_group_size(1, THREADS)))
#define ARK_BOUNDS_2(THREADS, WAVES) \
  ARK_BOUNDS_1(THREADS) __attribute__((amdgpu_waves_per_eu(WAVES)))
#define ARK_BOUNDS_PICK(_1, _2, NAME, ...) NAME
#define __launch_bounds__(...) \
  ARK_BOUNDS_PICK(__VA_ARGS__, ARK_BOUNDS_2, ARK_BOUNDS_1, )(__VA_ARGS__)
#define __restrict__ __restrict

#if defined(__GFX9__)
#define ARK_WAVE 64
typedef unsigned long long lane_mask;
#else
#define ARK_WAVE 32
typedef unsigned lane_mask;
#endif

typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
typedef __SIZE_TYPE__ size_t;

#define ARK_BUILTIN_VARIABLE(TYPE, NAME, X, Y, Z)                    \
  struct TYPE {                                                      \
    __declspec(property(get = get_x)) unsigned x;                    \
    __declspec(property(get = get_y)) unsigned y;                    \
    __declspec(property(get = get_z)) unsigned z;                    \
    __device__ static __forceinline__ unsigned get_x() { return X; } \
    __device__ static __forceinline__ unsigned get_y() { return Y; } \
    __device__ static __forceinline__ unsigned get_z() { return Z; } \
  };                                                                 \
  extern const __device__ __attribute__((weak)) TYPE NAME;

#define ARK_BLOCK_COUNT(I) \
  (((const __attribute__((address_space(4))) unsigned*)__builtin_amdgcn_implicitarg_ptr())[I])
ARK_BUILTIN_VARIABLE(ark_thread_index, threadIdx, __builtin_amdgcn_workitem_id_x(),
                     __builtin_amdgcn_workitem_id_y(), __builtin_amdgcn_workitem_id_z())
ARK_BUILTIN_VARIABLE(ark_block_index, blockIdx, __builtin_amdgcn_workgroup_id_x(),
                     __builtin_amdgcn_workgroup_id_y(), __builtin_amdgcn_workgroup_id_z())
ARK_BUILTIN_VARIABLE(ark_block_size, blockDim, __builtin_amdgcn_workgroup_size_x(),
                     __builtin_amdgcn_workgroup_size_y(), __builtin_amdgcn_workgroup_size_z())
ARK_BUILTIN_VARIABLE(ark_grid_size, gridDim, ARK_BLOCK_COUNT(0), ARK_BLOCK_COUNT(1),
                     ARK_BLOCK_COUNT(2))
#undef ARK_BUILTIN_VARIABLE
#undef ARK_BLOCK_COUNT

// A barrier with a fence on both sides: after it, every wave of the block sees what any of them
// wrote before it.
static __device__ __forceinline__ void __syncthreads() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
static __device__ __forceinline__ void __threadfence_block() {
  __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "workgroup");
}
static __device__ __forceinline__ void __threadfence() {
  __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "agent");
}
static __device__ __forceinline__ void __threadfence_system() {
  __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "");
}

// Lanes of a wave.
static __device__ __forceinline__ unsigned __lane_id() {
#if ARK_WAVE == 64
  return __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u));
#else
  return __builtin_amdgcn_mbcnt_lo(~0u, 0u);
#endif
}
static __device__ __forceinline__ lane_mask __ballot(int predicate) {
#if ARK_WAVE == 64
  return __builtin_amdgcn_ballot_w64(predicate != 0);
#else
  return __builtin_amdgcn_ballot_w32(predicate != 0);
#endif
}
static __device__ __forceinline__ int __popcll(uint64_t value) {
  return __builtin_popcountll(value);
}
static __device__ __forceinline__ int __popc(unsigned value) { return __builtin_popcount(value); }
template <class T>
__device__ __forceinline__ T ark_from_lane(T value, int lane) {
  static_assert(sizeof(T) % 4 == 0, "a lane exchange moves whole 32-bit words");
  union {
    T value;
    int word[sizeof(T) / 4];
  } from, to;
  from.value = value;
  for (unsigned i = 0; i < sizeof(T) / 4; ++i)
    to.word[i] = __builtin_amdgcn_ds_bpermute(lane * 4, from.word[i]);
  return to.value;
}
template <class T>
__device__ __forceinline__ T __shfl(T value, int lane) {
  return ark_from_lane(value, lane & (ARK_WAVE - 1));
}
template <class T>
__device__ __forceinline__ T __shfl_xor(T value, int mask) {
  return ark_from_lane(value, (int)__lane_id() ^ mask);
}
template <class T>
__device__ __forceinline__ T __shfl_up(T value, int delta) {
  int lane = (int)__lane_id();
  return ark_from_lane(value, lane < delta ? lane : lane - delta);
}
template <class T>
__device__ __forceinline__ T __shfl_down(T value, int delta) {
  int lane = (int)__lane_id();
  return ark_from_lane(value, lane + delta >= ARK_WAVE ? lane : lane + delta);
}

// Atomic functions under the names of HIP's headers: they are relaxed, have agent scope, and return
// the old value.
#define ARK_ATOMIC(NAME, BUILTIN)                                               \
  template <class T>                                                            \
  __device__ __forceinline__ T NAME(T* address, T value) {                      \
    return BUILTIN(address, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT); \
  }
ARK_ATOMIC(atomicAdd, __hip_atomic_fetch_add)
ARK_ATOMIC(atomicAnd, __hip_atomic_fetch_and)
ARK_ATOMIC(atomicOr, __hip_atomic_fetch_or)
ARK_ATOMIC(atomicXor, __hip_atomic_fetch_xor)
ARK_ATOMIC(atomicMin, __hip_atomic_fetch_min)
ARK_ATOMIC(atomicMax, __hip_atomic_fetch_max)
ARK_ATOMIC(atomicExch, __hip_atomic_exchange)
#undef ARK_ATOMIC
template <class T>
__device__ __forceinline__ T atomicCAS(T* address, T expected, T value) {
  __hip_atomic_compare_exchange_strong(address, &expected, value, __ATOMIC_RELAXED,
                                       __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  return expected;
}
