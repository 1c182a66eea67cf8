// The operand stream on GPUs with bulk copies (sm_90 and later): one warp beside the computing ones
// walks this processor's fetch list, over tasks and iterations, and copies stage after stage into a
// ring of slots in shared memory. How much is in flight is bounded apart from the ring's depth:
// whatever a task waits for (a packet, an activation) queues behind the copies in flight, while a
// deep ring fills during the waits. A slot belongs to one computing warp, or to all of them, and a
// task ends with a barrier: so neither side is ever more than one phase of a slot's barriers away
// from the other.

#define ARK_HAS_RING 1
constexpr int ARK_RING_DEPTH = ARK_RING_BYTES / ARK_STAGE_BYTES;
static_assert(ARK_RING_DEPTH > ARK_IN_FLIGHT, "the ring must be deeper than what is in flight");
static_assert(ARK_STAGE_BYTES % 128 == 0, "slots are 128-byte aligned");

// What is streamed through, if larger than any L2, is not seen again this iteration: it may go
// first, and leaves room for activations. The words are createpolicy's for evict_first and
// evict_normal.
constexpr ark_u64 ARK_STREAM_POLICY =
    ARK_STREAM_MIB > 64 ? 0x12f0000000000000ull : 0x1000000000000000ull;

constexpr ark_u64 ARK_GROWTH_POLICY = 0x1000000000000000ull;

struct ArkRing {
  ark_u64 full[ARK_RING_DEPTH];   // the loader arrives once a stage, with its bytes
  ark_u64 empty[ARK_RING_DEPTH];  // the owning warp arrives for all, or each warp for itself
  ark_u32 leave;                  // the computing warps have left the loop
  ark_u32 begun;                  // 1 + the iteration that may begin, once it may; read and written
                                  // by atomics, which racecheck takes for what they are
  ark_u32
      grown[ARK_WARPS];  // each warp's own: stages beyond one of the iteration's growing fetches
};

__shared__ ArkRing ark_ring;

ARK_DEVICE char* ark_slot(ark_u32 slot) { return ark_shared + slot * ARK_STAGE_BYTES; }

// Waits for the copy of the stage in `slot`, its `round`-th use; false after a failure. All lanes
// of a warp call it: each must see the barrier to see what the copy wrote.
ARK_DEVICE bool ark_slot_filled(ArkCtx& c, ark_u32 slot, ark_u32 round) {
  // The instruction sleeps by itself: first without a nap, which would delay the next copy.
#pragma unroll 1
  for (int tries = 0; tries < 64; ++tries) {
    if (ark_barrier_passed(&ark_ring.full[slot], round & 1u)) return true;
  }
  ArkSpin spin{0u, 0u};
  while (!ark_barrier_passed(&ark_ring.full[slot], round & 1u)) {
    if (ark_failed(c)) return false;
    const ArkVerdict verdict = ark_spin(c.p, spin, c.p->budget_ns);
    if (verdict == ARK_KEEP) continue;
    if (verdict == ARK_TIMEOUT) ark_fail(c, 3u, slot, round + 1u, round);
    return false;
  }
  return true;
}

// Stages since launch before this task's count begins.
ARK_DEVICE ark_u32 ark_stages_before(const ArkCtx& c) {
  return c.stage_base + (ARK_STREAM_GROWS ? ark_warp_load(&ark_ring.grown[ark_warp()]) : 0u);
}
ARK_DEVICE bool ark_stage_mine(const ArkCtx& c, ark_u32 stage) {
  const ark_u32 slot = (ark_stages_before(c) + stage) % ARK_RING_DEPTH;
  return slot % ARK_WARPS == static_cast<ark_u32>(ark_warp());
}
ARK_DEVICE const char* ark_stage(ArkCtx& c, ark_u32 stage) {
  const ark_u32 index = ark_stages_before(c) + stage;
  const ark_u32 slot = index % ARK_RING_DEPTH;
  if (!ark_slot_filled(c, slot, index / ARK_RING_DEPTH)) ark_give_up(c);
  return ark_slot(slot);
}
ARK_DEVICE void ark_stage_left(ArkCtx& c, ark_u32 stage, ark_u32 warps) {
  __syncwarp();
  if (ark_lane() == 0) {
    ark_barrier_arrive(&ark_ring.empty[(ark_stages_before(c) + stage) % ARK_RING_DEPTH], warps);
  }
}
ARK_DEVICE void ark_stage_done(ArkCtx& c, ark_u32 stage) { ark_stage_left(c, stage, ARK_WARPS); }
// For bodies in which every warp takes every stage: one warp is done with it.
ARK_DEVICE void ark_stage_shared_done(ArkCtx& c, ark_u32 stage) { ark_stage_left(c, stage, 1u); }

ARK_DEVICE bool ark_left() { return *const_cast<volatile ark_u32*>(&ark_ring.leave) != 0u; }

// The rows of a growing fetch's share, of `length` and the newest, and how many of them are older.
struct ArkGrown {
  ark_u32 begin;
  ark_u32 end;
  ark_u32 newest;
};
ARK_DEVICE ArkGrown ark_grown(ark_u32 length, ark_u32 rows, ark_u32 part, ark_u32 parts) {
  const ark_u32 all = length < rows ? length + 1u : rows;
  return ArkGrown{static_cast<ark_u32>(static_cast<ark_u64>(all) * part / parts),
                  static_cast<ark_u32>(static_cast<ark_u64>(all) * (part + 1u) / parts), all - 1u};
}
ARK_DEVICE ark_u32 ark_grown_stages(const ArkGrowth& g, ark_u32 length) {
  const ArkGrown rows = ark_grown(length, g.rows, g.part, g.parts);
  return (rows.end - rows.begin + g.step - 1u) / g.step;
}
// Each computing warp, at the end of a task whose fetch has grown to so many stages.
ARK_DEVICE void ark_stages_grown(ark_u32 stages) {
  ark_u32* mine = &ark_ring.grown[ark_warp()];
  const ark_u32 before = ark_warp_load(mine);
  __syncwarp();
  ark_warp_store(mine, before + stages - 1u);
  __syncwarp();
}

// May the loader fetch for this iteration? Beyond the limit there is nothing to run; in persistent
// mode operands may change until the host asks for the iteration. A limit that a stop token lowers
// later leaves at most a ring of unused stages.
ARK_DEVICE bool ark_stream_may_begin(const ArkParams* p, ark_u32 iteration) {
  ArkControl* control = ark_control(p);
  if (ark_left() || (p->end != 0u && iteration == p->end)) return false;
  if (!p->persistent) return iteration < ark_load_acquire(&control->limit, false);
  if (ark_load_host(&ark_host(p)->target) > iteration) return true;
  // Ends when the computing warps leave, which their own budgets see to.
  for (ark_u32 spins = 0u; !ark_left(); ++spins) {
    const ark_u32 go = ark_load_acquire(&control->go, false);
    if (go >= 0x40000000u) return false;
    if (go > iteration) return true;
    ark_pause(spins);
  }
  return false;
}

// Waits until the stage that used the slot before has been given back. Idle computing warps wait
// within budgets of their own and then leave, so this wait needs none.
ARK_DEVICE bool ark_slot_free(ark_u32 slot, ark_u32 round) {
  while (!ark_barrier_passed(&ark_ring.empty[slot], (round + 1u) & 1u)) {
    if (ark_left()) return false;
  }
  return true;
}

// All lanes call these with the same fetch. The first does what need not wait for the copies
// before; false if the stage does not fit. The second starts the copy.
ARK_DEVICE bool ark_slot_engine(ark_u64 address, ark_u32 bytes) {
  return ((address | bytes) & 15u) == 0u;
}
ARK_DEVICE bool ark_prepare_slot(ArkCtx& c, ark_u32 slot, ark_u64 address, ark_u32 bytes) {
  if (bytes > ARK_STAGE_BYTES) {
    ark_fail(c, 3u, slot, ARK_STAGE_BYTES, bytes);
    return false;
  }
  if (ark_slot_engine(address, bytes) && ark_lane() == 0) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                     ark_shared_address(&ark_ring.full[slot])),
                 "r"(bytes)
                 : "memory");
  }
  return true;
}
// One lane: starts a copy of whole 16 bytes to shared memory, which completes on a barrier.
ARK_DEVICE void ark_bulk_copy(char* to, ark_u64 from, ark_u32 bytes, ark_u64* barrier,
                              ark_u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(ark_shared_address(to)),
      "l"(from), "r"(bytes), "r"(ark_shared_address(barrier)), "l"(policy)
      : "memory");
}
ARK_DEVICE void ark_fill_slot(ark_u32 slot, ark_u64 address, ark_u32 bytes) {
  ark_u64* barrier = &ark_ring.full[slot];
  if (ark_slot_engine(address, bytes)) {
    if (ark_lane() == 0) ark_bulk_copy(ark_slot(slot), address, bytes, barrier, ARK_STREAM_POLICY);
    return;
  }
  // The copy engine moves 16-byte units; anything else goes through registers. The proxy fence
  // orders these stores before a later bulk copy into the same slot.
  const char* from = reinterpret_cast<const char*>(address);
  for (ark_u32 i = static_cast<ark_u32>(ark_lane()); i < bytes; i += 32u) {
    ark_slot(slot)[i] = from[i];
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
  if (ark_lane() == 0) ark_barrier_arrive(barrier, 1u);
}

// A stage of parts of several rows: a lane a piece.
struct ArkPieces {
  ark_u32 count;
  ark_u32 pitch;  // bytes between pieces in memory
};
ARK_DEVICE ArkPieces ark_stream_pieces(ark_u32 form) {
  if (!ARK_STREAM_CUTS || form >> 30 != 2u) return ArkPieces{1u, 0u};
  return ArkPieces{(form >> 24 & 31u) + 1u, (form & 0xffffffu) * 16u};
}
ARK_DEVICE void ark_fill_pieces(ark_u32 slot, ark_u64 address, ark_u32 bytes,
                                const ArkPieces& pieces) {
  const ark_u32 lane = static_cast<ark_u32>(ark_lane());
  const ark_u64 from = address + static_cast<ark_u64>(lane) * pieces.pitch;
  __syncwarp();  // the bytes are expected
  if (lane >= pieces.count) return;
  ark_bulk_copy(ark_slot(slot) + lane * bytes, from, bytes, &ark_ring.full[slot],
                ARK_STREAM_POLICY);
}

// A stage that is a box: parts of rows, 128 bytes of each row by those of the others, swizzled.
ARK_DEVICE bool ark_stream_boxed(ark_u32 form) { return ARK_STREAM_CUTS && form >> 30 == 3u; }
ARK_DEVICE void ark_fill_box(ark_u32 slot, ark_u64 map, ark_u32 row, ark_u32 line) {
  if (ark_lane() != 0) return;
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(ark_shared_address(ark_slot(slot))),
      "l"(map), "r"(0), "r"(row), "r"(line), "r"(ark_shared_address(&ark_ring.full[slot])),
      "l"(ARK_STREAM_POLICY)
      : "memory");
}

// Waits until the stage `back` before the `issued`-th has landed, if there is one.
ARK_DEVICE bool ark_stream_landed(ArkCtx& c, ark_u32 issued, ark_u32 back) {
  if (issued < back) return true;
  const ark_u32 index = issued - back;
  return ark_slot_filled(c, index % ARK_RING_DEPTH, index / ARK_RING_DEPTH);
}

// A record as another lane of the warp has it.
ARK_DEVICE ArkGrowth ark_from_lane(const ArkGrowth& g, ark_u32 lane) {
  ArkGrowth made;
  made.address = __shfl_sync(0xffffffffu, g.address, lane);
  made.beside = __shfl_sync(0xffffffffu, g.beside, lane);
  made.length = __shfl_sync(0xffffffffu, g.length, lane);
  made.row = __shfl_sync(0xffffffffu, g.row, lane);
  made.rows = __shfl_sync(0xffffffffu, g.rows, lane);
  made.step = __shfl_sync(0xffffffffu, g.step, lane);
  made.part = __shfl_sync(0xffffffffu, g.part, lane);
  made.parts = __shfl_sync(0xffffffffu, g.parts, lane);
  made.pad = 0u;
  return made;
}
// The iteration may begin: the computing side has said so, and what was written before is there for
// copies too. False if it has left; its own waits have budgets.
ARK_DEVICE bool ark_stream_begun(const ArkCtx& c) {
  bool begun = true;
  if (ark_lane() == 0) {
    while (begun && static_cast<ark_i32>(atomicAdd(&ark_ring.begun, 0u) - (c.iteration + 1u)) < 0) {
      begun = !ark_left();
      __nanosleep(20);
    }
    __threadfence();
  }
  if (!__shfl_sync(0xffffffffu, begun, 0)) return false;
  __syncwarp();
  asm volatile("fence.proxy.async;" ::: "memory");
  return true;
}
// A growing fetch: rows of two operands in each stage, as far as they are older than the iteration.
// Caches are small beside the weights, or read but once: they keep the ordinary place in L2.
ARK_DEVICE bool ark_stream_growth(ArkCtx& c, const ArkGrowth& g, ark_u32 length, ark_u32& issued) {
  const ArkGrown rows = ark_grown(length, g.rows, g.part, g.parts);
  for (ark_u32 first = rows.begin; first < rows.end; first += g.step) {
    const ark_u32 slot = issued % ARK_RING_DEPTH;
    const ark_u32 end = rows.end < rows.newest ? rows.end : rows.newest;
    const ark_u32 left = first < end ? end - first : 0u;
    const ark_u32 bytes = (left < g.step ? left : g.step) * g.row;
    if (!ark_slot_free(slot, issued / ARK_RING_DEPTH)) return false;
    if (!ark_prepare_slot(c, slot, g.address, 2u * bytes)) return false;
    if (!ark_stream_landed(c, issued, ARK_IN_FLIGHT)) return false;
    if (ark_lane() == 0 && bytes != 0u) {
      const ark_u64 at = static_cast<ark_u64>(first) * g.row;
      ark_u64* full = &ark_ring.full[slot];
      ark_bulk_copy(ark_slot(slot), g.address + at, bytes, full, ARK_GROWTH_POLICY);
      ark_bulk_copy(ark_slot(slot) + g.step * g.row, g.beside + at, bytes, full, ARK_GROWTH_POLICY);
    }
    if (++issued == 2u * ARK_STAGE_PERIOD) issued = ARK_STAGE_PERIOD;
  }
  return true;
}

// One iteration's fetches, `issued` stages after the launch; false when there is no use for more.
// Records are read 32 at a time, one a lane, and the next 32 are on their way while these are used.
ARK_DEVICE bool ark_stream_iteration(ArkCtx& c, const ArkRange& range, ark_u32& issued) {
  const uint4* records = reinterpret_cast<const uint4*>(c.p->fetches);
  const ark_u32 lane = static_cast<ark_u32>(ark_lane());
  const ark_u32 end = range.fetch_end;
  uint4 next = make_uint4(0u, 0u, 0u, 0u);
  const ArkGrowth* growths = reinterpret_cast<const ArkGrowth*>(c.p->growths);
  ArkGrowth growth = {};
  ark_u64 lengths = 0u;  // address of the number that is known
  ark_u32 length = 0u;
  if (range.fetch_begin + lane < end) next = records[range.fetch_begin + lane];
  for (ark_u32 first = range.fetch_begin; first < end; first += 32u) {
    const uint4 mine = next;
    if (first + 32u + lane < end) next = records[first + 32u + lane];
    const ark_u32 count = end - first < 32u ? end - first : 32u;
    if (ARK_STREAM_GROWS && mine.w - 1u < 0x7fffffffu) growth = growths[mine.w - 1u];
    for (ark_u32 k = 0u; k < count; ++k) {
      ark_u32 form = 0u;
      if (ARK_STREAM_GROWS || ARK_STREAM_CUTS) form = __shfl_sync(0xffffffffu, mine.w, k);
      if (ARK_STREAM_GROWS && form - 1u < 0x7fffffffu) {
        const ArkGrowth g = ark_from_lane(growth, k);
        if (g.length != lengths) {
          if (!ark_stream_begun(c)) return false;
          lengths = g.length;
          length = *reinterpret_cast<const volatile ark_u32*>(lengths);
        }
        if (!ark_stream_growth(c, g, length, issued)) return false;
        continue;
      }
      const ark_u32 slot = issued % ARK_RING_DEPTH;
      const ark_u64 low = __shfl_sync(0xffffffffu, mine.x, k);
      const ark_u64 high = __shfl_sync(0xffffffffu, mine.y, k);
      const ark_u32 packed = __shfl_sync(0xffffffffu, mine.z, k);
      const bool boxed = ark_stream_boxed(form);
      const ark_u32 bytes = boxed ? packed & 0xffffu : packed;
      const ark_u64 address = high << 32 | low;
      const ArkPieces pieces = ark_stream_pieces(form);
      // Little is in flight at once: the time from one copy's end to the next one's start counts.
      if (!ark_slot_free(slot, issued / ARK_RING_DEPTH)) return false;
      if (!ark_prepare_slot(c, slot, address, pieces.count * bytes)) return false;
      if (!ark_stream_landed(c, issued, ARK_IN_FLIGHT)) return false;
      if (boxed) {
        ark_fill_box(slot, address, form & 0x3fffffffu, packed >> 16);
      } else if (pieces.pitch != 0u) {
        ark_fill_pieces(slot, address, bytes, pieces);
      } else {
        ark_fill_slot(slot, address, bytes);
      }
      if (++issued == 2u * ARK_STAGE_PERIOD) issued = ARK_STAGE_PERIOD;
    }
  }
  return true;
}

// Has the processor anything to fetch, in any phase?
ARK_DEVICE bool ark_stream_needed(const ArkParams* p, ark_u32 processor) {
  const ArkRange* ranges = reinterpret_cast<const ArkRange*>(p->ranges);
  for (ark_u32 phase = 0u; phase < ARK_PHASES; ++phase) {
    const ArkRange& range = ranges[phase * p->processors + processor];
    if (range.fetch_begin != range.fetch_end) return true;
  }
  return false;
}

// The fetching warp's whole life.
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
  // A block must not end while copies into its shared memory are under way. A copy that was started
  // lands whatever else has failed, so that this wait asks nobody and needs no budget.
  for (ark_u32 back = ARK_IN_FLIGHT; back > 0u; --back) {
    if (issued < back) continue;
    const ark_u32 index = issued - back;
    ark_u64* full = &ark_ring.full[index % ARK_RING_DEPTH];
    while (!ark_barrier_passed(full, index / ARK_RING_DEPTH & 1u)) {
    }
  }
}

// Called by all threads before anything else.
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

// Called by the computing threads when they have left the loop.
ARK_DEVICE void ark_stream_close() {
  if (threadIdx.x == 0) *const_cast<volatile ark_u32*>(&ark_ring.leave) = 1u;
}
