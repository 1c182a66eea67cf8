// Weights on their way to L2 while the operand stream's ring is full (stream.h).

// While the ring is full, the weights that come next go to L2, so that the memory does not stand
// still while processors wait for each other: so many stages at most, one each so many clocks;
// boxes more slowly, which delay exchanges more. The policy is the ordinary one: the copy to shared
// memory is what makes lines the first to leave.
constexpr ark_u32 ARK_PREFETCHED = 8u;
constexpr ark_u32 ARK_PREFETCH_CLOCKS = ARK_STREAM_CUTS ? 1200u : 700u;
constexpr ark_u64 ARK_PREFETCH_POLICY = 0x1000000000000000ull;

// The records of a processor's fetches from `begin` on, 32 in `mine`, a lane each, and the next 32.
struct ArkRecords {
  uint4 mine;
  uint4 next;
  ark_u32 begin;
  ark_u32 end;         // of all
  ark_u32 prefetched;  // of all, so many have been seen to
};

// One lane: asks for a stage of that record in L2. Those that grow, and pieces, are left out.
ARK_DEVICE void ark_prefetch_stage(const uint4& record) {
  const ark_u64 address = static_cast<ark_u64>(record.y) << 32 | record.x;
  if (ark_stream_boxed(record.w)) {
    asm volatile(
        "cp.async.bulk.prefetch.tensor.3d.L2.global.tile.L2::cache_hint [%0, {%1, %2, %3}], %4;" ::
            "l"(address),
        "r"(0), "r"(record.w & 0x3fffffffu), "r"(record.z >> 16), "l"(ARK_PREFETCH_POLICY)
        : "memory");
  } else if (record.w == 0u && ark_slot_engine(address, record.z)) {
    asm volatile("cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], %1, %2;" ::"l"(address),
                 "r"(record.z), "l"(ARK_PREFETCH_POLICY)
                 : "memory");
  }
}
// Waits for a slot as ark_slot_free does, and meanwhile prefetches from record `place` on.
ARK_DEVICE bool ark_slot_free_prefetching(ark_u32 slot, ark_u32 round, ArkRecords& r,
                                          ark_u32 place) {
  const ark_u32 limit = r.end - place < ARK_PREFETCHED ? r.end : place + ARK_PREFETCHED;
  if (r.prefetched < place) r.prefetched = place;
  ark_u32 asked = ark_clock();
  while (r.prefetched < limit) {
    const bool free = ark_barrier_tested(&ark_ring.empty[slot], (round + 1u) & 1u);
    if (__all_sync(0xffffffffu, free)) return true;
    if (!__all_sync(0xffffffffu, ark_clock() - asked >= ARK_PREFETCH_CLOCKS)) continue;
    asked = ark_clock();
    const ark_u32 from = r.prefetched++ - r.begin, lane = from % 32u;
    const bool near = from < 32u;  // values are chosen: an address would put them into memory
    uint4 record;
    record.x = __shfl_sync(0xffffffffu, near ? r.mine.x : r.next.x, lane);
    record.y = __shfl_sync(0xffffffffu, near ? r.mine.y : r.next.y, lane);
    record.z = __shfl_sync(0xffffffffu, near ? r.mine.z : r.next.z, lane);
    record.w = __shfl_sync(0xffffffffu, near ? r.mine.w : r.next.w, lane);
    if (ark_lane() == 0) ark_prefetch_stage(record);
  }
  return ark_slot_free(slot, round);
}
