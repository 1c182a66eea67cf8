// Merges the partial results of attention's splits (parts of the positions). The steps are those of
// the vendor-independent body, but while a wave waits for partial results, it prefetches weights
// (see ask.h). Partial results arrive as packets. If they are too many for packets, they are in
// plain memory; then the task has waited for its counters before it calls these functions.

ARK_DEVICE void ark_await_parts(ArkCtx& c, const ark_u64* packet, bool system) {
  if (ark_warp() == ARK_WARPS - 1) ark_poll_asking(c, packet, system, 1);
}
ARK_DEVICE void ark_await_parts(ArkCtx&, const float*, bool) {}

#define ARK_HAS_LOAD_BLOCK 1
template <int N, class At>
ARK_DEVICE void ark_load_block(ArkCtx& c, const At& at, float* to, bool system) {
  ark_await_parts(c, at(0), system);
  for (int i = ark_tid(); i < N; i += ARK_THREADS) to[i] = ark_load(c, at(i), 0, system);
}
