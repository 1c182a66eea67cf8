// Attention of one query row of a head (a tile of one row, see attention_tiles.h), for KV caches
// that are read in place. A lane loads 16 bytes of a position's row, and the waves divide the
// positions. The loads of AHEAD steps of the loop over positions are in flight at once.
// attention_sums.h describes how scores and sums are divided among lanes.

// Computes attention of one query row of a head over all positions that the row sees. AHEAD: the
// number of loads of keys, and of loads of values, in flight.
template <class S, int AHEAD, typename T, class Q, class K, class V, class O, class P, class A>
ARK_DEVICE void ark_attention_one(ArkCtx& c, const ArkTask& t, const T* type, float scale,
                                  float cap, Q query, K keys, V values, O output, P position,
                                  A sinks) {
  constexpr int D = S::D, N = static_cast<int>(16 / sizeof(T));
  constexpr int GROUP = D / N;                 // lanes per position
  constexpr int TOGETHER = ARK_LANES / GROUP;  // positions per load
  constexpr int STRIDE = TOGETHER * ARK_WARPS;
  constexpr int WIDE = D + 2, HALVES = ARK_LANES / 32, PARTS = ARK_WARPS * HALVES;
  static_assert(S::M == 1 && S::ROWS == 1, "tiles of one row");
  float* parts = reinterpret_cast<float*>(ARK_SCRATCH(c));  // by half wave: sums, top, weight
  const int d = ark_lane() % GROUP * N;
  ark_attention_each<S>(t, position, [&](const ArkAttentionTile& tile) {
    const int head = tile.head / S::PER_KV;
    const int mine = tile.begin + ark_warp() * TOGETHER + ark_lane() / GROUP;
    const auto fetch = [&](const auto& cache, int at) {
      return at < tile.end ? ark_piece_at(ark_address(cache, tile.batch, head, at, d))
                           : ark_u32x4(0u);
    };
    ark_u32x4 key[AHEAD], value[AHEAD];
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      key[a] = fetch(keys, mine + a * STRIDE);
      value[a] = fetch(values, mine + a * STRIDE);
    }
    float sink = -1e30f;
    if constexpr (A::given) sink = sinks.p[tile.head];
    float q[N];
#pragma unroll
    for (int n = 0; n < N; ++n) {
      q[n] = ark_load(c, query, 0, tile.batch, tile.row, tile.head * D + d + n) * scale;
    }
    ArkHeadState<N> state;
    state.clear();
#pragma unroll 1
    for (int at = mine; at - ark_lane() / GROUP < tile.end; at += AHEAD * STRIDE) {
      float v[AHEAD][N], score[AHEAD], most = state.top;
#pragma unroll
      for (int a = 0; a < AHEAD; ++a) {
        float k[N];
        ark_widened(type, key[a], k);
        ark_widened(type, value[a], v[a]);
        float sum = k[0] * q[0];
#pragma unroll
        for (int n = 1; n < N; ++n) sum += k[n] * q[n];
        float product = ark_group_sum<GROUP>(sum);
        if (S::CAPPED) product = cap * ark_tanh(product / cap);
        score[a] = at + a * STRIDE < tile.end ? product * ARK_LOG2_E : -ark_inf();
        most = __builtin_fmaxf(most, score[a]);
      }
#pragma unroll
      for (int a = 0; a < AHEAD; ++a) {
        key[a] = fetch(keys, at + (AHEAD + a) * STRIDE);
        value[a] = fetch(values, at + (AHEAD + a) * STRIDE);
      }
      state.rise(ark_warp_max(most));
#pragma unroll
      for (int a = 0; a < AHEAD; ++a) state.add(ark_exp2(score[a] - state.top), v[a]);
    }
    // The sums are added over the lanes of each half wave by register moves, and then over all half
    // waves of the block in shared memory.
    state.weight = ark_half_sum<GROUP>(state.weight);
#pragma unroll
    for (int n = 0; n < N; ++n) state.sum[n] = ark_half_sum<GROUP>(state.sum[n]);
    if (ark_lane() % 32 < GROUP) {
      float* part = parts + (ark_warp() * HALVES + ark_lane() / 32) * WIDE;
#pragma unroll
      for (int n = 0; n < N; ++n) part[d + n] = state.sum[n];
      if (ark_lane() % 32 == 0) {
        part[D] = state.top;
        part[D + 1] = state.weight;
      }
    }
    ark_sync();
    for (int e = ark_tid(); e < D; e += ARK_THREADS) {
      float most = sink * ARK_LOG2_E, sum = 0.0f;
#pragma unroll
      for (int w = 0; w < PARTS; ++w) most = __builtin_fmaxf(most, parts[w * WIDE + D]);
      float weight = A::given ? ark_exp2(sink * ARK_LOG2_E - most) : 0.0f;
#pragma unroll
      for (int w = 0; w < PARTS; ++w) {
        const float keep = ark_exp2(parts[w * WIDE + D] - most);
        sum += keep * parts[w * WIDE + e];
        weight += keep * parts[w * WIDE + D + 1];
      }
      const float result = weight != 0.0f ? sum / weight : 0.0f;
      ark_publish(c, output, 0, tile.batch, tile.row, tile.head * D + e, result);
    }
    ark_sync();
  });
}
