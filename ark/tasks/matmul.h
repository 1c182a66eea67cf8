// Products of any matrices, for machines or signatures without a body on matrix units. coord:
// batch, batch, first row, first column of a tile of ROWS by COLUMNS. a(m, k), b(k, n) and
// output(m, n) give the place of an element.

template <int ROWS, int COLUMNS, int M, int N, int K, class A, class B, class O>
ARK_DEVICE void ark_matmul(ArkCtx&, const ArkTask& t, const A& a, const B& b, const O& output) {
  for (int e = ark_tid(); e < ROWS * COLUMNS; e += ARK_THREADS) {
    const int m = t.coord[2] + e / COLUMNS, n = t.coord[3] + e % COLUMNS;
    if (m >= M || n >= N) continue;
    float sum = 0.0f;
    for (int k = 0; k < K; ++k) sum += ark_get(a(m, k), 0) * ark_get(b(k, n), 0);
    ark_put(output(m, n), 0, sum);
  }
}

// By one thread: rows of b are consecutive, so they are added up row by row.
template <int ROWS, int COLUMNS, int M, int N, int K, class A, class B, class O>
ARK_DEVICE void ark_matmul_alone(ArkCtx& c, const ArkTask& t, const A& a, const B& b,
                                 const O& output) {
  float* sums = reinterpret_cast<float*>(ARK_SCRATCH(c));
  const int m1 = t.coord[2] + ROWS < M ? t.coord[2] + ROWS : M;
  const int n0 = t.coord[3], n1 = n0 + COLUMNS < N ? n0 + COLUMNS : N;
  for (int m = t.coord[2]; m < m1; ++m) {
    for (int j = 0; j < COLUMNS; ++j) sums[j] = 0.0f;
    for (int k = 0; k < K; ++k) {
      const float left = ark_get(a(m, k), 0);
      for (int n = n0; n < n1; ++n) sums[n - n0] += left * ark_get(b(k, n), 0);
    }
    for (int n = n0; n < n1; ++n) ark_put(output(m, n), 0, sums[n - n0]);
  }
}
