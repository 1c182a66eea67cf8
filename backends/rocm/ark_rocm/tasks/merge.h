// Joining the parts of attention: the common body, which waits for packets as ask.h does.

#define ARK_HAS_LOAD_BLOCK 1
template <int N, class At>
ARK_DEVICE void ark_load_block(ArkCtx& c, const At& at, float* to, bool system) {
  if (ark_warp() == ARK_WARPS - 1) ark_poll_asking(c, at(0), system, 1);
  for (int i = ark_tid(); i < N; i += ARK_THREADS) to[i] = ark_load(c, at(i), 0, system);
}
