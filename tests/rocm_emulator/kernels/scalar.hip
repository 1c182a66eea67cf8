// Scalar loads of memory that changes while the kernel runs. Stores do not update the scalar cache,
// so it must be invalidated.
#define KERNEL extern "C" __global__ __launch_bounds__(256) void
#define AGENT __HIP_MEMORY_SCOPE_AGENT
#if defined(__GFX11__)
#define S_LOAD "s_load_b32 "
#else
#define S_LOAD "s_load_dword "
#endif

// In this form clang has the address in scalar registers also at -O0.
static __device__ __forceinline__ unsigned scalar_load(const unsigned* p) {
  unsigned value;
  asm volatile("s_mov_b32 s20, %1\n\ts_mov_b32 s21, %2\n\t" S_LOAD
               "%0, s[20:21], 0x0\n\ts_waitcnt lgkmcnt(0)"
               : "=&s"(value)
               : "s"(__builtin_amdgcn_readfirstlane((unsigned)(uint64_t)p)),
                 "s"(__builtin_amdgcn_readfirstlane((unsigned)((uint64_t)p >> 32)))
               : "memory", "s20", "s21");
  return value;
}
static __device__ __forceinline__ void clear_scalar_cache() {
  __builtin_amdgcn_s_dcache_inv();
  asm volatile("s_waitcnt lgkmcnt(0)" ::: "memory");
}
static __device__ __forceinline__ void wait_agent(const unsigned* counter, unsigned least) {
  while (__hip_atomic_load(counter, __ATOMIC_ACQUIRE, AGENT) < least) __builtin_amdgcn_s_sleep(1);
}

// In every round block 0 writes a page, and every wave of the other blocks reads it.
KERNEL scalar_page(unsigned* page, unsigned* posted, unsigned* taken, unsigned* out, int rounds) {
  unsigned t = threadIdx.x, readers = gridDim.x - 1, sum = 0;
  for (int r = 0; r < rounds; ++r) {
    if (blockIdx.x == 0) {
      if (t == 0) {
        wait_agent(taken, r * readers);
        page[r & 3] = r * r + 1;
        __hip_atomic_fetch_add(posted, 1u, __ATOMIC_RELEASE, AGENT);
      }
    } else {
      if (t == 0) wait_agent(posted, r + 1);
      __syncthreads();
      clear_scalar_cache();
      sum += scalar_load(page + (r & 3));
      __syncthreads();
      if (t == 0) __hip_atomic_fetch_add(taken, 1u, __ATOMIC_RELEASE, AGENT);
    }
    __syncthreads();
  }
  out[blockIdx.x * blockDim.x + t] = sum;
}

// One wave invalidates the scalar cache for its whole block, which runs on one compute unit.
KERNEL scalar_page_leader(unsigned* page, unsigned* posted, unsigned* taken, unsigned* out,
                          int rounds) {
  unsigned t = threadIdx.x, readers = gridDim.x - 1, sum = 0;
  for (int r = 0; r < rounds; ++r) {
    if (blockIdx.x == 0) {
      if (t == 0) {
        wait_agent(taken, r * readers);
        page[r & 3] = r * r + 1;
        __hip_atomic_fetch_add(posted, 1u, __ATOMIC_RELEASE, AGENT);
      }
    } else {
      if (t < ARK_WAVE) {
        if (t == 0) wait_agent(posted, r + 1);
        clear_scalar_cache();
      }
      __syncthreads();
      sum += scalar_load(page + (r & 3));
      __syncthreads();
      if (t == 0) __hip_atomic_fetch_add(taken, 1u, __ATOMIC_RELEASE, AGENT);
    }
    __syncthreads();
  }
  out[blockIdx.x * blockDim.x + t] = sum;
}

// Every block writes its own cache line and reads it back, twice.
KERNEL scalar_own(unsigned* lines, unsigned* out) {
  unsigned *line = lines + blockIdx.x * 16, sum = 0;
  for (int round = 0; round < 2; ++round) {
    if (threadIdx.x < 16) line[threadIdx.x] = blockIdx.x * 100 + threadIdx.x * (round + 1);
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent");
    __syncthreads();
    clear_scalar_cache();
    sum += scalar_load(line + 3) + scalar_load(line + 7);
    __syncthreads();
  }
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
