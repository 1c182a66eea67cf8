// Matrix products on RDNA3 by v_wmma 16x16x16; a wave of 32 lanes computes a tile. Lanes 16 to 31
// hold the same rows of A and columns of B as lanes 0 to 15. Accumulator element i of a lane is in
// row 2 * i + lane / 16 and column lane % 16.
#define KERNEL extern "C" __global__ __launch_bounds__(32) void
#if defined(__gfx1100__)
typedef float float8 __attribute__((ext_vector_type(8)));
typedef int int8 __attribute__((ext_vector_type(8)));
typedef int int4 __attribute__((ext_vector_type(4)));
typedef _Float16 half16 __attribute__((ext_vector_type(16)));
typedef short short16 __attribute__((ext_vector_type(16)));

template <class T, class V>
static __device__ __forceinline__ void store_tile(T* c, int n, V sum) {
  int lane = threadIdx.x;
  for (int i = 0; i < 8; ++i)
    c[(blockIdx.y * 16 + 2 * i + lane / 16) * n + blockIdx.x * 16 + lane % 16] = sum[i];
}

KERNEL wmma_half(const _Float16* a, const _Float16* b, float* c, int n, int k) {
  int lane = threadIdx.x, row = blockIdx.y * 16 + lane % 16, column = blockIdx.x * 16 + lane % 16;
  float8 sum = 0;
  for (int s = 0; s < k; s += 16) {
    half16 left, right;
    for (int j = 0; j < 16; ++j) {
      left[j] = a[row * k + s + j];
      right[j] = b[(s + j) * n + column];
    }
    sum = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(left, right, sum);
  }
  store_tile(c, n, sum);
}

KERNEL wmma_bf16(const short* a, const short* b, float* c, int n, int k) {
  int lane = threadIdx.x, row = blockIdx.y * 16 + lane % 16, column = blockIdx.x * 16 + lane % 16;
  float8 sum = 0;
  for (int s = 0; s < k; s += 16) {
    short16 left, right;
    for (int j = 0; j < 16; ++j) {
      left[j] = a[row * k + s + j];
      right[j] = b[(s + j) * n + column];
    }
    sum = __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(left, right, sum);
  }
  store_tile(c, n, sum);
}

KERNEL wmma_int8(const signed char* a, const signed char* b, int* c, int n, int k) {
  int lane = threadIdx.x, row = blockIdx.y * 16 + lane % 16, column = blockIdx.x * 16 + lane % 16;
  int8 sum = 0;
  for (int s = 0; s < k; s += 16) {
    int4 left = 0, right = 0;
    for (int j = 0; j < 16; ++j) {
      left[j / 4] |= (int)(uint8_t)a[row * k + s + j] << 8 * (j % 4);
      right[j / 4] |= (int)(uint8_t)b[(s + j) * n + column] << 8 * (j % 4);
    }
    sum = __builtin_amdgcn_wmma_i32_16x16x16_iu8_w32(true, left, true, right, sum, false);
  }
  store_tile(c, n, sum);
}
#endif
