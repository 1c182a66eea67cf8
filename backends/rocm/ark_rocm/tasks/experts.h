// Products with the quantised weights of chosen experts: one row of input, by vector units
// (linear_rows.h) where the codes of a load share a scale, else by matrix units (linear_several.h).

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

// The expert of a task's row and slot; -1 if it belongs to another rank, and the results are zero.
template <int EXPERTS, bool SLOTS, int FIRST, int OF, class X, class E, class O>
ARK_DEVICE int ark_own_expert(ArkCtx& c, const ArkTask& t, const X& x, const E& experts,
                              const O& output) {
  const int row = t.coord[0], slot = t.coord[1];
  // No input is copied.
  const int expert = ark_expert_input<0, SLOTS, FIRST, OF>(c, row, slot, x, experts, nullptr);
  if (expert >= 0 && expert < EXPERTS) return expert;
  for (int i = t.coord[2] + ark_tid(); i < t.coord[3]; i += ARK_THREADS) {
    ark_put(ark_address(output, 0, row, slot, i), 0, 0.0f);
  }
  return -1;
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
  const int expert = ark_own_expert<EXPERTS, SLOTS, FIRST, OF>(c, t, x, experts, output);
  if (expert < 0) return true;
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

// The same on vector units. A wave multiplies the same part of every row of weights, and keeps its
// elements of the input in registers. PARTS: the number of parts of a row, each of which is one
// load of a wave; it divides the number of waves. ROWS: the number of outputs whose sums fit in
// shared memory at a time.
template <class ROW, int EXPERTS, int N, bool SLOTS, int FIRST, int OF, int PARTS, int ROWS,
          class X, class E, class O>
ARK_DEVICE bool ark_expert_split(ArkCtx& c, const ArkTask& t, X x, const unsigned char* bytes,
                                 E experts, const O& output) {
  typedef ArkSplitCodes<ROW, PARTS> Split;
  static_assert(ARK_WARPS % PARTS == 0, "a wave has one part");
  constexpr int AHEAD = 4, OWN = (ROWS + ARK_THREADS - 1) / ARK_THREADS, K = ROW::COLUMNS;
  constexpr int EACH = (K + ARK_THREADS - 1) / ARK_THREADS;
  float* xs = reinterpret_cast<float*>(ARK_SCRATCH(c));
  float* sums = xs + PARTS * Split::SPAN;
  const int row = t.coord[0], slot = t.coord[1], warp = ark_warp();
  if (!ark_enter(c)) return false;
  float v[EACH];
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    const int k = ark_tid() + e * ARK_THREADS;
    const auto* from = ark_address(x, 0, SLOTS ? row : 0, SLOTS ? slot : row, k < K ? k : 0);
    v[e] = ark_get(from, 0);
  }
  const int expert = ark_own_expert<EXPERTS, SLOTS, FIRST, OF>(c, t, x, experts, output);
  if (expert < 0) return true;
  ArkExpertSums<O> epilogue{output, row, slot};
  typename Split::Input input;
#pragma unroll 1
  for (int top = t.coord[2]; top < t.coord[3]; top += ROWS) {
    const int rows = t.coord[3] - top < ROWS ? t.coord[3] - top : ROWS;
    const ark_i64 first = static_cast<ark_i64>(expert) * N + top;
    const Split split{ark_to_global(bytes) + first * static_cast<ark_i64>(sizeof(ROW)),
                      rows * PARTS, ark_lane()};
    typename Split::Piece ring[AHEAD];
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) ring[a] = split.load(warp + a * ARK_WARPS);
    if (top == t.coord[2]) {
#pragma unroll
      for (int e = 0; e < EACH; ++e) {
        const int k = ark_tid() + e * ARK_THREADS;
        if (k < K) xs[Split::place(k)] = v[e];
      }
      ark_sync();
      input.take(xs, warp % PARTS, split);
    }
    ark_split_sums(split, ring, input, sums);
    float none[OWN][1][1] = {};
    ark_split_store<PARTS>(c, epilogue, sums, 1.0f, top, rows, none);
    ark_sync();
  }
  return true;
}
