// Products of input rows with the weights of chosen experts, in the variant `roles`. A warp keeps
// the weights of its next rows in registers while it multiplies the current ones, so that memory is
// busy all the time. experts.py describes operands and tasks.

// A row of K floating-point weights.
template <typename T, int K>
struct ArkFloatRow {
  T v[K];
};

// Reads rows in pieces of 16 bytes, of CODES weights each. scale(row, piece): the factor of a
// piece. four(piece, i): the weights 4 i to 4 i + 3 of a piece, before they are scaled.
template <class ROW>
struct ArkExpertRow;
template <typename T, int K>
struct ArkExpertRow<ArkFloatRow<T, K>> {
  static constexpr int COLUMNS = K, CODES = 8;
  ARK_DEVICE float scale(const ArkFloatRow<T, K>&, int) { return 1.0f; }
  ARK_DEVICE float4 four(const ark_u32 (&piece)[4], int i) {
    const T* type = nullptr;
    const float2 low = ark_pair(type, piece[2 * i]), high = ark_pair(type, piece[2 * i + 1]);
    return float4{low.x, low.y, high.x, high.y};
  }
};
// The order of an input row in shared memory. A lane multiplies pieces `lane`, `lane` + 32, and so
// on. Elements that the lanes read at once are neighbours. pair(s): the first of the two elements
// at positions 2 s and 2 s + 1; from K on there are zeros.
template <class READER>
struct ArkExpertOrder {
  static constexpr int CODES = READER::CODES, FOURS = CODES / 4;
  static constexpr int EACH = (READER::COLUMNS / CODES + ARK_LANES - 1) / ARK_LANES;
  static constexpr int SIZE = EACH * ARK_LANES * CODES;
  ARK_DEVICE int pair(int s) {
    const int four = s / 2, lane = four % ARK_LANES, i = four / ARK_LANES % FOURS;
    return (four / ARK_LANES / FOURS * ARK_LANES + lane) * CODES + i * 4 + s % 2 * 2;
  }
};

// Copies the input row of a slot (one of the row's chosen experts) to shared memory.
template <class ORDER, int K, bool SLOTS, class X>
ARK_DEVICE void ark_expert_row(ArkCtx& c, int row, int slot, const X& x, float* xs) {
  constexpr int N = (ORDER::SIZE / 2 + ARK_THREADS - 1) / ARK_THREADS;
  const auto* from = SLOTS ? ark_address(x, 0, row, slot, 0) : ark_address(x, 0, 0, row, 0);
  const int me = ark_tid();
  float v[2 * N];
  const auto place = [&](int n) { return me + n * ARK_THREADS; };
  const auto there = [&](int n) { return ORDER::pair(place(n)) < K; };
  const auto at = [&](int n) { return from + ORDER::pair(place(n)); };
  ark_load_pairs<N>(c, from, there, at, v, X::system);
#pragma unroll
  for (int n = 0; n < N; ++n) {
    if (place(n) >= ORDER::SIZE / 2) continue;
    *reinterpret_cast<float2*>(xs + 2 * place(n)) = float2{v[2 * n], v[2 * n + 1]};
  }
}

// The weights of one step of a warp: HELD pieces per lane of each of RUNS rows, their factors, and
// the operands of the epilogue.
template <int RUNS, int HELD, int OUT, int EXTRA>
struct ArkExpertStep {
  ark_u32 piece[RUNS][HELD][4];
  float scale[RUNS][HELD], with[OUT][EXTRA], left[OUT];
};

// Like ark_expert_products of experts.h. A step of a warp is OUT outputs of one slot, whose rows
// are cut into PARTS parts.
template <class ROW, int N, bool SLOTS, int OF, int WEIGHTS, int TOTAL, int OUT, int PARTS, class X,
          class E, class F>
ARK_DEVICE void ark_expert_ahead(ArkCtx& c, const ArkTask& t, X x, const unsigned char* first,
                                 const unsigned char* second, E experts, const F& finish) {
  typedef ArkExpertRow<ROW> Reader;
  typedef ArkExpertOrder<Reader> Order;
  constexpr int K = Reader::COLUMNS, CODES = Reader::CODES, PIECES = K / CODES;
  constexpr int HELD = (Order::EACH + PARTS - 1) / PARTS, RUNS = OUT * WEIGHTS;
  constexpr int ADDED = TOTAL > 0 ? TOTAL : 1;
  typedef ArkExpertStep<RUNS, HELD, OUT, F::EXTRA> Step;
  float* xs = reinterpret_cast<float*>(ARK_SCRATCH(c));
  float* totals = xs + Order::SIZE;
  int* chosen = reinterpret_cast<int*>(totals + ARK_EXPERT_TOTALS);
  const int row = t.coord[0], begin = t.coord[2], end = t.coord[3], lane = ark_lane();
  const int first_slot = TOTAL > 0 ? 0 : t.coord[1];
  if (ark_tid() < ADDED) {
    int expert = *ark_address(experts, 0, 0, row, first_slot + ark_tid());
    if (expert < 0 || expert >= OF) {
      ark_fail(c, 5u, 0u, static_cast<ark_u32>(OF), static_cast<ark_u32>(expert));
      expert = 0;
    }
    chosen[ark_tid()] = expert;
  }
  if (!SLOTS) ark_expert_row<Order, K, SLOTS>(c, row, first_slot, x, xs);
  ark_sync();
  const int rounds = (end - begin + OUT * ARK_WARPS - 1) / (OUT * ARK_WARPS);
  const int steps = ADDED * rounds * PARTS;
  const auto slot_of = [&](int s) { return s / (rounds * PARTS); };
  const auto output = [&](int s) {
    return begin + (s / PARTS % rounds * ARK_WARPS + ark_warp()) * OUT;
  };
  const auto load = [&](Step& to, int s) {
    const int expert = chosen[slot_of(s)], part = s % PARTS;
#pragma unroll
    for (int o = 0; o < OUT; ++o) {
      const int i = output(s) + o;
      const bool within = i < end;
      const ark_i64 at = static_cast<ark_i64>(expert) * N + (within ? i : begin);
#pragma unroll
      for (int w = 0; w < WEIGHTS; ++w) {
        const ROW& from = reinterpret_cast<const ROW*>(w > 0 ? second : first)[at];
#pragma unroll
        for (int h = 0; h < HELD; ++h) {
          const int p = (part * HELD + h) * ARK_LANES + lane;
          const bool some = within && p < PIECES;
          const uint4 v = some ? __ldcs(reinterpret_cast<const uint4*>(&from) + p) : uint4{};
          ark_u32(&piece)[4] = to.piece[o * WEIGHTS + w][h];
          piece[0] = v.x, piece[1] = v.y, piece[2] = v.z, piece[3] = v.w;
          to.scale[o * WEIGHTS + w][h] = some ? Reader::scale(from, p) : 0.0f;
        }
      }
      to.left[o] = 0.0f;
      if (part == PARTS - 1 && within && lane == 0) {
        finish.ahead(row, first_slot + slot_of(s), expert, i, to.with[o]);
        if (TOTAL > 0 && slot_of(s) == ADDED - 1) to.left[o] = finish.left(row, i);
      }
    }
  };
  float sums[RUNS] = {};
  const auto multiply = [&](const Step& step, int s) {
    const int part = s % PARTS;
#pragma unroll
    for (int h = 0; h < HELD; ++h) {
      const int p = (part * HELD + h) * ARK_LANES;
      if (p >= Order::EACH * ARK_LANES) break;
      const float4* own = reinterpret_cast<const float4*>(xs) + p * Order::FOURS + lane;
      float sum[RUNS] = {};
#pragma unroll
      for (int i = 0; i < Order::FOURS; ++i) {
        const float4 v = own[i * ARK_LANES];
#pragma unroll
        for (int r = 0; r < RUNS; ++r) {
          const float4 w = Reader::four(step.piece[r][h], i);
          sum[r] = fmaf(w.w, v.w, fmaf(w.z, v.z, fmaf(w.y, v.y, fmaf(w.x, v.x, sum[r]))));
        }
      }
#pragma unroll
      for (int r = 0; r < RUNS; ++r) sums[r] = fmaf(sum[r], step.scale[r][h], sums[r]);
    }
    if (part < PARTS - 1) return;
    const int slot = slot_of(s);
#pragma unroll
    for (int o = 0; o < OUT; ++o) {
      float all[WEIGHTS];
#pragma unroll
      for (int w = 0; w < WEIGHTS; ++w) {
        all[w] = ark_warp_sum(sums[o * WEIGHTS + w]);
        sums[o * WEIGHTS + w] = 0.0f;
      }
      const int i = output(s) + o;
      if (lane != 0 || i >= end) continue;
      float v = finish.term(all, step.with[o]);
      if (TOTAL > 0) {
        if (slot > 0) v += totals[i - begin];
        totals[i - begin] = v;
      }
      if (TOTAL == 0) finish.store(row, first_slot, i, v);
      if (TOTAL > 0 && slot == ADDED - 1) finish.store(row, 0, i, v + step.left[o]);
    }
  };
  Step now, next;
  load(now, 0);
  for (int s = 0; s < steps; ++s) {
    if (s + 1 < steps) load(next, s + 1);
    if (SLOTS && (s == 0 || slot_of(s) != slot_of(s - 1))) {
      if (s > 0) ark_sync();  // all warps have read the previous slot's input
      ark_expert_row<Order, K, SLOTS>(c, row, first_slot + slot_of(s), x, xs);
      ark_sync();
    }
    multiply(now, s);
    now = next;
  }
}
