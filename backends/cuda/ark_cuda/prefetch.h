// Prefetches weights to L2 while the operand stream's ring is full (stream.h).

// While the ring is full, the next weights are loaded to L2, so that memory does not idle while
// processors wait for each other. The number of prefetched stages is limited. One stage is
// prefetched per fixed number of clocks, a little slower than memory delivers a stage to each
// processor. Each stage that moves from L2 to the ring makes room for another one. Copies of boxes
// delay exchanges between processors more than copies of contiguous bytes do. So if all stages are
// boxes and the ring is deep, prefetches are slower and happen only while the ring is full. The
// same holds for all stages on a faster memory (an H200's).
constexpr bool ARK_SLOW_MEMORY = ARK_STAGE_NS > 600;
constexpr bool ARK_STREAM_MIXED = ARK_STREAM_CUTS && ARK_STREAM_RUNS;
constexpr bool ARK_PREFETCH_ON =
    ARK_SLOW_MEMORY && (!ARK_STREAM_CUTS || ARK_STREAM_MIXED || ARK_RING_DEPTH < 12);
constexpr ark_u32 ARK_PREFETCHED = ARK_PREFETCH_ON   ? (ARK_STREAM_MIXED ? 12u : 16u)
                                   : ARK_STREAM_CUTS ? 24u
                                                     : 16u;
constexpr ark_u32 ARK_STAGE_CLOCKS = ARK_STAGE_NS * 7 / 4;  // at 1.75 GHz
// The loading warp reads the clock once per stage. If all stages are runs and come from L2, a
// prefetch that is late by less than one interval does not delay the next one, so that the average
// interval is as set. A large model has more stages between two exchanges and gets a longer
// interval.
constexpr bool ARK_PREFETCH_MAKES_UP = ARK_PREFETCH_ON && !ARK_STREAM_CUTS;
constexpr bool ARK_STREAM_LARGE = ARK_STREAM_MIB > 4096;  // in an iteration
constexpr ark_u32 ARK_PREFETCH_CLOCKS = ARK_STAGE_CLOCKS *
                                        (ARK_PREFETCH_MAKES_UP ? (ARK_STREAM_LARGE ? 140u : 126u)
                                         : ARK_PREFETCH_ON     ? 110u
                                         : ARK_STREAM_CUTS     ? 120u
                                                               : 140u) /
                                        100u;
// The number of clock cycles for which the ring must have been full before the first prefetch.
constexpr ark_u32 ARK_PREFETCH_AFTER = ARK_STREAM_CUTS ? ARK_PREFETCH_CLOCKS : 700u;

// The records (ArkFetch) of a processor's fetches from number `begin` on: each lane holds one of 32
// in `mine`, and one of the next 32 in `next`.
struct ArkRecords {
  uint4 mine;
  uint4 next;
  ark_u32 begin;
  ark_u32 end;         // end of all records
  ark_u32 prefetched;  // number of records that were prefetched or skipped
  ark_u32 asked;       // the clock at the last prefetch
};

// Called by the whole warp: prefetches the stage of the next record to L2, if it is time for it.
// now: a clock value that the caller has read before, because reading the clock here would delay
// the next stage.
ARK_DEVICE void ark_prefetch_next(ArkRecords& r, ark_u32 now) {
  const ark_u32 due = r.asked + ARK_PREFETCH_CLOCKS;
  const bool makes_up = ARK_PREFETCH_MAKES_UP && now - due < ARK_PREFETCH_CLOCKS;
  r.asked = __shfl_sync(0xffffffffu, makes_up ? due : now, 0);
  const ark_u32 from = r.prefetched++ - r.begin, lane = from % 32u;
  // The values are selected, not the record: its address would move the records to local memory.
  const bool near = from < 32u;
  uint4 record;
  record.x = __shfl_sync(0xffffffffu, near ? r.mine.x : r.next.x, lane);
  record.y = __shfl_sync(0xffffffffu, near ? r.mine.y : r.next.y, lane);
  record.z = __shfl_sync(0xffffffffu, near ? r.mine.z : r.next.z, lane);
  record.w = __shfl_sync(0xffffffffu, near ? r.mine.w : r.next.w, lane);
  if (ark_lane() == 0) ark_prefetch_stage(record);
}
// Waits for a free slot as ark_slot_free does, and meanwhile prefetches to L2 the stages of the
// records from number `place` on.
ARK_DEVICE bool ark_slot_free_prefetching(const ArkRingAt& at, ark_u32 slot, ark_u32 round,
                                          ArkRecords& r, ark_u32 place) {
  const ark_u32 limit = r.end - place < ARK_PREFETCHED ? r.end : place + ARK_PREFETCHED;
  const bool near = r.prefetched > place;  // this stage is in L2
  if (!near) r.prefetched = place;
  if (!(ARK_PREFETCH_ON && near)) {  // most slots are free, and reading the clock takes long
    const bool free = ark_barrier_tested_at(at.empty + slot * 8u, (round + 1u) & 1u);
    if (__all_sync(0xffffffffu, free)) return true;
  }
  const ark_u32 began = ark_clock();
  const auto due = [&](ark_u32 now) { return now - r.asked >= ARK_PREFETCH_CLOCKS; };
  if (ARK_PREFETCH_ON && near && r.prefetched < limit && __all_sync(0xffffffffu, due(began))) {
    ark_prefetch_next(r, began);
  }
  while (r.prefetched < limit) {
    const bool free = ark_barrier_tested_at(at.empty + slot * 8u, (round + 1u) & 1u);
    if (__all_sync(0xffffffffu, free)) return true;
    const ark_u32 now = ark_clock();
    const bool full = now - began >= ARK_PREFETCH_AFTER;
    if (__all_sync(0xffffffffu, full && due(now))) ark_prefetch_next(r, now);
  }
  return ark_slot_free(at, slot, round);
}
