// Causal grouped-query attention over a cache of keys and values. The positions of the cache are
// divided into splits, whose results a second function combines. attention.py describes operands
// and tasks.

// Shared memory of a task, for G query heads of D elements each. CHUNK positions are processed at a
// time.
template <int G, int D, int CHUNK>
struct ArkAttentionScratch {
  float query[G * D];
  float sum[G * D];      // unnormalised
  float current[2 * D];  // the key and value of this iteration
  float score[G * CHUNK];
  float top[G];     // largest score so far
  float weight[G];  // the sum of the exponentials of the scores
  float keep[G];    // the factor by which a new maximum scales the earlier sums
};

// Computes the scores of `count` positions, beginning at position `first`. The keys of the first
// `cached` of these positions are in the cache. The key after them is the newest one, in shared
// memory (s.current).
template <int G, int D, int CHUNK, class K>
ARK_DEVICE void ark_attention_scores(ArkAttentionScratch<G, D, CHUNK>& s, K keys, int head,
                                     int first, int cached, int count) {
  for (int e = ark_warp(); e < count; e += ARK_WARPS) {
    for (int g = 0; g < G; ++g) {
      const float share =
          e < cached ? ark_row_dot(ark_address(keys, 0, head, first + e, 0), s.query + g * D, D)
                     : ark_row_dot(s.current, s.query + g * D, D);
      const float score = ark_warp_sum(share);
      if (ark_lane() == 0) s.score[g * CHUNK + e] = score;
    }
  }
}

// Softmax of a chunk: replaces the scores by exponentials relative to the running maximum.
template <int G, int D, int CHUNK>
ARK_DEVICE void ark_attention_softmax(ArkAttentionScratch<G, D, CHUNK>& s, int count) {
  for (int g = ark_warp(); g < G; g += ARK_WARPS) {
    float m = s.top[g];
    for (int e = ark_lane(); e < count; e += ARK_LANES) {
      const float v = s.score[g * CHUNK + e];
      m = v > m ? v : m;
    }
    m = ark_warp_max(m);
    float sum = 0.0f;
    for (int e = ark_lane(); e < count; e += ARK_LANES) {
      const float v = ark_exp(s.score[g * CHUNK + e] - m);
      s.score[g * CHUNK + e] = v;
      sum += v;
    }
    sum = ark_warp_sum(sum);
    if (ark_lane() == 0) {
      s.keep[g] = ark_exp(s.top[g] - m);
      s.weight[g] = s.weight[g] * s.keep[g] + sum;
      s.top[g] = m;
    }
  }
}

// Adds the chunk's values, weighted by their exponentials, to the sums. If a block has one thread,
// it processes row by row, so that the compiler vectorises over columns. Several threads divide the
// columns among themselves.
template <int G, int D, int CHUNK, class V>
ARK_DEVICE void ark_attention_values(ArkAttentionScratch<G, D, CHUNK>& s, V values, int head,
                                     int first, int cached, int count) {
  if constexpr (ARK_THREADS == 1) {
    for (int g = 0; g < G; ++g) {
      float* sum = s.sum + g * D;
      for (int d = 0; d < D; ++d) sum[d] *= s.keep[g];
      for (int e = 0; e < cached; ++e) {
        const auto* row = ark_address(values, 0, head, first + e, 0);
        for (int d = 0; d < D; ++d) sum[d] += s.score[g * CHUNK + e] * ark_get(row, d);
      }
      if (cached < count) {
        for (int d = 0; d < D; ++d) sum[d] += s.score[g * CHUNK + cached] * s.current[D + d];
      }
    }
  } else {
    for (int i = ark_tid(); i < G * D; i += ARK_THREADS) {
      const int g = i / D, d = i % D;
      float sum = s.sum[i] * s.keep[g];
      for (int e = 0; e < cached; ++e) {
        sum += s.score[g * CHUNK + e] * ark_get(ark_address(values, 0, head, first + e, 0), d);
      }
      if (cached < count) sum += s.score[g * CHUNK + cached] * s.current[D + d];
      s.sum[i] = sum;
    }
  }
}

// Computes the attention of G query heads that share a key/value head, over one split of the
// positions. Task coordinates: row, key/value head * SHARES + the share of its query heads, split.
// With one split, the output is the result of each query head. With several splits, it is the
// unnormalised sum, the maximum and the denominator of each query head over this split.
// WINDOW: the number of latest positions that are seen; 0 for all.
template <int G, int KV_HEADS, int SHARES, int D, int CONTEXT, int SPLITS, int CHUNK, int WINDOW,
          class Q, class K, class V, class P, class O, class F>
ARK_DEVICE void ark_attention(ArkCtx& c, const ArkTask& t, float scale, Q query, K keys, V values,
                              P position, O output, F fresh) {
  auto& s = *reinterpret_cast<ArkAttentionScratch<G, D, CHUNK>*>(ARK_SCRATCH(c));
  const int row = t.coord[0], split = t.coord[2];
  const int heads = t.coord[1] * G, head = t.coord[1] / SHARES;  // the first query head, and theirs
  const int at = position.p[0], seen = (at < CONTEXT ? at : CONTEXT) + row + 1;
  const int all = seen < 0 ? 0 : seen < CONTEXT ? seen : CONTEXT;
  const int count = WINDOW > 0 && all > WINDOW ? WINDOW : all, skipped = all - count;
  const int begin = skipped + static_cast<int>(static_cast<ark_i64>(count) * split / SPLITS);
  const int end = skipped + static_cast<int>(static_cast<ark_i64>(count) * (split + 1) / SPLITS);
  const int in_cache = F::given ? all - 1 : all;
  for (int i = ark_tid(); i < G * D; i += ARK_THREADS) {
    s.query[i] = ark_load(c, query, 0, 0, row, heads * D + i) * scale;
    s.sum[i] = 0.0f;
  }
  for (int g = ark_tid(); g < G; g += ARK_THREADS) {
    s.top[g] = -1e30f;
    s.weight[g] = 0.0f;
  }
  if constexpr (F::given) {
    for (int i = ark_tid(); end == all && i < 2 * D; i += ARK_THREADS) {
      const int column = i < D ? head * D + i : (KV_HEADS + head - 1) * D + i;
      s.current[i] = ark_load(c, fresh, 0, 0, 0, column);
    }
  }
  ark_sync();
  for (int first = begin; first < end; first += CHUNK) {
    const int many = end - first < CHUNK ? end - first : CHUNK;
    const int cached = first + many > in_cache ? in_cache - first : many;
    ark_attention_scores(s, keys, head, first, cached, many);
    ark_sync();
    ark_attention_softmax(s, many);
    ark_sync();
    ark_attention_values(s, values, head, first, cached, many);
    ark_sync();
  }
  if constexpr (SPLITS == 1) {
    for (int i = ark_tid(); i < G * D; i += ARK_THREADS) {
      const float weight = s.weight[i / D];
      const float v = weight != 0.0f ? s.sum[i] / weight : 0.0f;
      ark_publish(c, output, 0, 0, row, heads * D + i, v);
    }
  } else {
    for (int i = ark_tid(); i < G * (D + 2); i += ARK_THREADS) {
      const int g = i / (D + 2), d = i % (D + 2);
      const float v = d < D ? s.sum[g * D + d] : d == D ? s.top[g] : s.weight[g];
      ark_publish(c, output, row, heads + g, split, d, v);
    }
  }
}

#if !defined(ARK_HAS_LOAD_BLOCK)
// Copies N elements to shared memory by all threads of the block. at(i): the address of element i.
template <int N, class At>
ARK_DEVICE void ark_load_block(ArkCtx& c, const At& at, float* to, bool system) {
  for (int i = ark_tid(); i < N; i += ARK_THREADS) to[i] = ark_load(c, at(i), 0, system);
}
#endif

// Combines the partial results of all splits (parts of the positions) into the result of attention.
// A sink is an additional score of a head that counts in the softmax's denominator and has no
// value. Task coordinates: row, and the first of GROUP heads.
template <int D, int SPLITS, int GROUP, class P, class O, class S>
ARK_DEVICE void ark_attention_merge(ArkCtx& c, const ArkTask& t, P partial, O output, S sinks) {
  const int row = t.coord[0], head = t.coord[1];
  float* part = reinterpret_cast<float*>(ARK_SCRATCH(c));
  constexpr int EACH = SPLITS * (D + 2);
  const auto at = [&](int i) {
    return ark_address(partial, row, head + i / EACH, i % EACH / (D + 2), i % (D + 2));
  };
  float sink = -1e30f;  // of the thread's first element
  if constexpr (S::given) {
    if (ark_tid() < GROUP * D) sink = sinks.p[head + ark_tid() / D];
  }
  ark_load_block<GROUP * EACH>(c, at, part, P::system);
  ark_sync();
  for (int i = ark_tid(); i < GROUP * D; i += ARK_THREADS) {
    const int d = i % D;
    const float* own = part + i / D * EACH;
    float m = -1e30f, sum = 0.0f, weight = 0.0f;
    if constexpr (S::given) {
      if (i >= ARK_THREADS) sink = sinks.p[head + i / D];
      m = sink;
    }
    for (int s = 0; s < SPLITS; ++s) {
      const float top = own[s * (D + 2) + D];
      m = top > m ? top : m;
    }
    if constexpr (S::given) weight = ark_exp(sink - m);
    for (int s = 0; s < SPLITS; ++s) {
      const float keep = ark_exp(own[s * (D + 2) + D] - m);
      sum += keep * own[s * (D + 2) + d];
      weight += keep * own[s * (D + 2) + D + 1];
    }
    ark_publish(c, output, 0, 0, row, head * D + i, weight != 0.0f ? sum / weight : 0.0f);
  }
}
