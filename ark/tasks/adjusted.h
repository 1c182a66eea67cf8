// Device functions for sampling a token from logits with biases, penalties and filters, and for
// reporting log probabilities. adjusted.py describes the operands. Biases, penalties and filters
// are applied in the same order as in the transformers library.

constexpr ark_i32 ARK_IN_PROMPT = 1 << 30;
constexpr int ARK_BINS = 16;

struct ArkOptions {
  int top_k;
  float top_p, min_p, typical_p, repetition, presence, frequency;
  int min_tokens, logprobs, masked;
};
// Reads the sampling options of a sequence. A top-p, min-p or typical-p outside of its range is
// treated as the nearest value inside, so that at least one token passes the filters.
template <class O>
ARK_DEVICE ArkOptions ark_options(O o) {
  const auto number = [&](int i) { return ark_bits_float(static_cast<ark_u32>(o.p[i])); };
  const auto share = [&](int i) { return number(i) > 1e-37f ? number(i) : 1e-37f; };
  const float min_p = number(2) < 1.0f ? number(2) : 1.0f;
  return {o.p[0],    share(1),  min_p,  share(3), number(4),
          number(5), number(6), o.p[7], o.p[8],   o.p[9]};
}

// True if this sequence samples a token: it has processed its prompt and has not ended.
template <int CONTEXT, int STOPS, class S, class P, class T, class E>
ARK_DEVICE bool ark_draws(S settings, P position, T tokens, E stop_tokens) {
  return position.p[0] >= settings.p[3] &&
         !ark_ended<CONTEXT, STOPS>(settings, position, tokens, stop_tokens);
}

ARK_DEVICE float ark_block_max(float v, float* red) {
  v = ark_warp_max(v);
  if (ARK_WARPS == 1) return v;
  if (ark_lane() == 0) red[ark_warp()] = v;
  ark_sync();
  float most = red[0];
  for (int w = 1; w < ARK_WARPS; ++w) most = red[w] > most ? red[w] : most;
  ark_sync();
  return most;
}

// A logit after its bias and the penalties are applied. held: true while stop tokens must not be
// sampled yet.
template <int STOPS, class E>
ARK_DEVICE float ark_adjusted(const ArkOptions& o, float logit, float bias, ark_i32 seen, int token,
                              bool held, int stops, E stop_tokens) {
  float score = logit + bias;
  if (held) {
    for (int k = 0; k < stops; ++k) score = stop_tokens.p[k] == token ? -ark_inf() : score;
  }
  if (seen == 0) return score;
  score = score < 0.0f ? score * o.repetition : score / o.repetition;
  const ark_i32 times = seen & (ARK_IN_PROMPT - 1);
  return times > 0 ? score - o.presence - o.frequency * static_cast<float>(times) : score;
}

// Applies bias and penalties to a tile of logits, stores the results as scores, and finds the
// tile's best candidate for the next token. Task coordinates: the number of the tile, below TILES.
template <int VOCABULARY, int TILES, int CONTEXT, int STOPS, class L, class O, class S, class P,
          class T, class E, class B, class N, class D, class C, class M, class A>
ARK_DEVICE void ark_adjust_logits(ArkCtx& c, const ArkTask& t, L logits, O options, S settings,
                                  P position, T tokens, E stop_tokens, B bias, N counts, D scores,
                                  C candidates, M shares, A allowed) {
  if (!ark_draws<CONTEXT, STOPS>(settings, position, tokens, stop_tokens)) return;
  float* red = reinterpret_cast<float*>(ARK_SCRATCH(c));
  const int tile = t.coord[0];
  const int lo = static_cast<int>(static_cast<ark_i64>(VOCABULARY) * tile / TILES);
  const int hi = static_cast<int>(static_cast<ark_i64>(VOCABULARY) * (tile + 1) / TILES);
  const ArkOptions o = ark_options(options);
  const bool held = position.p[0] - settings.p[3] < o.min_tokens;
  const int stops = settings.p[5] < STOPS ? settings.p[5] : STOPS;
  ArkSampler sampler = ark_sampler(settings, position, lo);
  float most = -ark_inf(), best = -ark_inf();
  for (int i = lo + ark_tid(); i < hi; i += ARK_THREADS) {
    const float logit = ark_get(logits.p, i);
    const bool barred =
        o.masked != 0 && (static_cast<ark_u32>(allowed.p[i / 32]) >> i % 32 & 1u) == 0u;
    const float adjusted =
        ark_adjusted<STOPS>(o, logit, bias.p[i], counts.p[i], i, held, stops, stop_tokens);
    const float score = barred ? -ark_inf() : adjusted;
    scores.p[i] = score;
    ark_sample(sampler, score, i);
    most = logit > most ? logit : most;
    best = score > best ? score : best;
  }
  most = ark_block_max(most, red);
  best = ark_block_max(best, red);
  float sum = 0.0f;
  if (o.logprobs > 0) {
    for (int i = lo + ark_tid(); i < hi; i += ARK_THREADS) {
      sum += ark_exp(ark_get(logits.p, i) - most);
    }
    sum = ark_block_sum(sum, red);
  }
  if (ark_tid() == 0) {
    shares.p[3 * tile] = most;
    shares.p[3 * tile + 1] = sum;
    shares.p[3 * tile + 2] = best;
  }
  ark_sampled(c, sampler, candidates, tile, red);
}

// Replaces each bin by its sum over the block's threads. red: ARK_BINS * ARK_WARPS words of shared
// memory.
ARK_DEVICE void ark_sum_bins(float (&bins)[ARK_BINS], float* red) {
#pragma unroll
  for (int b = 0; b < ARK_BINS; ++b) bins[b] = ark_warp_sum(bins[b]);
  if (ARK_WARPS == 1) return;
  if (ark_lane() == 0) {
#pragma unroll
    for (int b = 0; b < ARK_BINS; ++b) red[ark_warp() * ARK_BINS + b] = bins[b];
  }
  ark_sync();
#pragma unroll
  for (int b = 0; b < ARK_BINS; ++b) {
    float total = 0.0f;
    for (int w = 0; w < ARK_WARPS; ++w) total += red[w * ARK_BINS + b];
    bins[b] = total;
  }
  ark_sync();
}

// Finds a threshold for top-p and similar filters. key(i), weight(i): key and weight of element i,
// from 0 to COUNT - 1. Consider the total weight of all elements whose key is at least some value.
// The threshold is the largest value for which this weight is at least `target` or, if share > 0,
// at least `share` times the weight of all elements. It is found by a radix search from the key's
// highest digit on. Each round considers the elements whose higher digits are those found so far,
// and adds up their weights for each value of the next digit.
template <int COUNT, class K, class W>
ARK_DEVICE ark_u32 ark_key_of_weight(K key, W weight, float target, float share, float* red) {
  ark_u32 digits = 0u;
  float above = 0.0f;
  for (int shift = 28; shift >= 0; shift -= 4) {
    float bins[ARK_BINS] = {};
    for (int i = ark_tid(); i < COUNT; i += ARK_THREADS) {
      const ark_u32 own = key(i);
      if (shift < 28 && (own >> (shift + 4)) != (digits >> (shift + 4))) continue;
      const ark_u32 digit = (own >> shift) & 15u;
      const float w = weight(i);
#pragma unroll
      for (int b = 0; b < ARK_BINS; ++b) bins[b] += digit == static_cast<ark_u32>(b) ? w : 0.0f;
    }
    ark_sum_bins(bins, red);
    if (shift == 28 && share > 0.0f) {
      float total = 0.0f;
#pragma unroll
      for (int b = ARK_BINS - 1; b >= 0; --b) total += bins[b];
      target = share * total;
    }
    ark_u32 digit = 0u;
    bool open = true;  // true until a bin reaches the target
#pragma unroll
    for (int b = ARK_BINS - 1; b > 0; --b) {
      const bool reached = open && above + bins[b] >= target;
      digit = reached ? static_cast<ark_u32>(b) : digit;
      open = open && !reached;
      above += open ? bins[b] : 0.0f;
    }
    digits |= digit << shift;
  }
  return digits;
}

// Samples a token from those that pass the filters: the token with the largest score / temperature
// + noise. top: the highest score.
template <int VOCABULARY, class D>
ARK_DEVICE void ark_sample_filtered(const ArkOptions& o, ArkSampler& sampler, D scores, float top,
                                    float* red) {
  // The temperature is bounded so that its reciprocal is a normal number. A reciprocal of 0 times a
  // score of -infinity would be NaN.
  const float inverse = 1.0f / (sampler.temperature < 1e30f ? sampler.temperature : 1e30f);
  const auto scaled = [&](int i) { return (scores.p[i] - top) * inverse; };  // 0 at most
  const auto key = [&](int i) { return ark_ordered(scores.p[i]); };
  ark_u32 bound = 0u;
  if (o.top_k > 0 && o.top_k < VOCABULARY) {
    const float many = static_cast<float>(o.top_k);
    bound = ark_key_of_weight<VOCABULARY>(key, [&](int) { return 1.0f; }, many, 0.0f, red);
  }
  if (o.top_p < 1.0f) {
    const auto weight = [&](int i) { return key(i) >= bound ? ark_exp(scaled(i)) : 0.0f; };
    const ark_u32 reached = ark_key_of_weight<VOCABULARY>(key, weight, 0.0f, o.top_p, red);
    bound = reached > bound ? reached : bound;
  }
  const auto kept = [&](int i) {
    return key(i) >= bound && scores.p[i] > -ark_inf() && ark_exp(scaled(i)) >= o.min_p;
  };
  float entropy = 0.0f, total = 1.0f;
  ark_u32 furthest = 0xffffffffu;
  // away(i): how far the information content of token i, -ln p, is from the entropy of the
  // distribution (typical-p sampling keeps the nearest). key(i): an integer that decreases as the
  // distance grows.
  const auto away = [&](int i) {
    const float difference = entropy + scaled(i) - ark_log(total);
    return difference < 0.0f ? -difference : difference;
  };
  const auto nearness = [&](int i) { return ~ark_float_bits(away(i)); };
  if (o.typical_p < 1.0f) {
    float sum = 0.0f, products = 0.0f;
    for (int i = ark_tid(); i < VOCABULARY; i += ARK_THREADS) {
      if (!kept(i)) continue;
      const float w = ark_exp(scaled(i));
      sum += w;
      products += w * scaled(i);
    }
    total = ark_block_sum(sum, red);
    entropy = ark_log(total) - ark_block_sum(products, red) / total;
    furthest = ark_key_of_weight<VOCABULARY>(
        nearness, [&](int i) { return kept(i) ? ark_exp(scaled(i)) : 0.0f; }, 0.0f, o.typical_p,
        red);
  }
  // The search for the limit has computed the same expression, but the compiler may have rounded it
  // differently there. So a tolerance is added to the limit.
  const float limit = ark_bits_float(~furthest);
  const float within = limit + 1e-6f * (1.0f + limit + entropy + ark_log(total));
  const auto typical = [&](int i) { return nearness(i) >= furthest || away(i) <= within; };
  for (int i = ark_tid(); i < VOCABULARY; i += ARK_THREADS) {
    if (kept(i) && (o.typical_p >= 1.0f || typical(i))) ark_sample(sampler, scores.p[i], i);
  }
}

// Reports log probabilities (under the logits before penalties) to the host: first that of the
// sampled token, then token ids and log probabilities of the most probable tokens.
template <int VOCABULARY, int TILES, int TOP, class L, class M, class H>
ARK_DEVICE void ark_report_logprobs(int count, ark_u32 token, int place, L logits, M shares, H host,
                                    float* red) {
  float most = -ark_inf(), sum = 0.0f;
  for (int k = 0; k < TILES; ++k) most = shares.p[3 * k] > most ? shares.p[3 * k] : most;
  for (int k = 0; k < TILES; ++k) sum += shares.p[3 * k + 1] * ark_exp(shares.p[3 * k] - most);
  const float all = most + ark_log(sum);
  ark_u32* words = reinterpret_cast<ark_u32*>(host.p) + static_cast<ark_i64>(place) * (1 + 2 * TOP);
  if (ark_tid() == 0) {
    ark_post_host(words, ark_float_bits(ark_get(logits.p, static_cast<int>(token)) - all));
  }
  float last = ark_inf();
  ark_u32 its = 0u;
  for (int n = 0; n < count && n < TOP; ++n) {
    float best = -ark_inf();
    ark_u32 id = 0xffffffffu;
    for (int i = ark_tid(); i < VOCABULARY; i += ARK_THREADS) {
      const float logit = ark_get(logits.p, i);
      const ark_u32 own = static_cast<ark_u32>(i);
      const bool left = n == 0 || ark_better(last, its, logit, own);
      if (left && ark_better(logit, own, best, id)) {
        best = logit;
        id = own;
      }
    }
    ark_best(best, id, red);
    last = best;
    its = id;
    if (ark_tid() == 0) {
      ark_post_host(words + 1 + 2 * n, id);
      ark_post_host(words + 2 + 2 * n, ark_float_bits(best - all));
    }
  }
}

template <int VOCABULARY, int TILES, int CONTEXT, int STOPS, int TOP, class L, class O, class S,
          class P, class T, class E, class D, class C, class M, class N, class W, class H>
ARK_DEVICE void ark_sample_adjusted(ArkCtx& c, const ArkTask&, L logits, O options, S settings,
                                    P position, T tokens, E stop_tokens, D scores, C candidates,
                                    M shares, N counts, W drawn, H host) {
  if (!ark_draws<CONTEXT, STOPS>(settings, position, tokens, stop_tokens)) {
    if (ark_tid() == 0) drawn.p[0] = drawn.p[1] = 0.0f;
    return;
  }
  float* red = reinterpret_cast<float*>(ARK_SCRATCH(c));
  const ArkOptions o = ark_options(options);
  ArkSampler sampler = ark_sampler(settings, position, 0);
  const bool filters = (o.top_k > 0 && o.top_k < VOCABULARY) || o.top_p < 1.0f || o.min_p > 0.0f ||
                       o.typical_p < 1.0f;
  if (filters && sampler.temperature > 0.0f) {
    float top = -ark_inf();
    for (int k = 0; k < TILES; ++k) top = shares.p[3 * k + 2] > top ? shares.p[3 * k + 2] : top;
    ark_sample_filtered<VOCABULARY>(o, sampler, scores, top, red);
  } else {
    for (int k = ark_tid(); k < TILES; k += ARK_THREADS) {
      ark_take(sampler, candidates.p[2 * k], ark_float_bits(candidates.p[2 * k + 1]));
    }
  }
  ark_best(sampler.best, sampler.token, red);
  if (sampler.token >= static_cast<ark_u32>(VOCABULARY)) sampler.token = 0u;  // all were NaN
  if (ark_tid() == 0) {
    drawn.p[0] = sampler.best;
    drawn.p[1] = ark_bits_float(sampler.token);
    counts.p[sampler.token] += 1;
  }
  const int next = position.p[0] + 1;
  if (o.logprobs > 0 && next < CONTEXT) {
    ark_report_logprobs<VOCABULARY, TILES, TOP>(o.logprobs - 1, sampler.token, next, logits, shares,
                                                host, red);
  }
}
