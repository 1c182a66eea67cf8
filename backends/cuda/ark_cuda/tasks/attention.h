// Attention over the KV cache. Loads of keys and values are issued before the task's queries are
// ready. ark/tasks/attention.py describes the task and its accesses; attention.py lists the
// signatures that this body supports.

// Shared memory of a task: G query heads of D elements, and the partial results of W warps.
template <int G, int D, int W>
struct ArkAttentionParts {
  float query[G * D];
  float current[2 * D];     // this iteration's key and value
  float part[W][G][D + 2];  // unnormalised sum, maximum, denominator
};

// Copies the G query heads of a key/value head to shared memory, multiplied by the scale. If the
// operand `fresh` is given, its key and value (the newest ones) are copied too. load() issues the
// loads of the warp's first cache rows. If these rows were written before the iteration, load()
// runs before the task's waits. In the variant `roles` this function performs the waits, and
// returns false if the processor must leave the loop.
#if defined(ARK_HAS_HANDSHAKE)
template <int G, int KV_HEADS, int D, class Q, class F>
ARK_DEVICE void ark_attention_gather(ArkCtx& c, float* to, int row, int head, bool newest,
                                     float scale, Q query, F fresh) {
  // The queries, the new key and the new value are loaded together, in this order.
  constexpr int N = ((G + 2) * D / 2 + ARK_THREADS - 1) / ARK_THREADS;
  float loaded[2 * N];
  const auto place = [&](int n) { return 2 * (n * ARK_THREADS + ark_tid()); };
  const auto there = [&](int n) {
    return place(n) < G * D || (F::given && newest && place(n) < (G + 2) * D);
  };
  const auto at = [&](int n) -> decltype(query.p) {
    if constexpr (F::given) {
      const int i = place(n) - G * D, column = (i < D ? head : KV_HEADS + head - 1) * D + i;
      if (i >= 0) return ark_address(fresh, 0, 0, 0, column);
    }
    return ark_address(query, 0, 0, row, head * (G * D) + place(n));
  };
  ark_load_pairs<N>(c, query.p, there, at, loaded, Q::system);
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int i = place(n);
    const float factor = i < G * D ? scale : 1.0f;
    if (i >= (G + 2) * D) continue;
    to[i] = loaded[2 * n] * factor;
    to[i + 1] = loaded[2 * n + 1] * factor;
  }
}
template <int G, int KV_HEADS, int D, int W, class Q, class F, class L>
ARK_DEVICE bool ark_attention_inputs(ArkCtx& c, ArkAttentionParts<G, D, W>& s, int row, int head,
                                     bool newest, float scale, Q query, F fresh, const L& load) {
  // Without the operand `fresh`, an earlier task of this iteration writes the newest cache row. So
  // cache rows are loaded only after the task has begun.
  if (F::given) load();
  if (!ark_enter(c)) return false;
  if (!F::given) load();
  ark_attention_gather<G, KV_HEADS, D>(c, reinterpret_cast<float*>(&s), row, head, newest, scale,
                                       query, fresh);
  return true;
}
#else
template <int G, int KV_HEADS, int D, int W, class Q, class F, class L>
ARK_DEVICE bool ark_attention_inputs(ArkCtx& c, ArkAttentionParts<G, D, W>& s, int row, int head,
                                     bool newest, float scale, Q query, F fresh, const L& load) {
  load();
  for (int first = 32 * ark_warp(); first < G * D; first += ARK_THREADS) {
    const int i = first + ark_lane();
    const ark_i64 at = ark_at(query, 0, 0, row, head * (G * D) + i);
    const float value = ark_load_by_warp(c, query.p, at, i < G * D, Q::system);
    if (i < G * D) s.query[i] = value * scale;
  }
  if constexpr (F::given) {
    // The last warps load the newest key and value, because they have no queries to load.
    const int begin = 32 * (ARK_WARPS - 1 - ark_warp());
    for (int first = begin; newest && first < 2 * D; first += ARK_THREADS) {
      const int i = first + ark_lane();
      const int column = i < D ? head * D + i : (KV_HEADS + head - 1) * D + i;
      const ark_i64 at = ark_at(fresh, 0, 0, 0, column);
      const float value = ark_load_by_warp(c, fresh.p, at, i < 2 * D, F::system);
      if (i < 2 * D) s.current[i] = value;
    }
  }
  return true;
}
#endif

ARK_DEVICE float ark_exp2(float v) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(v));
  return result;
}

// Adds up the scores of U rows for one query head over groups of LANES lanes. Lane l of a group
// gets the total of row l / (LANES / U).
template <int LANES, int U>
ARK_DEVICE float ark_fold_scores(float (&v)[U]) {
#pragma unroll
  for (int n = U / 2, mask = LANES / 2; n > 0; n /= 2, mask /= 2) {
    const bool upper = (ark_lane() & mask) != 0;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const float send = upper ? v[i] : v[i + n];
      v[i] = (upper ? v[i + n] : v[i]) + ark_shfl_xor(send, mask);
    }
  }
#pragma unroll
  for (int mask = LANES / U / 2; mask > 0; mask /= 2) v[0] += ark_shfl_xor(v[0], mask);
  return v[0];
}

// Updates a lane's running softmax with the scores of U rows for G query heads: raises the maximum,
// rescales the denominator and the lane's E columns of the result, and adds to the denominator.
// power: set to the exponential of each score relative to the maximum. there: false if the lane's
// row is past the end.
template <int LANES, int G, int E, int U>
ARK_DEVICE void ark_weigh_scores(float (&score)[G][U], bool there, float (&power)[G],
                                 float (&top)[G], float (&den)[G], float (&o)[G][E]) {
#pragma unroll
  for (int g = 0; g < G; ++g) {
    const float own = ark_fold_scores<LANES>(score[g]);
    float m = there ? fmaxf(top[g], own) : top[g];
#pragma unroll
    for (int mask = LANES / U; mask < 32; mask *= 2) m = fmaxf(m, ark_shfl_xor(m, mask));
    const float keep = ark_exp2(top[g] - m);
    power[g] = there ? ark_exp2(own - m) : 0.0f;
    top[g] = m;
    den[g] = fmaf(den[g], keep, power[g]);
#pragma unroll
    for (int i = 0; i < E; ++i) o[g][i] *= keep;
  }
}

// Combines the partial results of the warps and stores the task's result, of part `split` of query
// row `row` and key/value head `head`. EMPTY: true if the task may have no positions; its result is
// then zero.
template <int SPLITS, bool EMPTY, int G, int D, int W, class O>
ARK_DEVICE void ark_attention_store(ArkCtx& c, const ArkAttentionParts<G, D, W>& s, O output,
                                    int row, int head, int split) {
  for (int i = ark_tid(); i < G * D; i += ARK_THREADS) {
    const int g = i / D, d = i % D;
    float m = -1e30f;
#pragma unroll
    for (int w = 0; w < W; ++w) m = fmaxf(m, s.part[w][g][D]);
    float sum = 0.0f, all = 0.0f;
#pragma unroll
    for (int w = 0; w < W; ++w) {
      const float share = ark_exp(s.part[w][g][D] - m);
      sum = fmaf(share, s.part[w][g][d], sum);
      all = fmaf(share, s.part[w][g][D + 1], all);
    }
    if constexpr (SPLITS == 1) {
      ark_publish(c, output, 0, 0, row, head * (G * D) + i,
                  EMPTY && all == 0.0f ? 0.0f : sum / all);
    } else {
      ark_publish(c, output, row, head * G + g, split, d, sum);
      if (d == 0) {
        ark_publish(c, output, row, head * G + g, split, D, m);
        ark_publish(c, output, row, head * G + g, split, D + 1, all);
      }
    }
  }
}

// Computes attention of one query row over one split of the positions of a contiguous cache. Task
// coordinates: row, key/value head, split. A group of lanes reads a row of the cache, 16 bytes per
// lane, and loads U rows at a time. For these U rows there is one update of the maximum and one
// reduction over the lanes. Each of W warps keeps a running softmax of its rows. Exponentials use
// base 2. Returns false if a wait has failed or the launch was aborted; the processor must then
// leave the loop.
// WINDOW: the number of latest positions that are seen; 0 for all.
template <int G, int KV_HEADS, int D, int CONTEXT, int SPLITS, int W, int WINDOW, class Q, class K,
          class V, class P, class O, class F>
ARK_DEVICE bool ark_attention_warps(ArkCtx& c, const ArkTask& t, float scale, Q query, K key_cache,
                                    V value_cache, P position, O output, F fresh) {
  constexpr int E = 16 / sizeof(*key_cache.p), LANES = D / E, ROWS = 32 / LANES, STEP = ROWS * W;
  // The number of rows that a lane loads at a time. Long contexts need many loads in flight. For
  // short contexts, fewer rows make the code smaller.
  constexpr bool AHEAD = ARK_WARPS <= 8;  // enough registers to load the next rows early
  constexpr bool FOUR = G <= 4 && (AHEAD || LANES > 8);
  constexpr int SEEN = WINDOW > 0 && WINDOW < CONTEXT ? WINDOW : CONTEXT;
  constexpr int LONGEST = SEEN / SPLITS, MANY = FOUR && LONGEST >= 512 ? 4 : 2;
  constexpr int MOST = LONGEST > STEP ? MANY : 1, U = LANES < MOST ? LANES : MOST, OWN = LANES / U;
  constexpr float LOG2E = 1.44269504f, LN2 = 0.693147181f;
  auto& s = *reinterpret_cast<ArkAttentionParts<G, D, W>*>(ARK_SCRATCH(c));
  const int row = t.coord[0], head = t.coord[1], split = t.coord[2];
  const int seen = position.p[0] + row + 1;
  const int all = seen < CONTEXT ? seen : CONTEXT, count = all < SEEN ? all : SEEN;
  const int begin = all - count + static_cast<int>(static_cast<ark_i64>(count) * split / SPLITS);
  const int end =
      all - count + static_cast<int>(static_cast<ark_i64>(count) * (split + 1) / SPLITS);
  // The position whose key and value are in the operand `fresh`, if it belongs to this task's
  // split. Otherwise a number larger than all positions.
  const int newest = F::given && end == all ? all - 1 : 0x7fffffff;
  const int column = ark_lane() % LANES * E, mine = ark_warp() * ROWS + ark_lane() / LANES;
  const auto* keys = key_cache.p + static_cast<ark_i64>(head) * CONTEXT * D + column;
  const auto* values = value_cache.p + static_cast<ark_i64>(head) * CONTEXT * D + column;
  uint4 k[U] = {}, v[U] = {};
  // Loads 16 bytes of row u of a batch of rows that begins at `first`, from the keys or the values.
  const auto load = [&](uint4& to, const void* from, int u, int first) {
    const int e = first + u * STEP + mine;
    if (ark_warp() >= W || e >= end || e >= newest) return;
    to = static_cast<const uint4*>(from)[static_cast<ark_i64>(e) * LANES];
  };
  const auto first_rows = [&] {
#pragma unroll
    for (int u = 0; u < U; ++u) load(k[u], keys, u, begin);
#pragma unroll
    for (int u = 0; u < U; ++u) load(v[u], values, u, begin);
  };
  if (!ark_attention_inputs<G, KV_HEADS, D, W>(c, s, row, head, end == all, scale * LOG2E, query,
                                               fresh, first_rows)) {
    return false;
  }
  ark_sync();
  float top[G], den[G], o[G][E];
#pragma unroll
  for (int g = 0; g < G; ++g) {
    top[g] = -1e30f;
    den[g] = 0.0f;
#pragma unroll
    for (int i = 0; i < E; ++i) o[g][i] = 0.0f;
  }
  for (int first = begin; ark_warp() < W && first < end; first += U * STEP) {
    uint4 key[U], value[U];
    const auto next = [&](uint4(&to)[U], const void* from) {
#pragma unroll
      for (int u = 0; u < U; ++u) load(to[u], from, u, first + U * STEP);
    };
    // The next rows' loads are issued before any of the present rows is used. The compiler tracks
    // the loads of keys and values by one scoreboard, so a wait for keys also waits for values.
    if constexpr (AHEAD) {
#pragma unroll
      for (int u = 0; u < U; ++u) key[u] = k[u], value[u] = v[u];
      next(k, keys);
      next(v, values);
    }
    float score[G][U] = {};
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (first + u * STEP >= end) continue;
      float kf[E];
      ark_unpack(kf, AHEAD ? key[u] : k[u], keys);
      if (first + u * STEP + mine == newest) {
#pragma unroll
        for (int i = 0; i < E; ++i) kf[i] = s.current[column + i];
      }
#pragma unroll
      for (int g = 0; g < G; ++g) {
#pragma unroll
        for (int i = 0; i < E; ++i) {
          score[g][u] = fmaf(kf[i], s.query[g * D + column + i], score[g][u]);
        }
      }
    }
    if constexpr (!AHEAD) next(k, keys);
    const bool there = first + ark_lane() % LANES / OWN * STEP + mine < end;
    float power[G];
    ark_weigh_scores<LANES>(score, there, power, top, den, o);
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (first + u * STEP >= end) continue;
      float vf[E];
      ark_unpack(vf, AHEAD ? value[u] : v[u], values);
      if (first + u * STEP + mine == newest) {
#pragma unroll
        for (int i = 0; i < E; ++i) vf[i] = s.current[D + column + i];
      }
#pragma unroll
      for (int g = 0; g < G; ++g) {
        const float p = __shfl_sync(0xffffffffu, power[g], ark_lane() / LANES * LANES + u * OWN);
#pragma unroll
        for (int i = 0; i < E; ++i) o[g][i] = fmaf(p, vf[i], o[g][i]);
      }
    }
    if constexpr (!AHEAD) next(v, values);
  }
  // All rows of a warp use the same maximum, so their parts of the sums are added without
  // rescaling.
#pragma unroll
  for (int g = 0; g < G; ++g) {
#pragma unroll
    for (int mask = OWN; mask < 32; mask *= 2) den[g] += ark_shfl_xor(den[g], mask);
#pragma unroll
    for (int mask = LANES; mask < 32; mask *= 2) {
#pragma unroll
      for (int i = 0; i < E; ++i) o[g][i] += ark_shfl_xor(o[g][i], mask);
    }
    if (ark_warp() < W && ark_lane() < LANES) {
      float* to = s.part[ark_warp()][g];
#pragma unroll
      for (int i = 0; i < E; ++i) to[column + i] = o[g][i];
      if (ark_lane() == 0) {
        to[D] = top[g] * LN2;
        to[D + 1] = den[g];
      }
    }
  }
  ark_sync();
  ark_attention_store<SPLITS, false>(c, s, output, row, head, split);
  return true;
}

// Called by the lead warp before a task: waits until the last element of the head's query has
// arrived as a packet. The task's other warps then wait for the other packets themselves.
template <int COLUMNS, class Q>
ARK_DEVICE void ark_attention_poll(ArkCtx& c, const ArkTask& t, Q query) {
  const ark_i64 last = ark_at(query, 0, 0, t.coord[0], (t.coord[1] + 1) * COLUMNS - 1);
  ark_poll_packet(c, query.p + last, Q::system);
}
// Called by the lead warp before a task that merges the partial results of a head's splits: waits
// for the first element of the last split's result.
template <int SPLITS, class P>
ARK_DEVICE void ark_attention_merge_poll(ArkCtx& c, const ArkTask& t, P partial) {
  ark_poll_packet(c, ark_address(partial, t.coord[0], t.coord[1], SPLITS - 1, 0), P::system);
}
