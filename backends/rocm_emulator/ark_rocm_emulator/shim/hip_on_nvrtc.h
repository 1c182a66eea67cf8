// Lets NVRTC compile device source of the ROCm dialect for an NVIDIA GPU, to test the dialect's
// synchronisation on hardware with a weak memory model. It defines clang's builtins for AMD
// (__hip_atomic_*, __builtin_amdgcn_*) with NVRTC's, and replaces the HIP headers. It does not test
// AMD code generation. Waves are 32 lanes wide. There are no matrix instructions: sources use them
// only if __AMDGCN__ is defined.
#pragma once

#define ARK_HIP_ON_NVRTC 1
#define ARK_WAVE 32

typedef unsigned lane_mask;
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;

// Memory orders and scopes have NVRTC's names. NVRTC's builtins accept only literals, so the
// dialect must pass these names and not variables or template parameters.
#define __ATOMIC_RELAXED __NV_ATOMIC_RELAXED
#define __ATOMIC_CONSUME __NV_ATOMIC_CONSUME
#define __ATOMIC_ACQUIRE __NV_ATOMIC_ACQUIRE
#define __ATOMIC_RELEASE __NV_ATOMIC_RELEASE
#define __ATOMIC_ACQ_REL __NV_ATOMIC_ACQ_REL
#define __ATOMIC_SEQ_CST __NV_ATOMIC_SEQ_CST
#define __HIP_MEMORY_SCOPE_SINGLETHREAD __NV_THREAD_SCOPE_THREAD
#define __HIP_MEMORY_SCOPE_WAVEFRONT __NV_THREAD_SCOPE_BLOCK
#define __HIP_MEMORY_SCOPE_WORKGROUP __NV_THREAD_SCOPE_BLOCK
#define __HIP_MEMORY_SCOPE_AGENT __NV_THREAD_SCOPE_DEVICE
#define __HIP_MEMORY_SCOPE_SYSTEM __NV_THREAD_SCOPE_SYSTEM

// HIP's atomic load accepts a pointer to const; NVRTC's does not, so the const is removed.
template <class T>
__device__ __forceinline__ T* ark_writable(const T* pointer) {
  return const_cast<T*>(pointer);
}
template <class T>
__device__ __forceinline__ T* ark_writable(const volatile T* pointer) {
  return const_cast<T*>(pointer);
}
#define __hip_atomic_load(P, O, S) __nv_atomic_load_n(ark_writable(P), O, S)
#define __hip_atomic_store(P, V, O, S) __nv_atomic_store_n(P, V, O, S)
#define __hip_atomic_exchange(P, V, O, S) __nv_atomic_exchange_n(P, V, O, S)
#define __hip_atomic_fetch_add(P, V, O, S) __nv_atomic_fetch_add(P, V, O, S)
#define __hip_atomic_fetch_sub(P, V, O, S) __nv_atomic_fetch_sub(P, V, O, S)
#define __hip_atomic_fetch_and(P, V, O, S) __nv_atomic_fetch_and(P, V, O, S)
#define __hip_atomic_fetch_or(P, V, O, S) __nv_atomic_fetch_or(P, V, O, S)
#define __hip_atomic_fetch_xor(P, V, O, S) __nv_atomic_fetch_xor(P, V, O, S)
#define __hip_atomic_fetch_min(P, V, O, S) __nv_atomic_fetch_min(P, V, O, S)
#define __hip_atomic_fetch_max(P, V, O, S) __nv_atomic_fetch_max(P, V, O, S)
#define __hip_atomic_compare_exchange_strong(P, E, V, O, F, S) \
  __nv_atomic_compare_exchange_n(P, E, V, false, O, F, S)
#define __hip_atomic_compare_exchange_weak(P, E, V, O, F, S) \
  __nv_atomic_compare_exchange_n(P, E, V, true, O, F, S)

// HIP's fence names its scope by a string: "" is the system. NVRTC has no scope smaller than a
// block, so smaller scopes become a block.
__device__ constexpr bool ark_same(const char* left, const char* right) {
  while (*left != 0 && *left == *right) ++left, ++right;
  return *left == *right;
}
__device__ constexpr int ark_scope(const char* name) {
  if (ark_same(name, "")) return __NV_THREAD_SCOPE_SYSTEM;
  if (ark_same(name, "agent")) return __NV_THREAD_SCOPE_DEVICE;
  if (ark_same(name, "workgroup") || ark_same(name, "wavefront")) return __NV_THREAD_SCOPE_BLOCK;
  return -1;
}
#define __builtin_amdgcn_fence(ORDER, SCOPE)                           \
  do {                                                                 \
    constexpr int ark_fence_scope = ark_scope(SCOPE);                  \
    static_assert(ark_fence_scope >= 0, "a fence of unknown scope");   \
    if (ark_fence_scope == __NV_THREAD_SCOPE_SYSTEM) {                 \
      __nv_atomic_thread_fence(ORDER, __NV_THREAD_SCOPE_SYSTEM);       \
    } else if (ark_fence_scope == __NV_THREAD_SCOPE_DEVICE) {          \
      __nv_atomic_thread_fence(ORDER, __NV_THREAD_SCOPE_DEVICE);       \
    } else {                                                           \
      __nv_atomic_thread_fence(ORDER, __NV_THREAD_SCOPE_BLOCK);        \
    }                                                                  \
  } while (0)

// Functions that wait or read the time. The argument of a sleep is in units of 64 clocks; a
// nanosecond is about two clocks.
#define __builtin_amdgcn_s_barrier() __syncthreads()
#define __builtin_amdgcn_wave_barrier() __syncwarp()
#define __builtin_amdgcn_s_sleep(N) __nanosleep(32u * (N))
#define __builtin_amdgcn_s_waitcnt(N) __threadfence_block()
#define __builtin_amdgcn_s_setprio(N) ((void)0)
#define __builtin_amdgcn_s_memtime() ((unsigned long long)clock64())
#define __builtin_readcyclecounter() ((unsigned long long)clock64())
__device__ __forceinline__ unsigned long long ark_global_time() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
#define __builtin_amdgcn_s_memrealtime() ark_global_time()
#define __builtin_readsteadycounter() ark_global_time()
#define __builtin_amdgcn_s_trap(N) __trap()
#define __builtin_amdgcn_endpgm() asm volatile("exit;")

// The position of a thread.
#define __builtin_amdgcn_workitem_id_x() threadIdx.x
#define __builtin_amdgcn_workitem_id_y() threadIdx.y
#define __builtin_amdgcn_workitem_id_z() threadIdx.z
#define __builtin_amdgcn_workgroup_id_x() blockIdx.x
#define __builtin_amdgcn_workgroup_id_y() blockIdx.y
#define __builtin_amdgcn_workgroup_id_z() blockIdx.z
#define __builtin_amdgcn_workgroup_size_x() blockDim.x
#define __builtin_amdgcn_workgroup_size_y() blockDim.y
#define __builtin_amdgcn_workgroup_size_z() blockDim.z
#define __builtin_amdgcn_grid_size_x() (gridDim.x * blockDim.x)
#define __builtin_amdgcn_wavefrontsize() 32u

// Exchanges between lanes. HIP's functions have no mask argument: they exchange among the active
// lanes.
__device__ __forceinline__ unsigned ark_lanes_below() {
  unsigned mask;
  asm volatile("mov.u32 %0, %%lanemask_lt;" : "=r"(mask));
  return mask;
}
#define __builtin_amdgcn_mbcnt_lo(MASK, SUM) ((unsigned)__popc((MASK) & ark_lanes_below()) + (SUM))
#define __builtin_amdgcn_mbcnt_hi(MASK, SUM) ((unsigned)(SUM))
#define __builtin_amdgcn_ballot_w32(P) __ballot_sync(__activemask(), P)
#define __builtin_amdgcn_readlane(V, LANE) __shfl_sync(__activemask(), V, LANE)
#define __builtin_amdgcn_readfirstlane(V) \
  __shfl_sync(__activemask(), V, __ffs((int)__activemask()) - 1)
#define __builtin_amdgcn_ds_bpermute(INDEX, V) __shfl_sync(__activemask(), V, ((INDEX) >> 2) & 31)
#define __lane_id() __builtin_amdgcn_mbcnt_lo(~0u, 0u)
#define __ballot(P) __ballot_sync(__activemask(), P)
#define __shfl(V, LANE) __shfl_sync(__activemask(), V, LANE)
#define __shfl_xor(V, MASK) __shfl_xor_sync(__activemask(), V, MASK)
#define __shfl_up(V, DELTA) __shfl_up_sync(__activemask(), V, DELTA)
#define __shfl_down(V, DELTA) __shfl_down_sync(__activemask(), V, DELTA)

// Arithmetic functions: clang's builtins, and functions for which AMD has a single instruction.
#define __builtin_fmaf(A, B, C) fmaf(A, B, C)
#define __builtin_fmaxf(A, B) fmaxf(A, B)
#define __builtin_fminf(A, B) fminf(A, B)
#define __builtin_fabsf(A) fabsf(A)
#define __builtin_sqrtf(A) sqrtf(A)
#define __builtin_floorf(A) floorf(A)
#define __builtin_rintf(A) rintf(A)
#define __builtin_inff() __int_as_float(0x7f800000)
#define __builtin_amdgcn_rcpf(X) __frcp_rn(X)
#define __builtin_amdgcn_rsqf(X) rsqrtf(X)
#define __builtin_amdgcn_sqrtf(X) sqrtf(X)
#define __builtin_amdgcn_exp2f(X) exp2f(X)
#define __builtin_amdgcn_logf(X) log2f(X)
#define __builtin_amdgcn_perm(A, B, SELECT) __byte_perm(B, A, SELECT)
#define __builtin_popcount(X) __popc(X)
#define __builtin_popcountll(X) __popcll(X)
