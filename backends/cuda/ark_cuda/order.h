// Synchronisation of a block with other blocks and with the host: acquires and releases, words that
// the host writes or reads, and packets.

ARK_DEVICE ark_u32 ark_load_acquire(const ark_u32* p, bool system) {
  ark_u32 v;
  if (system) {
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  } else {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  }
  return v;
}
ARK_DEVICE void ark_add_release(ark_u32* p, ark_u32 v, bool system) {
  if (system) {
    asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
  } else {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
  }
}
ARK_DEVICE ark_u32 ark_cas(ark_u32* p, ark_u32 expected, ark_u32 desired) {
  ark_u32 old;
  asm volatile("atom.acq_rel.gpu.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(old)
               : "l"(p), "r"(expected), "r"(desired)
               : "memory");
  return old;
}
ARK_DEVICE ark_u32 ark_claim(ark_u32* p) {
  ark_u32 old;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(old) : "l"(p));
  return old;
}
ARK_DEVICE ark_u32 ark_load_host(const ark_u32* p) { return ark_load_acquire(p, true); }
// Loads a word that the host or another processor may be writing at the same time. The load orders
// no other accesses, so a thread waits for the value only when it uses it.
ARK_DEVICE ark_u32 ark_peek_host(const ark_u32* p) {
  ark_u32 v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
ARK_DEVICE void ark_post_host(ark_u32* p, ark_u32 v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
ARK_DEVICE void ark_store_host(ark_u32* p, ark_u32 v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
// Loads and stores a word in shared memory that only the lanes of one warp access. The access is
// not volatile: volatile accesses would cost 2% of the time per token. Loops that poll the word
// have a memory clobber, so that the compiler loads it again in each round.
ARK_DEVICE ark_u32 ark_warp_load(const ark_u32* p) { return *p; }
ARK_DEVICE void ark_warp_store(ark_u32* p, ark_u32 v) { *p = v; }

// The createpolicy word for the L2 eviction priority evict_last. Packets are polled in L2 while
// weights stream through it, and this priority keeps the weights from evicting them. Packets in
// other GPUs' memory are not cached in this L2 and have no priority.
constexpr ark_u64 ARK_PACKET_POLICY = 0x14f0000000000000ull;
// A packet carries its value and the value's epoch (iteration number). So neither the store nor the
// load needs an ordering with other memory accesses.
ARK_DEVICE ark_u64 ark_packet_load(const ark_u64* p, bool system) {
  ark_u64 v;
  if (system) {
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  } else {
    asm volatile("ld.relaxed.gpu.global.L2::cache_hint.u64 %0, [%1], %2;"
                 : "=l"(v)
                 : "l"(p), "l"(ARK_PACKET_POLICY)
                 : "memory");
  }
  return v;
}
ARK_DEVICE void ark_packet_store(ark_u64* p, ark_u64 v, bool system) {
  if (system) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
  } else {
    asm volatile("st.relaxed.gpu.global.L2::cache_hint.u64 [%0], %1, %2;" ::"l"(p), "l"(v),
                 "l"(ARK_PACKET_POLICY)
                 : "memory");
  }
}
// Short packets of 4 bytes: {16-bit value, 16 bits of the epoch}.
#define ARK_HAS_SHORT_PACKETS 1
ARK_DEVICE ark_u32 ark_short_load(const ark_u32* p, bool system) {
  ark_u32 v;
  if (system) {
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  } else {
    asm volatile("ld.relaxed.gpu.global.L2::cache_hint.u32 %0, [%1], %2;"
                 : "=r"(v)
                 : "l"(p), "l"(ARK_PACKET_POLICY)
                 : "memory");
  }
  return v;
}
ARK_DEVICE void ark_short_store(ark_u32* p, ark_u32 v, bool system) {
  if (system) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
  } else {
    asm volatile("st.relaxed.gpu.global.L2::cache_hint.u32 [%0], %1, %2;" ::"l"(p), "r"(v),
                 "l"(ARK_PACKET_POLICY)
                 : "memory");
  }
}
// Loads or stores two packets in one access. Each packet is atomic, but not the pair.
#define ARK_HAS_PACKET_PAIRS 1
ARK_DEVICE void ark_packets_load(const ark_u64* p, ark_u64& first, ark_u64& second, bool system) {
  if (system) {
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(first), "=l"(second)
                 : "l"(p)
                 : "memory");
  } else {
    asm volatile("ld.relaxed.gpu.global.L2::cache_hint.v2.u64 {%0, %1}, [%2], %3;"
                 : "=l"(first), "=l"(second)
                 : "l"(p), "l"(ARK_PACKET_POLICY)
                 : "memory");
  }
}
ARK_DEVICE void ark_packets_store(ark_u64* p, ark_u64 first, ark_u64 second, bool system) {
  if (system) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(p), "l"(first), "l"(second)
                 : "memory");
  } else {
    asm volatile("st.relaxed.gpu.global.L2::cache_hint.v2.u64 [%0], {%1, %2}, %3;" ::"l"(p),
                 "l"(first), "l"(second), "l"(ARK_PACKET_POLICY)
                 : "memory");
  }
}
// Loads four short packets in one access. Each packet is atomic, but not the four together.
ARK_DEVICE uint4 ark_shorts_load(const void* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p), "l"(ARK_PACKET_POLICY)
               : "memory");
  return v;
}
