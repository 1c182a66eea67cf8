// The gated activation silu(gate) * up of pairs of columns. rotary.py describes operands and
// tasks.

// silu(gate) * up.
ARK_DEVICE float ark_swiglu(float gate, float up) { return gate / (1.0f + ark_exp(-gate)) * up; }

// Computes silu(gate) * up of pairs of neighbouring columns, gate and up. Task coordinates: row,
// first column of x, and last column + 1.
template <class X, class O>
ARK_DEVICE void ark_swiglu_pairs(ArkCtx& c, const ArkTask& t, X x, O output) {
  const int m = t.coord[0];
  for (int n = t.coord[1] / 2 + ark_tid(); n < t.coord[2] / 2; n += ARK_THREADS) {
    const float gate = ark_load(c, x, 0, 0, m, 2 * n);
    const float up = ark_load(c, x, 0, 0, m, 2 * n + 1);
    ark_publish(c, output, 0, 0, m, n, ark_swiglu(gate, up));
  }
}

// The epilogue of a linear layer (linear_epilogue.h) in which two neighbouring rows of the weights
// give gate and up: stores silu(gate) * up.
template <class O>
struct ArkSwigluSums {
  static constexpr int WIDTH = 2;
  static constexpr bool WAITS = false;
  O output;
};
template <class O>
ARK_DEVICE ArkSwigluSums<O> ark_swiglu_sums(O output) {
  return {output};
}
template <class O, int R>
ARK_DEVICE void ark_sums_store(ArkCtx& c, const ArkSwigluSums<O>& e, int m, int n, int rows,
                               const float (&sum)[R], const float (&)[R]) {
  for (int r = 0; r < R; r += 2) {
    if (r < rows) ark_publish(c, e.output, 0, 0, m, (n + r) / 2, ark_swiglu(sum[r], sum[r + 1]));
  }
}
