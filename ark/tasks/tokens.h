// The token loop. What a task computes and touches is said in tokens.py.

// coord: first row, first column; a tile of ROWS by COLUMNS. FROM: the position (or none), to which
// the numbers of rows are relative. An id out of range ends the launch.
template <int ROWS, int COLUMNS, int OUT_ROWS, int WIDTH, int VOCABULARY, int IDS, class I, class T,
          class O, class P>
ARK_DEVICE void ark_embedding(ArkCtx& c, const ArkTask& t, I ids, T table, O output, P from) {
  int start = 0;
  if constexpr (P::given) start = from.p[0];
  for (int r = t.coord[0]; r < t.coord[0] + ROWS && r < OUT_ROWS; ++r) {
    auto id = start >= 0 && start + r < IDS ? ids.p[start + r] : 0;
    if (id < 0 || id >= VOCABULARY) {
      if (ark_tid() == 0) {
        ark_fail(c, 5u, 0u, static_cast<ark_u32>(VOCABULARY), static_cast<ark_u32>(id));
      }
      id = 0;
    }
    for (int w = t.coord[1] + ark_tid(); w < t.coord[1] + COLUMNS && w < WIDTH; w += ARK_THREADS) {
      ark_publish(c, output, 0, 0, r, w,
                  ark_get(ark_address(table, 0, 0, static_cast<int>(id), w), 0));
    }
  }
}

template <typename T, class H>
ARK_DEVICE void ark_embedding_store(T* to, const H& held) {
  const auto from = ark_unpacked(held);
  ArkPack<T, 8> made;
#pragma unroll
  for (int j = 0; j < 8; ++j) ark_put(made.v, j, ark_get(from.v, j));
  ark_store_pack<8>(to, made);
}
// The same of whole rows by eight columns at a time; several rows are asked for together.
template <int ROWS, int OUT_ROWS, int WIDTH, int VOCABULARY, int IDS, class I, class T, class O,
          class P>
ARK_DEVICE void ark_embedding_packs(ArkCtx& c, const ArkTask& t, I ids, T table, O output, P from) {
  constexpr int BATCH = ROWS < 4 ? ROWS : 4;
  int start = 0;
  if constexpr (P::given) start = from.p[0];
  for (int first = t.coord[0]; first < t.coord[0] + ROWS; first += BATCH) {
    int row[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int r = first + i;
      const bool there = r < t.coord[0] + ROWS && r < OUT_ROWS;
      const auto id = there && start >= 0 && start + r < IDS ? ids.p[start + r] : 0;
      const bool known = id >= 0 && id < VOCABULARY;
      if (!known && ark_tid() == 0) {
        ark_fail(c, 5u, 0u, static_cast<ark_u32>(VOCABULARY), static_cast<ark_u32>(id));
      }
      row[i] = known ? static_cast<int>(id) : 0;
    }
    for (int w = 8 * ark_tid(); w < WIDTH; w += 8 * ARK_THREADS) {
      decltype(ark_held<8>(table.p)) asked[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; ++i) ark_hold(asked[i], ark_address(table, 0, 0, row[i], w));
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        const int r = first + i;
        if (r >= t.coord[0] + ROWS || r >= OUT_ROWS) break;
        ark_embedding_store(ark_address(output, 0, 0, r, w), asked[i]);
      }
    }
  }
}

// The token that a logit belongs to. SHARED: ranks share the logits, and have their own share
// first: the first one's token is the rank's own number, the others follow round.
template <int VOCABULARY, bool SHARED>
ARK_DEVICE int ark_token_of(const ArkTask& t, int logit) {
  if constexpr (!SHARED) return logit;
  const int first = ark_own<0>(t);
  return logit < VOCABULARY - first ? logit + first : logit - (VOCABULARY - first);
}

// coord: tile, of TILES.
template <int VOCABULARY, bool SHARED, int TILES, class L, class S, class P, class C>
ARK_DEVICE void ark_sample_tile(ArkCtx& c, const ArkTask& t, L logits, S settings, P position,
                                C candidates) {
  const int tile = t.coord[0];
  const int lo = static_cast<int>(static_cast<ark_i64>(VOCABULARY) * tile / TILES);
  const int hi = static_cast<int>(static_cast<ark_i64>(VOCABULARY) * (tile + 1) / TILES);
  ArkSampler sampler = ark_sampler(settings, position, ark_token_of<VOCABULARY, SHARED>(t, lo));
  // Several logits are asked for at once: few tiles have many of them.
  constexpr int B = 8;
  for (int first = lo + ark_tid(); first < hi; first += B * ARK_THREADS) {
    float logit[B];
#pragma unroll
    for (int b = 0; b < B; ++b) {
      const int i = first + b * ARK_THREADS;
      logit[b] = i < hi ? ark_get(logits.p, i) : -ark_inf();
    }
#pragma unroll
    for (int b = 0; b < B; ++b) {
      const int i = first + b * ARK_THREADS;
      if (i < hi) ark_sample(sampler, logit[b], ark_token_of<VOCABULARY, SHARED>(t, i));
    }
  }
  ark_sampled(sampler, candidates, tile, reinterpret_cast<float*>(ARK_SCRATCH(c)));
}

// The best of the k largest logits, of which the smallest is found by bisection over ordered bits.
template <int VOCABULARY, bool SHARED, class L>
ARK_DEVICE void ark_sample_top_k(const ArkTask& t, ArkSampler& sampler, L logits, int k,
                                 float* red) {
  ark_u32 bound = 0u;  // the largest that at least k logits reach
  for (int bit = 31; bit >= 0; --bit) {
    const ark_u32 trial = bound | (1u << bit);
    float many = 0.0f;
    for (int i = ark_tid(); i < VOCABULARY; i += ARK_THREADS) {
      many += ark_ordered(ark_get(logits.p, i)) >= trial ? 1.0f : 0.0f;
    }
    if (ark_block_sum(many, red) >= static_cast<float>(k)) bound = trial;
  }
  for (int i = ark_tid(); i < VOCABULARY; i += ARK_THREADS) {
    const float logit = ark_get(logits.p, i);
    if (ark_ordered(logit) < bound) continue;
    ark_sample(sampler, logit, ark_token_of<VOCABULARY, SHARED>(t, i));
  }
}

// Joins the candidates, appends the token, tells the host, moves on, and ends at a stop token.
template <int VOCABULARY, bool SHARED, int TILES, int CONTEXT, int STOPS, class L, class S, class P,
          class C, class T, class H, class E>
ARK_DEVICE void ark_choose(ArkCtx& c, const ArkTask& t, L logits, S settings, P position_at,
                           C candidates, T tokens, H host, E stop_tokens) {
  float* red = reinterpret_cast<float*>(ARK_SCRATCH(c));
  // All that does not depend on the token is asked for at once: everybody waits for this task.
  ArkSampler sampler = ark_sampler(settings, position_at, 0);
  const int top_k = settings.p[1], limit = settings.p[4], position = position_at.p[0];
  const int stops = settings.p[5] < STOPS ? settings.p[5] : STOPS;
  const int i = ark_tid();
  if (i < TILES) {
    sampler.best = candidates.p[2 * i];
    sampler.token = ark_float_bits(candidates.p[2 * i + 1]);
  }
  const ark_i32 stop = i < STOPS ? stop_tokens.p[i] : -1;
  if (top_k > 0 && top_k < VOCABULARY && sampler.temperature > 0.0f) {
    sampler.best = -ark_inf();
    ark_sample_top_k<VOCABULARY, SHARED>(t, sampler, logits, top_k, red);
  } else {
    for (int k = i + ARK_THREADS; k < TILES; k += ARK_THREADS) {
      const float score = candidates.p[2 * k];
      const ark_u32 id = ark_float_bits(candidates.p[2 * k + 1]);
      if (score > sampler.best || (score == sampler.best && id < sampler.token)) {
        sampler.best = score;
        sampler.token = id;
      }
    }
  }
  ark_best(sampler.best, sampler.token, red);
  const ark_i32 token = static_cast<ark_i32>(sampler.token);
  bool found = i < stops && stop == token;
  for (int k = i + ARK_THREADS; k < stops; k += ARK_THREADS) {
    found = found || stop_tokens.p[k] == token;
  }
  const bool stopped = !ark_all(!found);
  if (ark_tid() != 0 || position < 0 || position >= CONTEXT) return;
  if (sampler.best == -ark_inf()) ark_fail(c, 6u, 0u, 0u, 0u);
  const int next = position + 1;
  position_at.p[0] = next;
  const bool full = next + 1 >= limit || next + 1 >= CONTEXT;
  // Others are reading it.
  if (stopped || full) ark_lower_limit(c, c.iteration + 1u);
  if (next >= CONTEXT) return;
  tokens.p[next] = token;
  ark_post_later(c, 0, reinterpret_cast<ark_u32*>(host.p) + next, sampler.token);
}

// Moves the position on by a chunk of the prompt.
template <int ROWS, class S, class P>
ARK_DEVICE void ark_advance(ArkCtx&, const ArkTask&, S settings, P position) {
  if (ark_tid() != 0) return;
  const int next = position.p[0] + ROWS;
  position.p[0] = next < settings.p[3] ? next : settings.p[3];
}
