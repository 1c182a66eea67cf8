// Copies to a peer by the bulk copy unit (sm_90 and later): one thread loads pieces into shared
// memory and sends them on, SLOTS of SLOT bytes, half of them on their way in and half on their
// way out.

ARK_DEVICE ark_u32 ark_bulk_address(const void* p) {
  return static_cast<ark_u32>(__cvta_generic_to_shared(p));
}
ARK_DEVICE void ark_bulk_in(char* to, ark_u64 from, ark_u32 bytes, ark_u64* full) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(ark_bulk_address(full)),
      "r"(bytes)
      : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(ark_bulk_address(to)),
      "l"(from), "r"(bytes), "r"(ark_bulk_address(full))
      : "memory");
}
ARK_DEVICE void ark_bulk_out(ark_u64 to, const char* from, ark_u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(ark_bulk_address(from)), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// A copy that this thread has started itself ends without anybody's help.
ARK_DEVICE void ark_bulk_await(ark_u64* full, ark_u32 parity) {
  ark_u32 passed;
  do {
    asm volatile(
        "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        " selp.u32 %0, 1, 0, p;\n}"
        : "=r"(passed)
        : "r"(ark_bulk_address(full)), "r"(parity)
        : "memory");
  } while (passed == 0u);
}

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
  for (int i = 0; i < SLOTS; ++i) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(ark_bulk_address(full + i))
                 : "memory");
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  // What others wrote by ordinary stores, here and in shared memory, is there for copies too.
  asm volatile("fence.proxy.async;" ::: "memory");
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
  for (int i = 0; i < SLOTS; ++i) {
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(ark_bulk_address(full + i))
                 : "memory");
  }
}

// The tile t.coord[0] to t.coord[1], counted in UNIT bytes; its odd end byte by byte.
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
