// The epilogue of a decoder's last linear layer, whose sums are logits (linear_epilogue.h).

// The epilogue of the linear layer that computes logits: stores the sums (logits) and finds the
// task's best candidate for the next token. A stage has R rows of the weights, and the STAGES
// stages are divided among TILES tasks. SHARED: true if each rank computes a part of the logits.
// Then the token id of the first row of the weights is read from the task's record (ark_token_of).
// Otherwise it is 0.
template <int R, int TILES, int STAGES, bool SHARED, class O, class C>
struct ArkSampleSums {
  static constexpr int WIDTH = 1;
  static constexpr bool WAITS = false;
  O output;
  C candidates;
  ArkSampler sampler;
  int first;
};
template <int R, int TILES, int STAGES, bool SHARED, class O, class S, class P, class C>
ARK_DEVICE ArkSampleSums<R, TILES, STAGES, SHARED, O, C> ark_sample_sums(const ArkTask& t, O output,
                                                                         S settings, P position,
                                                                         C candidates) {
  const int first = SHARED ? ark_own<1>(t) : 0;
  return {output, candidates, ark_sampler(settings, position, first + t.coord[0]), first};
}

template <int S, int TILES, int STAGES, bool SHARED, class O, class C, int R>
ARK_DEVICE void ark_sums_store(ArkCtx& c, ArkSampleSums<S, TILES, STAGES, SHARED, O, C>& e, int m,
                               int n, int rows, const float (&sum)[R], const float (&)[R]) {
  for (int r = 0; r < R; ++r) {
    if (r >= rows) continue;
    ark_publish(c, e.output, 0, 0, m, n + r, sum[r]);
    ark_sample(e.sampler, sum[r], (SHARED ? e.first : 0) + n + r);
  }
}
template <int R, int TILES, int STAGES, bool SHARED, class O, class C>
ARK_DEVICE void ark_sums_finish(ArkCtx& c, const ArkTask& t,
                                ArkSampleSums<R, TILES, STAGES, SHARED, O, C>& e, float* red) {
  const ark_i64 stage = t.coord[0] / R;
  ark_sampled(c, e.sampler, e.candidates, static_cast<int>((stage * TILES + STAGES - 1) / STAGES),
              red);
}
