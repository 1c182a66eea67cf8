// Attention of one query row over a KV cache that is read in place. The cache has a row of D
// elements per position. A lane loads 16 bytes of a row, so one load of the whole wave covers
// several rows. The waves of a block are first divided among the query heads that share a key head;
// if there are more waves than heads, the waves of a head divide the positions. In this way few
// partial sums must be combined. Each wave has one running maximum per head (online softmax). Sums
// are combined over lanes by shuffles and over waves through shared memory. Waves that read the
// same positions hit each other's lines in the L1 cache.

// The greatest common divisor of a and b. Used with the number of query heads of a key head and the
// number of waves: the result is the number of heads that are computed at the same time.
ARK_DEVICE constexpr int ark_common(int a, int b) { return b == 0 ? a : ark_common(b, a % b); }

// Returns how many of a head's splits (parts of the context) are used for `count` positions. The
// planner would choose the same number of splits for a context of this length
// (ark/lower/ops/attention.py). The processors of the other splits have nothing to do and continue
// with their next tasks.
template <int SPLITS>
ARK_DEVICE int ark_parts_used(int count) {
  constexpr int LEAST = 64;
  const float third = __builtin_amdgcn_logf(static_cast<float>(count)) / 3.0f;
  const int root = static_cast<int>(ark_exp2(third) + 0.01f), most = count / LEAST;
  const int wanted = root < most ? root : most;
  return wanted < 1 ? 1 : wanted < SPLITS ? wanted : SPLITS;
}

// Computes attention of one query row over one split of the positions, like ark_attention of
// ark/tasks/attention.h. Task coordinates: row, key/value head * SHARES + share of its query heads,
// split. AHEAD: the number of loads of keys, and of values, in flight. The first loads are issued
// before the task waits, because position and caches were written before the iteration. Returns
// false if a wait has failed or the launch was aborted; the processor must then leave the loop.
template <int G, int KV_HEADS, int SHARES, int D, int CONTEXT, int SPLITS, int AHEAD, typename T,
          class Q, class K, class V, class P, class O, class F>
ARK_DEVICE bool ark_row_attention(ArkCtx& c, const ArkTask& t, const T* type, float scale, Q query,
                                  K keys, V values, P position, O output, F fresh) {
  constexpr int N = static_cast<int>(16 / sizeof(T));
  constexpr int GROUP = D / N;                 // lanes per position
  constexpr int TOGETHER = ARK_LANES / GROUP;  // positions per load
  constexpr int ACROSS = ark_common(G, ARK_WARPS), TEAMS = ARK_WARPS / ACROSS;
  constexpr int OWN = G / ACROSS;           // heads per wave
  constexpr int STRIDE = TOGETHER * TEAMS;  // positions between a wave's loads
  constexpr int WIDE = D + 2, HALVES = ARK_LANES / 32;
  float* parts = reinterpret_cast<float*>(ARK_SCRATCH(c));  // by team, head: sums, top, weight
  const int row = t.coord[0], split = t.coord[2];
  const int heads = t.coord[1] * G, head = t.coord[1] / SHARES;  // the first query head, and theirs
  const int seen = position.p[0] + row + 1;
  const int count = seen < CONTEXT ? seen : CONTEXT;
  const int used = ark_parts_used<SPLITS>(count);
  if (split >= used) {
    if (!ark_enter(c)) return false;
    for (int i = ark_tid(); i < G * WIDE; i += ARK_THREADS) {
      const float v = i % WIDE == D ? -1e30f : 0.0f;
      ark_publish(c, output, row, heads + i / WIDE, split, i % WIDE, v);
    }
    return true;
  }
  const int begin = static_cast<int>(static_cast<ark_i64>(count) * split / used);
  const int end = static_cast<int>(static_cast<ark_i64>(count) * (split + 1) / used);
  const int cached = F::given && end == count ? end - 1 : end;
  const int team = ark_warp() / ACROSS, first = ark_warp() % ACROSS * OWN;
  const int d = ark_lane() % GROUP * N;
  const int mine = begin + team * TOGETHER + ark_lane() / GROUP;
  const auto fetch = [&](const auto& cache, int at) {
    return at < cached ? ark_piece_at(ark_address(cache, 0, head, at, d)) : ark_u32x4(0u);
  };
  ark_u32x4 key[AHEAD], value[AHEAD];
#pragma unroll
  for (int a = 0; a < AHEAD; ++a) {
    key[a] = fetch(keys, mine + a * STRIDE);
    value[a] = fetch(values, mine + a * STRIDE);
  }
  if (!ark_enter_prefetching(c, false, -1)) return false;
  float* given = parts + TEAMS * HALVES * G * WIDE;  // queries, then the newest key and value
  constexpr int QUERIES = G * D, GIVEN = QUERIES + (F::given ? 2 * D : 0);
  if (GIVEN <= ARK_PREFETCHER * ARK_LANES) ark_prefetch_for_packets(c);
  for (int i = ark_tid(); i < GIVEN; i += ARK_THREADS) {
    if (i < QUERIES) {
      given[i] = ark_load(c, query, 0, 0, row, heads * D + i) * (scale * ARK_LOG2_E);
    }
    if constexpr (F::given) {
      const int e = i - QUERIES;
      const int column = e < D ? head * D + e : (KV_HEADS + head - 1) * D + e;
      if (e >= 0) given[i] = ark_load(c, fresh, 0, 0, 0, column);
    }
  }
  ark_packets_arrived(c);
  ark_sync();
  float q[OWN][N];
  ArkHeadState<N> state[OWN];
#pragma unroll
  for (int g = 0; g < OWN; ++g) {
#pragma unroll
    for (int n = 0; n < N; ++n) q[g][n] = given[(first + g) * D + d + n];
    state[g].clear();
  }
  const auto dot = [&](int g, const float (&k)[N]) {
    float sum = k[0] * q[g][0];
#pragma unroll
    for (int n = 1; n < N; ++n) sum += k[n] * q[g][n];
    return ark_group_sum<GROUP>(sum);
  };
#pragma unroll 1
  for (int at = begin + team * TOGETHER; at < cached; at += AHEAD * STRIDE) {
    float v[AHEAD][N], score[OWN][AHEAD];
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      const int here = at + a * STRIDE + ark_lane() / GROUP;
      float k[N];
      ark_widened(type, key[a], k);
      ark_widened(type, value[a], v[a]);
      key[a] = fetch(keys, here + AHEAD * STRIDE);
      value[a] = fetch(values, here + AHEAD * STRIDE);
#pragma unroll
      for (int g = 0; g < OWN; ++g) {
        const float found = dot(g, k);
        score[g][a] = here < cached ? found : -1e30f;
      }
    }
#pragma unroll
    for (int g = 0; g < OWN; ++g) {
      float most = state[g].top;
#pragma unroll
      for (int a = 0; a < AHEAD; ++a) most = __builtin_fmaxf(most, score[g][a]);
      state[g].rise(ark_warp_max(most));
      // Positions past the end need no test here: they were given scores far below the maximum, so
      // their exponentials are 0.
#pragma unroll
      for (int a = 0; a < AHEAD; ++a) state[g].add(ark_exp2(score[g][a] - state[g].top), v[a]);
    }
  }
  if (cached < end && team == TEAMS - 1) {  // the newest position; GROUP lanes add its value
    float k[N], v[N];
#pragma unroll
    for (int n = 0; n < N; ++n) {
      k[n] = given[QUERIES + d + n];
      v[n] = given[QUERIES + D + d + n];
    }
#pragma unroll
    for (int g = 0; g < OWN; ++g) {
      const float score = dot(g, k);
      state[g].rise(__builtin_fmaxf(state[g].top, score));
      state[g].add(ark_lane() < GROUP ? ark_exp2(score - state[g].top) : 0.0f, v);
    }
  }
  // Adds the sums first within rows of 16 lanes, then across rows of 32 lanes by a shuffle, and
  // over the waves in shared memory.
  const int half = ark_lane() / 32;
#pragma unroll
  for (int g = 0; g < OWN; ++g) {
    ArkHeadState<N>& s = state[g];
    s.weight = ark_half_sum<GROUP>(s.weight);
#pragma unroll
    for (int n = 0; n < N; ++n) s.sum[n] = ark_half_sum<GROUP>(s.sum[n]);
    if (ark_lane() % 32 < GROUP) {
      float* part = parts + ((team * HALVES + half) * G + first + g) * WIDE;
#pragma unroll
      for (int n = 0; n < N; ++n) part[d + n] = s.sum[n];
      if (ark_lane() % 32 == 0) {
        part[D] = s.top;
        part[D + 1] = s.weight;
      }
    }
  }
  ark_sync();
  for (int i = ark_tid(); i < G * D; i += ARK_THREADS) {
    const int g = i / D, e = i % D;
    float most = -1e30f, sum = 0.0f, weight = 0.0f;
#pragma unroll
    for (int w = 0; w < TEAMS * HALVES; ++w) {
      most = __builtin_fmaxf(most, parts[(w * G + g) * WIDE + D]);
    }
#pragma unroll
    for (int w = 0; w < TEAMS * HALVES; ++w) {
      const float* part = parts + (w * G + g) * WIDE;
      const float keep = ark_exp2(part[D] - most);
      sum += keep * part[e];
      weight += keep * part[D + 1];
    }
    if constexpr (SPLITS == 1) {
      ark_publish(c, output, 0, 0, row, heads * D + i, sum / weight);
    } else {
      ark_publish(c, output, row, heads + g, split, e, sum);
      if (e == 0) {
        ark_publish(c, output, row, heads + g, split, D, most / ARK_LOG2_E);
        ark_publish(c, output, row, heads + g, split, D + 1, weight);
      }
    }
  }
  if (!decltype(output)::packets) ark_signal_early(c);
  return true;
}
