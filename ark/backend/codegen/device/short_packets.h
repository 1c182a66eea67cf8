// Packets of 4 bytes: an element of a 16-bit type T in the low half, and 16 bits of the epoch in
// the high half. A reader sees a packet of the current iteration, or of an earlier iteration of the
// same phase, normally the preceding one. So 16 bits suffice to distinguish them. Cleared memory
// has an epoch that no iteration has.

template <typename T>
struct ArkShort {
  ark_u32 word;
};
template <typename T>
inline constexpr bool ark_packets<ArkShort<T>> = true;
template <typename T>
inline constexpr bool ark_packets<const ArkShort<T>> = true;

#if !defined(ARK_HAS_SHORT_PACKETS)
ARK_DEVICE ark_u32 ark_short_load(const ark_u32* p, bool) { return ark_peek_host(p); }
ARK_DEVICE void ark_short_store(ark_u32* p, ark_u32 v, bool) { ark_post_host(p, v); }
#endif

// The epoch of the current iteration, in the high half of a word. It is never 0.
ARK_DEVICE ark_u32 ark_short_epoch(const ArkCtx& c) { return (c.iteration % 0xffffu + 1u) << 16; }
ARK_DEVICE bool ark_short_ready(ark_u32 epoch, ark_u32 seen) { return (seen ^ epoch) < 0x10000u; }

// ark_short_value: the element of a packet as float. ark_short_packet: the packet of a float.
ARK_DEVICE float ark_short_value(const ArkShort<ark_bf16>*, ark_u32 seen) {
  return ark_bits_float(seen << 16);
}
ARK_DEVICE float ark_short_value(const ArkShort<ark_f16>*, ark_u32 seen) {
  ark_f16 value;
  value.bits = static_cast<unsigned short>(seen & 0xffffu);
  return ark_float(value);
}
ARK_DEVICE ark_u32 ark_short_bits(const ArkShort<ark_bf16>*, float v) { return ark_bfloat(v).bits; }
ARK_DEVICE ark_u32 ark_short_bits(const ArkShort<ark_f16>*, float v) { return ark_half(v).bits; }

// Reads one packet: repeats the load until the packet's epoch is the current one.
template <typename T>
ARK_DEVICE float ark_wait_packet(ArkCtx& c, const ArkShort<T>* packet, bool system) {
  const ark_u32 epoch = ark_short_epoch(c);
  ArkSpin spin{0u, 0u};
  while (!ark_failed(c)) {
    const ark_u32 seen = ark_short_load(&packet->word, system);
    if (ark_short_ready(epoch, seen)) return ark_short_value(packet, seen);
    const ArkVerdict verdict = ark_spin(ARK_PARAMS(c), spin, ARK_PARAMS(c)->budget_ns);
    if (verdict == ARK_KEEP) continue;
    if (verdict == ARK_TIMEOUT) ark_fail(c, 2u, 0u, epoch >> 16, seen >> 16);
    ark_give_up(c);
  }
  return 0.0f;
}

template <typename T>
ARK_DEVICE float ark_load(ArkCtx& c, const ArkShort<T>* p, ark_i64 i, bool system) {
  return ark_wait_packet(c, p + i, system);
}
template <typename T>
ARK_DEVICE void ark_publish(ArkCtx& c, ArkShort<T>* p, ark_i64 i, float v, bool system) {
  ark_short_store(&p[i].word, ark_short_epoch(c) | ark_short_bits(p, v), system);
}

// Loads a row of packets of 4 bytes into shared memory, as ark_load_row in common.h does for other
// rows.
template <bool SCALED, typename T>
ARK_DEVICE float ark_load_row(ArkCtx& c, const ArkShort<T>* p, int stride, int n, float* xs,
                              bool system) {
  float squares = 0.0f;
  for (int k = ark_tid(); k < n; k += ARK_THREADS) {
    const float v = ark_load(c, p, static_cast<ark_i64>(k) * stride, system);
    squares += ark_store_scaled<SCALED>(v, xs + k);
  }
  return squares;
}
