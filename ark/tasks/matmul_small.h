// Many products of small matrices, one per warp at a time. The warp copies both matrices to shared
// memory as floats, and a lane computes R rows of one column. Warps work independently.

// Copies one matrix (LINES rows of a, or columns of b, with K elements each) to shared memory.
// Element (line, k) is stored at line * ALONG_LINE + k * ALONG_K. at(line, k): its address in
// memory. Packs of V neighbours are along k if DEEP, otherwise along the lines.
template <int LINES, int K, int ALONG_LINE, int ALONG_K, bool DEEP, int V, class At>
ARK_DEVICE void ark_matmul_small_side(float* to, const At& at) {
  constexpr int PACKS = LINES * K / V;
#pragma unroll 4
  for (int p = ark_lane(); p < PACKS; p += ARK_LANES) {
    const int line = DEEP ? p * V / K : p * V % LINES, k = DEEP ? p * V % K : p * V / LINES;
    const auto pack = ark_load_pack<V>(at(line, k));
#pragma unroll
    for (int v = 0; v < V; ++v) {
      to[(DEEP ? line : line + v) * ALONG_LINE + (DEEP ? k + v : k) * ALONG_K] = ark_get(pack.v, v);
    }
  }
}

// The layout of an M by K and a K by N matrix in a warp's part of shared memory: a by rows, b by k.
// k is padded with zeros to a multiple of four.
template <int M, int N, int K>
struct ArkSmall {
  static constexpr int across() {
    int lanes = 1;
    while (lanes < N) lanes *= 2;
    return lanes;
  }
  static constexpr int ACROSS = across(), BANDS = ARK_LANES / ACROSS;
  static constexpr int R = (M + BANDS - 1) / BANDS, DEPTH = (K + 3) / 4 * 4;
  static constexpr int A_PITCH = DEPTH + 4, B_PITCH = ACROSS + 1;
  static constexpr int LEFT = BANDS * R * A_PITCH, FLOATS = (LEFT + DEPTH * B_PITCH + 3) / 4 * 4;
};

// Computes the products of a task: number `coord[0]` and every TASKS-th after it, of COUNT. a(i, m,
// k) and b(i, n, k): addresses of elements of matrices i. finish(i, m, n, sum): stores a result.
template <int COUNT, int TASKS, int M, int N, int K, bool A_DEEP, int A_PACK, bool B_DEEP,
          int B_PACK, class A, class B, class Finish>
ARK_DEVICE void ark_matmul_small(ArkCtx& c, const ArkTask& t, const A& a, const B& b,
                                 const Finish& finish) {
  typedef ArkSmall<M, N, K> Form;
  float* left = reinterpret_cast<float*>(ARK_SCRATCH(c)) + ark_warp() * Form::FLOATS;
  float* right = left + Form::LEFT;
  // Lanes after the last column or row read the last ones and store nothing, because shared memory
  // after these was never written.
  const int column = ark_lane() % Form::ACROSS, row = ark_lane() / Form::ACROSS * Form::R;
  const int read = column < N ? column : N - 1, first = row < M - Form::R ? row : M - Form::R;
  if constexpr (Form::DEPTH > K) {
    for (int i = ark_lane(); i < Form::FLOATS; i += ARK_LANES) left[i] = 0.0f;
    ark_warp_sync();
  }
  for (int i = t.coord[0] + ark_warp() * TASKS; i < COUNT; i += ARK_WARPS * TASKS) {
    ark_matmul_small_side<M, K, Form::A_PITCH, 1, A_DEEP, A_PACK>(
        left, [&](int line, int k) { return a(i, line, k); });
    ark_matmul_small_side<N, K, 1, Form::B_PITCH, B_DEEP, B_PACK>(
        right, [&](int line, int k) { return b(i, line, k); });
    ark_warp_sync();
    float sums[Form::R] = {};
#pragma unroll 2
    for (int k = 0; k < Form::DEPTH; k += 4) {
      float y[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) y[j] = right[(k + j) * Form::B_PITCH + read];
#pragma unroll
      for (int r = 0; r < Form::R; ++r) {
        const auto x = ark_load_pack<4>(left + (first + r) * Form::A_PITCH + k);
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[r] += x.v[j] * y[j];
      }
    }
    ark_warp_sync();
#pragma unroll
    for (int r = 0; r < Form::R; ++r) {
      if (column < N && first + r >= row) finish(i, first + r, column, sums[r]);
    }
  }
}
