// Rows times weights of few bits. What a task computes and touches is said in quantized.py.

// What is taken from a group's values: its zero point, or nothing.
template <class Z>
ARK_DEVICE float ark_zero_point(const Z& zeros, int row, int group) {
  if constexpr (Z::given) {
    return ark_get(ark_address(zeros, 0, 0, row, group), 0);
  } else {
    return 0.0f;
  }
}

// coord: first and last+1 row of the weights. M rows of K elements; a lane takes eight weights at
// once, which fill ITEMS of the weights' storage type; a row of them has PITCH.
template <int M, int K, int GROUP, int ITEMS, int PITCH, class X, class W, class S, class Z,
          class O>
ARK_DEVICE void ark_quantized_linear(ArkCtx& c, const ArkTask& t, X x, W weights, S scales, Z zeros,
                                     O output) {
  constexpr int STEP = 8;
  float* xs = reinterpret_cast<float*>(ARK_SCRATCH(c));
  for (int i = ark_tid(); i < M * K; i += ARK_THREADS) xs[i] = ark_load(c, x, 0, 0, i / K, i % K);
  ark_sync();
  for (int n = t.coord[0] + ark_warp(); n < t.coord[1]; n += ARK_WARPS) {
    const auto* row = weights.p + static_cast<ark_i64>(n) * PITCH;
    float sum[M] = {};
    for (int k = ark_lane() * STEP; k < K; k += ARK_LANES * STEP) {
      const auto pack = ark_load_pack<ITEMS>(row + k / STEP * ITEMS);
      const float scale = ark_get(ark_address(scales, 0, 0, n, k / GROUP), 0);
      const float zero = ark_zero_point(zeros, n, k / GROUP);
#pragma unroll
      for (int j = 0; j < STEP; ++j) {
        const float w = (static_cast<float>(ark_element(pack.v, j)) - zero) * scale;
#pragma unroll
        for (int m = 0; m < M; ++m) sum[m] += w * xs[m * K + k + j];
      }
    }
#pragma unroll
    for (int m = 0; m < M; ++m) {
      const float total = ark_warp_sum(sum[m]);
      if (ark_lane() == 0) ark_publish(c, output, 0, 0, m, n, total);
    }
  }
}
