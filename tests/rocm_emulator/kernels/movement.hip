// Kernels that move data: transposes through LDS, dynamic LDS, direct-to-LDS and buffer loads.
#define KERNEL extern "C" __global__ __launch_bounds__(256) void

template <class T>
static __device__ __forceinline__ void transpose_tile(const T* x, T* y, int rows, int columns) {
  __shared__ T tile[16][17];
  unsigned c = blockIdx.x * 16 + threadIdx.x, r = blockIdx.y * 16 + threadIdx.y;
  if (r < rows && c < columns) tile[threadIdx.y][threadIdx.x] = x[r * columns + c];
  __syncthreads();
  unsigned to_row = blockIdx.x * 16 + threadIdx.y, to_column = blockIdx.y * 16 + threadIdx.x;
  if (to_row < columns && to_column < rows)
    y[to_row * rows + to_column] = tile[threadIdx.x][threadIdx.y];
}
KERNEL transpose_f32(const float* x, float* y, int rows, int columns) {
  transpose_tile(x, y, rows, columns);
}
KERNEL transpose_u16(const uint16_t* x, uint16_t* y, int rows, int columns) {
  transpose_tile(x, y, rows, columns);
}
KERNEL transpose_u8(const uint8_t* x, uint8_t* y, int rows, int columns) {
  transpose_tile(x, y, rows, columns);
}
KERNEL transpose_f64(const double* x, double* y, int rows, int columns) {
  transpose_tile(x, y, rows, columns);
}

typedef float float4 __attribute__((ext_vector_type(4)));
// LDS accesses of 128 bits: each thread stores a vector and reads that of the thread at the same
// distance from the other end.
KERNEL mirror_vector4(const float4* x, float4* y) {
  __shared__ float4 line[256];
  unsigned t = threadIdx.x;
  line[t] = x[blockIdx.x * 256 + t];
  __syncthreads();
  y[blockIdx.x * 256 + t] = line[255 - t];
}

extern __shared__ int dynamic_line[];
KERNEL reverse_dynamic_lds(const int* x, int* y, int n) {
  unsigned t = threadIdx.x;
  dynamic_line[t] = x[blockIdx.x * n + t];
  __syncthreads();
  y[blockIdx.x * n + t] = dynamic_line[n - 1 - t];
}

KERNEL gather_scatter(const int* index, const float* x, float* y, int n) {
  unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[index[i]] = x[index[n - 1 - i]];
}

// A buffer descriptor checks bounds: loads past its end return zero, stores past it are dropped.
KERNEL buffer_bounds(const int* x, int* y, int n) {
  int i = (blockIdx.x * blockDim.x + threadIdx.x) * 4;
#if ARK_WAVE == 64
  const int format = 0x00027000;
#else
  const int format = 0x31004000;
#endif
  __amdgpu_buffer_rsrc_t from = __builtin_amdgcn_make_buffer_rsrc((void*)x, 0, n * 4, format);
  __amdgpu_buffer_rsrc_t to = __builtin_amdgcn_make_buffer_rsrc((void*)y, 0, n * 4, format);
  __builtin_amdgcn_raw_buffer_store_b32(__builtin_amdgcn_raw_buffer_load_b32(from, i, 4, 0) + 1, to,
                                        i, 0, 0);
}

#if defined(__gfx90a__) || defined(__gfx942__) || defined(__gfx950__)
KERNEL load_to_lds(const int* x, int* y) {
  __shared__ int line[256];
  unsigned t = threadIdx.x, wave = __builtin_amdgcn_readfirstlane(t / ARK_WAVE);
  auto* from = (__attribute__((address_space(1))) void*)(x + blockIdx.x * 256 + t);
  __builtin_amdgcn_global_load_lds(
      from, (__attribute__((address_space(3))) void*)(line + wave * ARK_WAVE), 4, 0, 0);
  __builtin_amdgcn_s_waitcnt(0);
  __syncthreads();
  y[blockIdx.x * 256 + t] = line[255 - t];
}
#endif

// Two variables of the module: one that the host reads and writes, and a constant table.
__device__ int module_counter = 5;
__constant__ int squares[8] = {0, 1, 4, 9, 16, 25, 36, 49};
KERNEL module_globals(int* out) {
  unsigned t = threadIdx.x;
  out[t] = squares[t & 7] + module_counter;
  __syncthreads();
  if (t == 0) module_counter += 1;
}

KERNEL stencil_halo(const float* x, float* y, int n) {
  __shared__ float line[258];
  unsigned t = threadIdx.x, i = blockIdx.x * 256 + t;
  line[t + 1] = i < n ? x[i] : 0.0f;
  if (t == 0) line[0] = i > 0 ? x[i - 1] : 0.0f;
  if (t == 255) line[257] = i + 1 < n ? x[i + 1] : 0.0f;
  __syncthreads();
  if (i < n) y[i] = 0.25f * line[t] + 0.5f * line[t + 1] + 0.25f * line[t + 2];
}
