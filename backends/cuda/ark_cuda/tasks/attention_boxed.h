// Attention of one row in the variant `matrix`: the loading thread copies keys and values of older
// positions to the slots of the ring while earlier tasks still run. A slot always belongs to the
// same warp, or to the same few warps, which share the stages in it. So a warp waits for all stages
// of its own slots, one after another. ark/tasks/attention.py describes the task and its accesses,
// attention_boxed_sums.h how a warp processes a stage. The keys and the values of a stage are
// stored as two halves each, with a gap of ARK_BOXED_SKEW bytes after each half.

// The number of positions in each stage of a task that processes `rows` positions. A slot has room
// for `most`, a multiple of ARK_BOXED_UNIT. The number of stages is the smallest multiple of
// `several` that suffices. If each slot has a warp of its own, `several` is the number of slots.
// Otherwise full stages of 64 positions would divide 513 positions into nine stages for eight
// slots, and the warp with two stages would have to wait for its slot. If warps share stages,
// `several` is 1: with fewer stages a warp's tiles are better filled, and the ring has room for
// stages of the next task.
ARK_DEVICE ark_u32 ark_boxed_step(ark_u32 rows, ark_u32 most, ark_u32 several) {
  const ark_u32 room = several * most, rounds = rows / room + (rows % room != 0u);
  const ark_u32 stages = several * (rounds > 0u ? rounds : 1u);
  return ((rows + stages - 1u) / stages + ARK_BOXED_UNIT - 1u) / ARK_BOXED_UNIT * ARK_BOXED_UNIT;
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
  const ArkGrown rows = ark_grown(length, g.rows, g.part, g.parts, g.window);
  const ark_u32 end = rows.end < rows.newest ? rows.end : rows.newest;
  const ark_u32 step = ark_boxed_step(rows.end - rows.begin, S::MOST, S::SEVERAL);
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
    // Few copies matter, because this thread starts all of them, one after the other.
    const ark_u32 half = step / 2u;
#pragma unroll 1
    for (ark_u32 at = 0u, place = to; at < count; at += half) {
      const ark_u32 some = count - at < half ? count - at : half;
      ark_matrix_grown_rows(g, g.address, place, first + at, some, full);
      ark_matrix_grown_rows(g, g.beside, place + S::VALUES, first + at, some, full);
      place += half * g.row + ARK_BOXED_SKEW;
    }
    ark_matrix_loaded(load, false);
    ark_matrix_issued(load);
  }
}

// What a task reads besides older keys and values. position: the sequence's position.
template <int G, int D>
struct alignas(16) ArkBoxedInputs {
  float query[G * D];    // scaled
  float current[2 * D];  // this iteration's key and value
  int position;
};

// Shared memory of a task, in front of the stages. own: partial results (ark_boxed_part), one for
// each warp. If these do not fit, two warps share one. inputs: those of the task, and those of the
// next one if they fit (AHEAD). Tasks with odd and even numbers take turns.
template <int G, int D>
struct ArkBoxedAttention {
  static constexpr int PITCH = D + 4;
  static constexpr int SLABS = static_cast<int>(ARK_MATRIX_SLABS) / 4;  // floats
  static constexpr int INPUTS = static_cast<int>(sizeof(ArkBoxedInputs<G, D>)) / 4;
  static constexpr bool AHEAD = ARK_WARPS / 2 * G * PITCH <= SLABS - 2 * INPUTS;
  static constexpr int LEFT = SLABS - (AHEAD ? 2 : 1) * INPUTS;
  static constexpr int PARTS = ARK_WARPS * G * PITCH <= LEFT ? ARK_WARPS : ARK_WARPS / 2;
  static_assert(PARTS * G * PITCH <= LEFT, "attention_boxed.py lets it fit");
  float own[PARTS][G * PITCH];
  ArkBoxedInputs<G, D> inputs[AHEAD ? 2 : 1];
};

// How a stage is divided among warps. A group of ARK_WARPS / OWNERS warps shares the stages in its
// slots; the number of slots must be a multiple of OWNERS. Few warps share a stage, because each
// stage costs each of its warps a wait, an update of the maximum and a release. MOST: positions
// that a slot has room for. SEVERAL: for ark_boxed_step. VALUES: bytes before the values in a
// stage.
template <typename T, int D>
struct ArkBoxedStages {
  static constexpr int OWNERS = ARK_MATRIX_STAGES % 8u == 0u   ? 8
                                : ARK_MATRIX_STAGES % 4u == 0u ? 4
                                                               : 2;
  static constexpr int SHARERS = ARK_WARPS / OWNERS;
  static constexpr ark_u32 SEVERAL = SHARERS == 1 ? ARK_MATRIX_STAGES : 1u;
  static constexpr int ROOM = static_cast<int>(ARK_MATRIX_STAGE) - 4 * ARK_BOXED_SKEW;
  static constexpr int UNIT = static_cast<int>(ARK_BOXED_UNIT);
  static constexpr int MOST = ROOM / static_cast<int>(2 * D * sizeof(T)) / UNIT * UNIT;
  static constexpr int VALUES = MOST * D * static_cast<int>(sizeof(T)) + 2 * ARK_BOXED_SKEW;
  static_assert(MOST >= UNIT * SHARERS, "attention_boxed.py lets it fit");
};

// A thread's part of a task's inputs, in registers.
template <int G, int D>
struct ArkBoxedHeld {
  static constexpr int EACH = (G * D + ARK_THREADS - 1) / ARK_THREADS;
  static_assert(2 * D <= ARK_THREADS, "a thread copies one element of the key and the value");
  float value[EACH];
  float current;
  int position;
};
// Loads the query heads of a key/value head, and this iteration's key and value. The key and value
// are loaded even if another task processes the newest position, because the position is not known
// yet.
template <int G, int KV_HEADS, int D, class Q, class P, class F>
ARK_DEVICE void ark_boxed_ask(ArkCtx& c, ArkBoxedHeld<G, D>& held, int row, int head, Q query,
                              P position, F fresh) {
#pragma unroll
  for (int n = 0; n < ArkBoxedHeld<G, D>::EACH; ++n) {
    const int i = n * ARK_THREADS + ark_tid();
    const ark_i64 at = ark_at(query, 0, 0, row, head * (G * D) + i);
    held.value[n] = ark_load_by_warp(c, query.p, at, i < G * D, Q::system);
  }
  const int i = ark_tid(), column = i < D ? head * D + i : (KV_HEADS + head - 1) * D + i;
  const ark_i64 at = ark_at(fresh, 0, 0, 0, column);
  held.current = ark_load_by_warp(c, fresh.p, at, i < 2 * D, F::system);
  held.position = position.p[0];
}
template <int G, int D>
ARK_DEVICE void ark_boxed_put(ArkBoxedInputs<G, D>& inputs, const ArkBoxedHeld<G, D>& held,
                              float scale) {
#pragma unroll
  for (int n = 0; n < ArkBoxedHeld<G, D>::EACH; ++n) {
    const int to = n * ARK_THREADS + ark_tid();
    if (to < G * D) inputs.query[to] = held.value[n] * scale;
  }
  if (ark_tid() < 2 * D) inputs.current[ark_tid()] = held.current;
  if (ark_tid() == 0) inputs.position = held.position;
}

// True if the task `next`, which comes after the running task `t`, has the same body and no waits,
// and if it does not read what `t` writes: its inputs can be loaded while `t` runs. Q, P, O, F: the
// operands' numbers. bytes: at least those of the inputs and of the result.
template <int Q, int P, int O, int F>
ARK_DEVICE bool ark_boxed_follows(const ArkTask& t, const ArkTask& next, ark_u64 bytes) {
  const auto apart = [&](ark_u64 at) {
    const ark_u64 out = t.operand[O];
    return at + bytes <= out || out + bytes <= at;
  };
  return next.kind == t.kind && next.wait_begin == next.wait_end && apart(next.operand[Q]) &&
         apart(next.operand[P]) && apart(next.operand[F]);
}

// True if an operand with elements V is a tensor in memory, of type T or fp32. False for packets,
// which a task waits for without a counter.
template <typename A, typename B>
constexpr bool ARK_ONE_TYPE = false;
template <typename A>
constexpr bool ARK_ONE_TYPE<A, A> = true;
template <typename T, typename V>
ARK_DEVICE constexpr bool ark_in_memory(const V*) {
  return ARK_ONE_TYPE<V, T> || ARK_ONE_TYPE<V, float>;
}

// Processes this warp's share of the positions from `begin` to `end`. S: ArkBoxedStages.
template <class S, int D, typename T>
ARK_DEVICE void ark_boxed_share(ArkCtx& c, const float* current, int begin, int end, int newest,
                                const uint4 (&a)[D / 32][2], ArkBoxedSums<D>& r) {
  const int owner = ark_warp() / S::SHARERS;
  const ark_u32 full = ark_shared_address(ark_matrix.full);
  const ark_u32 empty = ark_shared_address(ark_matrix.empty);
  const int step =
      static_cast<int>(ark_boxed_step(static_cast<ark_u32>(end - begin), S::MOST, S::SEVERAL));
  // A warp has the same rows of each quarter, an even number; the last warp may have fewer.
  const int quarter = step / 4, each = (quarter + 2 * S::SHARERS - 1) / (2 * S::SHARERS) * 2;
  const int mine = ark_warp() % S::SHARERS * each;
  ArkBoxedPlace place{quarter, mine, quarter - mine < each ? quarter - mine : each, 0};
  ArkMatrixSlot slot = ark_matrix_place_of();
#pragma unroll 1
  for (int first = begin; first < end; first += step, ark_matrix_next(slot)) {
    if (static_cast<int>(slot.slot) % S::OWNERS != owner) continue;
    place.n = end - first < step ? end - first : step;
    ark_matrix_filled(c, full + 8u * slot.slot, slot.parity);
    T* keys = reinterpret_cast<T*>(ark_matrix_stage(c, slot.slot));
    T* values = keys + S::VALUES / static_cast<int>(sizeof(T));
    // Only the warp that processes the newest position needs its key and value.
    const int at = newest - first;
    bool patched = at >= 0 && at < place.n;
    if (patched) {
      const int from = at / quarter, inside = at - from * quarter - place.first;
      patched = inside >= 0 && inside < place.rows;
      if (patched) {
        const int row = at * D + from / 2 * (ARK_BOXED_SKEW / static_cast<int>(sizeof(T)));
        ark_stage_newest<D>(keys + row, current);
        ark_stage_newest<D>(values + row, current + D);
      }
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
// head, split. AT_Q, AT_P, AT_O, AT_F: the operands' numbers in the task's record.
template <typename T, int G, int KV_HEADS, int D, int CONTEXT, int SPLITS, int AT_Q, int AT_P,
          int AT_O, int AT_F, class Q, class P, class O, class F>
ARK_DEVICE void ark_attention_boxed(ArkCtx& c, const ArkTask& t, float scale, Q query, P position,
                                    O output, F fresh) {
  constexpr float LOG2E = 1.44269504f;
  typedef ArkBoxedAttention<G, D> Shared;
  Shared& s = *reinterpret_cast<Shared*>(ARK_SCRATCH(c));
  const ArkLoop& loop = *reinterpret_cast<const ArkLoop*>(ARK_SCRATCH(c) - ARK_LOOP_BYTES);
  const ark_u32 at = ark_warp_load(&c.warps[ark_warp()]) & ~ARK_GAVE_UP, turn = at & 1u;
  ArkBoxedInputs<G, D>& inputs = s.inputs[Shared::AHEAD ? turn : 0u];
  ArkBoxedHeld<G, D> held = {};
  if (!Shared::AHEAD || ark_shared_word(&ark_matrix.inputs) != at) {
    ark_boxed_ask<G, KV_HEADS, D>(c, held, t.coord[0], t.coord[1], query, position, fresh);
    ark_boxed_put(inputs, held, scale * LOG2E);
    ark_sync();
  }
  // The inputs of the next task are asked for before this task's positions are processed.
  const ArkTask& next = loop.tasks[(at + 1u) % ARK_SLOTS];
  constexpr ark_u64 BYTES = 8ull * KV_HEADS * G * (D + 2) * SPLITS;
  // Packets of the next task may depend on this one.
  constexpr bool MEMORY = ark_in_memory<T>(static_cast<decltype(Q::p)>(nullptr)) &&
                          ark_in_memory<T>(static_cast<decltype(F::p)>(nullptr));
  const bool ahead = Shared::AHEAD && MEMORY && at + 1u < c.task_end &&
                     ark_boxed_follows<AT_Q, AT_P, AT_O, AT_F>(t, next, BYTES);
  if (ahead) {
    query.p = reinterpret_cast<decltype(query.p)>(next.operand[AT_Q]);
    position.p = reinterpret_cast<decltype(position.p)>(next.operand[AT_P]);
    fresh.p = reinterpret_cast<decltype(fresh.p)>(next.operand[AT_F]);
    ark_boxed_ask<G, KV_HEADS, D>(c, held, next.coord[0], next.coord[1], query, position, fresh);
  }
  const ark_u32 split = static_cast<ark_u32>(t.coord[2]);
  const ArkGrown grown = ark_grown(static_cast<ark_u32>(inputs.position), CONTEXT, split, SPLITS);
  const int begin = static_cast<int>(grown.begin), end = static_cast<int>(grown.end);
  const int newest = static_cast<int>(grown.newest);
  uint4 a[D / 32][2];
  ark_query_tiles<G, D, T>(inputs.query, a);
  ArkBoxedSums<D> r = {};
  r.top = -1e30f;
  ark_boxed_share<ArkBoxedStages<T, D>, D, T>(c, inputs.current, begin, end, newest, a, r);
  if (ahead) ark_boxed_put(s.inputs[turn ^ 1u], held, scale * LOG2E);
  float* part = s.own[ark_warp() % Shared::PARTS];
  if (ark_warp() >= ARK_WARPS - Shared::PARTS) ark_boxed_part<G, D, Shared::PITCH, false>(r, part);
  ark_sync();
  // Behind this barrier all warps have read the word that says whose inputs were loaded.
  if (ahead && ark_tid() == 0) *const_cast<volatile ark_u32*>(&ark_matrix.inputs) = at + 1u;
  if constexpr (Shared::PARTS < ARK_WARPS) {
    if (ark_warp() < Shared::PARTS) ark_boxed_part<G, D, Shared::PITCH, true>(r, part);
    ark_sync();
  }
  ark_staged_join<G, D, SPLITS, Shared::PITCH>(c, t, s, output, Shared::PARTS, ark_tid(),
                                               ARK_THREADS);
}
