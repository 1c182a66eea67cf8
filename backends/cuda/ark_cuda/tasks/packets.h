// Loads packets by whole warps. All lanes load at once. If packets are missing, one lane polls one
// of them until it arrives, and then all lanes load again. If thousands of threads each polled a
// different packet, they would take bandwidth from the operand stream.

// Polls one packet for a warp that misses packets. late: a packet that the lane still misses, or
// null. Called by all lanes. Returns false if no lane misses a packet, or after a failure.
ARK_DEVICE bool ark_await_one(ArkCtx& c, const ark_u64* late, bool system) {
  const ark_u32 missing = __ballot_sync(0xffffffffu, late != nullptr && !ark_failed(c));
  if (missing == 0u) return false;
  if (ark_lane() == __ffs(static_cast<int>(missing)) - 1) ark_wait_packet(c, late, system);
  __syncwarp();
  return true;
}

// Loads element i of an operand in each lane whose `valid` is true; other lanes get 0.
template <typename T>
ARK_DEVICE float ark_load_by_warp(ArkCtx&, const T* p, ark_i64 i, bool valid, bool) {
  return valid ? ark_get(p, i) : 0.0f;
}
ARK_DEVICE float ark_load_by_warp(ArkCtx& c, const ark_u64* p, ark_i64 i, bool valid, bool system) {
  ark_u64 seen = 0u;  // no epoch is 0
  const ark_u64* late;
  do {
    if (valid && !ark_packet_ready(c, seen)) seen = ark_packet_load(p + i, system);
    late = valid && !ark_packet_ready(c, seen) ? p + i : nullptr;
  } while (ark_await_one(c, late, system));
  return valid ? ark_bits_float(static_cast<ark_u32>(seen)) : 0.0f;
}

// Copies N elements to shared memory, element i from at(i). Elements that arrive as packets are all
// loaded at once.
#define ARK_HAS_LOAD_BLOCK 1
#if defined(ARK_HAS_HANDSHAKE)
template <int N, class At>
ARK_DEVICE void ark_load_block(ArkCtx& c, const At& at, float* to, bool system) {
  constexpr int ALL = (N / 2 + ARK_THREADS - 1) / ARK_THREADS, B = ALL < 8 ? ALL : 8;
#pragma unroll
  for (int first = 0; first < ALL; first += B) {
    float loaded[2 * B];
    const auto place = [&](int n) { return 2 * ((first + n) * ARK_THREADS + ark_tid()); };
    const auto there = [&](int n) { return place(n) < N; };
    const auto from = [&](int n) { return at(place(n)); };
    ark_load_pairs<B>(c, at(0), there, from, loaded, system);
#pragma unroll
    for (int n = 0; n < B; ++n) {
      if (place(n) >= N) continue;
      to[place(n)] = loaded[2 * n];
      to[place(n) + 1] = loaded[2 * n + 1];
    }
  }
}
#else
template <int N, class At>
ARK_DEVICE void ark_load_block(ArkCtx& c, const At& at, float* to, bool system) {
  for (int first = 32 * ark_warp(); first < N; first += ARK_THREADS) {
    const int i = first + ark_lane();
    const float value = ark_load_by_warp(c, at(i), 0, i < N, system);
    if (i < N) to[i] = value;
  }
}
#endif
