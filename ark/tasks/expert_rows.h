// Products with the quantised weights of chosen experts. experts.py describes operands and tasks.

// The same as ark_expert_linear of experts.h, for quantised weights with N rows per expert, which
// begin at `bytes`.
template <class ROW, int EXPERTS, int N, bool SLOTS, int FIRST, int OF, class X, class E, class O>
ARK_DEVICE void ark_expert_rows(ArkCtx& c, const ArkTask& t, X x, const unsigned char* bytes,
                                E experts, O output) {
  const int row = t.coord[0], slot = t.coord[1];
  float* xs = reinterpret_cast<float*>(ARK_SCRATCH(c));
  const int expert = ark_expert_input<ROW::COLUMNS, SLOTS, FIRST, OF>(c, row, slot, x, experts, xs);
  const bool held = expert >= 0 && expert < EXPERTS;
  const ROW* w = reinterpret_cast<const ROW*>(bytes) + static_cast<ark_i64>(held ? expert : 0) * N;
  ark_sync();
  for (int i = t.coord[2] + ark_warp(); i < t.coord[3]; i += ARK_WARPS) {
    float sum[1] = {0.0f};
    if (held) ark_row_products<1, 0>(w[i], xs, sum);
    const float v = ark_warp_sum(sum[0]);
    if (ark_lane() == 0) ark_put(ark_address(output, 0, row, slot, i), 0, v);
  }
}
