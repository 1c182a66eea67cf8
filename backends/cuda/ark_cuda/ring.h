// The ring of the operand stream (stream.h): slots in shared memory that a loading warp fills with
// stages of operands. A stage is copied in one of three forms: a run (contiguous bytes), pieces
// (parts of several rows) or a box (by TMA).

#define ARK_HAS_RING 1
static_assert(ARK_RING_DEPTH > ARK_IN_FLIGHT, "the ring must be deeper than what is in flight");
static_assert(ARK_STAGE_BYTES % 128 == 0, "slots are 128-byte aligned");
static_assert(!ARK_STREAM_CUTS || ARK_STAGE_BYTES % ARK_SHARED_ALIGNMENT == 0, "boxes' slots");

// The L2 eviction priority of streamed operands, as a createpolicy word. If the operands of an
// iteration are larger than the L2 of any GPU, none of their lines is still in L2 when it is read
// again. They then get evict_first, which leaves room for activations. Otherwise they get
// evict_normal.
constexpr ark_u64 ARK_STREAM_POLICY =
    ARK_STREAM_MIB > 64 ? 0x12f0000000000000ull : 0x1000000000000000ull;

struct ArkRing {
  ark_u64 full[ARK_RING_DEPTH];   // the loading warp arrives once per stage and expects its bytes
  ark_u64 empty[ARK_RING_DEPTH];  // the warps that have read the stage arrive
  ark_u32 leave;                  // the computing warps have left the loop
  // 1 + the number of the latest iteration that may begin. Accessed by atomics, because the
  // sanitizer's racecheck recognises only these.
  ark_u32 begun;
  // A growing fetch (rows of a KV cache) has a number of stages that is known only at run time; a
  // task's stage numbers count it as one stage. For each warp, this array has the number of
  // additional stages of such fetches in this iteration so far. No other warp accesses the word.
  ark_u32 grown[ARK_WARPS];
};

static_assert(sizeof(ArkRing) == (ARK_RING_STATE + 7) / 8 * 8, "what the prelude keeps for it");
#define ark_ring (ark_static_at<ArkRing, ARK_RING_BEGIN, ARK_RING_END>())

ARK_DEVICE char* ark_slot(ark_u32 slot) { return ark_shared + slot * ARK_STAGE_BYTES; }

// Waits until the copy of a stage to `slot` has arrived. round: how often the slot was used before.
// Returns false after a failure. All lanes of a warp call it, because each lane must observe the
// barrier to see the copied data.
ARK_DEVICE bool ark_slot_filled(ArkCtx& c, ark_u32 slot, ark_u32 round) {
  // The test instruction suspends the warp itself for a short time. The first polls therefore have
  // no additional sleep, which would delay the next copy.
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

// Returns the number that must be added to a task's stage numbers (fetch_begin) to get stage
// numbers since the launch. A task's stage numbers count each growing fetch as one stage, so the
// additional stages of these fetches are included.
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
// Releases a stage on behalf of one warp, in bodies in which every warp uses every stage.
ARK_DEVICE void ark_stage_shared_done(ArkCtx& c, ark_u32 stage) { ark_stage_left(c, stage, 1u); }

ARK_DEVICE bool ark_left() { return *const_cast<volatile ark_u32*>(&ark_ring.leave) != 0u; }

// Waits until the loading warp may fetch operands for an iteration. Returns false if no further
// iteration runs. In persistent mode the host may change operands until it releases the iteration.
// Otherwise operands are fetched at once; if a stop token ends the launch early, at most one ring
// of stages was loaded in vain.
ARK_DEVICE bool ark_stream_may_begin(const ArkParams* p, ark_u32 iteration) {
  ArkControl* control = ark_control(p);
  if (ark_left() || (p->end != 0u && iteration == p->end)) return false;
  if (!p->persistent) return iteration < ark_load_acquire(&control->limit, false);
  if (ark_load_host(&ark_host(p)->target) > iteration) return true;
  // This wait needs no time limit: it ends when the computing warps leave the loop, and their waits
  // have time limits.
  for (ark_u32 spins = 0u; !ark_left(); ++spins) {
    const ark_u32 go = ark_load_acquire(&control->go, false);
    if (go >= 0x40000000u) return false;
    if (go > iteration) return true;
    ark_pause(spins);
  }
  return false;
}

// The ring's addresses, which the loading warp keeps in registers. Computing a shared-memory
// address reads the block's rank in its cluster each time, which is slow compared with a stage's
// few instructions.
struct ArkRingAt {
  ark_u32 full;
  ark_u32 empty;
  ark_u32 slots;
};
ARK_DEVICE ark_u32 ark_kept_address(const void* p) {
  ark_u32 kept;
  asm volatile("mov.u32 %0, %1;" : "=r"(kept) : "r"(ark_shared_address(p)));
  return kept;
}
ARK_DEVICE ArkRingAt ark_ring_at() {
  return ArkRingAt{ark_kept_address(ark_ring.full), ark_kept_address(ark_ring.empty),
                   ark_kept_address(ark_shared)};
}

// Waits until the computing warps have released the slot's previous stage. This wait needs no time
// limit: computing warps that make no progress leave the loop after the time limits of their own
// waits.
ARK_DEVICE bool ark_slot_free(const ArkRingAt& at, ark_u32 slot, ark_u32 round) {
  while (!ark_barrier_passed_at(at.empty + slot * 8u, (round + 1u) & 1u)) {
    if (ark_left()) return false;
  }
  return true;
}

// Waits until the copy of stage number issued - back has arrived in shared memory. Returns at once
// if that number is negative.
ARK_DEVICE bool ark_stream_landed(ArkCtx& c, const ArkRingAt& at, ark_u32 issued, ark_u32 back) {
  if (issued < back) return true;
  const ark_u32 index = issued - back;
  const ark_u32 round = index / ARK_RING_DEPTH, full = at.full + index % ARK_RING_DEPTH * 8u;
  if (__all_sync(0xffffffffu, ark_barrier_passed_at(full, round & 1u))) return true;
  return ark_slot_filled(c, index % ARK_RING_DEPTH, index / ARK_RING_DEPTH);
}

// True if a hardware copy (cp.async.bulk) can copy these bytes: address and size are multiples of
// 16.
ARK_DEVICE bool ark_slot_engine(ark_u64 address, ark_u32 bytes) {
  return ((address | bytes) & 15u) == 0u;
}
// Called by one lane: a copy of so many bytes will signal the slot's barrier `full`.
ARK_DEVICE void ark_stage_expects(ark_u32 full, ark_u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(full), "r"(bytes)
               : "memory");
}
// Two functions start the copy of a stage. All lanes call ark_prepare_slot and then ark_fill_slot
// with the same fetch. ark_prepare_slot does the work that need not wait for earlier copies, and
// returns false if the bytes do not fit into a slot. ark_fill_slot starts the copy.
ARK_DEVICE bool ark_prepare_slot(ArkCtx& c, const ArkRingAt& at, ark_u32 slot, ark_u64 address,
                                 ark_u32 bytes) {
  if (bytes > ARK_STAGE_BYTES) {
    ark_fail(c, 3u, slot, ARK_STAGE_BYTES, bytes);
    return false;
  }
  if (ark_slot_engine(address, bytes) && ark_lane() == 0) {
    ark_stage_expects(at.full + slot * 8u, bytes);
  }
  return true;
}
ARK_DEVICE void ark_fill_slot(const ArkRingAt& at, ark_u32 slot, ark_u64 address, ark_u32 bytes) {
  if (ark_slot_engine(address, bytes)) {
    if (ark_lane() == 0) {
      ark_bulk_copy(at.slots + slot * ARK_STAGE_BYTES, address, bytes, at.full + slot * 8u,
                    ARK_STREAM_POLICY);
    }
    return;
  }
  // Hardware copies only units of 16 bytes, so other data goes through registers. The proxy fence
  // orders these stores before a later bulk copy to the same slot.
  const char* from = reinterpret_cast<const char*>(address);
  for (ark_u32 i = static_cast<ark_u32>(ark_lane()); i < bytes; i += 32u) {
    ark_slot(slot)[i] = from[i];
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
  if (ark_lane() == 0) ark_barrier_arrive(&ark_ring.full[slot], 1u);
}

// A stage that consists of pieces of several rows; each lane copies one piece.
struct ArkPieces {
  ark_u32 count;
  ark_u32 pitch;  // bytes between pieces in memory
};
ARK_DEVICE ArkPieces ark_stream_pieces(ark_u32 form) {
  if (!ARK_STREAM_CUTS || form >> 30 != 2u) return ArkPieces{1u, 0u};
  return ArkPieces{(form >> 24 & 31u) + 1u, (form & 0xffffffu) * 16u};
}
ARK_DEVICE void ark_fill_pieces(const ArkRingAt& at, ark_u32 slot, ark_u64 address, ark_u32 bytes,
                                const ArkPieces& pieces) {
  const ark_u32 lane = static_cast<ark_u32>(ark_lane());
  const ark_u64 from = address + static_cast<ark_u64>(lane) * pieces.pitch;
  __syncwarp();  // the bytes are expected
  if (lane >= pieces.count) return;
  ark_bulk_copy(at.slots + slot * ARK_STAGE_BYTES + lane * bytes, from, bytes, at.full + slot * 8u,
                ARK_STREAM_POLICY);
}

// ark_stream_boxed: true if box copies (TMA) load the stages of a fetch, according to the field
// `form` of its record. ark_fill_box: fills a stage by a box copy of a matrix, with 128 bytes of
// each of several rows, swizzled.
ARK_DEVICE bool ark_stream_boxed(ark_u32 form) { return ARK_STREAM_CUTS && form >> 30 == 3u; }
ARK_DEVICE void ark_fill_box(const ArkRingAt& at, ark_u32 slot, ark_u64 map, ark_u32 row,
                             ark_u32 line) {
  if (ark_lane() != 0) return;
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(at.slots + slot * ARK_STAGE_BYTES),
      "l"(map), "r"(0), "r"(row), "r"(line), "r"(at.full + slot * 8u), "l"(ARK_STREAM_POLICY)
      : "memory");
}

// The L2 priority of prefetched lines is normal. The later copy to shared memory marks them to be
// evicted first.
constexpr ark_u64 ARK_PREFETCH_POLICY = 0x1000000000000000ull;
// Called by one lane: prefetches the stage of a fetch record to L2. Growing fetches and pieces are
// skipped.
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
