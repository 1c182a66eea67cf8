// Linear layers whose weights arrive by the operand stream (copies to shared memory ahead of the
// task), for backends without a specialised device function. linear.py describes operands and
// tasks.

// Loads the M input rows of K elements into shared memory. If the layer begins with a norm, it also
// computes the scale of each row.
template <int M, int K, class X, class P>
ARK_DEVICE void ark_linear_input(ArkCtx& c, X x, const P& prologue, float* xs, float (&scale)[M]) {
  if constexpr (P::norm) {
    // The weights of the norm are available before the input, so they are loaded first. The norm's
    // scale is applied to the sums at the end.
    for (int k = ark_tid(); k < K; k += ARK_THREADS) {
      const float v = ark_get(prologue.weight.p, k);
      for (int m = 0; m < M; ++m) xs[m * K + k] = v;
    }
    for (int m = 0; m < M; ++m) scale[m] = ark_load_row<true>(c, x, m, K, xs + m * K);
    for (int m = 0; m < M; ++m) {
      scale[m] = ark_rsqrt(ark_block_sum(scale[m], xs + M * K) / K + prologue.eps);
    }
  } else {
    for (int m = 0; m < M; ++m) ark_load_row<false>(c, x, m, K, xs + m * K);
  }
}

// Multiplies the M rows (of K elements) of the input x by rows of the weights. Task coordinates:
// first row of the weights, and last row + 1. The weights have type T. A stage (a slot of the ring
// in shared memory) has R rows of the weights. RAGGED: a task's number of rows is not a multiple of
// R.
template <typename T, int M, int K, int R, bool RAGGED, class X, class P, class E>
ARK_DEVICE void ark_linear(ArkCtx& c, const ArkTask& t, X x, const P& prologue, E epilogue) {
  float* xs = reinterpret_cast<float*>(ARK_SCRATCH(c));
  float scale[M];
  ark_linear_input<M, K>(c, x, prologue, xs, scale);
  ark_sync();
  ark_u32 stage = t.fetch_begin;
  for (int n = t.coord[0]; n < t.coord[1]; n += R, ++stage) {
    if (!ark_stage_mine(c, stage)) continue;
    const int rows = t.coord[1] - n < R ? t.coord[1] - n : R;
    float ahead[M][R] = {};
    if (ark_lane() == 0) ark_sums_ahead(c, epilogue, 0, n, rows, ahead);
    const T* w = reinterpret_cast<const T*>(ark_stage(c, stage));
    float sum[M][R];
    for (int m = 0; m < M; ++m) {
      if (RAGGED && rows < R) {
        for (int r = 0; r < R; ++r) {
          if (r < rows) ark_dots<1>(w + r * K, K, xs + m * K, K, sum[m] + r);
        }
        continue;
      }
      ark_dots<R>(w, K, xs + m * K, K, sum[m]);
    }
    ark_stage_done(c, stage);
    if (ark_lane() != 0) continue;
    for (int m = 0; m < M; ++m) {
      if constexpr (P::norm) {
        for (int r = 0; r < R; ++r) sum[m][r] *= scale[m];
      }
      ark_sums_store(c, epilogue, m, n, rows, sum[m], ahead[m]);
    }
  }
  ark_sums_finish(c, t, epilogue, xs + M * K + ARK_WARPS);
}
