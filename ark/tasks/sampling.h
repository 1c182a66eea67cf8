// Functions that choose the next token, for the task kinds that sample. Noise is added to the
// logits. It is computed from a hash of the sequence's key (ark.tasks.tokens.noise_key), the
// position and the token, so that every backend samples the same tokens.

#if !defined(ARK_HAS_LATER)
// Stores a word in host memory that the host polls. On some backends a store to host memory delays
// the operations after it. Such a backend may postpone the store until the iteration's tasks have
// ended, so only one word may be stored to an address in each iteration.
constexpr int ARK_LATER = 1;
ARK_DEVICE void ark_post_later(ArkCtx&, int, ark_u32* p, ark_u32 v) { ark_post_host(p, v); }
#endif

// A hash of 64 bits (splitmix64; Steele, Lea and Flood 2014).
ARK_DEVICE ark_u64 ark_mix(ark_u64 z) {
  z += 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}
// The score of a token: its logit if the temperature is 0, otherwise logit / temperature plus
// Gumbel noise.
ARK_DEVICE float ark_score(float logit, float temperature, ark_u64 key, ark_u32 position,
                           ark_u32 token) {
  if (temperature <= 0.0f) return logit;
  const ark_u64 place = (static_cast<ark_u64>(position) << 32) | token;
  const ark_u64 bits = ark_mix(key ^ place);
  // u is (a 23-bit integer + 1/2) / 2^23, which is exact in fp32. So u is never rounded to 1, for
  // which the noise would be infinite.
  const float u = (static_cast<float>(static_cast<ark_u32>(bits >> 41)) + 0.5f) * 1.1920929e-7f;
  return logit / temperature - ark_log(-ark_log(u));
}
// Maps a float to an integer such that integers compare as the floats do: the larger float has the
// larger integer.
ARK_DEVICE ark_u32 ark_ordered(float v) {
  const ark_u32 bits = ark_float_bits(v);
  return (bits & 0x80000000u) ? ~bits : bits | 0x80000000u;
}
// True if the first of two candidates is chosen: the one with the higher score or, if scores are
// equal, the smaller token id.
ARK_DEVICE bool ark_better(float score, ark_u32 token, float than, ark_u32 its) {
  return (score > than) | ((score == than) & (token < its));
}
// True if a comes before b in falling order, where NaN counts as larger than all numbers.
ARK_DEVICE bool ark_above(float a, float b) { return a > b || (a != a && b == b); }
// Encodes a candidate so that ark_better also orders NaN, which counts as larger than infinity.
// score, place: the largest element that was found, and its index (below 2^31). odd: the index of a
// NaN, or ~0 if there is none. With a NaN the score becomes infinity and the index that of the NaN.
// Without one the index becomes 2^31 or more, so that even an infinite score loses against a NaN.
constexpr ark_u32 ARK_PLACE = 0x7fffffffu;
ARK_DEVICE void ark_ranked(float& score, ark_u32& place, ark_u32 odd) {
  const bool found = odd != 0xffffffffu;  // place of a NaN
  score = found ? ark_inf() : score;
  place = found ? odd : place | ~ARK_PLACE;
}
// Finds the candidate with the highest score among a warp's lanes. A backend may have a faster
// implementation.
#if !defined(ARK_HAS_WARP_BEST)
ARK_DEVICE void ark_warp_best(float& score, ark_u32& token) {
  for (int mask = ARK_LANES / 2; mask > 0; mask /= 2) {
    const float s = ark_shfl_xor(score, mask);
    const ark_u32 i = ark_shfl_xor(token, mask);
    if (ark_better(s, i, score, token)) {
      score = s;
      token = i;
    }
  }
}
#endif
// Finds the candidate with the highest score among the block's threads. red: shared memory of 2 *
// ARK_WARPS words.
ARK_DEVICE void ark_best(float& score, ark_u32& token, float* red) {
  ark_warp_best(score, token);
  if (ARK_WARPS == 1) return;
  ark_u32* ids = reinterpret_cast<ark_u32*>(red + ARK_WARPS);
  if (ark_lane() == 0) {
    red[ark_warp()] = score;
    ids[ark_warp()] = token;
  }
  ark_sync();
  score = red[ark_lane() % ARK_WARPS];
  token = ids[ark_lane() % ARK_WARPS];
  ark_warp_best(score, token);
  ark_sync();
}

// The best token that a thread has found so far, and the settings from which it computes scores of
// tokens.
struct ArkSampler {
  float temperature;
  ark_u64 key;
  ark_u32 position;
  float best;
  ark_u32 token;
};
template <class S, class P>
ARK_DEVICE ArkSampler ark_sampler(S settings, P position, int first) {
  const ark_u64 low = static_cast<ark_u32>(settings.p[2]);
  const ark_u64 high = static_cast<ark_u32>(settings.p[6]);
  // Logits divided by a temperature below 1e-5 may be infinite. At such a temperature the best
  // token is nearly certain, so 0 is used.
  const float given = ark_bits_float(static_cast<ark_u32>(settings.p[0]));
  const float temperature = given >= 1e-5f ? given : 0.0f;
  return {temperature, high << 32 | low, static_cast<ark_u32>(position.p[0]), -ark_inf(),
          static_cast<ark_u32>(first)};
}
// Replaces the thread's best token if this one has a higher score. If scores are equal, the smaller
// token id wins.
ARK_DEVICE void ark_take(ArkSampler& s, float score, ark_u32 token) {
  if (ark_better(score, token, s.best, s.token)) {
    s.best = score;
    s.token = token;
  }
}
ARK_DEVICE void ark_sample(ArkSampler& s, float logit, int token) {
  const ark_u32 id = static_cast<ark_u32>(token);
  ark_take(s, ark_score(logit, s.temperature, s.key, s.position, id), id);
}
// Stores the block's best token as candidate `tile`: its score and the token's bits. red: 2 *
// ARK_WARPS words of shared memory.
template <class C>
ARK_DEVICE void ark_sampled(ArkCtx& c, ArkSampler& s, C candidates, int tile, float* red) {
  ark_best(s.best, s.token, red);
  if (ark_tid() != 0) return;
  ark_publish(c, candidates, 0, 0, tile, 0, s.best);
  ark_publish(c, candidates, 0, 0, tile, 1, ark_bits_float(s.token));
}
