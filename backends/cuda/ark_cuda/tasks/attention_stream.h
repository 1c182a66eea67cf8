// Attention whose keys and values come through the operand ring, in the variant `roles`. A stage
// has the keys and values of STEP positions. Up to four warps share a stage, so that its slot is
// soon free again and several warps can work on a short context, too. ark/tasks/attention.py
// describes the task and its accesses, attention_staged.h the steps.

// Shared memory of a task. own: for each of the WARPS warps that compute, first the exponentials (2
// to score - maximum) of its positions if the sums are ArkStagedSoftmax, later its partial result
// (sum, maximum and denominator of each query head).
template <int G, int D, int WARPS>
struct ArkStagedAttention {
  float query[G * D];
  float current[2 * D];  // this iteration's key and value
  float own[WARPS][(G * (D + 2) + 3) / 4 * 4];
};

// The type of a warp's sums. UNITS: true if matrix units add up the values.
template <int G, int D, bool UNITS>
struct ArkStagedFor {
  typedef ArkStagedSums<D> Sums;
};
template <int G, int D>
struct ArkStagedFor<G, D, false> {
  typedef ArkStagedSoftmax<G> Sums;
};

// Processes this warp's share of the positions from `begin` to `end`, in stages that SHARERS warps
// share. Returns the number of warps that had positions.
template <int SHARERS, int G, int D, int STEP, typename T, int WARPS, class R>
ARK_DEVICE int ark_staged_share(ArkCtx& c, const ArkTask& t, ArkStagedAttention<G, D, WARPS>& s,
                                int begin, int end, int newest, const uint4 (&a)[D / 32][2], R& r) {
  constexpr int ROWS = STEP / SHARERS;
  const int units = (end - begin + ROWS - 1) / ROWS;
  for (int unit = ark_warp(); ark_warp() < WARPS && unit < units; unit += WARPS) {
    const int j = unit / SHARERS, place = unit % SHARERS;
    const int at = begin + unit * ROWS, n = end - at < ROWS ? end - at : ROWS;
    T* keys = reinterpret_cast<T*>(const_cast<char*>(ark_stage(c, t.fetch_begin + j)));
    keys += place * ROWS * D;
    T* values = keys + STEP * D;
    const bool patched = at + n > newest;
    if (patched) {
      ark_stage_newest<D>(keys + (newest - at) * D, s.current);
      ark_stage_newest<D>(values + (newest - at) * D, s.current + D);
      __syncwarp();
    }
    ark_stage_attend<G, D, ROWS, T>(keys, values, a, n, s.own[ark_warp()], r);
    // The fence orders these ordinary stores before the next asynchronous copy to the same slot.
    if (patched) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    // A slot of the ring is free after as many releases as there are computing warps. Each warp
    // that shares the stage releases the slot once. The first of them adds the releases of all
    // computing warps that do not share it.
    const int left = units - j * SHARERS, sharers = left < SHARERS ? left : SHARERS;
    const ark_u32 warps = place == 0 ? static_cast<ark_u32>(ARK_WARPS + 1 - sharers) : 1u;
    ark_stage_left(c, t.fetch_begin + j, warps);
  }
  return units < WARPS ? units : WARPS;
}

// Computes attention of one row over one split of the positions, whose keys and values come through
// the ring. Task coordinates: row, key/value head, split. Returns false if a wait has failed or the
// launch was aborted; the processor must then leave the loop.
// WARPS: the number of warps that compute. WINDOW: the number of latest positions that are seen; 0
// for all.
template <typename T, int G, int KV_HEADS, int D, int CONTEXT, int SPLITS, int STEP, int WARPS,
          int WINDOW, class Q, class P, class O, class F>
ARK_DEVICE bool ark_attention_staged(ArkCtx& c, const ArkTask& t, float scale, Q query, P position,
                                     O output, F fresh) {
  constexpr float LOG2E = 1.44269504f;
  constexpr int SHARERS = STEP % 32 == 0 ? 4 : 1;
  auto& s = *reinterpret_cast<ArkStagedAttention<G, D, WARPS>*>(ARK_SCRATCH(c));
  const int head = t.coord[1], split = t.coord[2];
  const ArkGrown grown = ark_grown(static_cast<ark_u32>(position.p[0]), CONTEXT,
                                   static_cast<ark_u32>(split), SPLITS, WINDOW);
  const int begin = static_cast<int>(grown.begin), end = static_cast<int>(grown.end);
  const int newest = static_cast<int>(grown.newest);
  if (!ark_enter(c)) return false;
  ark_attention_gather<G, KV_HEADS, D>(c, s.query, t.coord[0], head, newest < end, scale * LOG2E,
                                       query, fresh);
  ark_gathered();
  const int stages = (end - begin + STEP - 1) / STEP;
  uint4 a[D / 32][2];
  ark_query_tiles<G, D, T>(s.query, a);
  typename ArkStagedFor<G, D, (D <= 64)>::Sums r = {};
  r.top = -1e30f;
  float* own = s.own[ark_warp() < WARPS ? ark_warp() : 0];
  // It takes less time if each warp has whole stages than if several warps share stages in several
  // rounds. This requires that one task computes the whole head, and that a warp's shared memory
  // holds the exponentials of all positions of a stage.
  constexpr bool ALONE = SPLITS == 1 && STEP <= D;
  int parts = 0;
  if (ALONE && stages <= WARPS && stages * SHARERS > 2 * WARPS) {
    parts = ark_staged_share<ALONE ? 1 : SHARERS, G, D, STEP, T>(c, t, s, begin, end, newest, a, r);
  } else {
    parts = ark_staged_share<SHARERS, G, D, STEP, T>(c, t, s, begin, end, newest, a, r);
  }
  ark_stages_grown(static_cast<ark_u32>(stages));
  // If one warp had all positions, its result is the task's result. Otherwise the partial results
  // of the warps that had positions are combined.
  // Both cases use the same code, because code that a task runs once is mostly loaded from memory.
  const bool alone = parts <= 1;
  if (alone && ark_warp() != 0) return true;
  if (alone || ark_warp() < parts) ark_stage_part<G, D>(r, own);  // also of no positions
  if (alone) {
    __syncwarp();
  } else {
    ark_gathered();
  }
  ark_staged_join<G, D, SPLITS>(c, t, s, output, alone ? 1 : parts, alone ? ark_lane() : ark_tid(),
                                alone ? 32 : ARK_THREADS);
  return true;
}
