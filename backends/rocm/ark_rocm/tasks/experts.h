// Products with the quantised weights of the selected experts. They use the method of
// linear_several.h with one input row.

// Defined in ark/tasks/experts.h, which comes later in the source.
template <int K, bool SLOTS, int FIRST, int OF, class X, class E>
ARK_DEVICE int ark_expert_input(ArkCtx& c, int row, int slot, const X& x, const E& experts,
                                float* xs);

struct ArkExpertInput {
  static constexpr bool norm = false;
};
template <class O>
struct ArkExpertSums {
  static constexpr int WIDTH = 1;
  const O& output;
  int row, slot;
};
template <class O>
ARK_DEVICE void ark_sums_ahead(ArkCtx&, const ArkExpertSums<O>&, int, int, int, float (&)[1][1]) {}
template <class O>
ARK_DEVICE void ark_sums_store(ArkCtx&, const ArkExpertSums<O>& sums, int, int n, int,
                               const float (&v)[1], const float (&)[1]) {
  ark_put(ark_address(sums.output, 0, sums.row, sums.slot, n), 0, v[0]);
}

// coord: row, slot, first output and end of the outputs, as in ark_expert_rows of
// ark/tasks/expert_rows.h. Returns false if the processor must leave.
template <class ROW, int EXPERTS, int N, bool SLOTS, int FIRST, int OF, int GROUP, bool ALIGNED,
          class X, class E, class O>
ARK_DEVICE bool ark_expert_several(ArkCtx& c, const ArkTask& t, X x, const unsigned char* bytes,
                                   E experts, const O& output) {
  constexpr int K = ROW::COLUMNS;
  const int row = t.coord[0], slot = t.coord[1];
  if (!ark_enter(c)) return false;
  // No input is copied.
  const int expert = ark_expert_input<0, SLOTS, FIRST, OF>(c, row, slot, x, experts, nullptr);
  if (expert < 0 || expert >= EXPERTS) {
    for (int i = t.coord[2] + ark_tid(); i < t.coord[3]; i += ARK_THREADS) {
      ark_put(ark_address(output, 0, row, slot, i), 0, 0.0f);
    }
    return true;
  }
  x.p = SLOTS ? ark_address(x, 0, row, slot, 0) : ark_address(x, 0, 0, row, 0);
  ArkTask range = t;
  range.coord[0] = t.coord[2];
  range.coord[1] = t.coord[3];
  const ark_i64 first = static_cast<ark_i64>(expert) * N + t.coord[2];
  const auto* from = ark_to_global(reinterpret_cast<const char*>(bytes)) +
                     first * static_cast<ark_i64>(sizeof(ROW));
  const ArkSeveralCodes<ROW> weights{from, t.coord[3] - t.coord[2], ark_lane()};
  return ark_linear_several<ArkSeveralCodes<ROW>, K, 1, GROUP, ALIGNED, false>(
      c, range, weights, x, ArkExpertInput{}, ArkExpertSums<O>{output, row, slot});
}
