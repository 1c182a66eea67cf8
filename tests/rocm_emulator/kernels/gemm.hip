// Matrix products without matrix instructions. C[m][n] = sum over k of A[m][k] * B[k][n],
// row-major.
#define KERNEL extern "C" __global__ __launch_bounds__(256) void

KERNEL gemm_naive(const float* a, const float* b, float* c, int m, int n, int k) {
  int column = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y * blockDim.y + threadIdx.y;
  if (row >= m || column >= n) return;
  float sum = 0;
  for (int i = 0; i < k; ++i) sum = __builtin_fmaf(a[row * k + i], b[i * n + column], sum);
  c[row * n + column] = sum;
}

KERNEL gemm_tiled(const float* a, const float* b, float* c, int m, int n, int k) {
  __shared__ float left[16][16], right[16][16];
  int tx = threadIdx.x, ty = threadIdx.y, column = blockIdx.x * 16 + tx, row = blockIdx.y * 16 + ty;
  float sum = 0;
  for (int start = 0; start < k; start += 16) {
    left[ty][tx] = row < m && start + tx < k ? a[row * k + start + tx] : 0.0f;
    right[ty][tx] = start + ty < k && column < n ? b[(start + ty) * n + column] : 0.0f;
    __syncthreads();
    for (int i = 0; i < 16; ++i) sum = __builtin_fmaf(left[ty][i], right[i][tx], sum);
    __syncthreads();
  }
  if (row < m && column < n) c[row * n + column] = sum;
}

// Each thread computes four results with operands in registers. LDS is double-buffered, so that a
// step has one barrier.
KERNEL gemm_double_buffered(const float* a, const float* b, float* c, int n, int k) {
  __shared__ float left[2][32][9], right[2][8][33];
  int t = threadIdx.x, column = t % 32, row = t / 32 * 4;
  int block_row = blockIdx.y * 32, block_column = blockIdx.x * 32;
  float sum[4] = {0, 0, 0, 0};
  left[0][t / 8][t % 8] = a[(block_row + t / 8) * k + t % 8];
  right[0][t / 32][t % 32] = b[(t / 32) * n + block_column + t % 32];
  __syncthreads();
  for (int start = 0, side = 0; start < k; start += 8, side = 1 - side) {
    if (start + 8 < k) {
      left[1 - side][t / 8][t % 8] = a[(block_row + t / 8) * k + start + 8 + t % 8];
      right[1 - side][t / 32][t % 32] = b[(start + 8 + t / 32) * n + block_column + t % 32];
    }
    for (int i = 0; i < 8; ++i)
      for (int r = 0; r < 4; ++r)
        sum[r] = __builtin_fmaf(left[side][row + r][i], right[side][i][column], sum[r]);
    __syncthreads();
  }
  for (int r = 0; r < 4; ++r) c[(block_row + row + r) * n + block_column + column] = sum[r];
}

KERNEL gemv_bf16(const __bf16* a, const __bf16* x, float* y, int columns) {
  float sum = 0;
  for (unsigned c = __lane_id(); c < columns; c += ARK_WAVE)
    sum = __builtin_fmaf((float)a[blockIdx.x * columns + c], (float)x[c], sum);
  for (int mask = ARK_WAVE / 2; mask > 0; mask /= 2) sum += __shfl_xor(sum, mask);
  if (threadIdx.x == 0) y[blockIdx.x] = sum;
}

typedef _Float16 half2 __attribute__((ext_vector_type(2)));
KERNEL gemv_half_dot(const half2* a, const half2* x, float* y, int pairs) {
  float sum = 0;
  for (unsigned c = __lane_id(); c < pairs; c += ARK_WAVE)
    sum = __builtin_amdgcn_fdot2(a[blockIdx.x * pairs + c], x[c], sum, false);
  for (int mask = ARK_WAVE / 2; mask > 0; mask /= 2) sum += __shfl_xor(sum, mask);
  if (threadIdx.x == 0) y[blockIdx.x] = sum;
}

KERNEL gemv_int8_dot(const int* a, const int* x, int* y, int quads) {
  int sum = 0;
  for (unsigned c = __lane_id(); c < quads; c += ARK_WAVE)
#if ARK_WAVE == 64
    sum = __builtin_amdgcn_sdot4(a[blockIdx.x * quads + c], x[c], sum, false);
#else
    sum = __builtin_amdgcn_sudot4(true, a[blockIdx.x * quads + c], true, x[c], sum, false);
#endif
  for (int mask = ARK_WAVE / 2; mask > 0; mask /= 2) sum += __shfl_xor(sum, mask);
  if (threadIdx.x == 0) y[blockIdx.x] = sum;
}
