// Prefix sums, and algorithms that use them: compaction, segments, sorting.
#define KERNEL extern "C" __global__ __launch_bounds__(256) void

KERNEL block_scan(const int* x, int* out) {
  __shared__ int line[2][256];
  unsigned t = threadIdx.x, side = 0;
  line[0][t] = x[blockIdx.x * 256 + t];
  __syncthreads();
  for (unsigned step = 1; step < 256; step *= 2) {
    line[1 - side][t] = line[side][t] + (t >= step ? line[side][t - step] : 0);
    side = 1 - side;
    __syncthreads();
  }
  out[blockIdx.x * 256 + t] = line[side][t];
}

KERNEL wave_scan(const float* x, float* out) {
  unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  float sum = x[i];
  for (int step = 1; step < ARK_WAVE; step *= 2) {
    float left = __shfl_up(sum, step);
    if ((int)__lane_id() >= step) sum += left;
  }
  out[i] = sum;
}

// Block b waits for the running total of block b - 1: total and flag travel in one 64-bit word.
KERNEL chained_scan(const int* x, int* out, uint64_t* state) {
  __shared__ int line[256];
  __shared__ int before;
  unsigned t = threadIdx.x, b = blockIdx.x;
  line[t] = x[b * 256 + t];
  __syncthreads();
  for (unsigned step = 1; step < 256; step *= 2) {
    int left = t >= step ? line[t - step] : 0;
    __syncthreads();
    line[t] += left;
    __syncthreads();
  }
  if (t == 0) {
    uint64_t seen = 1ull << 32;
    if (b > 0) {
      while (
          ((seen = __hip_atomic_load(state + b - 1, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_AGENT)) >>
           32) == 0)
        __builtin_amdgcn_s_sleep(1);
    }
    before = (int)(unsigned)seen;
    uint64_t mine = 1ull << 32 | (unsigned)(before + line[255]);
    __hip_atomic_store(state + b, mine, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_AGENT);
  }
  __syncthreads();
  out[b * 256 + t] = before + line[t];
}

KERNEL segmented_scan(const int* x, const int* head, int* out) {
  __shared__ int value[256], flag[256];
  unsigned t = threadIdx.x, i = blockIdx.x * 256 + t;
  value[t] = x[i];
  flag[t] = head[i] || t == 0;
  __syncthreads();
  for (unsigned step = 1; step < 256; step *= 2) {
    int left = 0, left_flag = 1;
    if (t >= step) {
      left = value[t - step];
      left_flag = flag[t - step];
    }
    __syncthreads();
    if (t >= step && !flag[t]) {
      value[t] += left;
      flag[t] = left_flag;
    }
    __syncthreads();
  }
  out[i] = value[t];
}

// Keeps the odd numbers, in order. A ballot gives a number's place within its wave, LDS that of the
// wave.
KERNEL compact_odd(const int* x, int* out, int* counts) {
  __shared__ int start[256 / ARK_WAVE + 1];
  unsigned t = threadIdx.x, wave = t / ARK_WAVE, lane = __lane_id();
  int value = x[blockIdx.x * 256 + t];
  lane_mask kept = __ballot(value & 1);
  if (lane == 0) start[wave + 1] = __popcll(kept);
  __syncthreads();
  if (t == 0) {
    start[0] = 0;
    for (unsigned w = 0; w < 256 / ARK_WAVE; ++w) start[w + 1] += start[w];
    counts[blockIdx.x] = start[256 / ARK_WAVE];
  }
  __syncthreads();
  if (value & 1) {
    lane_mask below = kept & (((lane_mask)1 << lane) - 1);
    out[blockIdx.x * 256 + start[wave] + __popcll(below)] = value;
  }
}

KERNEL bitonic_sort(const int* x, int* out) {
  __shared__ int line[256];
  unsigned t = threadIdx.x;
  line[t] = x[blockIdx.x * 256 + t];
  __syncthreads();
  for (unsigned size = 2; size <= 256; size *= 2) {
    for (unsigned stride = size / 2; stride > 0; stride /= 2) {
      unsigned other = t ^ stride;
      if (other > t) {
        int a = line[t], b = line[other];
        if ((a > b) == ((t & size) == 0)) {
          line[t] = b;
          line[other] = a;
        }
      }
      __syncthreads();
    }
  }
  out[blockIdx.x * 256 + t] = line[t];
}
