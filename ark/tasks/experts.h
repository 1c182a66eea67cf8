// A mixture of experts. What a task computes and touches is said in experts.py.

// coord: row. By one thread: the best K so far in order, of which most elements are less than the
// last. What is no number is never chosen.
template <int N, int K, class X, class V, class I>
ARK_DEVICE void ark_topk_alone(int row, X x, V values, I indices) {
  float best[K];
  ark_u32 at[K];
  for (int j = 0; j < K; ++j) {
    best[j] = -ark_inf();
    at[j] = 0xffffffffu;
  }
  const auto* from = ark_address(x, 0, 0, row, 0);
  const ark_i64 apart = ark_address(x, 0, 0, row, 1) - from;
  for (int i = 0; i < N; ++i) {
    const float v = ark_get(from + i * apart, 0);
    if (!(v > best[K - 1] || (v == best[K - 1] && at[K - 1] == 0xffffffffu))) continue;
    int j = K - 1;
    for (; j > 0 && (v > best[j - 1] || at[j - 1] == 0xffffffffu); --j) {
      best[j] = best[j - 1];
      at[j] = at[j - 1];
    }
    best[j] = v;
    at[j] = static_cast<ark_u32>(i);
  }
  for (int j = 0; j < K; ++j) {
    ark_put(ark_address(values, 0, 0, row, j), 0, best[j]);
    *ark_address(indices, 0, 0, row, j) = static_cast<ark_i32>(at[j]);
  }
}

// coord: row. Each round takes the best of what comes behind the one before.
template <int N, int K, class X, class V, class I>
ARK_DEVICE void ark_topk(ArkCtx& c, const ArkTask& t, X x, V values, I indices) {
  const int row = t.coord[0];
  if constexpr (ARK_THREADS == 1 && K <= 64) {
    ark_topk_alone<N, K>(row, x, values, indices);
    return;
  }
  float last = ark_inf();
  ark_u32 before = 0u;
  for (int j = 0; j < K; ++j) {
    float best = -ark_inf();
    ark_u32 at = 0xffffffffu;
    for (int i = ark_tid(); i < N; i += ARK_THREADS) {
      const float v = ark_get(ark_address(x, 0, 0, row, i), 0);
      const ark_u32 place = static_cast<ark_u32>(i);
      if (j > 0 && (v > last || (v == last && place <= before))) continue;
      if (v > best || (v == best && place < at)) {
        best = v;
        at = place;
      }
    }
    ark_best(best, at, reinterpret_cast<float*>(ARK_SCRATCH(c)));
    if (ark_tid() == 0) {
      ark_put(ark_address(values, 0, 0, row, j), 0, best);
      *ark_address(indices, 0, 0, row, j) = static_cast<ark_i32>(at);
    }
    last = best;
    before = at;
  }
}

// coord: row, slot, first and last+1 output. The input has a row a slot (SLOTS) or one for all. The
// weight has EXPERTS experts from FIRST on, of OF; the results of the others are zeros.
template <int EXPERTS, int N, int K, bool SLOTS, int FIRST, int OF, class X, class W, class E,
          class O>
ARK_DEVICE void ark_expert_linear(ArkCtx& c, const ArkTask& t, X x, W weight, E experts, O output) {
  const int row = t.coord[0], slot = t.coord[1];
  float* xs = reinterpret_cast<float*>(ARK_SCRATCH(c));
  for (int i = ark_tid(); i < K; i += ARK_THREADS) {
    xs[i] = ark_get(SLOTS ? ark_address(x, 0, row, slot, i) : ark_address(x, 0, 0, row, i), 0);
  }
  int expert = *ark_address(experts, 0, 0, row, slot);
  if (expert < 0 || expert >= OF) {
    if (ark_tid() == 0) {
      ark_fail(c, 5u, 0u, static_cast<ark_u32>(OF), static_cast<ark_u32>(expert));
    }
    expert = FIRST;
  }
  expert -= FIRST;
  if (OF > EXPERTS && (expert < 0 || expert >= EXPERTS)) {
    for (int i = t.coord[2] + ark_tid(); i < t.coord[3]; i += ARK_THREADS) {
      ark_put(ark_address(output, 0, row, slot, i), 0, 0.0f);
    }
    return;
  }
  const auto* w = weight.p + static_cast<ark_i64>(expert) * N * K;
  ark_sync();
  for (int i = t.coord[2] + ark_warp(); i < t.coord[3]; i += ARK_WARPS) {
    const float v = ark_warp_sum(ark_row_dot(w + static_cast<ark_i64>(i) * K, xs, K));
    if (ark_lane() == 0) ark_put(ark_address(output, 0, row, slot, i), 0, v);
  }
}
