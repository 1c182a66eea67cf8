// The number of copies that the operand stream (stream.h) has in flight. It is low while warps may
// wait for other processors, because the packets that they wait for queue behind the copies. One
// more copy is in flight while warps wait for stages, that is, while the ring is almost empty.

// The ring counts as almost empty when all stages but this number have been used. On a GPU with
// faster memory, stages arrive in less time than warps take to use them, so the number is
// different.
constexpr ark_u32 ARK_STARVING = ARK_SLOW_MEMORY ? 5 : 6;
// True if one more copy may be in flight while the ring is almost empty. This is done only in the
// variant `roles`: in variants in which all warps use each stage, more copies in flight were always
// slower.
constexpr bool ARK_STARVES = ARK_BLOCK_WARPS > ARK_WARPS + 1 && ARK_RING_DEPTH > ARK_STARVING;
constexpr ark_u32 ARK_MOST_IN_FLIGHT = ARK_STARVES ? ARK_IN_FLIGHT + 1 : ARK_IN_FLIGHT;

// Called by the whole warp: the number of copies that may be in flight when the copy of stage
// `issued` begins.
ARK_DEVICE ark_u32 ark_stream_in_flight(const ArkRingAt& at, ark_u32 issued) {
  if (!ARK_STARVES || issued < ARK_STARVING) return ARK_IN_FLIGHT;
  const ark_u32 index = issued - ARK_STARVING, round = index / ARK_RING_DEPTH;
  const bool used = ark_barrier_tested_at(at.empty + index % ARK_RING_DEPTH * 8u, round & 1u);
  return __all_sync(0xffffffffu, used) ? ARK_MOST_IN_FLIGHT : ARK_IN_FLIGHT;
}
