// Many products of small matrices, each a warp's: it copies both sides to shared memory as floats,
// ahead of nobody and waiting for nobody, and a lane has R rows of one column.

// A side of LINES rows of a, or columns of b, K deep, in shared memory: element (line, k) lies at
// line * ALONG_LINE + k * ALONG_K. at(line, k) is its place in memory, where packs of V lie side by
// side along k, if DEEP, or along the lines.
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

// How M by N by K matrices lie in a warp's part of shared memory: a row by row, b by k, and k up to
// a multiple of four, where both are zero.
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

// The matrices of a task, number `coord[0]` and every TASKS-th of COUNT on. side a(i, m, k) and
// b(i, n, k) give places in matrix i; finish(i, m, n, sum) stores.
template <int COUNT, int TASKS, int M, int N, int K, bool A_DEEP, int A_PACK, bool B_DEEP,
          int B_PACK, class A, class B, class Finish>
ARK_DEVICE void ark_matmul_small(ArkCtx& c, const ArkTask& t, const A& a, const B& b,
                                 const Finish& finish) {
  typedef ArkSmall<M, N, K> Form;
  float* left = reinterpret_cast<float*>(ARK_SCRATCH(c)) + ark_warp() * Form::FLOATS;
  float* right = left + Form::LEFT;
  // Lanes behind the last column or row read the last ones and store nothing: what lies behind was
  // never written.
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
