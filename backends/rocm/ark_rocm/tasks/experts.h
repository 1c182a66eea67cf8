// Products of one input row with the quantised weights of chosen experts. If all codes that one
// load reads share a scale, vector units multiply (linear_rows.h). Otherwise matrix units multiply
// (linear_several.h).

// A forward declaration: the function is defined in ark/tasks/experts.h, which follows later in the
// kernel's source.
template <int K, bool SLOTS, int FIRST, int OF, class X, class E>
ARK_DEVICE int ark_expert_input(ArkCtx& c, int row, int slot, const X& x, const E& experts,
                                float* xs);

struct ArkExpertInput {
  static constexpr bool norm = false;
};
// Adapts the epilogue of an expert layer (ArkExpertFinish) to the interface of a linear layer.
template <class F>
struct ArkExpertSums {
  static constexpr int WIDTH = 1;
  const F& finish;
  int row, slot, expert;
};
template <class F>
ARK_DEVICE void ark_sums_ahead(ArkCtx&, const ArkExpertSums<F>&, int, int, int, float (&)[1][1]) {}
template <class F>
ARK_DEVICE void ark_sums_store(ArkCtx&, const ArkExpertSums<F>& sums, int, int n, int,
                               const float (&v)[1], const float (&)[1]) {
  float with[F::EXTRA];
  sums.finish.ahead(sums.row, sums.slot, sums.expert, n, with);
  sums.finish.store(sums.row, sums.slot, n, sums.finish.term(v, with));
}

// Applies the epilogue to the sums and stores the outputs. The method `ahead` loads the epilogue's
// operands for a thread's first output before the sums are complete.
template <int ADDED, int TOTAL, class F>
struct ArkExpertResults {
  const F& finish;
  const int row, slot;
  const int (&expert)[ADDED];
  float with[ADDED][F::EXTRA];
  float left;

  ARK_METHOD void ahead(int n) {
#pragma unroll
    for (int s = 0; s < ADDED; ++s) finish.ahead(row, slot + s, expert[s], n, with[s]);
    if constexpr (TOTAL > 0) left = finish.left(row, n);
  }
  // Stores the outputs `first` to `first` + `rows` - 1. sum(run, i): the sum of output i of a run;
  // a run is one expert with one of its WEIGHTS matrices.
  template <int WEIGHTS, class Sum>
  ARK_METHOD void store(int first, int rows, const Sum& sum) {
    for (int i = ark_tid(); i < rows; i += ARK_THREADS) {
      float result = 0.0f;
#pragma unroll
      for (int s = 0; s < ADDED; ++s) {
        float sums[WEIGHTS];
#pragma unroll
        for (int w = 0; w < WEIGHTS; ++w) sums[w] = sum(s * WEIGHTS + w, i);
        if (i >= ARK_THREADS) finish.ahead(row, slot + s, expert[s], first + i, with[s]);
        result += finish.term(sums, with[s]);
      }
      if (TOTAL > 0 && i >= ARK_THREADS) left = finish.left(row, first + i);
      finish.store(row, slot, first + i, TOTAL > 0 ? result + left : result);
    }
  }
};

// Returns the expert that a row has chosen in a slot (one of the row's chosen experts). If the
// expert belongs to another rank, returns -1 and sets the results to zero.
template <int EXPERTS, bool SLOTS, int FIRST, int OF, class X, class E, class F>
ARK_DEVICE int ark_own_expert(ArkCtx& c, const ArkTask& t, int slot, const X& x, const E& experts,
                              const F& finish) {
  const int row = t.coord[0];
  // With K = 0 the call only determines the expert and copies no input.
  const int expert = ark_expert_input<0, SLOTS, FIRST, OF>(c, row, slot, x, experts, nullptr);
  if (OF <= EXPERTS || (expert >= 0 && expert < EXPERTS)) return expert;
  for (int i = t.coord[2] + ark_tid(); i < t.coord[3]; i += ARK_THREADS) {
    finish.store(row, slot, i, 0.0f);
  }
  return -1;
}

// Multiplies one input row by quantised weights of a chosen expert, like ark_expert_rows of
// ark/tasks/expert_rows.h, on matrix units. Task coordinates: row, slot (one chosen expert of the
// row), first output, end of the outputs (last + 1). Returns false if a wait has failed or the
// launch was aborted; the processor must then leave the loop.
template <class ROW, int EXPERTS, int N, bool SLOTS, int FIRST, int OF, int GROUP, bool ALIGNED,
          class X, class E, class F>
ARK_DEVICE bool ark_expert_several(ArkCtx& c, const ArkTask& t, X x, const unsigned char* bytes,
                                   E experts, const F& finish) {
  constexpr int K = ROW::COLUMNS;
  const int row = t.coord[0], slot = t.coord[1];
  if (!ark_enter(c)) return false;
  const int expert = ark_own_expert<EXPERTS, SLOTS, FIRST, OF>(c, t, slot, x, experts, finish);
  if (expert < 0) return true;
  x.p = SLOTS ? ark_address(x, 0, row, slot, 0) : ark_address(x, 0, 0, row, 0);
  ArkTask range = t;
  range.coord[0] = t.coord[2];
  range.coord[1] = t.coord[3];
  const ark_i64 first = static_cast<ark_i64>(expert) * N + t.coord[2];
  const auto* from = ark_to_global(reinterpret_cast<const char*>(bytes)) +
                     first * static_cast<ark_i64>(sizeof(ROW));
  typedef ArkSeveralCodes<ROW, 8> Codes;
  const Codes weights{from, t.coord[3] - t.coord[2], ark_lane()};
  return ark_linear_several<Codes, K, 1, GROUP, false, ALIGNED, false>(
      c, range, weights, x, ArkExpertInput{}, ArkExpertSums<F>{finish, row, slot, expert});
}

// Like ark_expert_several, on vector units, for several slots and weight matrices. The rows of one
// weight matrix for one slot are called a run. A row of weights is cut along k into PARTS parts (a
// divisor of the number of waves). A wave multiplies one part of each row, and holds the same part
// of the input in registers. Runs are processed one after the other, but the first loads of
// AHEAD_RUNS runs are in flight at once. AHEAD: the number of loads of a run in flight. ROWS: the
// number of outputs whose sums shared memory holds at once. WEIGHTS and TOTAL are explained in
// ark/tasks/experts.h.
template <class ROW, int EXPERTS, int N, bool SLOTS, int FIRST, int OF, int WEIGHTS, int TOTAL,
          int PARTS, int AHEAD, int ROWS, class X, class E, class F>
ARK_DEVICE bool ark_expert_split(ArkCtx& c, const ArkTask& t, X x, const unsigned char* bytes,
                                 const unsigned char* second, E experts, const F& finish) {
  typedef ArkSplitCodes<ROW, PARTS> Split;
  static_assert(ARK_WARPS % PARTS == 0, "a wave has one part");
  static_assert(AHEAD <= 4, "sums of four loads");
  constexpr int STEP = AHEAD * ARK_WARPS, K = ROW::COLUMNS;
  constexpr int EACH = ArkPacketRows<K, 1, SLOTS>::EACH, ALL = PARTS * Split::SPAN;
  constexpr int ADDED = TOTAL > 0 ? TOTAL : 1, INPUTS = SLOTS ? ADDED : 1;
  constexpr int RUNS = ADDED * WEIGHTS, SUMS = ROWS * PARTS + STEP;
  constexpr int AHEAD_RUNS = RUNS < 4 ? RUNS : 4;
  static_assert(OF <= EXPERTS || RUNS == 1, "a part of the experts has no epilogue");
  float* xs = reinterpret_cast<float*>(ARK_SCRATCH(c));  // with several inputs: two buffers in turn
  float* sums = xs + (INPUTS > 1 ? 2 : 1) * ALL;         // by run, row, part
  const int row = t.coord[0], slot = TOTAL > 0 ? 0 : t.coord[1];
  // These numbers are the same in all lanes of a wave. readfirstlane makes this known to the
  // compiler, which then computes the addresses of rows once per wave.
  const int warp = __builtin_amdgcn_readfirstlane(ark_warp()), own_part = warp % PARTS;
  if (!ark_enter(c)) return false;
  ArkPacketRows<K, INPUTS, SLOTS> held;
  held.load(x, row, slot);
  held.take(c, x, row, slot, [] {});
  int expert[ADDED];
#pragma unroll
  for (int s = 0; s < ADDED; ++s) {
    expert[s] = ark_own_expert<EXPERTS, SLOTS, FIRST, OF>(c, t, slot + s, x, experts, finish);
    if (expert[s] < 0) return true;
    expert[s] = __builtin_amdgcn_readfirstlane(expert[s]);
  }
  typename Split::Input input;
#pragma unroll 1
  for (int top = t.coord[2]; top < t.coord[3]; top += ROWS) {
    const int rows = t.coord[3] - top < ROWS ? t.coord[3] - top : ROWS;
    const int count = rows * PARTS, padded = (count + STEP - 1) / STEP * STEP;
    Split runs[RUNS];
#pragma unroll
    for (int r = 0; r < RUNS; ++r) {
      const ark_i64 first = static_cast<ark_i64>(expert[r / WEIGHTS]) * N + top;
      const auto* from = ark_to_global(r % WEIGHTS > 0 ? second : bytes);
      runs[r] = {from + first * static_cast<ark_i64>(sizeof(ROW)), count, ark_lane()};
    }
    // Past the last row, the last row is loaded again instead of skipping the load. With a branch,
    // the compiler could not count the loads in flight, and the next wait would be for all of them.
    const auto load = [&](const Split& run, int part) {
      const int of = part / PARTS;
      return run.load_from(of < rows ? of : rows - 1, own_part);
    };
    typename Split::Piece ring[AHEAD_RUNS][AHEAD];
#pragma unroll
    for (int r = 0; r < AHEAD_RUNS; ++r) {
#pragma unroll
      for (int a = 0; a < AHEAD; ++a) ring[r][a] = load(runs[r], warp + a * ARK_WARPS);
    }
    ArkExpertResults<ADDED, TOTAL, F> results{finish, row, slot, expert, {}, 0.0f};
    results.ahead(top + (ark_tid() < rows ? ark_tid() : 0));
#pragma unroll
    for (int r = 0; r < RUNS; ++r) {
      if (r % (RUNS / INPUTS) == 0 && (INPUTS > 1 || top == t.coord[2])) {
        const int s = r / (RUNS / INPUTS);
        float* own = xs + s % 2 * ALL;
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
          const int k = ark_tid() + e * ARK_THREADS;
          if (k < K) own[Split::place(k)] = held.v[s][e];
        }
        ark_sync();
        input.take(own, warp % PARTS, runs[r]);
      }
      typename Split::Piece(&loaded)[AHEAD] = ring[r % AHEAD_RUNS];
      const auto products = [&](int part, const auto& then) {
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
          sum[a] = runs[r].dot(own_part, loaded[a], input);
          then(a);
        }
        const float all = ark_sum_four(sum, ark_lane());
        if (ark_lane() < AHEAD) sums[r * SUMS + part + ark_lane() * ARK_WARPS] = all;
      };
      int part = warp;
#pragma unroll 1
      for (; part + STEP < padded; part += STEP) {
        products(part, [&](int a) { loaded[a] = load(runs[r], part + STEP + a * ARK_WARPS); });
      }
      products(part, [&](int a) {
        if constexpr (RUNS > AHEAD_RUNS) {
          const int later = r + AHEAD_RUNS < RUNS ? r + AHEAD_RUNS : r;
          if (r + AHEAD_RUNS < RUNS) loaded[a] = load(runs[later], warp + a * ARK_WARPS);
        }
        (void)a;
      });
    }
    ark_sync();
    results.template store<WEIGHTS>(top, rows, [&](int r, int i) {
      const float* of = sums + r * SUMS + i * PARTS;
      float sum = of[0];
#pragma unroll
      for (int p = 1; p < PARTS; ++p) sum += of[p];
      return sum;
    });
    ark_sync();
  }
  return true;
}
