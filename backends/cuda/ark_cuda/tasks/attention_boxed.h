// Attention of one row in the variant `matrix`: the loading thread copies keys and values of older
// positions to the slots of the ring while earlier tasks still run. A slot always belongs to the
// same warp, or to the same few warps, which share the stages in it. So a warp waits for all stages
// of its own slots, one after another. ark/tasks/attention.py describes the task and its accesses,
// attention_boxed_sums.h how a warp processes a stage. The values of a stage are stored as four
// quarters, with a gap of ARK_BOXED_SKEW bytes between neighbouring quarters.

// The number of positions in each stage of a task that processes `rows` positions. A slot has room
// for `most`, a multiple of `unit`. The stages fill all slots evenly, as often as necessary,
// because each warp processes the stages of its own slots only. For example, full stages of 64
// positions would divide 513 positions into nine stages for eight slots. One warp would then
// process two stages, and the second one would have to wait for its slot.
ARK_DEVICE ark_u32 ark_boxed_step(ark_u32 rows, ark_u32 most, ark_u32 unit) {
  const ark_u32 room = ARK_MATRIX_STAGES * most, rounds = rows / room + (rows % room != 0u);
  const ark_u32 stages = ARK_MATRIX_STAGES * (rounds > 0u ? rounds : 1u);
  return ((rows + stages - 1u) / stages + unit - 1u) / unit * unit;
}

// Called by the loading thread: copies `count` rows of keys or values, from row `first` of the
// cache on, to shared memory. These rows were written before the iteration. cache: the address of
// keys or values. full: the barrier of the slot.
ARK_DEVICE void ark_matrix_grown_rows(const ArkGrowth& g, ark_u64 cache, ark_u32 to, ark_u32 first,
                                      ark_u32 count, ark_u32 full) {
  if (!ARK_STREAM_PAGES || g.page == 0u) {
    if (count == 0u) return;
    const ark_u64 from = cache + static_cast<ark_u64>(first) * g.row;
    ark_bulk_copy(to, from, count * g.row, full, ARK_BOX_LEAVES);
    return;
  }
#pragma unroll 1
  for (ark_u32 done = 0u; done < count;) {
    const ark_u32 row = first + done, inside = row % g.page;
    const ark_u32 left = count - done, some = g.page - inside < left ? g.page - inside : left;
    // A number outside of the pool is replaced by page 0; the task's body checks the numbers too
    // and ends the run.
    const ark_u32 found = reinterpret_cast<const volatile ark_u32*>(g.table)[row / g.page];
    const ark_u32 number = found < g.pages ? found : 0u;
    const ark_u64 from =
        cache + static_cast<ark_u64>(number) * g.pitch + static_cast<ark_u64>(inside) * g.row;
    ark_bulk_copy(to + done * g.row, from, some * g.row, full, ARK_BOX_LEAVES);
    done += some;
  }
}

// Called by the loading thread: loads the stages of a task with a growing fetch
// (ark.plan.types.Growth), which reads all rows of a cache up to the current position. The rows
// that are loaded were written before the iteration, and so was their number. S: ArkBoxedStages.
template <class S>
ARK_DEVICE void ark_matrix_load_grown(ArkCtx& c, const ArkTask& t, ArkMatrixLoad& load) {
  const ArkGrowth& g = ARK_POINTER(const ArkGrowth, ARK_PARAMS(c)->growths)[t.growth - 1u];
  const ark_u32 length = ark_load_acquire(ark_words(g.length), false);
  const ArkGrown rows = ark_grown(length, g.rows, g.part, g.parts);
  const ark_u32 end = rows.end < rows.newest ? rows.end : rows.newest;
  const ark_u32 step = ark_boxed_step(rows.end - rows.begin, S::MOST, S::UNIT);
#pragma unroll 1
  for (ark_u32 first = rows.begin; first < rows.end; first += step) {
    if (!ark_matrix_free(load)) {
      load.stopped = true;
      return;
    }
    ark_u64* barrier = &ark_matrix.full[load.at.slot];
    const ark_u32 full = ark_shared_address(barrier);
    const ark_u32 left = first < end ? end - first : 0u, count = left < step ? left : step;
    const ark_u32 to = ark_shared_address(ark_matrix_stage(c, load.at.slot));
    ark_matrix_expect(barrier, 2u * count * g.row);
    ark_matrix_grown_rows(g, g.address, to, first, count, full);
    const ark_u32 values = to + S::MOST * g.row, quarter = step / 4u;
#pragma unroll 1
    for (ark_u32 q = 0u, at = 0u; at < count; ++q, at += quarter) {
      const ark_u32 some = count - at < quarter ? count - at : quarter;
      ark_matrix_grown_rows(g, g.beside, values + at * g.row + q * ARK_BOXED_SKEW, first + at, some,
                            full);
    }
    ark_matrix_loaded(load, false);
    ark_matrix_issued(load);
  }
}

// Shared memory of a task, in front of the stages. own: partial results (ark_boxed_part), one for
// each warp. If these do not fit, two warps share one.
template <int G, int D>
struct ArkBoxedAttention {
  static constexpr int PITCH = D + 4;
  static constexpr int LEFT = static_cast<int>(ARK_MATRIX_SLABS) / 4 - (G + 2) * D;  // floats
  static constexpr int PARTS = ARK_WARPS * G * PITCH <= LEFT ? ARK_WARPS : ARK_WARPS / 2;
  static_assert(PARTS * G * PITCH <= LEFT, "attention_boxed.py lets it fit");
  float query[G * D];
  float current[2 * D];  // this iteration's key and value
  float own[PARTS][G * PITCH];
};

// How a stage is divided among warps. A group of ARK_WARPS / OWNERS warps shares the stages in its
// slots; the number of slots must be a multiple of OWNERS. Few warps share a stage, because each
// stage costs each of its warps a wait, an update of the maximum and a release. MOST: positions
// that a slot has room for. UNIT: positions of a stage are a multiple of it, so that each warp
// takes whole tiles of 8 positions.
template <typename T, int D>
struct ArkBoxedStages {
  static constexpr int fitting(int owners) {
    const int unit = 8 * ARK_WARPS / owners;
    const int room = static_cast<int>(ARK_MATRIX_STAGE) - 3 * ARK_BOXED_SKEW;
    return ARK_MATRIX_STAGES % owners == 0u ? room / (2 * D * sizeof(T)) / unit * unit : 0;
  }
  static constexpr int OWNERS = fitting(8) > 0 ? 8 : fitting(4) > 0 ? 4 : 2;
  static constexpr int SHARERS = ARK_WARPS / OWNERS, MOST = fitting(OWNERS), UNIT = 8 * SHARERS;
  static_assert(MOST > 0, "attention_boxed.py lets it fit");
};

// Copies the query heads of a key/value head, scaled, and this iteration's key and value to shared
// memory. The key and value are loaded even if another task processes the newest position, because
// the position is not known yet. All loads begin before the first of them is awaited.
template <int G, int KV_HEADS, int D, class Q, class F>
ARK_DEVICE void ark_boxed_inputs(ArkCtx& c, ArkBoxedAttention<G, D>& s, int row, int head,
                                 float scale, Q query, F fresh) {
  constexpr int EACH = (G * D + ARK_THREADS - 1) / ARK_THREADS;
  static_assert(2 * D <= ARK_THREADS, "a thread copies one element of the key and the value");
  float value[EACH];
#pragma unroll
  for (int n = 0; n < EACH; ++n) {
    const int i = n * ARK_THREADS + ark_tid();
    const ark_i64 at = ark_at(query, 0, 0, row, head * (G * D) + i);
    value[n] = ark_load_by_warp(c, query.p, at, i < G * D, Q::system);
  }
  const int i = ark_tid(), column = i < D ? head * D + i : (KV_HEADS + head - 1) * D + i;
  const ark_i64 at = ark_at(fresh, 0, 0, 0, column);
  const float current = ark_load_by_warp(c, fresh.p, at, i < 2 * D, F::system);
#pragma unroll
  for (int n = 0; n < EACH; ++n) {
    const int to = n * ARK_THREADS + ark_tid();
    if (to < G * D) s.query[to] = value[n] * scale;
  }
  if (i < 2 * D) s.current[i] = current;
}

// Processes this warp's share of the positions from `begin` to `end`. S: ArkBoxedStages.
template <class S, int D, typename T>
ARK_DEVICE void ark_boxed_share(ArkCtx& c, const float* current, int begin, int end, int newest,
                                const uint4 (&a)[D / 32][2], ArkBoxedSums<D>& r) {
  const int owner = ark_warp() / S::SHARERS;
  const ark_u32 full = ark_shared_address(ark_matrix.full);
  const ark_u32 empty = ark_shared_address(ark_matrix.empty);
  const int step =
      static_cast<int>(ark_boxed_step(static_cast<ark_u32>(end - begin), S::MOST, S::UNIT));
  const int quarter = step / 4, rows = quarter / S::SHARERS;
  ArkBoxedPlace place{quarter, ark_warp() % S::SHARERS * rows, rows, 0};
  ArkMatrixSlot slot = ark_matrix_place_of();
#pragma unroll 1
  for (int first = begin; first < end; first += step, ark_matrix_next(slot)) {
    if (static_cast<int>(slot.slot) % S::OWNERS != owner) continue;
    place.n = end - first < step ? end - first : step;
    ark_matrix_filled(c, full + 8u * slot.slot, slot.parity);
    T* keys = reinterpret_cast<T*>(ark_matrix_stage(c, slot.slot));
    T* values = keys + S::MOST * D;
    // Only the warp that processes the newest position needs its key and value.
    const int at = newest - first, inside = at % quarter - place.first;
    const bool patched = at >= 0 && at < place.n && inside >= 0 && inside < rows;
    if (patched) {
      constexpr int SKEW = ARK_BOXED_SKEW / static_cast<int>(sizeof(T));
      ark_stage_newest<D>(keys + at * D, current);
      ark_stage_newest<D>(values + at * D + at / quarter * SKEW, current + D);
      __syncwarp();
    }
    ark_boxed_attend<D>(keys, values, a, place, r);
    // The fence orders these ordinary stores before the next asynchronous copy to the same slot.
    if (patched) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    if (ark_lane() == 0) {
      // A stage is free when each computing warp has released it.
      for (int i = 0; i < S::OWNERS; ++i) ark_matrix_release_warp(empty + 8u * slot.slot);
    }
  }
  ark_matrix_keep_place(slot);
}

// Computes attention of one row over one split of the positions. Task coordinates: row, key/value
// head, split.
template <typename T, int G, int KV_HEADS, int D, int CONTEXT, int SPLITS, class Q, class P,
          class O, class F>
ARK_DEVICE void ark_attention_boxed(ArkCtx& c, const ArkTask& t, float scale, Q query, P position,
                                    O output, F fresh) {
  constexpr float LOG2E = 1.44269504f;
  typedef ArkBoxedAttention<G, D> Shared;
  Shared& s = *reinterpret_cast<Shared*>(ARK_SCRATCH(c));
  const int head = t.coord[1];
  const ark_u32 split = static_cast<ark_u32>(t.coord[2]);
  const ArkGrown grown = ark_grown(static_cast<ark_u32>(position.p[0]), CONTEXT, split, SPLITS);
  const int begin = static_cast<int>(grown.begin), end = static_cast<int>(grown.end);
  const int newest = static_cast<int>(grown.newest);
  ark_boxed_inputs<G, KV_HEADS, D>(c, s, t.coord[0], head, scale * LOG2E, query, fresh);
  ark_sync();
  uint4 a[D / 32][2];
  ark_query_tiles<G, D, T>(s.query, a);
  ArkBoxedSums<D> r = {};
  r.top = -1e30f;
  ark_boxed_share<ArkBoxedStages<T, D>, D, T>(c, s.current, begin, end, newest, a, r);
  float* part = s.own[ark_warp() % Shared::PARTS];
  if (ark_warp() >= ARK_WARPS - Shared::PARTS) ark_boxed_part<G, D, Shared::PITCH, false>(r, part);
  ark_sync();
  if constexpr (Shared::PARTS < ARK_WARPS) {
    if (ark_warp() < Shared::PARTS) ark_boxed_part<G, D, Shared::PITCH, true>(r, part);
    ark_sync();
  }
  ark_staged_join<G, D, SPLITS, Shared::PITCH>(c, t, s, output, Shared::PARTS, ark_tid(),
                                               ARK_THREADS);
}
