// Matrix products on the matrix cores of CDNA: one wave computes one tile of C = A B, K steps at a
// time. A is [M][K], B is [K][N], C is [M][N], all row-major. A block is one wave; blockIdx selects
// its tile.
#define KERNEL extern "C" __global__ __launch_bounds__(64) void
typedef float float4 __attribute__((ext_vector_type(4)));
typedef float float16 __attribute__((ext_vector_type(16)));
typedef int int4 __attribute__((ext_vector_type(4)));
typedef _Float16 half4 __attribute__((ext_vector_type(4)));
typedef _Float16 half8 __attribute__((ext_vector_type(8)));
typedef short short4 __attribute__((ext_vector_type(4)));
typedef double double4 __attribute__((ext_vector_type(4)));

// The place of a lane's accumulator element i in a 32x32 tile: row 8 * (i / 4) + 4 * (lane / 32) +
// i % 4, column lane % 32.
template <class V>
static __device__ __forceinline__ void store_32x32(float* c, int n, V sum) {
  int lane = threadIdx.x;
  for (int i = 0; i < 16; ++i)
    c[(blockIdx.y * 32 + 8 * (i / 4) + 4 * (lane / 32) + i % 4) * n + blockIdx.x * 32 + lane % 32] =
        sum[i];
}
// The same for a 16x16 tile: row 4 * (lane / 16) + i, column lane % 16.
template <class T, class V>
static __device__ __forceinline__ void store_16x16(T* c, int n, V sum) {
  int lane = threadIdx.x;
  for (int i = 0; i < 4; ++i)
    c[(blockIdx.y * 16 + 4 * (lane / 16) + i) * n + blockIdx.x * 16 + lane % 16] = sum[i];
}

KERNEL mfma_f32_32x32(const float* a, const float* b, float* c, int n, int k) {
  int lane = threadIdx.x, row = blockIdx.y * 32 + lane % 32, column = blockIdx.x * 32 + lane % 32;
  float16 sum = 0;
  for (int s = lane / 32; s < k; s += 2)
    sum = __builtin_amdgcn_mfma_f32_32x32x2f32(a[row * k + s], b[s * n + column], sum, 0, 0, 0);
  store_32x32(c, n, sum);
}

KERNEL mfma_f32_16x16(const float* a, const float* b, float* c, int n, int k) {
  int lane = threadIdx.x, row = blockIdx.y * 16 + lane % 16, column = blockIdx.x * 16 + lane % 16;
  float4 sum = 0;
  for (int s = lane / 16; s < k; s += 4)
    sum = __builtin_amdgcn_mfma_f32_16x16x4f32(a[row * k + s], b[s * n + column], sum, 0, 0, 0);
  store_16x16(c, n, sum);
}

KERNEL mfma_half_32x32(const _Float16* a, const _Float16* b, float* c, int n, int k) {
  int lane = threadIdx.x, row = blockIdx.y * 32 + lane % 32, column = blockIdx.x * 32 + lane % 32;
  float16 sum = 0;
  for (int s = lane / 32 * 4; s < k; s += 8) {
    half4 left, right;
    for (int j = 0; j < 4; ++j) {
      left[j] = a[row * k + s + j];
      right[j] = b[(s + j) * n + column];
    }
    sum = __builtin_amdgcn_mfma_f32_32x32x8f16(left, right, sum, 0, 0, 0);
  }
  store_32x32(c, n, sum);
}

KERNEL mfma_half_16x16(const _Float16* a, const _Float16* b, float* c, int n, int k) {
  int lane = threadIdx.x, row = blockIdx.y * 16 + lane % 16, column = blockIdx.x * 16 + lane % 16;
  float4 sum = 0;
  for (int s = lane / 16 * 4; s < k; s += 16) {
    half4 left, right;
    for (int j = 0; j < 4; ++j) {
      left[j] = a[row * k + s + j];
      right[j] = b[(s + j) * n + column];
    }
    sum = __builtin_amdgcn_mfma_f32_16x16x16f16(left, right, sum, 0, 0, 0);
  }
  store_16x16(c, n, sum);
}

KERNEL mfma_bf16_32x32(const short* a, const short* b, float* c, int n, int k) {
  int lane = threadIdx.x, row = blockIdx.y * 32 + lane % 32, column = blockIdx.x * 32 + lane % 32;
  float16 sum = 0;
  for (int s = lane / 32 * 4; s < k; s += 8) {
    short4 left, right;
    for (int j = 0; j < 4; ++j) {
      left[j] = a[row * k + s + j];
      right[j] = b[(s + j) * n + column];
    }
    sum = __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(left, right, sum, 0, 0, 0);
  }
  store_32x32(c, n, sum);
}

KERNEL mfma_bf16_16x16(const short* a, const short* b, float* c, int n, int k) {
  int lane = threadIdx.x, row = blockIdx.y * 16 + lane % 16, column = blockIdx.x * 16 + lane % 16;
  float4 sum = 0;
  for (int s = lane / 16 * 4; s < k; s += 16) {
    short4 left, right;
    for (int j = 0; j < 4; ++j) {
      left[j] = a[row * k + s + j];
      right[j] = b[(s + j) * n + column];
    }
    sum = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(left, right, sum, 0, 0, 0);
  }
  store_16x16(c, n, sum);
}

KERNEL mfma_f64_16x16(const double* a, const double* b, double* c, int n, int k) {
  int lane = threadIdx.x, row = blockIdx.y * 16 + lane % 16, column = blockIdx.x * 16 + lane % 16;
  double4 sum = 0;
  for (int s = lane / 16; s < k; s += 4)
    sum = __builtin_amdgcn_mfma_f64_16x16x4f64(a[row * k + s], b[s * n + column], sum, 0, 0, 0);
  for (int i = 0; i < 4; ++i) c[(blockIdx.y * 16 + lane / 16 + 4 * i) * n + column] = sum[i];
}

// Eight-bit operands: in each step over k a lane has 8 bytes on gfx942 and gfx950, 4 on gfx90a.
KERNEL mfma_int8_16x16(const signed char* a, const signed char* b, int* c, int n, int k) {
  int lane = threadIdx.x, row = blockIdx.y * 16 + lane % 16, column = blockIdx.x * 16 + lane % 16;
  int4 sum = 0;
#if defined(__gfx90a__)
  for (int s = lane / 16 * 4; s < k; s += 16) {
    unsigned left = 0, right = 0;
    for (int j = 0; j < 4; ++j) {
      left |= (unsigned)(uint8_t)a[row * k + s + j] << 8 * j;
      right |= (unsigned)(uint8_t)b[(s + j) * n + column] << 8 * j;
    }
    sum = __builtin_amdgcn_mfma_i32_16x16x16i8((int)left, (int)right, sum, 0, 0, 0);
  }
#else
  for (int s = lane / 16 * 8; s < k; s += 32) {
    uint64_t left = 0, right = 0;
    for (int j = 0; j < 8; ++j) {
      left |= (uint64_t)(uint8_t)a[row * k + s + j] << 8 * j;
      right |= (uint64_t)(uint8_t)b[(s + j) * n + column] << 8 * j;
    }
    sum = __builtin_amdgcn_mfma_i32_16x16x32_i8((long)left, (long)right, sum, 0, 0, 0);
  }
#endif
  store_16x16(c, n, sum);
}

#if defined(__gfx942__) || defined(__gfx950__)
KERNEL mfma_fp8_16x16(const uint8_t* a, const uint8_t* b, float* c, int n, int k) {
  int lane = threadIdx.x, row = blockIdx.y * 16 + lane % 16, column = blockIdx.x * 16 + lane % 16;
  float4 sum = 0;
  for (int s = lane / 16 * 8; s < k; s += 32) {
    uint64_t left = 0, right = 0;
    for (int j = 0; j < 8; ++j) {
      left |= (uint64_t)a[row * k + s + j] << 8 * j;
      right |= (uint64_t)b[(s + j) * n + column] << 8 * j;
    }
    sum = __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8((long)left, (long)right, sum, 0, 0, 0);
  }
  store_16x16(c, n, sum);
}

KERNEL mfma_fp8_32x32(const uint8_t* a, const uint8_t* b, float* c, int n, int k) {
  int lane = threadIdx.x, row = blockIdx.y * 32 + lane % 32, column = blockIdx.x * 32 + lane % 32;
  float16 sum = 0;
  for (int s = lane / 32 * 8; s < k; s += 16) {
    uint64_t left = 0, right = 0;
    for (int j = 0; j < 8; ++j) {
      left |= (uint64_t)a[row * k + s + j] << 8 * j;
      right |= (uint64_t)b[(s + j) * n + column] << 8 * j;
    }
    sum = __builtin_amdgcn_mfma_f32_32x32x16_fp8_bf8((long)left, (long)right, sum, 0, 0, 0);
  }
  store_32x32(c, n, sum);
}

KERNEL fp8_round_trip(const float* x, unsigned* packed, float* back, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  int word = __builtin_amdgcn_cvt_pk_fp8_f32(x[2 * i], x[2 * i + 1], 0, false);
  word = __builtin_amdgcn_cvt_pk_bf8_f32(x[2 * i], x[2 * i + 1], word, true);
  packed[i] = word;
  back[4 * i] = __builtin_amdgcn_cvt_f32_fp8(word, 0);
  back[4 * i + 1] = __builtin_amdgcn_cvt_f32_fp8(word, 1);
  back[4 * i + 2] = __builtin_amdgcn_cvt_f32_bf8(word, 2);
  back[4 * i + 3] = __builtin_amdgcn_cvt_f32_bf8(word, 3);
}
#endif

#if defined(__gfx950__)
KERNEL mfma_half_16x16x32(const _Float16* a, const _Float16* b, float* c, int n, int k) {
  int lane = threadIdx.x, row = blockIdx.y * 16 + lane % 16, column = blockIdx.x * 16 + lane % 16;
  float4 sum = 0;
  for (int s = lane / 16 * 8; s < k; s += 32) {
    half8 left, right;
    for (int j = 0; j < 8; ++j) {
      left[j] = a[row * k + s + j];
      right[j] = b[(s + j) * n + column];
    }
    sum = __builtin_amdgcn_mfma_f32_16x16x32_f16(left, right, sum, 0, 0, 0);
  }
  store_16x16(c, n, sum);
}
#endif
