// Linear layers whose weights are rows of a quantised matrix, for backends without a specialised
// device function. linear.py describes operands and tasks.

// Multiplies the M rows (of K elements) of the input x by rows of quantised weights. Task
// coordinates: first row of the weights, and last row + 1. A stage (a slot of the ring in shared
// memory) has R rows of the weights.
template <class ROW, int M, int K, int R, class X, class P, class E>
ARK_DEVICE void ark_linear_rows(ArkCtx& c, const ArkTask& t, X x, const P& prologue, E epilogue) {
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
    const ROW* w = reinterpret_cast<const ROW*>(ark_stage(c, stage));
    float sum[M][R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      float own[M] = {};
      if (r < rows) ark_row_products<M, K>(w[r], xs, own);
#pragma unroll
      for (int m = 0; m < M; ++m) sum[m][r] = ark_warp_sum(own[m]);
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
