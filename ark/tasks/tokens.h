// Device functions of a decoder's token loop: embed the current token, sample the next one, advance
// the position. tokens.py describes operands and tasks.

// Copies the rows of the embedding table whose numbers are in `ids`. Task coordinates: first row
// and first column of a tile of ROWS by COLUMNS of the result. from: the position that is added to
// row numbers, if it is given. An id out of range ends the launch with an error.
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
// Like ark_embedding, for whole rows. A thread copies eight columns at a time, and several rows are
// loaded together.
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

// The token id to which a logit belongs. With SHARED, each rank has computed a share of the logits.
// A rank's own share comes first in its memory, and the other shares follow in cyclic order. Then
// the first logit's token id differs between ranks and is read from the task's record.
template <int VOCABULARY, bool SHARED>
ARK_DEVICE int ark_token_of(const ArkTask& t, int logit) {
  if constexpr (!SHARED) return logit;
  const int first = ark_own<0>(t);
  return logit < VOCABULARY - first ? logit + first : logit - (VOCABULARY - first);
}

// Finds the best candidate for the next token in a tile of logits. Task coordinates: the number of
// the tile, below TILES.
template <int VOCABULARY, bool SHARED, int TILES, class L, class S, class P, class C>
ARK_DEVICE void ark_sample_tile(ArkCtx& c, const ArkTask& t, L logits, S settings, P position,
                                C candidates) {
  const int tile = t.coord[0];
  const int lo = static_cast<int>(static_cast<ark_i64>(VOCABULARY) * tile / TILES);
  const int hi = static_cast<int>(static_cast<ark_i64>(VOCABULARY) * (tile + 1) / TILES);
  ArkSampler sampler = ark_sampler(settings, position, ark_token_of<VOCABULARY, SHARED>(t, lo));
  // Several logits, or packs of them, are loaded at a time, because a thread has many of them if
  // there are few tiles.
  constexpr int B = 8, PACKS = 16;
  // If the tile consists of whole packs (vectors), the largest logit is searched pack by pack. This
  // fast path does not add noise: the unrolled code that adds noise to so many logits would take
  // longer to load than to run.
  constexpr int PACK = 16 / static_cast<int>(sizeof(*logits.p));
  constexpr bool PACKED = ARK_THREADS > 1 && VOCABULARY % (PACK * TILES) == 0;
  const bool packed =
      PACKED && sampler.temperature <= 0.0f && reinterpret_cast<ark_u64>(logits.p) % 16u == 0u;
  for (int first = lo + PACK * ark_tid(); packed && first < hi;
       first += PACKS * PACK * ARK_THREADS) {
    decltype(ark_held<PACK>(logits.p)) held[PACKS];
#pragma unroll
    for (int b = 0; b < PACKS; ++b) {
      const int i = first + b * PACK * ARK_THREADS;
      ark_hold(held[b], logits.p + (i < hi ? i : first));
    }
#pragma unroll
    for (int b = 0; b < PACKS; ++b) {
      const int i = first + b * PACK * ARK_THREADS, at = i < hi ? i : first;
      const auto pack = ark_unpacked(held[b]);
#pragma unroll
      for (int j = 0; j < PACK; ++j) {
        const ark_u32 id = static_cast<ark_u32>(ark_token_of<VOCABULARY, SHARED>(t, at + j));
        ark_take(sampler, ark_get(pack.v, j), id);
      }
    }
  }
  for (int first = lo + ark_tid(); !packed && first < hi; first += B * ARK_THREADS) {
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
  ark_sampled(c, sampler, candidates, tile, reinterpret_cast<float*>(ARK_SCRATCH(c)));
}

// Chooses among the k largest logits. The smallest of these is found by bisection over integers
// with the same order.
template <int VOCABULARY, bool SHARED, class L>
ARK_DEVICE void ark_sample_top_k(const ArkTask& t, ArkSampler& sampler, L logits, int k,
                                 float* red) {
  ark_u32 bound = 0u;  // the largest number that at least k logits reach
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

// The inputs of the choice of a token that do not depend on the logits, such as the temperature.
// They are loaded before the logits arrive, because the next iteration waits for the choice.
struct ArkChoice {
  ArkSampler sampler;
  int top_k, limit, position, stops;
  ark_i32 stop;  // the thread's first stop token; -1 if there is none
};
template <int STOPS, class S, class P, class E>
ARK_DEVICE ArkChoice ark_choice(S settings, P position_at, E stop_tokens) {
  const int stops = settings.p[5] < STOPS ? settings.p[5] : STOPS;
  const ark_i32 stop = ark_tid() < STOPS ? stop_tokens.p[ark_tid()] : -1;
  return {ark_sampler(settings, position_at, 0),
          settings.p[1],
          settings.p[4],
          position_at.p[0],
          stops,
          stop};
}
// True if the token is sampled by top-k, among the k largest logits only. The candidates of the
// tiles do not suffice then, and all logits are read again.
template <int VOCABULARY, class S>
ARK_DEVICE bool ark_ranks(S settings) {
  return settings.p[1] > 0 && settings.p[1] < VOCABULARY &&
         ark_bits_float(static_cast<ark_u32>(settings.p[0])) > 0.0f;
}

// Called by one thread after a token was chosen: appends it to the sequence, passes it to the host,
// advances the position, and ends the launch at a stop token.
template <int CONTEXT, class P, class T, class H>
ARK_DEVICE void ark_choice_ends(ArkCtx& c, const ArkChoice& x, bool stopped, P position_at,
                                T tokens, H host) {
  if (x.position < 0 || x.position >= CONTEXT) return;
  if (x.sampler.best == -ark_inf()) ark_fail(c, 6u, 0u, 0u, 0u);
  const int next = x.position + 1;
  position_at.p[0] = next;
  const bool full = next + 1 >= x.limit || next + 1 >= CONTEXT;
  // Ends the launch after this iteration, by an atomic operation, because other processors read the
  // limit at the same time.
  if (stopped || full) ark_lower_limit(c, c.iteration + 1u);
  if (next >= CONTEXT) return;
  tokens.p[next] = static_cast<ark_i32>(x.sampler.token);
  ark_post_later(c, 0, reinterpret_cast<ark_u32*>(host.p) + next, x.sampler.token);
}

// Chooses the next token among the candidates of TILES tiles of logits, or among the largest logits
// (ark_ranks), and advances the position.
template <int VOCABULARY, bool SHARED, int TILES, int CONTEXT, int STOPS, class L, class S, class P,
          class C, class T, class H, class E>
ARK_DEVICE void ark_choose(ArkCtx& c, const ArkTask& t, L logits, S settings, P position_at,
                           C candidates, T tokens, H host, E stop_tokens) {
  float* red = reinterpret_cast<float*>(ARK_SCRATCH(c));
  ArkChoice x = ark_choice<STOPS>(settings, position_at, stop_tokens);
  ArkSampler& sampler = x.sampler;
  const int i = ark_tid();
  const auto given = [&](int k, int what) { return ark_load(c, candidates, 0, 0, k, what); };
  if (i < TILES) {
    sampler.best = given(i, 0);
    sampler.token = ark_float_bits(given(i, 1));
  }
  if (ark_ranks<VOCABULARY>(settings)) {
    sampler.best = -ark_inf();
    ark_sample_top_k<VOCABULARY, SHARED>(t, sampler, logits, x.top_k, red);
  } else {
    for (int k = i + ARK_THREADS; k < TILES; k += ARK_THREADS) {
      ark_take(sampler, given(k, 0), ark_float_bits(given(k, 1)));
    }
  }
  ark_best(sampler.best, sampler.token, red);
  const ark_i32 token = static_cast<ark_i32>(sampler.token);
  bool found = i < x.stops && x.stop == token;
  for (int k = i + ARK_THREADS; k < x.stops; k += ARK_THREADS) {
    found = found || stop_tokens.p[k] == token;
  }
  const bool stopped = !ark_all(!found);
  if (i == 0) ark_choice_ends<CONTEXT>(c, x, stopped, position_at, tokens, host);
}

#if defined(ARK_BODIES_ENTER)
// Waits for the TILES candidates, which arrive as packets, and finds the best of them within a
// warp. Lane l loads the candidates l, l + ARK_LANES and so on.
template <int TILES>
ARK_DEVICE void ark_take_packets(ArkCtx& c, const ark_u64* candidates, ArkSampler& sampler) {
  constexpr int EACH = (TILES + ARK_LANES - 1) / ARK_LANES;
  ark_u64 seen[EACH][2];
  ArkSpin spin{0u, 0u};
  for (;;) {
    ark_u32 other = 0u;
    for (int e = 0; e < EACH; ++e) {
      const int k = ark_lane() + e * ARK_LANES;
      const ark_u64* from = candidates + 2 * (k < TILES ? k : TILES - 1);
      for (int w = 0; w < 2; ++w) seen[e][w] = ark_packet_load(from + w, false);
    }
    for (int e = 0; e < EACH; ++e) {
      for (int w = 0; w < 2; ++w) {
        other |= static_cast<ark_u32>(seen[e][w] >> 32) ^ (c.iteration + 1u);
      }
    }
    if (ark_ballot(other != 0u) == 0u) break;
    const ArkVerdict verdict = ark_spin(ARK_PARAMS(c), spin, ARK_PARAMS(c)->budget_ns);
    if (verdict == ARK_KEEP) continue;
    if (verdict == ARK_TIMEOUT) ark_fail(c, 2u, 0u, c.iteration + 1u, 0u);
    ark_give_up(c);
    break;
  }
  for (int e = 0; e < EACH; ++e) {
    const float score = ark_bits_float(static_cast<ark_u32>(seen[e][0]));
    ark_take(sampler, score, static_cast<ark_u32>(seen[e][1]));
  }
  ark_warp_best(sampler.best, sampler.token);
}

// Like ark_choose, for candidates that arrive as packets. One warp chooses while the tasks that
// compute the logits are still ending; it waits for their counter before it stores anything.
// Returns false if a wait has failed or the launch was aborted; the processor must then leave the
// loop.
template <int VOCABULARY, bool SHARED, int TILES, int CONTEXT, int STOPS, class L, class S, class P,
          class C, class T, class H, class E>
ARK_DEVICE bool ark_choose_early(ArkCtx& c, const ArkTask& t, L logits, S settings, P position_at,
                                 C candidates, T tokens, H host, E stop_tokens) {
  static_assert(STOPS <= ARK_LANES, "a lane has one");
  float* red = reinterpret_cast<float*>(ARK_SCRATCH(c));
  // Warps that do not choose must not read the settings and the position: the position changes as
  // soon as one warp has chosen.
  const bool ranks = ark_ranks<VOCABULARY>(settings);
  ArkChoice x = {};
  if (ranks || ark_warp() == 0) x = ark_choice<STOPS>(settings, position_at, stop_tokens);
  if (!ranks && ark_warp() == 0) ark_take_packets<TILES>(c, candidates.p, x.sampler);
  if (!ark_enter(c)) return false;
  if (ranks) {
    ark_sample_top_k<VOCABULARY, SHARED>(t, x.sampler, logits, x.top_k, red);
    ark_best(x.sampler.best, x.sampler.token, red);
  }
  if (ark_warp() != 0 || ark_failed(c)) return true;
  const bool found = ark_lane() < x.stops && x.stop == static_cast<ark_i32>(x.sampler.token);
  const bool stopped = ark_ballot(found) != 0u;
  if (ark_lane() == 0) ark_choice_ends<CONTEXT>(c, x, stopped, position_at, tokens, host);
  return true;
}
#endif

// The host sets a word to end the launch after an iteration. A task of that iteration calls
// ark_ask_leave at its beginning and ark_heed_leave at its end. Where host memory is slow to read,
// the first call loads the word, so that the load is in flight during the task; a word that is set
// meanwhile takes effect an iteration later. Elsewhere the second call loads the word, after the
// task has posted its tokens, so that at most one iteration ends after the host has set the word.
ARK_DEVICE ark_u32 ark_ask_leave(const ark_u32* word) {
  return ARK_HOST_CHECK != 0u && ark_tid() == 0 ? ark_peek_host(word) : 0u;
}
ARK_DEVICE void ark_heed_leave(const ArkCtx& c, const ark_u32* word, ark_u32 asked) {
  if (ARK_HOST_CHECK == 0u && ark_tid() == 0) asked = ark_load_host(word);
  if (asked != 0u) ark_lower_limit(c, c.iteration + 1u);
}

// Adds the number of tokens of a chunk of the prompt to the sequence's position.
template <int ROWS, class S, class P>
ARK_DEVICE void ark_advance(ArkCtx&, const ArkTask&, S settings, P position) {
  if (ark_tid() != 0) return;
  const int next = position.p[0] + ROWS;
  position.p[0] = next < settings.p[3] ? next : settings.p[3];
}
