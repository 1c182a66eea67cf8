// The operand stream on GPUs with bulk copies (sm_90 and later). The loading warp, which runs
// beside the computing warps, walks this processor's fetch list across tasks and iterations. It
// copies one stage of operands after another to a ring of slots in shared memory.
//
// The ring has many slots, so that it fills while tasks wait. But few copies are in flight at once,
// because a packet or an activation that a task waits for queues behind them. So the number of
// copies in flight has its own limit.
//
// A slot is freed by one computing warp or by all of them, and a task ends with a barrier. So
// neither the loading warp nor the computing warps are ever more than one phase of a slot's
// barriers ahead of the other.

// While the ring is full, the next weights are prefetched to L2, so that memory does not idle while
// processors wait for each other. The number of prefetched stages is limited: when a stage is
// copied from L2 to the ring, another one may be prefetched. One stage is prefetched per fixed
// number of clock cycles, at a rate a little below that at which memory delivers a stage to each
// processor. Copies of boxes delay exchanges between processors more than copies of contiguous
// bytes do. So if all stages are boxes and the ring has 12 slots or more, prefetches are slower and
// happen only while the ring is full. On a faster memory (H200) this applies to all stages.
constexpr bool ARK_SLOW_MEMORY = ARK_STAGE_NS > 600;
constexpr bool ARK_STREAM_MIXED = ARK_STREAM_CUTS && ARK_STREAM_RUNS;
constexpr bool ARK_PREFETCH_ON =
    ARK_SLOW_MEMORY && (!ARK_STREAM_CUTS || ARK_STREAM_MIXED || ARK_RING_DEPTH < 12);
constexpr ark_u32 ARK_PREFETCHED = ARK_PREFETCH_ON   ? (ARK_STREAM_MIXED ? 12u : 16u)
                                   : ARK_STREAM_CUTS ? 24u
                                                     : 16u;
constexpr ark_u32 ARK_STAGE_CLOCKS = ark_clocks(ARK_STAGE_NS);
// The loading warp reads the clock once per stage. If all stages are contiguous bytes and come from
// L2, a prefetch that is late by less than one interval does not delay the next one, so that the
// average interval is as set. If the operands of an iteration have more than 4 GiB, more stages are
// loaded between two exchanges of data between processors, and the interval is longer.
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

// Fetch records (ArkFetch) of a processor, from number `begin` on. Each lane holds one of 32
// records in `mine` and one of the following 32 in `next`.
struct ArkRecords {
  uint4 mine;
  uint4 next;
  ark_u32 begin;
  ark_u32 end;         // end of all records
  ark_u32 prefetched;  // number of records that were prefetched or skipped
  ark_u32 asked;       // the clock at the last prefetch
};

// Called by the whole warp: prefetches the stage of the next record to L2 and advances the record.
// now: the clock that the caller has read. Reading the clock here would delay the next stage.
ARK_DEVICE void ark_prefetch_next(ArkRecords& r, ark_u32 now) {
  const ark_u32 due = r.asked + ARK_PREFETCH_CLOCKS;
  const bool makes_up = ARK_PREFETCH_MAKES_UP && now - due < ARK_PREFETCH_CLOCKS;
  r.asked = __shfl_sync(0xffffffffu, makes_up ? due : now, 0);
  const ark_u32 from = r.prefetched++ - r.begin, lane = from % 32u;
  // Each word is selected separately. Selecting one of two structs by address would make the
  // compiler store the records in local memory.
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

// Only a few copies are in flight, because packets from other processors, for which warps may be
// waiting, queue behind the copies. While the ring is almost empty, one more copy is in flight,
// because warps then wait for stages.

// The ring counts as almost empty if at most this many stages were issued and have not been used
// yet. The number is lower for faster memory, on which stages arrive faster than warps use them.
constexpr ark_u32 ARK_STARVING = ARK_SLOW_MEMORY ? 5 : 6;
// True if one more copy may be in flight while the ring is almost empty. This is done only in the
// variant `roles`: in variants in which all warps use each stage, more copies in flight were always
// slower.
constexpr bool ARK_STARVES = ARK_BLOCK_WARPS > ARK_WARPS + 1 && ARK_RING_DEPTH > ARK_STARVING;
// The limit is for stages that fill their slots. Of stages that fill at most half, twice as many
// may be in flight, if the ring is deep enough.
constexpr ark_u32 ARK_SMALL_STAGE = ARK_STAGE_BYTES / 2;
constexpr ark_u32 ARK_SMALL_MORE =
    !ARK_STREAM_CUTS && ARK_RING_DEPTH > 2 * ARK_IN_FLIGHT + 1 ? ARK_IN_FLIGHT : 0;
constexpr ark_u32 ARK_MOST_IN_FLIGHT = ARK_IN_FLIGHT + ARK_SMALL_MORE + (ARK_STARVES ? 1 : 0);
static_assert(ARK_RING_DEPTH > ARK_MOST_IN_FLIGHT, "the ring is deeper than what is in flight");

// Called by the whole warp. Returns the number of copies that may be in flight when the copy of
// stage `issued` begins.
ARK_DEVICE ark_u32 ark_stream_in_flight(const ArkRingAt& at, ark_u32 issued) {
  if (!ARK_STARVES || issued < ARK_STARVING) return ARK_IN_FLIGHT;
  const ark_u32 index = issued - ARK_STARVING, round = index / ARK_RING_DEPTH;
  const bool used = ark_barrier_tested_at(at.empty + index % ARK_RING_DEPTH * 8u, round & 1u);
  return __all_sync(0xffffffffu, used) ? ARK_IN_FLIGHT + 1 : ARK_IN_FLIGHT;
}

#ifndef ARK_HAS_GROWTH  // no fetch of this kernel grows (stream_growth.h)
struct ArkGrowing {
  ark_u32 stages;
};
ARK_DEVICE ArkGrowth ark_from_lane(const ArkGrowth& g, ark_u32) { return g; }
ARK_DEVICE bool ark_stream_begun(const ArkCtx&) { return false; }
ARK_DEVICE bool ark_stream_growth(ArkCtx&, const ArkRingAt&, const ArkGrowth&, ark_u32, ark_u32&) {
  return false;
}
ARK_DEVICE void ark_count_growth(const ArkParams*, const ArkTask&, ArkGrowing&) {}
ARK_DEVICE void ark_begin_growth(ark_u32) {}
#endif

// One pass of the loading warp over the ring takes about as long as memory needs for a stage of 8
// KB, because its tests wait behind the computing warps' loads from shared memory. So a pass starts
// the copies of up to this many stages. At most ARK_IN_FLIGHT, and at most ARK_STARVING if the
// latter's test is made: so a pass only tests barriers for stages that began before it, which are
// less than one phase away.
constexpr ark_u32 ARK_PASS_STAGES =
    ARK_STARVES && ARK_STARVING < ARK_IN_FLIGHT ? ARK_STARVING : ARK_IN_FLIGHT;

// True if the phase of stage number `index` has completed, of the barrier of its slot in the array
// at `barriers`.
ARK_DEVICE bool ark_stage_tested(ark_u32 barriers, ark_u32 index) {
  const ark_u32 round = index / ARK_RING_DEPTH;
  return ark_barrier_tested_at(barriers + index % ARK_RING_DEPTH * 8u, round & 1u);
}
// True if fewer than the most copies are in flight when the copy of stage number `index` begins.
// more: number of copies that may be in flight beyond ARK_IN_FLIGHT. All barriers are tested before
// a result is used, because a test takes long. The test of a stage before the first one has no
// meaning, and its result is not used.
ARK_DEVICE bool ark_stage_next(const ArkRingAt& at, ark_u32 index, ark_u32 more) {
  const ark_u32 back = ARK_IN_FLIGHT + more;
  const bool landed = ark_stage_tested(at.full, index - back);
  if (!ARK_STARVES) return landed || index < back;
  const bool earlier = ark_stage_tested(at.full, index - back - 1u);
  const bool used = ark_stage_tested(at.empty, index - ARK_STARVING);
  const bool starves = used && index >= ARK_STARVING;
  return landed || index < back || (starves && (earlier || index == back));
}

// Called by the whole warp. Starts the copies of stage number `issued` and of those after it that
// may begin now. Lane k has the record of stage `issued`, and each lane after it the next record.
// runs: the lanes (as a mask) with stages of contiguous bytes; lane k is one. small: those whose
// stages fill at most half of a slot. Returns the number of copies that were started, 0 if the
// launch ends.
ARK_DEVICE ark_u32 ark_stream_pass(ArkCtx& c, const ArkRingAt& at, ArkRecords& r, ark_u32 k,
                                   ark_u32 runs, ark_u32 small, ark_u32 issued) {
  const ark_u32 lane = static_cast<ark_u32>(ark_lane()), ahead = lane - k;
  const ark_u32 index = issued + ahead, slot = index % ARK_RING_DEPTH;
  // While stages come from L2, a prefetch may be due before each.
  const bool several = !ARK_PREFETCH_ON || r.prefetched <= r.begin + k;
  bool free = false, next = false;
  if (several && ahead < ARK_PASS_STAGES && (runs >> lane & 1u) != 0u) {
    free = ark_barrier_tested_at(at.empty + slot * 8u, (index / ARK_RING_DEPTH + 1u) & 1u);
    next = ark_stage_next(at, index, (small >> lane & 1u) != 0u ? ARK_SMALL_MORE : 0u);
  }
  const ark_u32 begin = __ballot_sync(0xffffffffu, free && next) >> k;
  const ark_u32 frees = __ballot_sync(0xffffffffu, free) >> k;
  ark_u32 count = static_cast<ark_u32>(__ffs(static_cast<int>(~begin))) - 1u;
  const ark_u32 full = at.full + slot * 8u, to = at.slots + slot * ARK_STAGE_BYTES;
  const ark_u64 address = static_cast<ark_u64>(r.mine.y) << 32 | r.mine.x;
  const bool waits = count == 0u;
  if (waits) {
    const ark_u32 first = issued % ARK_RING_DEPTH, round = issued / ARK_RING_DEPTH;
    if ((frees & 1u) == 0u && !ark_slot_free_prefetching(at, first, round, r, r.begin + k)) {
      return 0u;
    }
    count = 1u;
  }
  if (ahead < count) ark_stage_expects(full, r.mine.z);
  if (waits) {
    const ark_u32 more = (small >> k & 1u) != 0u ? ARK_SMALL_MORE : 0u;
    if (!ark_stream_landed(c, at, issued, ark_stream_in_flight(at, issued) + more)) return 0u;
  }
  if (ahead < count) ark_bulk_copy(to, address, r.mine.z, full, ARK_STREAM_POLICY);
  return count;
}

// Starts the copies of all stages of one iteration. issued: the number of stages since the launch.
// Returns false if no more stages are needed. The fetch records are loaded 32 at a time, one per
// lane, and the next 32 are loaded while these are used.
ARK_DEVICE bool ark_stream_iteration(ArkCtx& c, const ArkRange& range, ark_u32& issued) {
  const uint4* records = reinterpret_cast<const uint4*>(c.p->fetches);
  const ark_u32 lane = static_cast<ark_u32>(ark_lane());
  const ark_u32 end = range.fetch_end;
  ArkRecords r = {{},  make_uint4(0u, 0u, 0u, 0u), range.fetch_begin,
                  end, range.fetch_begin,          ark_clock()};
  const ArkGrowth* growths = reinterpret_cast<const ArkGrowth*>(c.p->growths);
  ArkGrowth growth = {};
  ark_u64 lengths = 0u;  // the address from which `length` was loaded
  ark_u32 length = 0u;
  const ArkRingAt at = ark_ring_at();
  if (range.fetch_begin + lane < end) r.next = records[range.fetch_begin + lane];
  for (ark_u32 first = range.fetch_begin; first < end; first += 32u) {
    r.mine = r.next, r.begin = first;
    const uint4& mine = r.mine;
    if (first + 32u + lane < end) r.next = records[first + 32u + lane];
    const ark_u32 count = end - first < 32u ? end - first : 32u;
    if (ARK_STREAM_GROWS && mine.w - 1u < 0x7fffffffu) growth = growths[mine.w - 1u];
    // Boxes and pieces take longer to start, and beside them a pass gains nothing: eight rows in
    // bf16 took 2% longer with it.
    ark_u32 runs = 0u, small = 0u;
    if (!ARK_STREAM_CUTS) {
      const ark_u64 from = static_cast<ark_u64>(mine.y) << 32 | mine.x;
      const bool run = lane < count && mine.w == 0u && mine.z <= ARK_STAGE_BYTES;
      runs = __ballot_sync(0xffffffffu, run && ark_slot_engine(from, mine.z));
      small = __ballot_sync(0xffffffffu, mine.z <= ARK_SMALL_STAGE);
    }
    for (ark_u32 k = 0u, done = 1u; k < count; k += done) {
      if (!ARK_STREAM_CUTS && (runs >> k & 1u) != 0u) {
        done = ark_stream_pass(c, at, r, k, runs, small, issued);
        if (done == 0u) return false;
        issued += done;
        if (issued >= 2u * ARK_STAGE_PERIOD) issued -= ARK_STAGE_PERIOD;
        continue;
      }
      done = 1u;
      ark_u32 form = 0u;
      if (ARK_STREAM_GROWS || ARK_STREAM_CUTS) form = __shfl_sync(0xffffffffu, mine.w, k);
      const ark_u64 low = __shfl_sync(0xffffffffu, mine.x, k);
      const ark_u64 high = __shfl_sync(0xffffffffu, mine.y, k);
      const ark_u32 packed = __shfl_sync(0xffffffffu, mine.z, k);
      if (ARK_STREAM_GROWS && form - 1u < 0x7fffffffu) {
        const ArkGrowth g = ark_from_lane(growth, k);
        if (g.length != lengths) {
          if (!ark_stream_begun(c)) return false;
          lengths = g.length;
          length = *reinterpret_cast<const volatile ark_u32*>(lengths);
        }
        if (!ark_stream_growth(c, at, g, length, issued)) return false;
        continue;
      }
      const ark_u32 slot = issued % ARK_RING_DEPTH;
      const bool boxed = ark_stream_boxed(form);
      const ark_u32 bytes = boxed ? packed & 0xffffu : packed;
      const ark_u64 address = high << 32 | low;
      const ArkPieces pieces = ark_stream_pieces(form);
      // Few copies are in flight at once. So the time from the end of one copy to the start of the
      // next matters, and this loop is kept short.
      const ark_u32 round = issued / ARK_RING_DEPTH;
      if (!ark_slot_free_prefetching(at, slot, round, r, first + k)) return false;
      if (!ark_prepare_slot(c, at, slot, address, pieces.count * bytes)) return false;
      if (!ark_stream_landed(c, at, issued, ark_stream_in_flight(at, issued))) return false;
      if (boxed) {
        ark_fill_box(at, slot, address, form & 0x3fffffffu, packed >> 16);
      } else if (pieces.pitch != 0u) {
        ark_fill_pieces(at, slot, address, bytes, pieces);
      } else {
        ark_fill_slot(at, slot, address, bytes);
      }
      if (++issued == 2u * ARK_STAGE_PERIOD) issued = ARK_STAGE_PERIOD;
    }
  }
  return true;
}

// True if the processor has anything to fetch in any phase.
ARK_DEVICE bool ark_stream_needed(const ArkParams* p, ark_u32 processor) {
  const ArkRange* ranges = reinterpret_cast<const ArkRange*>(p->ranges);
  for (ark_u32 phase = 0u; phase < ARK_PHASES; ++phase) {
    const ArkRange& range = ranges[phase * p->processors + processor];
    if (range.fetch_begin != range.fetch_end) return true;
  }
  return false;
}

// The main function of the loading warp.
ARK_DEVICE void ark_stream_run(const ArkParams* p, ark_u32 processor) {
  if (!ark_stream_needed(p, processor)) return;
  ArkCtx c;
  c.p = p;
  c.processor = processor;
  c.iteration = p->first;
  c.warps[ark_warp()] = ARK_NO_TASK;
  const ArkPhases phases = ark_phases(p);
  const ArkRange* ranges = reinterpret_cast<const ArkRange*>(p->ranges);
  ark_u32 issued = 0u;
  for (;; ++c.iteration) {
    bool go = true;
    if (ark_lane() == 0) go = ark_stream_may_begin(p, c.iteration);
    if (!__shfl_sync(0xffffffffu, go, 0)) break;
    const ark_u32 first = ark_phase(phases, c.iteration) * p->processors;
    if (!ark_stream_iteration(c, ranges[first + processor], issued)) break;
  }
  // A block must not end while copies to its shared memory are in flight. A copy that was started
  // always completes, so this wait needs no time limit.
  for (ark_u32 back = ARK_RING_DEPTH; back > 0u; --back) {
    if (issued < back) continue;
    const ark_u32 index = issued - back;
    ark_u64* full = &ark_ring.full[index % ARK_RING_DEPTH];
    while (!ark_barrier_passed(full, index / ARK_RING_DEPTH & 1u)) {
    }
  }
}

// Initialises the ring's barriers. Called by all threads when the kernel starts.
ARK_DEVICE void ark_stream_open() {
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < ARK_RING_DEPTH; ++slot) {
      ark_barrier_init(&ark_ring.full[slot], 1u);
      ark_barrier_init(&ark_ring.empty[slot], ARK_WARPS);
    }
    ark_ring.leave = ark_ring.begun = 0u;
    for (int w = 0; w < ARK_WARPS; ++w) ark_ring.grown[w] = 0u;
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
}

// Lets the loading warp end. Called by the computing threads after they have left the loop.
ARK_DEVICE void ark_stream_close() {
  if (threadIdx.x == 0) *const_cast<volatile ark_u32*>(&ark_ring.leave) = 1u;
}
