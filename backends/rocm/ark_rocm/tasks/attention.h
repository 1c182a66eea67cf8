// Attention of one query row over a cache read in place: a lane has 16 bytes of a position's row,
// D * size / 16 lanes a position, so that one load of a wave covers several whole positions. Each
// group of lanes has a running maximum and sums of its own (online softmax); groups are joined by
// shuffles, waves in shared memory.

constexpr float ARK_LOG2_E = 1.44269504f;

// 2 to the power of v, to a unit in the last place; 0 below the least normal number.
ARK_DEVICE float ark_exp2(float v) { return __builtin_amdgcn_exp2f(v); }

// A lane's share of the result of G query heads: N dimensions.
template <int G, int N>
struct ArkRowState {
  float top[G];  // scores are times log2(e)
  float weight[G];
  float sum[G][N];

  ARK_METHOD void clear() {
#pragma unroll
    for (int g = 0; g < G; ++g) {
      top[g] = -1e30f;
      weight[g] = 0.0f;
#pragma unroll
      for (int n = 0; n < N; ++n) sum[g][n] = 0.0f;
    }
  }
  // P more positions of head g: their scores, -1e30 where there is none, and their values.
  template <int P>
  ARK_METHOD void add(int g, const float (&score)[P], const float (&value)[P][N]) {
    float most = top[g];
#pragma unroll
    for (int p = 0; p < P; ++p) most = __builtin_fmaxf(most, score[p]);
    lower(g, most);
#pragma unroll
    for (int p = 0; p < P; ++p) {
      const float share = score[p] > -1e30f ? ark_exp2(score[p] - most) : 0.0f;
      weight[g] += share;
#pragma unroll
      for (int n = 0; n < N; ++n) sum[g][n] += share * value[p][n];
    }
  }
  // Takes `most` for the maximum.
  ARK_METHOD void lower(int g, float most) {
    const float keep = ark_exp2(top[g] - most);
    top[g] = most;
    weight[g] *= keep;
#pragma unroll
    for (int n = 0; n < N; ++n) sum[g][n] *= keep;
  }
};

// 16 bytes as floats.
template <typename T, int N>
ARK_DEVICE void ark_widened(const T* type, ark_u32x4 piece, float (&to)[N]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    to[2 * i] = ark_low(type, piece[i]);
    to[2 * i + 1] = ark_high(type, piece[i]);
  }
}
template <typename T>
ARK_DEVICE ark_u32x4 ark_piece_at(const T* p) {
  return *(const ark_global<ark_u32x4>*)p;
}

// Sums over the groups of GROUP lanes in each half of 32 lanes, lane by lane.
template <int GROUP>
ARK_DEVICE float ark_half_sum(float v) {
  if (GROUP <= 4) v += ark_row_move<0x124>(v);  // row_ror 4
  if (GROUP <= 8) v += ark_row_move<0x128>(v);  // row_ror 8
  return v + ark_bits_float(static_cast<ark_u32>(__builtin_amdgcn_ds_swizzle(
                 static_cast<int>(ark_float_bits(v)), 0x401f)));  // the other row of 16
}

// Sums over the lanes of a position: 4, 8 or 16 neighbours; the same in each of them.
template <int LANES>
ARK_DEVICE float ark_group_sum(float v) {
  v += ark_row_move<0xb1>(v);
  v += ark_row_move<0x4e>(v);
  if (LANES >= 8) v += ark_row_move<0x141>(v);
  if (LANES >= 16) v += ark_row_move<0x140>(v);
  return v;
}

// coord: row, key/value head, split; as ark_attention of ark/tasks/attention.h. AHEAD: loads of
// keys, and of values, under way; the first are before the task waits, as position and caches are
// older than the iteration. False if the processor is to leave.
template <int G, int KV_HEADS, int D, int CONTEXT, int SPLITS, int AHEAD, typename T, class Q,
          class K, class V, class P, class O, class F>
ARK_DEVICE bool ark_row_attention(ArkCtx& c, const ArkTask& t, const T* type, float scale, Q query,
                                  K keys, V values, P position, O output, F fresh) {
  constexpr int N = static_cast<int>(16 / sizeof(T));
  constexpr int GROUP = D / N;                  // lanes of a position
  constexpr int TOGETHER = ARK_LANES / GROUP;   // positions of a load
  constexpr int STRIDE = TOGETHER * ARK_WARPS;  // of the block's loads
  constexpr int WIDE = D + 2, HALVES = ARK_LANES / 32;
  float* parts = reinterpret_cast<float*>(ARK_SCRATCH(c));  // by wave, head: sums, top, weight
  const int row = t.coord[0], head = t.coord[1], split = t.coord[2];
  const int seen = position.p[0] + row + 1;
  const int count = seen < CONTEXT ? seen : CONTEXT;
  const int begin = static_cast<int>(static_cast<ark_i64>(count) * split / SPLITS);
  const int end = static_cast<int>(static_cast<ark_i64>(count) * (split + 1) / SPLITS);
  const int cached = F::given && end == count ? end - 1 : end;
  const int d = ark_lane() % GROUP * N;
  const int mine = begin + ark_warp() * TOGETHER + ark_lane() / GROUP;
  const auto fetch = [&](const auto& cache, int at) {
    return at < cached ? ark_piece_at(ark_address(cache, 0, head, at, d)) : ark_u32x4(0u);
  };
  ark_u32x4 key[AHEAD], value[AHEAD];
#pragma unroll
  for (int a = 0; a < AHEAD; ++a) {
    key[a] = fetch(keys, mine + a * STRIDE);
    value[a] = fetch(values, mine + a * STRIDE);
  }
  if (!ark_enter(c)) return false;
  float* given = parts + ARK_WARPS * HALVES * G * WIDE;  // queries, then the newest key and value
  constexpr int QUERIES = G * D, GIVEN = QUERIES + (F::given ? 2 * D : 0);
  for (int i = ark_tid(); i < GIVEN; i += ARK_THREADS) {
    if (i < QUERIES) {
      given[i] = ark_load(c, query, 0, 0, row, head * QUERIES + i) * (scale * ARK_LOG2_E);
    }
    if constexpr (F::given) {
      const int e = i - QUERIES;
      const int column = e < D ? head * D + e : (KV_HEADS + head - 1) * D + e;
      if (e >= 0) given[i] = ark_load(c, fresh, 0, 0, 0, column);
    }
  }
  ark_sync();
  const bool newest = cached < end && ark_warp() == ARK_WARPS - 1;  // its lanes take it too
  float q[G][N];
#pragma unroll
  for (int g = 0; g < G; ++g) {
#pragma unroll
    for (int n = 0; n < N; ++n) q[g][n] = given[g * D + d + n];
  }
  ArkRowState<G, N> state;
  state.clear();
  const auto dot = [&](int g, const float (&k)[N]) {
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < N; ++n) sum += k[n] * q[g][n];
    return ark_group_sum<GROUP>(sum);
  };
#pragma unroll 1
  for (int at = begin + ark_warp() * TOGETHER; at < cached; at += AHEAD * STRIDE) {
    float v[AHEAD][N], score[G][AHEAD];
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      const int here = at + a * STRIDE + ark_lane() / GROUP;
      float k[N];
      ark_widened(type, key[a], k);
      ark_widened(type, value[a], v[a]);
      key[a] = fetch(keys, here + AHEAD * STRIDE);
      value[a] = fetch(values, here + AHEAD * STRIDE);
#pragma unroll
      for (int g = 0; g < G; ++g) score[g][a] = here < cached ? dot(g, k) : -1e30f;
    }
#pragma unroll
    for (int g = 0; g < G; ++g) state.add(g, score[g], v);
  }
  if (newest) {
    float k[N], v[1][N];
#pragma unroll
    for (int n = 0; n < N; ++n) {
      k[n] = given[QUERIES + d + n];
      v[0][n] = given[QUERIES + D + d + n];
    }
#pragma unroll
    for (int g = 0; g < G; ++g) {
      const float score[1] = {ark_lane() < GROUP ? dot(g, k) : -1e30f};
      state.add(g, score, v);
    }
  }
  // One maximum for the wave, so that only sums are left to be joined: within rows of 16 lanes
  // here, across rows of 32 by a shuffle, the rest in shared memory.
#pragma unroll
  for (int g = 0; g < G; ++g) {
    state.lower(g, ark_warp_max(state.top[g]));
    state.weight[g] = ark_half_sum<GROUP>(state.weight[g]);
#pragma unroll
    for (int n = 0; n < N; ++n) state.sum[g][n] = ark_half_sum<GROUP>(state.sum[g][n]);
  }
  const int half = ark_lane() / 32;
  if (ark_lane() % 32 < GROUP) {
#pragma unroll
    for (int g = 0; g < G; ++g) {
      float* part = parts + ((ark_warp() * HALVES + half) * G + g) * WIDE;
#pragma unroll
      for (int n = 0; n < N; ++n) part[d + n] = state.sum[g][n];
      if (ark_lane() % 32 == 0) {
        part[D] = state.top[g];
        part[D + 1] = state.weight[g];
      }
    }
  }
  ark_sync();
  for (int i = ark_tid(); i < G * D; i += ARK_THREADS) {
    const int g = i / D, e = i % D;
    float most = -1e30f, sum = 0.0f, weight = 0.0f;
#pragma unroll
    for (int w = 0; w < ARK_WARPS * HALVES; ++w) {
      most = __builtin_fmaxf(most, parts[(w * G + g) * WIDE + D]);
    }
#pragma unroll
    for (int w = 0; w < ARK_WARPS * HALVES; ++w) {
      const float* part = parts + (w * G + g) * WIDE;
      const float keep = ark_exp2(part[D] - most);
      sum += keep * part[e];
      weight += keep * part[D + 1];
    }
    if constexpr (SPLITS == 1) {
      ark_publish(c, output, 0, 0, row, head * G * D + i, sum / weight);
    } else {
      ark_publish(c, output, row, head * G + g, split, e, sum);
      if (e == 0) {
        ark_publish(c, output, row, head * G + g, split, D, most / ARK_LOG2_E);
        ark_publish(c, output, row, head * G + g, split, D + 1, weight);
      }
    }
  }
  return true;
}
