// One thread, one element: arithmetic in every type, conversions, and control flow that diverges.
#define KERNEL extern "C" __global__ __launch_bounds__(256) void
#define HERE (blockIdx.x * blockDim.x + threadIdx.x)

KERNEL saxpy(float a, const float* x, float* y, int n) {
  unsigned i = HERE;
  if (i < n) y[i] = __builtin_fmaf(a, x[i], y[i]);
}

typedef _Float16 half2 __attribute__((ext_vector_type(2)));
KERNEL axpy_half2(_Float16 a, const half2* x, half2* y, int n) {
  unsigned i = HERE;
  half2 both = {a, a};
  if (i < n) y[i] = __builtin_elementwise_fma(both, x[i], y[i]);
}

KERNEL scale_bf16(float a, const __bf16* x, __bf16* y, int n) {
  unsigned i = HERE;
  if (i < n) y[i] = (__bf16)(a * (float)x[i]);
}

KERNEL integers_32(const int* a, const int* b, int* out, int n) {
  unsigned i = HERE;
  if (i >= n) return;
  int x = a[i], y = b[i];
  unsigned u = x, v = y;
  int* o = out + i * 16;
  o[0] = x * y;
  o[1] = (int)(((long long)x * y) >> 32);
  o[2] = (int)(((unsigned long long)u * v) >> 32);
  o[3] = y ? x / y : 0;
  o[4] = y ? x % y : 0;
  o[5] = v ? u / v : 0;
  o[6] = v ? u % v : 0;
  o[7] = x << (y & 31);
  o[8] = x >> (y & 31);
  o[9] = u >> (v & 31);
  o[10] = u ? __builtin_clz(u) : 32;
  o[11] = u ? __builtin_ctz(u) : 32;
  o[12] = __builtin_popcount(u);
  o[13] = x < y ? x : y;
  o[14] = u < v ? v : u;
  o[15] = (x & ~y) ^ (x | y);
}

KERNEL integers_64(const int64_t* a, const int64_t* b, int64_t* out, int n) {
  unsigned i = HERE;
  if (i >= n) return;
  int64_t x = a[i], y = b[i];
  uint64_t u = x, v = y;
  int64_t* o = out + i * 10;
  o[0] = x + y;
  o[1] = x - y;
  o[2] = x * y;
  o[3] = y ? x / y : 0;
  o[4] = v ? u % v : 0;
  o[5] = x << (y & 63);
  o[6] = x >> (y & 63);
  o[7] = u >> (v & 63);
  o[8] = x < y ? x : y;
  o[9] = __builtin_popcountll(u);
}

KERNEL polynomial_f64(const double* x, double* y, int n) {
  unsigned i = HERE;
  if (i >= n) return;
  double t = x[i], sum = 0.0;
  for (int k = 8; k >= 1; --k) sum = __builtin_fma(sum, t, 1.0 / k);
  y[i] = sum / (t * t + 1.0) + __builtin_sqrt(__builtin_fabs(t));
}

KERNEL silu(const float* x, float* y, int n) {
  unsigned i = HERE;
  if (i < n)
    y[i] = x[i] * __builtin_amdgcn_rcpf(1.0f + __builtin_amdgcn_exp2f(-1.4426950408889634f * x[i]));
}

KERNEL divide_and_root(const float* a, const float* b, float* out, int n) {
  unsigned i = HERE;
  if (i >= n) return;
  out[2 * i] = a[i] / b[i];
  out[2 * i + 1] = __builtin_sqrtf(__builtin_fabsf(a[i]));
}

KERNEL round_all_ways(const float* x, float* out, int n) {
  unsigned i = HERE;
  if (i >= n) return;
  float t = x[i];
  out[i * 6] = __builtin_floorf(t);
  out[i * 6 + 1] = __builtin_ceilf(t);
  out[i * 6 + 2] = __builtin_truncf(t);
  out[i * 6 + 3] = __builtin_rintf(t);
  out[i * 6 + 4] = __builtin_amdgcn_fractf(t);
  out[i * 6 + 5] = __builtin_ldexpf(t, (int)i % 5 - 2);
}

KERNEL convert_types(const float* x, uint16_t* half, uint16_t* bf16, int* integer, uint8_t* byte,
                     int n) {
  unsigned i = HERE;
  if (i >= n) return;
  half[i] = __builtin_bit_cast(uint16_t, (_Float16)x[i]);
  bf16[i] = __builtin_bit_cast(uint16_t, (__bf16)x[i]);
  integer[i] = (int)x[i];
  byte[i] = (uint8_t)(int)(x[i] < 0 ? 0.0f : x[i] > 255 ? 255.0f : x[i]);
}

KERNEL compare_specials(const float* a, const float* b, int* out, int n) {
  unsigned i = HERE;
  if (i >= n) return;
  float x = a[i], y = b[i];
  out[i] = (x < y) | (x <= y) << 1 | (x == y) << 2 | (x != y) << 3 | (x > y) << 4 | (x >= y) << 5 |
           (__builtin_isnan(x) ? 1 : 0) << 6 | (__builtin_isinf(y) ? 1 : 0) << 7 |
           (__builtin_isunordered(x, y) ? 1 : 0) << 8;
}

// Lanes leave the loop after different numbers of steps.
KERNEL collatz(const unsigned* start, unsigned* steps, int n) {
  unsigned i = HERE;
  if (i >= n) return;
  unsigned value = start[i], count = 0;
  while (value != 1) {
    value = value & 1 ? 3 * value + 1 : value / 2;
    ++count;
  }
  steps[i] = count;
}

KERNEL mandelbrot(unsigned* out, int width, int height, int limit) {
  int column = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y * blockDim.y + threadIdx.y;
  if (column >= width || row >= height) return;
  float cx = column * 0.0625f - 2.0f, cy = row * 0.125f - 1.0f, x = 0, y = 0;
  int count = 0;
  for (; count < limit && x * x + y * y <= 4.0f; ++count) {
    float next = x * x - y * y + cx;
    y = 2.0f * x * y + cy;
    x = next;
  }
  out[row * width + column] = count;
}

KERNEL xorshift(const unsigned* seed, unsigned* out, int n, int rounds) {
  unsigned i = HERE;
  if (i >= n) return;
  unsigned s = seed[i];
  for (int k = 0; k < rounds; ++k) {
    s ^= s << 13;
    s ^= s >> 17;
    s ^= s << 5;
  }
  out[i] = s;
}

// Ids and sizes in three dimensions.
KERNEL grid_ids(unsigned* out) {
  unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  out[block * blockDim.x * blockDim.y * blockDim.z + thread] =
      blockIdx.x | blockIdx.y << 4 | blockIdx.z << 8 | threadIdx.x << 12 | threadIdx.y << 18 |
      threadIdx.z << 24;
}

// An array indexed by a runtime value lives in scratch.
KERNEL private_array(const int* x, int* out, int n) {
  unsigned i = HERE;
  if (i >= n) return;
  int slot[32];
  for (int k = 0; k < 32; ++k) slot[(x[i] + k * 7) & 31] = k * x[i];
  int sum = 0;
  for (int k = 0; k < 32; ++k) sum += slot[(k * x[i]) & 31] * (k + 1);
  out[i] = sum;
}

static __device__ __noinline__ int add_three(int a, int b, int c) { return a + 2 * b + 3 * c; }
static __device__ __noinline__ int multiply_then_add(int a, int b, int c) {
  return a * b + add_three(a, b, c);
}
KERNEL function_calls(const int* x, int* out, int n) {
  unsigned i = HERE;
  if (i < n) out[i] = multiply_then_add(x[i], i, n) - add_three(i, n, x[i]);
}

KERNEL jump_table(const int* x, int* out, int n) {
  unsigned i = HERE;
  if (i >= n) return;
  int t = x[i];
  switch (t & 7) {
    case 0: t = t * 3; break;
    case 1: t = t ^ 0x55; break;
    case 2: t = t >> 1;
    case 3: t = t + 11; break;
    case 4: t = -t; break;
    case 5: t = t * t; break;
    default: t = ~t;
  }
  out[i] = t;
}

// Bytes and halves at odd addresses.
KERNEL unaligned_copy(const uint8_t* from, uint8_t* to, int n) {
  unsigned i = HERE;
  if (i >= n) return;
  struct __attribute__((packed)) Record {
    uint8_t tag;
    uint16_t half;
    uint32_t word;
    uint64_t wide;
  };
  Record record = ((const Record*)from)[i];
  record.tag += 1;
  record.half += 2;
  record.word += 3;
  record.wide += 4;
  ((Record*)to)[i] = record;
}

typedef float float4 __attribute__((ext_vector_type(4)));
KERNEL copy_vector4(const float4* from, float4* to, int n) {
  for (unsigned i = HERE; i < n; i += gridDim.x * blockDim.x) to[i] = from[i] * 2.0f;
}

KERNEL bit_fields(const unsigned* x, unsigned* out, int n) {
  unsigned i = HERE;
  if (i >= n) return;
  unsigned t = x[i];
  out[i * 5] = __builtin_amdgcn_ubfe(t, 5, 9);
  out[i * 5 + 1] = (unsigned)__builtin_amdgcn_sbfe((int)t, 3, 7);
  out[i * 5 + 2] = __builtin_bitreverse32(t);
  out[i * 5 + 3] = __builtin_amdgcn_perm(t, 0x12345678u, 0x00070205u);
  out[i * 5 + 4] = __builtin_rotateleft32(t, 11);
}

KERNEL saturate_add(const short* a, const short* b, short* out, int n) {
  unsigned i = HERE;
  if (i < n) out[i] = __builtin_elementwise_add_sat(a[i], b[i]);
}
