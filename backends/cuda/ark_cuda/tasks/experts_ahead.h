// Products of an input row with the floating-point weights of one chosen
// expert, in the variant `roles`. A warp keeps the weights of its next rows in
// registers while it multiplies the current ones, so that memory is busy all
// the time. experts.py describes operands and tasks.

// A row of K floating-point weights.
template <typename T, int K>
struct ArkFloatRow {
  T v[K];
};

// Weights 4 i to 4 i + 3 of a piece of 16 bytes, which has eight weights of
// type T.
template <typename T>
ARK_DEVICE float4 ark_expert_four(const ark_u32 (&piece)[4], int i) {
  const T* type = nullptr;
  const float2 low = ark_pair(type, piece[2 * i]), high = ark_pair(type, piece[2 * i + 1]);
  return float4{low.x, low.y, high.x, high.y};
}

// The order of an input row in shared memory. A lane multiplies pieces `lane`,
// `lane` + 32, and so on. Elements that the lanes read at once are neighbours.
// pair(s): the first of the two elements at positions 2 s and 2 s + 1; from K
// on there are zeros.
template <int K>
struct ArkExpertOrder {
  static constexpr int CODES = 8, FOURS = CODES / 4;
  static constexpr int EACH = (K / CODES + ARK_LANES - 1) / ARK_LANES;
  static constexpr int SIZE = EACH * ARK_LANES * CODES;
  ARK_DEVICE int pair(int s) {
    const int four = s / 2, lane = four % ARK_LANES, i = four / ARK_LANES % FOURS;
    return (four / ARK_LANES / FOURS * ARK_LANES + lane) * CODES + i * 4 + s % 2 * 2;
  }
};

// Copies the input row of a slot (one of the row's chosen experts) to shared
// memory.
template <int K, bool SLOTS, class X>
ARK_DEVICE void ark_expert_row(ArkCtx& c, int row, int slot, const X& x, float* xs) {
  typedef ArkExpertOrder<K> Order;
  constexpr int N = (Order::SIZE / 2 + ARK_THREADS - 1) / ARK_THREADS;
  const auto* from = SLOTS ? ark_address(x, 0, row, slot, 0) : ark_address(x, 0, 0, row, 0);
  const int me = ark_tid();
  float v[2 * N];
  const auto place = [&](int n) { return me + n * ARK_THREADS; };
  const auto there = [&](int n) { return Order::pair(place(n)) < K; };
  const auto at = [&](int n) { return from + Order::pair(place(n)); };
  ark_load_pairs<N>(c, from, there, at, v, X::system);
#pragma unroll
  for (int n = 0; n < N; ++n) {
    if (place(n) >= Order::SIZE / 2) continue;
    *reinterpret_cast<float2*>(xs + 2 * place(n)) = float2{v[2 * n], v[2 * n + 1]};
  }
}

// The weights of one step of a warp: HELD pieces per lane of each of RUNS rows,
// and the operands of the epilogue.
template <int RUNS, int HELD, int OUT, int EXTRA>
struct ArkExpertStep {
  ark_u32 piece[RUNS][HELD][4];
  float with[OUT][EXTRA];
};

// Like ark_expert_products of experts.h, for tasks of one slot. Weights have
// type T. A step of a warp is OUT outputs, whose rows are cut into PARTS parts.
template <typename T, int K, int N, bool SLOTS, int OF, int WEIGHTS, int OUT, int PARTS, class X,
          class E, class F>
ARK_DEVICE void ark_expert_ahead(ArkCtx& c, const ArkTask& t, X x, const unsigned char* first,
                                 const unsigned char* second, E experts, const F& finish) {
  typedef ArkFloatRow<T, K> Row;
  typedef ArkExpertOrder<K> Order;
  constexpr int PIECES = K / Order::CODES, RUNS = OUT * WEIGHTS;
  constexpr int HELD = (Order::EACH + PARTS - 1) / PARTS;
  typedef ArkExpertStep<RUNS, HELD, OUT, F::EXTRA> Step;
  float* xs = reinterpret_cast<float*>(ARK_SCRATCH(c));
  const int row = t.coord[0], slot = t.coord[1], begin = t.coord[2], end = t.coord[3];
  const int lane = ark_lane();
  int expert = *ark_address(experts, 0, 0, row, slot);
  if (expert < 0 || expert >= OF) {
    if (ark_tid() == 0) {
      ark_fail(c, 5u, 0u, static_cast<ark_u32>(OF), static_cast<ark_u32>(expert));
    }
    expert = 0;
  }
  ark_expert_row<K, SLOTS>(c, row, slot, x, xs);
  ark_sync();
  const int steps = (end - begin + OUT * ARK_WARPS - 1) / (OUT * ARK_WARPS) * PARTS;
  const auto output = [&](int s) { return begin + (s / PARTS * ARK_WARPS + ark_warp()) * OUT; };
  const auto load = [&](Step& to, int s) {
    const int part = s % PARTS;
#pragma unroll
    for (int o = 0; o < OUT; ++o) {
      const int i = output(s) + o;
      const bool within = i < end;
      const ark_i64 at = static_cast<ark_i64>(expert) * N + (within ? i : begin);
#pragma unroll
      for (int w = 0; w < WEIGHTS; ++w) {
        const Row& from = reinterpret_cast<const Row*>(w > 0 ? second : first)[at];
#pragma unroll
        for (int h = 0; h < HELD; ++h) {
          const int p = (part * HELD + h) * ARK_LANES + lane;
          const bool some = within && p < PIECES;
          const uint4 v = some ? __ldcs(reinterpret_cast<const uint4*>(&from) + p) : uint4{};
          ark_u32(&piece)[4] = to.piece[o * WEIGHTS + w][h];
          piece[0] = v.x, piece[1] = v.y, piece[2] = v.z, piece[3] = v.w;
        }
      }
      if (part == PARTS - 1 && within && lane == 0) finish.ahead(row, slot, expert, i, to.with[o]);
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
#pragma unroll
      for (int i = 0; i < Order::FOURS; ++i) {
        const float4 v = own[i * ARK_LANES];
#pragma unroll
        for (int r = 0; r < RUNS; ++r) {
          const float4 w = ark_expert_four<T>(step.piece[r][h], i);
          sums[r] = fmaf(w.w, v.w, fmaf(w.z, v.z, fmaf(w.y, v.y, fmaf(w.x, v.x, sums[r]))));
        }
      }
    }
    if (part < PARTS - 1) return;
#pragma unroll
    for (int o = 0; o < OUT; ++o) {
      float all[WEIGHTS];
#pragma unroll
      for (int w = 0; w < WEIGHTS; ++w) {
        all[w] = ark_warp_sum(sums[o * WEIGHTS + w]);
        sums[o * WEIGHTS + w] = 0.0f;
      }
      const int i = output(s) + o;
      if (lane == 0 && i < end) finish.store(row, slot, i, finish.term(all, step.with[o]));
    }
  };
  // Without values from the start, ptxas would keep registers for them in the whole kernel.
  Step now = {}, next = {};
  load(now, 0);
  for (int s = 0; s < steps; ++s) {
    if (s + 1 < steps) load(next, s + 1);
    multiply(now, s);
    now = next;
  }
}
