// Many products of small matrices, one per warp at a time. The warp copies both matrices to shared
// memory as floats, and a lane computes R rows of C columns. Warps work independently.

// Copies one matrix to shared memory: LINES lines of K elements. A line is a row of a or a column
// of b. Element (line, k) is stored at line * ALONG_LINE + k * ALONG_K. at(line, k): its address in
// memory. A thread loads packs (vectors) of V neighbouring elements, which are along k if DEEP,
// otherwise along the lines. If elements of a pack are neighbours in shared memory too, four are
// stored at a time.
template <int LINES, int K, int ALONG_LINE, int ALONG_K, bool DEEP, int V, class At>
ARK_DEVICE void ark_matmul_small_side(float* to, const At& at) {
  constexpr int PACKS = LINES * K / V;
  constexpr int STEP = DEEP ? ALONG_K : ALONG_LINE, OTHER = DEEP ? ALONG_LINE : ALONG_K;
  constexpr int WIDE = STEP == 1 && OTHER % 4 == 0 && V % 4 == 0 ? 4 : 1;
#pragma unroll 4
  for (int p = ark_lane(); p < PACKS; p += ARK_LANES) {
    const int line = DEEP ? p * V / K : p * V % LINES, k = DEEP ? p * V % K : p * V / LINES;
    const auto pack = ark_load_pack<V>(at(line, k));
    float* first = to + line * ALONG_LINE + k * ALONG_K;
#pragma unroll
    for (int v = 0; v < V; v += WIDE) {
      ArkPack<float, WIDE> some;
#pragma unroll
      for (int j = 0; j < WIDE; ++j) some.v[j] = ark_get(pack.v, v + j);
      ark_store_pack<WIDE>(first + v * STEP, some);
    }
  }
}

// The layout of an M by K and a K by N matrix in a warp's part of shared memory: a by rows, b by k.
// k is padded with zeros to a multiple of four. The lanes of a warp form a grid of BANDS by WIDE. A
// lane computes every BANDS-th row and every WIDE-th column of the result, so that neighbouring
// lanes read neighbouring elements.
template <int M, int N, int K, bool B_DEEP>
struct ArkSmall {
  static constexpr int across() {
    int lanes = 1;
    while (lanes < N) lanes *= 2;
    return lanes;
  }
  static constexpr int ACROSS = across();
  static constexpr int columns() {
    int each = 1;
    while (each < 4 && 2 * each * 4 <= ACROSS && 4 * each * ARK_LANES / ACROSS <= M) each *= 2;
    return each;
  }
  static constexpr int C = columns(), WIDE = ACROSS / C, BANDS = ARK_LANES / WIDE;
  static constexpr int R = (M + BANDS - 1) / BANDS, DEPTH = (K + 3) / 4 * 4;
  static constexpr int A_PITCH = DEPTH + 4, B_PITCH = ACROSS + (B_DEEP || ACROSS < 4 ? 1 : 4);
  static constexpr int LEFT = M * A_PITCH, FLOATS = (LEFT + DEPTH * B_PITCH + 3) / 4 * 4;
};

// Computes products of small matrices (M by K with K by N). There are COUNT products; the task
// computes number `coord[0]` and every TASKS-th after it. a(i, m, k) and b(i, n, k): addresses of
// elements of the matrices of product i. finish(i, m, n, sum): stores a result.
template <int COUNT, int TASKS, int M, int N, int K, bool A_DEEP, int A_PACK, bool B_DEEP,
          int B_PACK, class A, class B, class Finish>
ARK_DEVICE void ark_matmul_small(ArkCtx& c, const ArkTask& t, const A& a, const B& b,
                                 const Finish& finish) {
  typedef ArkSmall<M, N, K, B_DEEP> Form;
  float* left = reinterpret_cast<float*>(ARK_SCRATCH(c)) + ark_warp() * Form::FLOATS;
  float* right = left + Form::LEFT;
  const int column = ark_lane() % Form::WIDE, band = ark_lane() / Form::WIDE;
  // If a lane's column or row is past the last one, the lane computes the last one again, because
  // shared memory past it was never written. It stores nothing.
  const auto row_of = [&](int r) { return band + Form::BANDS * r; };
  const auto column_of = [&](int j) { return column + Form::WIDE * j; };
  const auto row_read = [&](int r) {
    return M % Form::BANDS == 0 || row_of(r) < M ? row_of(r) : M - 1;
  };
  const auto column_read = [&](int j) {
    return N == Form::ACROSS || column_of(j) < N ? column_of(j) : N - 1;
  };
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
    float sums[Form::R][Form::C] = {};
#pragma unroll 2
    for (int k = 0; k < Form::DEPTH; k += 4) {
      float y[4][Form::C];
#pragma unroll
      for (int e = 0; e < 4 * Form::C; ++e) {
        const int j = e / Form::C, n = e % Form::C;
        y[j][n] = right[(k + j) * Form::B_PITCH + column_read(n)];
      }
#pragma unroll
      for (int r = 0; r < Form::R; ++r) {
        const auto x = ark_load_pack<4>(left + row_read(r) * Form::A_PITCH + k);
#pragma unroll
        for (int e = 0; e < 4 * Form::C; ++e) {
          sums[r][e % Form::C] += x.v[e / Form::C] * y[e / Form::C][e % Form::C];
        }
      }
    }
    ark_warp_sync();
#pragma unroll
    for (int e = 0; e < Form::R * Form::C; ++e) {
      const int r = e / Form::C, j = e % Form::C;
      if (row_of(r) < M && column_of(j) < N) finish(i, row_of(r), column_of(j), sums[r][j]);
    }
  }
}
