// Loads the input row of a linear layer that arrives as short packets (short_packets.h), in the
// variant `roles`.

// Like ark_load_pairs, for short packets, whose elements are not converted. A thread loads N groups
// of four elements, group i from at(i), with 16 bytes per load.
template <int N, typename T, typename There, typename At>
ARK_DEVICE void ark_load_fours(ArkCtx& c, const ArkShort<T>*, const There& there, const At& at,
                               uint4 (&seen)[N]) {
  const ark_u32 epoch = ark_short_epoch(c);
#pragma unroll
  for (int i = 0; i < N; ++i) seen[i].x = seen[i].y = seen[i].z = seen[i].w = ~epoch;
  const auto late = [&](int i) {  // above the elements: bits of another epoch
    const ark_u32 first = (seen[i].x ^ epoch) | (seen[i].y ^ epoch);
    return first | (seen[i].z ^ epoch) | (seen[i].w ^ epoch);
  };
  ArkSpin spin{0u, 0u};
  for (;;) {
    ark_u32 any = 0u;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (there(i) && late(i) >= 0x10000u) seen[i] = ark_shorts_load(at(i));
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (there(i)) any |= late(i);
    }
    if (__all_sync(0xffffffffu, any < 0x10000u || ark_failed(c))) return;
    const ArkVerdict verdict = ark_spin(c.p, spin, c.p->budget_ns);
    if (__all_sync(0xffffffffu, verdict == ARK_KEEP)) continue;
    if (verdict == ARK_TIMEOUT) ark_fail(c, 2u, 0u, epoch >> 16, seen[0].x >> 16);
    ark_give_up(c);
  }
}

// Like ark_row, for packets of 4 bytes whose values have the type of xs. They are not scaled, so
// they need no conversion.
template <int K, int S, int FIRST, bool NORM, typename T, int F>
ARK_DEVICE float ark_row(ArkCtx& c, const ArkShort<T>* p, const float (&)[F], T* xs, bool) {
  static_assert(S == 1 && !NORM && K % 4 == 0, "one row as it is");
  constexpr int ALL = (K / 4 + ARK_THREADS - 1) / ARK_THREADS, N = ALL < 8 ? ALL : 8;
#pragma unroll
  for (int first = 0; first < ALL; first += N) {
    uint4 v[N];
    const auto place = [&](int i) { return 4 * ((first + i) * ARK_THREADS + ark_tid()); };
    const auto there = [&](int i) { return place(i) < K; };
    const auto at = [&](int i) { return p + place(i); };
    ark_load_fours<N>(c, p, there, at, v);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (place(i) >= K) continue;
      ark_u32* to = reinterpret_cast<ark_u32*>(xs + place(i));
      to[0] = (v[i].x & 0xffffu) | v[i].y << 16;
      to[1] = (v[i].z & 0xffffu) | v[i].w << 16;
    }
  }
  return 0.0f;
}
