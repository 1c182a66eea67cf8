// Linear layers of one input row in which every wave of the block has an equal share of a task's
// weights, whatever the number of rows: rows are cut along k into parts of a wave's 16-byte loads,
// dealt to the waves in turn. A wave's first AHEAD loads are under way before the task waits for
// its input; registers are the ring.

// A lane's products of 16 bytes of weights, nothing beyond the row's end.
template <typename T, int K, int PARTS>
struct ArkSplitRows {
  static constexpr int PIECE = static_cast<int>(16 / sizeof(T));
  static constexpr int SPAN = ARK_LANES * PIECE;
  static constexpr bool WHOLE = K % SPAN == 0;
  const ark_global<T>* weights;
  int count;  // parts of all rows

  ARK_METHOD int k(int part) const { return part % PARTS * SPAN + ark_lane() * PIECE; }
  ARK_METHOD ark_u32x4 load(int part) const {
    const int at = k(part);
    if (part >= count || (!WHOLE && at >= K)) return ark_u32x4(0u);
    return __builtin_nontemporal_load(
        (const ark_global<ark_u32x4>*)(weights + static_cast<ark_i64>(part / PARTS) * K + at));
  }
  ARK_METHOD float dot(int part, ark_u32x4 piece, const float* xs) const {
    const int at = WHOLE || k(part) < K ? k(part) : 0;
    return ark_warp_sum(ark_piece_dot(static_cast<const T*>(nullptr), piece, xs + at));
  }
};

// The input row to shared memory, times the norm's weights if there are any; the norm's scale.
template <int K, class X, class P>
ARK_DEVICE float ark_split_input(ArkCtx& c, X x, const P& prologue, float* xs, float* red) {
  if constexpr (P::norm) {
    constexpr int EACH = (K + ARK_THREADS - 1) / ARK_THREADS;
    float factors[EACH];
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const int k = ark_tid() + e * ARK_THREADS;
      factors[e] = k < K ? ark_get(prologue.weight.p, k) : 0.0f;
    }
    float squares = ark_load_row<false>(c, x, 0, K, xs);
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const int k = ark_tid() + e * ARK_THREADS;
      if (k < K) xs[k] *= factors[e];
    }
    return ark_rsqrt(ark_block_sum(squares, red) / K + prologue.eps);
  } else {
    ark_load_row<false>(c, x, 0, K, xs);
    return 1.0f;
  }
}

// coord: first and last+1 row of the weights; at most ROWS. False if the processor is to leave.
template <typename T, int K, int PARTS, int ROWS, int AHEAD, class X, class P, class E>
ARK_DEVICE bool ark_linear_split(ArkCtx& c, const ArkTask& t, const T* weights, X x,
                                 const P& prologue, E epilogue) {
  constexpr int WIDTH = E::WIDTH;
  constexpr int OWN = (ROWS / WIDTH + ARK_THREADS - 1) / ARK_THREADS;  // of a thread
  float* xs = reinterpret_cast<float*>(ARK_SCRATCH(c));
  float* sums = xs + K;
  float* red = sums + ROWS * PARTS;
  const int first = t.coord[0], rows = t.coord[1] - first;
  const ArkSplitRows<T, K, PARTS> split{
      ark_to_global(weights) + static_cast<ark_i64>(first) * K, rows * PARTS};
  ark_u32x4 ring[AHEAD];
#pragma unroll
  for (int a = 0; a < AHEAD; ++a) ring[a] = split.load(ark_warp() + a * ARK_WARPS);
  if (!ark_enter(c)) return false;
  float ahead[OWN][1][WIDTH] = {};
#pragma unroll
  for (int o = 0; o < OWN; ++o) {
    const int row = (ark_tid() + o * ARK_THREADS) * WIDTH;
    if (row < rows) ark_sums_ahead(c, epilogue, first + row, rows - row, ahead[o]);
  }
  const float scale = ark_split_input<K>(c, x, prologue, xs, red);
  ark_sync();
#pragma unroll 1
  for (int part = ark_warp(); part < split.count; part += AHEAD * ARK_WARPS) {
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      const int at = part + a * ARK_WARPS;
      const float sum = split.dot(at, ring[a], xs);
      ring[a] = split.load(at + AHEAD * ARK_WARPS);
      if (at < split.count && ark_lane() == 0) sums[at] = sum;
    }
  }
  ark_sync();
#pragma unroll
  for (int o = 0; o < OWN; ++o) {
    const int row = (ark_tid() + o * ARK_THREADS) * WIDTH;
    if (row >= rows) continue;
    float total[WIDTH];
#pragma unroll
    for (int r = 0; r < WIDTH; ++r) {
      total[r] = 0.0f;
      for (int p = 0; p < PARTS; ++p) total[r] += sums[(row + r) * PARTS + p];
      if constexpr (P::norm) total[r] *= scale;
    }
    ark_sums_store(c, epilogue, 0, first + row, rows - row, total, ahead[o][0]);
  }
  ark_sums_finish(c, t, epilogue, red);
  return true;
}
