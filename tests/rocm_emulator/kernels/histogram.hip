// Counting with atomics, on global memory and on LDS, of every width.
#define KERNEL extern "C" __global__ __launch_bounds__(256) void

KERNEL histogram_global(const uint8_t* x, unsigned* bins, int n) {
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    atomicAdd(bins + x[i], 1u);
}

KERNEL histogram_lds(const uint8_t* x, unsigned* bins, int n) {
  __shared__ unsigned local[256];
  unsigned t = threadIdx.x;
  local[t] = 0;
  __syncthreads();
  for (unsigned i = blockIdx.x * 256 + t; i < n; i += gridDim.x * 256)
    __hip_atomic_fetch_add(local + x[i], 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
  __syncthreads();
  if (local[t]) atomicAdd(bins + t, local[t]);
}

// The sums are exact in any order, because the values are small multiples of a power of two.
KERNEL histogram_float_cas(const uint8_t* key, const float* weight, unsigned* bins, int n) {
  unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  unsigned* bin = bins + (key[i] & 31);
  unsigned seen = __hip_atomic_load(bin, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT), old;
  do {
    old = seen;
    float sum = __builtin_bit_cast(float, old) + weight[i];
    seen = atomicCAS(bin, old, __builtin_bit_cast(unsigned, sum));
  } while (seen != old);
}

KERNEL lds_atomics(const int* x, int* out) {
  __shared__ int sum, least, most, bits, mixed;
  __shared__ uint64_t wide;
  unsigned t = threadIdx.x;
  if (t == 0) {
    sum = 0;
    least = 0x7fffffff;
    most = -0x7fffffff - 1;
    bits = 0;
    mixed = 0;
    wide = 0;
  }
  __syncthreads();
  int value = x[blockIdx.x * 256 + t];
  __hip_atomic_fetch_add(&sum, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
  __hip_atomic_fetch_min(&least, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
  __hip_atomic_fetch_max(&most, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
  __hip_atomic_fetch_or(&bits, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
  __hip_atomic_fetch_xor(&mixed, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
  __hip_atomic_fetch_add(&wide, (uint64_t)(unsigned)value, __ATOMIC_RELAXED,
                         __HIP_MEMORY_SCOPE_WORKGROUP);
  __syncthreads();
  if (t == 0) {
    int* o = out + blockIdx.x * 7;
    o[0] = sum;
    o[1] = least;
    o[2] = most;
    o[3] = bits;
    o[4] = mixed;
    o[5] = (int)wide;
    o[6] = (int)(wide >> 32);
  }
}

// Every thread takes a number from one counter; each number is taken exactly once.
KERNEL tickets(unsigned* counter, unsigned* owner) {
  unsigned ticket = atomicAdd(counter, 1u);
  owner[ticket] = blockIdx.x * blockDim.x + threadIdx.x + 1;
}

KERNEL radix_digits(const unsigned* x, unsigned* counts, int shift) {
  __shared__ unsigned local[16];
  unsigned t = threadIdx.x;
  if (t < 16) local[t] = 0;
  __syncthreads();
  __hip_atomic_fetch_add(local + (x[blockIdx.x * 256 + t] >> shift & 15), 1u, __ATOMIC_RELAXED,
                         __HIP_MEMORY_SCOPE_WORKGROUP);
  __syncthreads();
  if (t < 16) counts[t * gridDim.x + blockIdx.x] = local[t];
}
