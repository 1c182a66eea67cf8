// Linear layers with the quantised weights of chosen experts. experts.py describes operands and
// tasks.

// Multiplies rows by the quantised weights of their chosen experts, like ark_expert_linear of
// experts.h. An expert has one or two weight matrices of N rows. first, second: the addresses of
// the first and the second matrices of all experts.
template <class ROW, int EXPERTS, int N, bool SLOTS, int FIRST, int OF, int WEIGHTS, int TOTAL,
          class X, class E, class F>
ARK_DEVICE void ark_expert_rows(ArkCtx& c, const ArkTask& t, X x, const unsigned char* first,
                                const unsigned char* second, E experts, const F& finish) {
  const auto dot = [&](int w, int expert, int i, const float* xs) {
    const ROW* rows = reinterpret_cast<const ROW*>(w > 0 ? second : first);
    float sum[1] = {0.0f};
    ark_row_products<1, 0>(rows[static_cast<ark_i64>(expert) * N + i], xs, sum);
    return sum[0];
  };
  ark_expert_products<EXPERTS, ROW::COLUMNS, SLOTS, FIRST, OF, WEIGHTS, TOTAL>(c, t, x, experts,
                                                                               dot, finish);
}
