// Products of any matrices, for machines or signatures without a body on matrix units: the tile of
// ROWS by COLUMNS that begins at m0, n0. a(m, k) and b(k, n) give the place of an element,
// finish(m, n, sum) stores the result's; sums are over k0 to k1.

// Lanes that share an element of a tile of so few that threads would be idle: a power of two.
constexpr int ark_matmul_lanes(int elements) {
  int lanes = 1;
  while (2 * lanes * elements <= ARK_THREADS && 2 * lanes <= ARK_LANES) lanes *= 2;
  return lanes;
}

template <int ROWS, int COLUMNS, int M, int N, class A, class B, class Finish>
ARK_DEVICE void ark_matmul(ArkCtx&, const ArkTask&, int m0, int n0, int k0, int k1, const A& a,
                           const B& b, const Finish& finish) {
  constexpr int LANES = ark_matmul_lanes(ROWS * COLUMNS);
  if constexpr (LANES > 1) {
    const int e = ark_tid() / LANES, m = m0 + e / COLUMNS, n = n0 + e % COLUMNS;
    const bool here = e < ROWS * COLUMNS && m < M && n < N;
    float sum = 0.0f;
    if (here) {
      for (int k = k0 + ark_tid() % LANES; k < k1; k += LANES) {
        sum += ark_get(a(m, k), 0) * ark_get(b(k, n), 0);
      }
    }
    for (int mask = 1; mask < LANES; mask *= 2) sum += ark_shfl_xor(sum, mask);
    if (here && ark_tid() % LANES == 0) finish(m, n, sum);
    return;
  }
  for (int e = ark_tid(); e < ROWS * COLUMNS; e += ARK_THREADS) {
    const int m = m0 + e / COLUMNS, n = n0 + e % COLUMNS;
    if (m >= M || n >= N) continue;
    float sum = 0.0f;
    for (int k = k0; k < k1; ++k) sum += ark_get(a(m, k), 0) * ark_get(b(k, n), 0);
    finish(m, n, sum);
  }
}

// By one thread: rows of b are consecutive, so they are added up row by row.
template <int ROWS, int COLUMNS, int M, int N, class A, class B, class Finish>
ARK_DEVICE void ark_matmul_alone(ArkCtx& c, const ArkTask&, int m0, int n0, int k0, int k1,
                                 const A& a, const B& b, const Finish& finish) {
  float* sums = reinterpret_cast<float*>(ARK_SCRATCH(c));
  const int m1 = m0 + ROWS < M ? m0 + ROWS : M, n1 = n0 + COLUMNS < N ? n0 + COLUMNS : N;
  for (int m = m0; m < m1; ++m) {
    for (int j = 0; j < COLUMNS; ++j) sums[j] = 0.0f;
    for (int k = k0; k < k1; ++k) {
      const float left = ark_get(a(m, k), 0);
      for (int n = n0; n < n1; ++n) sums[n - n0] += left * ark_get(b(k, n), 0);
    }
    for (int n = n0; n < n1; ++n) finish(m, n, sums[n - n0]);
  }
}

// Neighbouring columns are a gate and what it lets pass; finish has the result's column.
template <int ROWS, int COLUMNS, int M, int N, class A, class B, class Finish>
ARK_DEVICE void ark_matmul_gated(ArkCtx&, const ArkTask&, int m0, int n0, int k0, int k1,
                                 const A& a, const B& b, const Finish& finish) {
  for (int e = ark_tid(); e < ROWS * COLUMNS / 2; e += ARK_THREADS) {
    const int m = m0 + e / (COLUMNS / 2), n = n0 + e % (COLUMNS / 2) * 2;
    if (m >= M || n >= N) continue;
    float gate = 0.0f, up = 0.0f;
    for (int k = k0; k < k1; ++k) {
      const float left = ark_get(a(m, k), 0);
      gate += left * ark_get(b(k, n), 0);
      up += left * ark_get(b(k, n + 1), 0);
    }
    finish(m, n / 2, ark_swiglu(gate, up));
  }
}
