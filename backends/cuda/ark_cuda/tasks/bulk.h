// Copies to a peer GPU by cp.async.bulk (sm_90 and later). One thread loads pieces of the data to
// shared memory and stores them to the peer. There are SLOTS slots of SLOT bytes; half of them have
// loads in flight and half have stores in flight.

template <int SLOTS, int SLOT>
ARK_DEVICE void ark_bulk_pieces(char* scratch, ark_u64 from, ark_u64 to, ark_i64 bytes) {
  constexpr int LEAD = SLOTS / 2;
  const ark_u64 base = (reinterpret_cast<ark_u64>(scratch) + 127u) & ~127ull;
  ark_u64* full = reinterpret_cast<ark_u64*>(base);
  char* slots = reinterpret_cast<char*>(base + 128u);
  const int pieces = static_cast<int>((bytes + SLOT - 1) / SLOT);
  const auto size = [&](int n) {
    const ark_i64 left = bytes - static_cast<ark_i64>(n) * SLOT;
    return static_cast<ark_u32>(left < SLOT ? left : SLOT);
  };
  ark_bulk_begin<SLOTS>(full);
  for (int n = 0; n < pieces + LEAD; ++n) {
    if (n < pieces) {
      if (n >= SLOTS) {
        asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(SLOTS - LEAD - 1) : "memory");
      }
      const ark_u64 place = from + static_cast<ark_u64>(n) * SLOT;
      ark_bulk_in(slots + n % SLOTS * SLOT, place, size(n), full + n % SLOTS);
    }
    const int m = n - LEAD;
    if (m < 0) continue;
    ark_bulk_await(full + m % SLOTS, static_cast<ark_u32>(m / SLOTS) & 1u);
    ark_bulk_out(to + static_cast<ark_u64>(m) * SLOT, slots + m % SLOTS * SLOT, size(m));
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  asm volatile("fence.proxy.async;" ::: "memory");
  ark_bulk_end<SLOTS>(full);
}

// Copies part of `source` to `target`: bytes t.coord[0] * UNIT to t.coord[1] * UNIT. The last bytes
// that do not fill 16 bytes are copied one by one.
template <int UNIT, int SLOTS, int SLOT>
ARK_DEVICE void ark_bulk(ArkCtx& c, const ArkTask& t, ark_u64 source, ark_u64 target) {
  const ark_u64 first = static_cast<ark_u64>(t.coord[0]) * UNIT;
  const ark_i64 bytes = static_cast<ark_i64>(t.coord[1] - t.coord[0]) * UNIT;
  const ark_i64 whole = ark_aligned(source | target | first) ? bytes & ~15ll : 0;
  if (ark_tid() == 0 && whole > 0) {
    ark_bulk_pieces<SLOTS, SLOT>(ARK_SCRATCH(c), source + first, target + first, whole);
  }
  const unsigned char* from = ARK_POINTER(const unsigned char, source + first);
  unsigned char* to = ARK_POINTER(unsigned char, target + first);
  for (ark_i64 i = whole + ark_tid(); i < bytes; i += ARK_THREADS) to[i] = from[i];
}
