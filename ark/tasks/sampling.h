// How the next token is drawn, for the kinds that look for a best element. The noise is a hash of
// seed, position and token, so that every backend draws the same.

#if !defined(ARK_HAS_LATER)
// A word of the host's memory, which the host polls for. A backend whose stores to the host hold up
// what follows them may do it when the iteration's tasks are done; each place has one word an
// iteration.
constexpr int ARK_LATER = 1;
ARK_DEVICE void ark_post_later(ArkCtx&, int, ark_u32* p, ark_u32 v) { ark_post_host(p, v); }
#endif

// A mixing of 64 bits (splitmix64, Steele, Lea and Flood 2014).
ARK_DEVICE ark_u64 ark_mix(ark_u64 z) {
  z += 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}
// What a token competes with: its logit, or the logit over the temperature plus Gumbel noise.
ARK_DEVICE float ark_score(float logit, float temperature, ark_u32 seed, ark_u32 position,
                           ark_u32 token) {
  if (temperature <= 0.0f) return logit;
  const ark_u64 place = (static_cast<ark_u64>(position) << 32) | token;
  const ark_u64 bits = ark_mix(ark_mix(seed) ^ place);
  // 23 bits and a half are exact in fp32: u never rounds to 1, of which the noise is infinite.
  const float u = (static_cast<float>(static_cast<ark_u32>(bits >> 41)) + 0.5f) * 1.1920929e-7f;
  return logit / temperature - ark_log(-ark_log(u));
}
// A float's bits as an integer of the same order.
ARK_DEVICE ark_u32 ark_ordered(float v) {
  const ark_u32 bits = ark_float_bits(v);
  return (bits & 0x80000000u) ? ~bits : bits | 0x80000000u;
}
// The best of a warp: higher score wins, then the lower token.
ARK_DEVICE void ark_warp_best(float& score, ark_u32& token) {
  for (int mask = ARK_LANES / 2; mask > 0; mask /= 2) {
    const float s = ark_shfl_xor(score, mask);
    const ark_u32 i = ark_shfl_xor(token, mask);
    if (s > score || (s == score && i < token)) {
      score = s;
      token = i;
    }
  }
}
// The best of the block. red: 2 * ARK_WARPS words.
ARK_DEVICE void ark_best(float& score, ark_u32& token, float* red) {
  ark_warp_best(score, token);
  if (ARK_WARPS == 1) return;
  ark_u32* ids = reinterpret_cast<ark_u32*>(red + ARK_WARPS);
  if (ark_lane() == 0) {
    red[ark_warp()] = score;
    ids[ark_warp()] = token;
  }
  ark_sync();
  for (int w = 0; w < ARK_WARPS; ++w) {
    if (red[w] > score || (red[w] == score && ids[w] < token)) {
      score = red[w];
      token = ids[w];
    }
  }
  ark_sync();
}

// A thread's best token so far, and what scores depend on.
struct ArkSampler {
  float temperature;
  ark_u32 seed;
  ark_u32 position;
  float best;
  ark_u32 token;
};
template <class S, class P>
ARK_DEVICE ArkSampler ark_sampler(S settings, P position, int first) {
  return {ark_bits_float(static_cast<ark_u32>(settings.p[0])), static_cast<ark_u32>(settings.p[2]),
          static_cast<ark_u32>(position.p[0]), -ark_inf(), static_cast<ark_u32>(first)};
}
// Of equal scores the lower token wins.
ARK_DEVICE void ark_sample(ArkSampler& s, float logit, int token) {
  const float score =
      ark_score(logit, s.temperature, s.seed, s.position, static_cast<ark_u32>(token));
  const ark_u32 id = static_cast<ark_u32>(token);
  if (score > s.best || (score == s.best && id < s.token)) {
    s.best = score;
    s.token = id;
  }
}
// A candidate: (score, bits of the token).
template <class C>
ARK_DEVICE void ark_candidate(const C& candidates, int tile, float best, ark_u32 token) {
  candidates.p[2 * tile] = best;
  candidates.p[2 * tile + 1] = ark_bits_float(token);
}
// The block's best becomes candidate `tile`. red: 2 * ARK_WARPS words.
template <class C>
ARK_DEVICE void ark_sampled(ArkSampler& s, C candidates, int tile, float* red) {
  ark_best(s.best, s.token, red);
  if (ark_tid() == 0) ark_candidate(candidates, tile, s.best, s.token);
}
