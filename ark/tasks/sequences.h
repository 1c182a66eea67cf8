// Device functions that end an iteration of several sequences: they choose each sequence's next
// token. sequences.py describes operands and tasks.

// True if this sequence has ended: it has sampled a stop token or reached its limit of positions.
template <int CONTEXT, int STOPS, class S, class P, class T, class E>
ARK_DEVICE bool ark_ended(S settings, P position, T tokens, E stop_tokens) {
  const int at = position.p[0];
  if (at <= settings.p[3]) return false;
  if (at + 1 >= settings.p[4] || at + 1 >= CONTEXT) return true;
  const int stops = settings.p[5] < STOPS ? settings.p[5] : STOPS;
  const ark_i32 token = tokens.p[at];
  bool found = false;
  for (int k = 0; k < stops; ++k) found = found || stop_tokens.p[k] == token;
  return found;
}

// The best candidates for a sequence's next token: the part that one lane loads. They are loaded
// together with the other data that a task reads first, so that all loads are in flight at once.
template <int TILES>
struct ArkCandidates {
  static constexpr int EACH = (TILES + ARK_LANES - 1) / ARK_LANES;
  float score[EACH];
  float id[EACH];
};
template <int TILES, class C>
ARK_DEVICE void ark_candidates(C candidates, ArkCandidates<TILES>& own) {
  for (int i = 0; i < ArkCandidates<TILES>::EACH; ++i) {
    const int k = i * ARK_LANES + ark_lane();
    own.score[i] = k < TILES ? candidates.p[2 * k] : -ark_inf();
    own.id[i] = k < TILES ? candidates.p[2 * k + 1] : 0.0f;
  }
}

// Appends the chosen token of sequence `number`, whose score is `best`, behind `position`. Returns
// true if this ends the sequence: the token is a stop token (`stopped`), or no position is left of
// `limit`.
template <int CONTEXT, class P, class T, class H>
ARK_DEVICE bool ark_append_token(ArkCtx& c, int number, P position_at, T tokens, H host,
                                 int position, int limit, float best, ark_u32 token, bool stopped) {
  if (best == -ark_inf()) ark_fail(c, 6u, 0u, 0u, 0u);
  const int next = position + 1;
  position_at.p[0] = next;
  if (next < CONTEXT) {
    tokens.p[next] = static_cast<ark_i32>(token);
    ark_post_later(c, number, reinterpret_cast<ark_u32*>(host.p) + next, token);
  }
  return stopped || next + 1 >= limit || next + 1 >= CONTEXT;
}

// Like ark_choose (tokens.h) for sequence `number`, by one warp. Returns in the first lane whether
// the sequence has ended, and true in the others.
template <int TILES, int CONTEXT, int STOPS, class S, class P, class T, class H, class E>
ARK_DEVICE bool ark_choose_by_warp(ArkCtx& c, int number, S settings, P position_at,
                                   const ArkCandidates<TILES>& own, T tokens, H host,
                                   E stop_tokens) {
  const int position = position_at.p[0], limit = settings.p[4];
  const int stops = settings.p[5] < STOPS ? settings.p[5] : STOPS;
  float best = -ark_inf();
  ark_u32 token = 0u;
  for (int i = 0; i < ArkCandidates<TILES>::EACH; ++i) {
    const float score = own.score[i];
    const ark_u32 id = ark_float_bits(own.id[i]);
    if (score > best || (score == best && id < token)) best = score, token = id;
  }
  ark_warp_best(best, token);
  float stopped = 0.0f;
  for (int k = ark_lane(); k < stops; k += ARK_LANES) {
    if (stop_tokens.p[k] == static_cast<ark_i32>(token)) stopped = 1.0f;
  }
  stopped = ark_warp_sum(stopped);
  if (ark_lane() != 0 || position < 0 || position >= CONTEXT) return true;
  return ark_append_token<CONTEXT>(c, number, position_at, tokens, host, position, limit, best,
                                   token, stopped > 0.0f);
}

// Processes one sequence by one thread; for many sequences that have few candidates. `number` is
// the sequence. Returns true if the sequence has ended.
template <int TILES, int CONTEXT, int STOPS, class S, class P, class C, class T, class H, class E>
ARK_DEVICE bool ark_choose_by_lane(ArkCtx& c, int number, S settings, P position_at, C candidates,
                                   T tokens, H host, E stop_tokens) {
  const int position = position_at.p[0], last = settings.p[3], limit = settings.p[4];
  const int stops = settings.p[5] < STOPS ? settings.p[5] : STOPS;
  float score[TILES], id[TILES];
#pragma unroll
  for (int k = 0; k < TILES; ++k) score[k] = candidates.p[2 * k], id[k] = candidates.p[2 * k + 1];
  float best = score[0];
  ark_u32 token = ark_float_bits(id[0]);
#pragma unroll
  for (int k = 1; k < TILES; ++k) {
    const ark_u32 other = ark_float_bits(id[k]);
    const bool better = ark_better(score[k], other, best, token);
    best = better ? score[k] : best, token = better ? other : token;
  }
  bool stopped = false;
  for (int k = 0; k < stops; ++k) {
    if (stop_tokens.p[k] == static_cast<ark_i32>(token)) stopped = true;
  }
  if (ark_ended<CONTEXT, STOPS>(settings, position_at, tokens, stop_tokens)) return true;
  if (position < last) {
    position_at.p[0] = position + 1;
    return false;
  }
  if (position < 0 || position >= CONTEXT) return true;
  return ark_append_token<CONTEXT>(c, number, position_at, tokens, host, position, limit, best,
                                   token, stopped);
}

// Processes all sequences. A sequence that has ended is not changed; a sequence within its prompt
// advances by one position; for all others a token is chosen as by ark_choose. Each sequence is
// processed by one warp or, if there are many sequences, by one thread. If a sequence samples among
// its largest logits, all threads process one sequence after the other. The launch ends when the
// last sequence has ended.
template <int VOCABULARY, int TILES, int CONTEXT, int STOPS, int BATCH, int SETTINGS, class L,
          class S, class P, class C, class T, class H, class E>
ARK_DEVICE void ark_choose_each(ArkCtx& c, const ArkTask& t, L logits, S settings, P position,
                                C candidates, T tokens, H host, E stop_tokens) {
  ark_u32* limit = &ark_control(ARK_PARAMS(c))->limit;
  // Other processors read the launch's iteration limit at the same time, so it must not be read
  // from a cached copy.
  const ark_u32 before = ark_peek_host(limit);
  // If there are many sequences with few candidates each, a thread processes one sequence, so that
  // the loads of all sequences are in flight at the same time.
  constexpr bool BY_LANE = BATCH > ARK_WARPS && TILES <= 16 && ARK_THREADS >= BATCH;
  bool ranks = false, over = true;
  ArkCandidates<TILES> ahead = {};  // of the warp's first sequence
  if constexpr (BY_LANE) {
    S own = settings;
    own.p += SETTINGS * (ark_tid() < BATCH ? ark_tid() : 0);
    ranks = !ark_all(!ark_ranks<VOCABULARY>(own));
    if (!ranks && ark_tid() < BATCH) {
      const int b = ark_tid();
      P at = position;
      C found = candidates;
      T row = tokens;
      H posted = host;
      at.p += b, found.p += 2 * TILES * b, row.p += CONTEXT * b, posted.p += CONTEXT * b;
      over =
          ark_choose_by_lane<TILES, CONTEXT, STOPS>(c, b, own, at, found, row, posted, stop_tokens);
    }
  } else {
    C first = candidates;
    first.p += 2 * TILES * (ark_warp() < BATCH ? ark_warp() : 0);
    ark_candidates<TILES>(first, ahead);
    // Each lane reads the settings of other sequences, so that all loads are in flight at once.
    for (int b = ark_lane(); b < BATCH; b += ARK_LANES) {
      S own = settings;
      own.p += SETTINGS * b;
      ranks = ranks || ark_ranks<VOCABULARY>(own);
    }
    ranks = ark_warp_sum(ranks ? 1.0f : 0.0f) > 0.0f;
  }
  for (int b = BY_LANE && !ranks ? BATCH : 0; b < BATCH; ++b) {
    if (ranks || b % ARK_WARPS == ark_warp()) {
      ArkCandidates<TILES> own = ahead;
      if (!ranks && b != ark_warp()) ark_candidates<TILES>(candidates, own);
      const bool ended = ark_ended<CONTEXT, STOPS>(settings, position, tokens, stop_tokens);
      // This sum over the warp also synchronises the lanes, so that all lanes have read the
      // position before the first lane writes it.
      const bool reads = ark_warp_sum(position.p[0] < settings.p[3] ? 1.0f : 0.0f) > 0.0f;
      const bool first = ranks ? ark_tid() == 0 : ark_lane() == 0;
      if (ranks) ark_sync();  // all threads have read what one of them writes
      if (!ended && reads) {
        over = false;
        if (first) position.p[0] += 1;
      } else if (!ended && ranks) {
        ark_choose<VOCABULARY, false, TILES, CONTEXT, STOPS>(c, t, logits, settings, position,
                                                             candidates, tokens, host, stop_tokens);
        if (first) {
          over = ark_ended<CONTEXT, STOPS>(settings, position, tokens, stop_tokens) && over;
        }
      } else if (!ended) {
        const bool last = ark_choose_by_warp<TILES, CONTEXT, STOPS>(c, b, settings, position, own,
                                                                    tokens, host, stop_tokens);
        over = over && last;
      }
    }
    logits.p += VOCABULARY;
    settings.p += SETTINGS;
    position.p += 1;
    candidates.p += 2 * TILES;
    tokens.p += CONTEXT;
    host.p += CONTEXT;
  }
  over = ark_all(over);
  if (ark_tid() == 0) ark_lower_limit(c, over ? c.iteration + 1u : before);
}
