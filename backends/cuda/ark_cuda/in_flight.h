// How many copies of the operand stream are in flight (stream.h): few while warps may wait for each
// other, whose packets queue behind the copies; one more while they wait for stages, so that the
// ring is almost empty.

// The ring is almost empty when all stages but so many have been used. From a faster memory stages
// come in less time than warps take to use them.
constexpr ark_u32 ARK_STARVING = ARK_SLOW_MEMORY ? 5 : 6;
// Under roles; where all warps take each stage, more in flight was slower throughout.
constexpr bool ARK_STARVES = ARK_BLOCK_WARPS > ARK_WARPS + 1 && ARK_RING_DEPTH > ARK_STARVING;
constexpr ark_u32 ARK_MOST_IN_FLIGHT = ARK_STARVES ? ARK_IN_FLIGHT + 1 : ARK_IN_FLIGHT;

// By the whole warp: copies that may be in flight when the `issued`-th stage's begins.
ARK_DEVICE ark_u32 ark_stream_in_flight(const ArkRingAt& at, ark_u32 issued) {
  if (!ARK_STARVES || issued < ARK_STARVING) return ARK_IN_FLIGHT;
  const ark_u32 index = issued - ARK_STARVING, round = index / ARK_RING_DEPTH;
  const bool used = ark_barrier_tested_at(at.empty + index % ARK_RING_DEPTH * 8u, round & 1u);
  return __all_sync(0xffffffffu, used) ? ARK_MOST_IN_FLIGHT : ARK_IN_FLIGHT;
}
