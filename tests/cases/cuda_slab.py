"""A warp's slab (its part of shared memory, in which it arranges results before it stores them) on
the host, for tests of the device code that uses it.
"""

TYPES = r"""
typedef uint32_t ark_u32;
typedef int64_t ark_i64;
typedef uint64_t ark_u64;
template <typename T, int N>
struct alignas(sizeof(T) * N >= 16 ? 16 : sizeof(T) * N) ArkPack {
  T v[N];
};
"""
# The slab, and __syncwarp as the barrier `together` of tests.cases.cuda_boxes.
SLAB = r"""
struct ArkCtx {};
alignas(128) static char slab_of_warp[2048];
static char* ark_matrix_slab(ArkCtx&, int) { return slab_of_warp; }
static int ark_warp() { return 0; }
static void __syncwarp() { together.arrive_and_wait(); }
"""
_CALLS = r"""
static ark_u32 ark_shared_address(const char* p) { return static_cast<ark_u32>(p - slab_of_warp); }
template <int N, typename T>
static void ark_store_pack(T* to, const ArkPack<T, N>& pack) {
  for (int i = 0; i < N; ++i) to[i] = pack.v[i];
}
static ark_u32 ark_pack_pair(const Half*, float low, float high) {
  ark_u32 a, b;
  __builtin_memcpy(&a, &low, 4);
  __builtin_memcpy(&b, &high, 4);
  return a >> 16 | (b & 0xffff0000u);
}
static ark_u32 ark_matrix_slab_at(char* slab, int j);
static ark_u32 places[32];
// Matrix i of four has its rows where lanes 8 i to 8 i + 7 say; a lane has two neighbours of it.
static void each_matrix(char* slab, int j, ark_u32* words, bool put) {
  together.arrive_and_wait();
  places[lane] = ark_matrix_slab_at(slab, j);
  together.arrive_and_wait();
  for (int i = 0; i < 4; ++i) {
    char* at = slab + places[8 * i + lane / 4] + lane % 4 * 4;
    put ? __builtin_memcpy(at, words + i, 4) : __builtin_memcpy(words + i, at, 4);
  }
  together.arrive_and_wait();
}
static void ark_matrix_slab_put(char* slab, int j, const ark_u32 (&words)[4]) {
  each_matrix(slab, j, const_cast<ark_u32*>(words), true);
}
static void ark_matrix_slab_take(char* slab, int j, ark_u32 (&words)[4]) {
  each_matrix(slab, j, words, false);
}
"""
CALLS = TYPES + SLAB + _CALLS
