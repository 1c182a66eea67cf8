// Reductions by LDS, exchanges between lanes, DPP, atomics, and by the block that ends last.
#define KERNEL extern "C" __global__ __launch_bounds__(256) void

KERNEL block_sum(const float* x, float* out) {
  __shared__ float part[256];
  unsigned t = threadIdx.x;
  part[t] = x[blockIdx.x * 256 + t];
  __syncthreads();
  for (unsigned half = 128; half > 0; half /= 2) {
    if (t < half) part[t] += part[t + half];
    __syncthreads();
  }
  if (t == 0) out[blockIdx.x] = part[0];
}

KERNEL wave_sum_shuffle(const float* x, float* out) {
  unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  float sum = x[i];
  for (int mask = ARK_WAVE / 2; mask > 0; mask /= 2) sum += __shfl_xor(sum, mask);
  if (__lane_id() == 0) out[i / ARK_WAVE] = sum;
}

// Adds up each row of 16 lanes by DPP row rotations, then the rows by reading single lanes.
KERNEL wave_sum_dpp(const int* x, int* out) {
  unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  int sum = x[i];
  sum += __builtin_amdgcn_update_dpp(0, sum, 0x128, 0xf, 0xf, true);  // row_ror:8
  sum += __builtin_amdgcn_update_dpp(0, sum, 0x124, 0xf, 0xf, true);  // row_ror:4
  sum += __builtin_amdgcn_update_dpp(0, sum, 0x4e, 0xf, 0xf, true);   // quad_perm:[2,3,0,1]
  sum += __builtin_amdgcn_update_dpp(0, sum, 0xb1, 0xf, 0xf, true);   // quad_perm:[1,0,3,2]
  int total = 0;
  for (int row = 0; row < ARK_WAVE; row += 16) total += __builtin_amdgcn_readlane(sum, row);
  if (__lane_id() == 0) out[i / ARK_WAVE] = total;
}

KERNEL shift_dpp(const int* x, int* out) {
  unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  out[4 * i] = __builtin_amdgcn_update_dpp(-1, x[i], 0x111, 0xf, 0xf,
                                           false);      // row_shr:1 keeps the old value
  out[4 * i + 1] =
      __builtin_amdgcn_update_dpp(-1, x[i], 0x102, 0xf, 0xf, true);   // row_shl:2 writes zero
  out[4 * i + 2] = __builtin_amdgcn_update_dpp(-1, x[i], 0x140, 0xf, 0xf, false);  // row_mirror
  out[4 * i + 3] = __builtin_amdgcn_update_dpp(-1, x[i], 0x141, 0xa, 0xf,
                                               false);  // row_half_mirror, rows 1 and 3
}

KERNEL swizzle_groups(const int* x, int* out) {
  unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  out[2 * i] = __builtin_amdgcn_ds_swizzle(x[i], 0x041f);      // xor 1 within 32
  out[2 * i + 1] = __builtin_amdgcn_ds_swizzle(x[i], 0x80b1);  // quad permute [1,0,3,2]
}

KERNEL grid_sum_atomic(const int* x, int* total, int n) {
  unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) atomicAdd(total, x[i]);
}

KERNEL extremes_atomic(const int* x, int* least, int* most, unsigned* umost, int n) {
  unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  atomicMin(least, x[i]);
  atomicMax(most, x[i]);
  atomicMax(umost, (unsigned)x[i]);
}

// The value is in the high half of a word and the index in the low one, so a single 64-bit maximum
// finds both.
KERNEL argmax_packed(const unsigned* x, uint64_t* best, int n) {
  unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) atomicMax(best, (uint64_t)x[i] << 32 | (0xffffffffu - i));
}

// Every block stores a partial sum; the block that increments the counter last adds them up.
KERNEL last_block_sum(const float* x, float* partial, unsigned* arrived, float* out, int n) {
  __shared__ float part[256];
  __shared__ bool last;
  unsigned t = threadIdx.x;
  float sum = 0;
  for (unsigned i = blockIdx.x * 256 + t; i < n; i += gridDim.x * 256) sum += x[i];
  part[t] = sum;
  __syncthreads();
  for (unsigned half = 128; half > 0; half /= 2) {
    if (t < half) part[t] += part[t + half];
    __syncthreads();
  }
  if (t == 0) {
    partial[blockIdx.x] = part[0];
    unsigned before =
        __hip_atomic_fetch_add(arrived, 1u, __ATOMIC_ACQ_REL, __HIP_MEMORY_SCOPE_AGENT);
    last = before + 1 == gridDim.x;
  }
  __syncthreads();
  if (last && t == 0) {
    float total = 0;
    for (unsigned b = 0; b < gridDim.x; ++b) total += partial[b];
    *out = total;
  }
}

KERNEL softmax_rows(const float* x, float* y, int columns) {
  __shared__ float part[256];
  unsigned t = threadIdx.x;
  const float* row = x + blockIdx.x * columns;
  float most = -__builtin_inff();
  for (unsigned c = t; c < columns; c += 256) most = __builtin_fmaxf(most, row[c]);
  part[t] = most;
  __syncthreads();
  for (unsigned half = 128; half > 0; half /= 2) {
    if (t < half) part[t] = __builtin_fmaxf(part[t], part[t + half]);
    __syncthreads();
  }
  most = part[0];
  __syncthreads();
  float sum = 0;
  for (unsigned c = t; c < columns; c += 256)
    sum += __builtin_amdgcn_exp2f(1.4426950408889634f * (row[c] - most));
  part[t] = sum;
  __syncthreads();
  for (unsigned half = 128; half > 0; half /= 2) {
    if (t < half) part[t] += part[t + half];
    __syncthreads();
  }
  for (unsigned c = t; c < columns; c += 256)
    y[blockIdx.x * columns + c] =
        __builtin_amdgcn_exp2f(1.4426950408889634f * (row[c] - most)) / part[0];
}

KERNEL rms_norm(const float* x, const float* weight, float* y, int columns, float epsilon) {
  __shared__ float wave_part[256 / ARK_WAVE];
  unsigned t = threadIdx.x;
  const float* row = x + blockIdx.x * columns;
  float sum = 0;
  for (unsigned c = t; c < columns; c += 256) sum += row[c] * row[c];
  for (int mask = ARK_WAVE / 2; mask > 0; mask /= 2) sum += __shfl_xor(sum, mask);
  if (__lane_id() == 0) wave_part[t / ARK_WAVE] = sum;
  __syncthreads();
  sum = 0;
  for (unsigned w = 0; w < 256 / ARK_WAVE; ++w) sum += wave_part[w];
  float scale = __builtin_amdgcn_rsqf(sum / columns + epsilon);
  for (unsigned c = t; c < columns; c += 256)
    y[blockIdx.x * columns + c] = row[c] * scale * weight[c];
}

KERNEL dot_f64(const double* a, const double* b, double* out, int n) {
  __shared__ double part[256];
  unsigned t = threadIdx.x;
  double sum = 0;
  for (unsigned i = t; i < n; i += 256) sum = __builtin_fma(a[i], b[i], sum);
  part[t] = sum;
  __syncthreads();
  for (unsigned half = 128; half > 0; half /= 2) {
    if (t < half) part[t] += part[t + half];
    __syncthreads();
  }
  if (t == 0) *out = part[0];
}

KERNEL votes(const int* x, uint64_t* ballots, int* answers) {
  unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  lane_mask some = __ballot(x[i] > 0);
  if (__lane_id() == 0) {
    ballots[i / ARK_WAVE] = some;
    answers[i / ARK_WAVE] =
        (some != 0) | (some == (lane_mask) ~(lane_mask)0) << 1 | __popcll(some) << 2;
  }
}
