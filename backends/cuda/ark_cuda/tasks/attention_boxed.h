// Attention of one row in the variant `matrix`: the loading thread copies keys and values of older
// positions to the slots of the ring while earlier tasks still run. A slot always belongs to the
// same warp, or to the same few warps, which share the stages in it. So a warp waits for all stages
// of its own slots, one after another. ark/tasks/attention.py describes the task and its accesses,
// attention_staged.h the steps.

// The number of positions in each stage of a task that processes `rows` positions. A slot has room
// for `most`, a multiple of `unit`. The stages fill all slots evenly, as often as necessary, because
// each warp processes the stages of its own slots only. With full stages, one warp would process
// two stages of 513 positions in eight slots, the second of which would wait for a slot.
ARK_DEVICE ark_u32 ark_boxed_step(ark_u32 rows, ark_u32 most, ark_u32 unit) {
  const ark_u32 room = ARK_MATRIX_STAGES * most, rounds = rows / room + (rows % room != 0u);
  const ark_u32 stages = ARK_MATRIX_STAGES * (rounds > 0u ? rounds : 1u);
  return ((rows + stages - 1u) / stages + unit - 1u) / unit * unit;
}

// Called by the loading thread: copies a stage, which has `count` rows of keys at `to` and the same
// rows of values at `beside`, from row `first` of the cache on. These rows were written before the
// iteration. full: the barrier of the slot.
ARK_DEVICE void ark_matrix_grown_rows(const ArkGrowth& g, ark_u32 to, ark_u32 beside, ark_u32 first,
                                      ark_u32 count, ark_u32 full) {
  if (!ARK_STREAM_PAGES || g.page == 0u) {
    if (count == 0u) return;
    const ark_u64 from = static_cast<ark_u64>(first) * g.row;
    ark_bulk_copy(to, g.address + from, count * g.row, full, ARK_BOX_LEAVES);
    ark_bulk_copy(beside, g.beside + from, count * g.row, full, ARK_BOX_LEAVES);
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
        static_cast<ark_u64>(number) * g.pitch + static_cast<ark_u64>(inside) * g.row;
    ark_bulk_copy(to + done * g.row, g.address + from, some * g.row, full, ARK_BOX_LEAVES);
    ark_bulk_copy(beside + done * g.row, g.beside + from, some * g.row, full, ARK_BOX_LEAVES);
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
    ark_u64* full = &ark_matrix.full[load.at.slot];
    const ark_u32 left = first < end ? end - first : 0u, count = left < step ? left : step;
    const ark_u32 to = ark_shared_address(ark_matrix_stage(c, load.at.slot));
    ark_matrix_expect(full, 2u * count * g.row);
    ark_matrix_grown_rows(g, to, to + S::MOST * g.row, first, count, ark_shared_address(full));
    ark_matrix_loaded(load, false);
    ark_matrix_issued(load);
  }
}

constexpr int ARK_BOXED_SCORES = 96;  // the most positions that one warp processes at a time

// Shared memory of a task, in front of the stages. powers: for each warp, the exponentials of the
// scores of the ROWS positions that it processes in a stage. own: partial results; each is used by
// two warps in turn.
template <int G, int D, int ROWS>
struct ArkBoxedAttention {
  float query[G * D];
  float current[2 * D];  // this iteration's key and value
  float powers[ARK_WARPS][ROWS * G];
  float own[ARK_WARPS / 2][(G * (D + 2) + 3) / 4 * 4];
};
// How a stage is divided among warps. A group of ARK_WARPS / OWNERS warps shares the stages in its
// slots; the number of slots must be a multiple of OWNERS. Few warps share a stage, because each
// stage costs each of its warps a wait, an update of the maximum and a release. MOST: positions
// that a slot has room for. ROWS: the most positions of a stage that one warp processes. Their
// exponentials must fit in shared memory before the stages, and their scores in registers. UNIT:
// positions of a stage are a multiple of it, so that each warp takes whole products of matrix units,
// which have 8 positions.
template <typename T, int G, int D>
struct ArkBoxedStages {
  static constexpr int fitting(int owners) {
    const int shared = static_cast<int>(ARK_MATRIX_SLABS - sizeof(ArkBoxedAttention<G, D, 8>));
    const int slot = static_cast<int>(ARK_MATRIX_STAGE / (2 * D * sizeof(T))) * owners / ARK_WARPS;
    if (ARK_MATRIX_STAGES % owners != 0u || shared < 0) return 0;
    const int powers = 8 + shared / (4 * G * ARK_WARPS), least = powers < slot ? powers : slot;
    return (least < ARK_BOXED_SCORES ? least : ARK_BOXED_SCORES) / 8 * 8;
  }
  static constexpr int OWNERS = fitting(8) > 0 ? 8 : fitting(4) > 0 ? 4 : 2;
  static constexpr int SHARERS = ARK_WARPS / OWNERS, ROWS = fitting(OWNERS);
  static constexpr int MOST = SHARERS * ROWS, UNIT = 8 * SHARERS;
  static_assert(ROWS > 0, "attention_boxed.py lets it fit");
};

// Adds a warp's partial result to that of another warp, which has stored it to `part` by
// ark_stage_part.
template <int G, int D>
ARK_DEVICE void ark_stage_add(ArkStagedSoftmax<G>& r, float* part) {
  constexpr int LANES = D / 8;
  constexpr float LN2 = 0.693147181f;
  r.den += ark_shfl_xor(r.den, 1);
  r.den += ark_shfl_xor(r.den, 2);
  const int head = ark_lane() / 4 < G ? ark_lane() / 4 : G - 1;
  const float own = r.top * LN2, other = part[head * (D + 2) + D];
  const float top = fmaxf(own, other);
  const float keep = ark_exp(own - top), share = ark_exp(other - top);
  const float den = fmaf(r.den, keep, part[head * (D + 2) + D + 1] * share);
  const int first = ark_fold_groups<LANES, 8 * G>(r.o);
#pragma unroll
  for (int i = 0; i < G * LANES / 4; ++i) {
    const int at = first + i;
    const float mine = __shfl_sync(0xffffffffu, keep, at / 8 * 4);
    const float theirs = __shfl_sync(0xffffffffu, share, at / 8 * 4);
    float& sum = part[at / 8 * (D + 2) + ark_lane() % LANES * 8 + at % 8];
    sum = fmaf(sum, theirs, r.o[i] * mine);
  }
  __syncwarp();  // all lanes have read the maximum and the denominator
  if (ark_lane() % 4 == 0 && ark_lane() / 4 < G) {
    part[head * (D + 2) + D] = top;
    part[head * (D + 2) + D + 1] = den;
  }
}

// Copies the query heads of a key/value head, scaled, and this iteration's key and value to shared
// memory. The key and value are loaded even if another task processes the newest position, because
// the position is not known yet.
template <int G, int KV_HEADS, int D, int ROWS, class Q, class F>
ARK_DEVICE void ark_boxed_inputs(ArkCtx& c, ArkBoxedAttention<G, D, ROWS>& s, int row, int head,
                                 float scale, Q query, F fresh) {
  for (int first = 32 * ark_warp(); first < G * D; first += ARK_THREADS) {
    const int i = first + ark_lane();
    const ark_i64 at = ark_at(query, 0, 0, row, head * (G * D) + i);
    const float value = ark_load_by_warp(c, query.p, at, i < G * D, Q::system);
    if (i < G * D) s.query[i] = value * scale;
  }
  for (int first = 32 * ark_warp(); first < 2 * D; first += ARK_THREADS) {
    const int i = first + ark_lane();
    const int column = i < D ? head * D + i : (KV_HEADS + head - 1) * D + i;
    const ark_i64 at = ark_at(fresh, 0, 0, 0, column);
    const float value = ark_load_by_warp(c, fresh.p, at, i < 2 * D, F::system);
    if (i < 2 * D) s.current[i] = value;
  }
}

// Processes this warp's share of the positions from `begin` to `end`. S: ArkBoxedStages.
template <class S, int G, int D, typename T>
ARK_DEVICE void ark_boxed_share(ArkCtx& c, ArkBoxedAttention<G, D, S::ROWS>& s, int begin, int end,
                                int newest, const uint4 (&a)[D / 32][2], ArkStagedSoftmax<G>& r) {
  const int owner = ark_warp() / S::SHARERS, place = ark_warp() % S::SHARERS;
  const ark_u32 full = ark_shared_address(ark_matrix.full);
  const ark_u32 empty = ark_shared_address(ark_matrix.empty);
  const int step =
      static_cast<int>(ark_boxed_step(static_cast<ark_u32>(end - begin), S::MOST, S::UNIT));
  const int rows = step / S::SHARERS;
  ArkMatrixSlot slot = ark_matrix_place_of();
#pragma unroll 1
  for (int first = begin; first < end; first += step, ark_matrix_next(slot)) {
    if (static_cast<int>(slot.slot) % S::OWNERS != owner) continue;
    const int at = first + place * rows, n = end - at < rows ? end - at : rows;
    // A warp without positions in the stage waits as well: if it released the stage earlier, that
    // could count as a release of the slot's previous stage.
    ark_matrix_filled(c, full + 8u * slot.slot, slot.parity);
    if (n > 0) {
      T* keys = reinterpret_cast<T*>(ark_matrix_stage(c, slot.slot)) + place * rows * D;
      T* values = keys + S::MOST * D;
      const bool patched = at + n > newest;
      if (patched) {
        ark_stage_newest<D>(keys + (newest - at) * D, s.current);
        ark_stage_newest<D>(values + (newest - at) * D, s.current + D);
        __syncwarp();
      }
      ark_stage_attend<G, D, S::ROWS, T>(keys, values, a, n, s.powers[ark_warp()], r);
      // The fence orders these ordinary stores before the next asynchronous copy to the same slot.
      if (patched) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
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
  typedef ArkBoxedStages<T, G, D> S;
  constexpr int ROWS = S::ROWS;
  auto& s = *reinterpret_cast<ArkBoxedAttention<G, D, ROWS>*>(ARK_SCRATCH(c));
  const int head = t.coord[1];
  const ark_u32 split = static_cast<ark_u32>(t.coord[2]);
  const ArkGrown grown = ark_grown(static_cast<ark_u32>(position.p[0]), CONTEXT, split, SPLITS);
  const int begin = static_cast<int>(grown.begin), end = static_cast<int>(grown.end);
  const int newest = static_cast<int>(grown.newest);
  ark_boxed_inputs<G, KV_HEADS, D, ROWS>(c, s, t.coord[0], head, scale * LOG2E, query, fresh);
  ark_sync();
  uint4 a[D / 32][2];
  ark_query_tiles<G, D, T>(s.query, a);
  ArkStagedSoftmax<G> r = {};
  r.top = -1e30f;
  ark_boxed_share<S, G, D, T>(c, s, begin, end, newest, a, r);
  constexpr int PARTS = ARK_WARPS / 2;
  float* part = s.own[ark_warp() % PARTS];
  if (ark_warp() >= PARTS) ark_stage_part<G, D>(r, part);
  ark_sync();
  if (ark_warp() < PARTS) ark_stage_add<G, D>(r, part);
  ark_sync();
  ark_staged_join<G, D, SPLITS>(c, t, s, output, PARTS, ark_tid(), ARK_THREADS);
}
