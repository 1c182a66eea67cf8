// Attention of tiles of queries on mma.sync: the loop over blocks of keys, with the code before and
// after it. attention_units.h describes how a block's warps share a tile.

// Applies the masks to the scores of a group's nth block of keys: first the mask operand, if there
// is one, by under(s, tile, row, key). Then the scores of keys that a row does not see become -inf.
// row: the lane's first row in the tile. key: the first key of the warp's scores.
template <class U, class S, class Under>
ARK_DEVICE void ark_attention_finish(float (&s)[U::SCORES / 2], const ArkAttentionStrip& strip,
                                     int n, const Under& under) {
  const ArkAttentionPlace<U> w(strip);
  const ArkAttentionTile& tile = (&strip)[w.zero].tile;
  const int key = ark_attention_block<U>(tile, w.group, n);
  const int place = tile.place + 16 * w.slab;
  under(s, tile, 16 * w.slab + w.lane / 4, key + w.part * U::SCORES);
  const bool whole = key + U::KEYS <= ark_attention_end<S>(place) &&
                     (S::WINDOW == 0 || key >= ark_attention_first<S>(place + 15));
  if (!whole) {
    ark_attention_mask<S, U::SCORES>(s, place + w.lane / 4, key + w.part * U::SCORES);
  }
}

// Computes this warp's part of the exponentials `p` for its group's nth block of keys. Returns
// false if the warp's rows see none of these keys. queries, keys: shared-memory addresses of the
// slab's queries and of the block's keys. under: see ark_attention_finish.
template <class U, class S, class Under>
ARK_DEVICE bool ark_attention_exponentials(char* shared, const ArkAttentionStrip& strip, int n,
                                           ark_u32 base, ark_u32 keys,
                                           const ark_u32 (&held)[U::HELD ? U::STEPS : 1][4],
                                           float factor, float scale, float cap,
                                           ArkAttentionSums<U>& sums, ark_u32 (&p)[U::KEYS / 4],
                                           const Under& under) {
  const ArkAttentionPlace<U> w(strip);
  const int key = ark_attention_block<U>(strip.tile, w.group, n);
  const int own = 16 * w.slab, place = strip.tile.place + own;
  const bool seen = own < strip.rows && key < ark_attention_end<S>(place + 15) &&
                    key + U::KEYS > ark_attention_first<S>(place);
  if (!seen) return false;
  float s[U::SCORES / 2];
  const ark_u32 queries = base + w.queries() + ark_attention_lane<U::PITCH, true>(w.lane);
  const ark_u32 own_keys =
      keys + w.part * (U::SCORES * U::PITCH) + ark_attention_lane<U::PITCH, false>(w.lane);
  ark_attention_scores<U>(s, queries, own_keys, held);
  if constexpr (S::CAPPED) {
#pragma unroll
    for (int i = 0; i < U::SCORES / 2; ++i) {
      s[i] = ark_attention_capped(s[i] * (scale / cap), cap);
    }
  }
  ark_attention_finish<U, S>(s, strip, n, under);
  ark_attention_weigh<U>(s, sums, p, factor, strip, shared);
  return true;
}

// Adds the products of a block's exponentials with the block's values. values: the address of the
// block in shared memory.
template <class U>
ARK_DEVICE void ark_attention_weighted(char* shared, const ArkAttentionPlace<U>& v, ark_u32 values,
                                       const ark_u32 (&p)[U::KEYS / 4], ArkAttentionSums<U>& sums) {
  const ark_u32 own_values = values + ark_attention_lane<U::PITCH, true>(v.lane);
#pragma unroll
  for (int k = 0; k < U::KEYS / 16; ++k) {
    ark_u32 powers[4];
    if constexpr (U::TEAM > 1) {
      const uint4 x = reinterpret_cast<const uint4*>(shared + v.team())[32 * k + v.lane];
      powers[0] = x.x, powers[1] = x.y, powers[2] = x.z, powers[3] = x.w;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) powers[i] = p[4 * k + i];
    }
    ark_attention_values<U>(sums, powers, own_values + k * 16 * U::PITCH, v.part * U::OWN);
  }
}

// Loads the slab's queries (16 rows) into registers.
template <class U>
ARK_DEVICE void ark_attention_hold(ark_u32 (&held)[U::HELD ? U::STEPS : 1][4], ark_u32 base,
                                   const ArkAttentionPlace<U>& w) {
  if constexpr (U::HELD) {
    const ark_u32 queries = base + w.queries() + ark_attention_lane<U::PITCH, true>(w.lane);
#pragma unroll
    for (int k = 0; k < U::STEPS; ++k) ark_load_tiles(held[k], ark_attention_step(queries, k));
  }
}

// Initialises a warp's sums before its first block. sink: an operand with a score for each head.
// The score counts in the denominator and has no value.
template <class U, class N>
ARK_DEVICE void ark_attention_clear(ArkAttentionSums<U>& sums, const N& sink, int head, int group) {
#pragma unroll
  for (int i = 0; i < 8 * U::OWN; ++i) sums.values[i] = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) sums.powers[i] = N::given && group == 0 ? 1.0f : 0.0f;
  sums.top[0] = sums.top[1] = -1e30f;
  if constexpr (N::given) {
    sums.top[0] = sums.top[1] = sink.p[head] * ARK_ATTENTION_LOG2E;
  }
}

// Computes this warp's part of attention over the blocks of keys that are assigned to its group.
// keys(task), values(task): return the operands keys and values of a task.
template <class U, class S, class K, class V, class M>
ARK_DEVICE void ark_attention_walk(char* shared, const ArkAttentionStrip& strip, float scale,
                                   float cap, const K& keys, const V& values, const M& mask,
                                   ArkAttentionSums<U>& sums) {
  // With four slots, one wait covers both the keys and the values of a block.
  constexpr bool BOTH = U::SLOTS == 4;
  constexpr bool MASKED = decltype(mask(*strip.task))::given;
  const float factor = (S::CAPPED || MASKED ? 1.0f : scale) * ARK_ATTENTION_LOG2E;
  const ark_u32 base = static_cast<ark_u32>(__cvta_generic_to_shared(shared));
  ark_u32 held[U::HELD ? U::STEPS : 1][4];
  ark_attention_hold<U>(held, base, ArkAttentionPlace<U>(strip));
  const auto slot = [&](const ArkAttentionPlace<U>& w, int item) {
    return base + w.ring() + item % U::SLOTS * U::SLOT;
  };
  const auto fetch = [&](const ArkAttentionPlace<U>& w, int item, const auto& operand) {
    ark_attention_fetch<U, S>(strip.tile, operand(*strip.task), slot(w, item), w, item / 2);
  };
  const auto filled = [&](const ArkAttentionPlace<U>& w) {
    ark_copies_but<(BOTH ? 0 : U::SLOTS - 2)>();
    w.meet_group();
  };
#pragma unroll 1
  for (int n = 0;; ++n) {
    const ArkAttentionPlace<U> w(strip);
    filled(w);
    const int key = ark_attention_block<U>(strip.tile, w.group, n);
    if (key < 0) break;
    if (U::SLOTS > 2) fetch(w, 2 * n + 2, keys);
    if (U::SLOTS != 3) fetch(w, 2 * n + (BOTH ? 3 : 1), values);
    ark_u32 p[U::KEYS / 4];
    const bool seen = ark_attention_exponentials<U, S>(
        shared, strip, n, base, slot(w, 2 * n), held, factor, scale, cap, sums, p,
        [&](float (&s)[U::SCORES / 2], const ArkAttentionTile& tile, int row, int first) {
          if constexpr (MASKED) {
            ark_attention_under<S, U::SCORES>(s, mask(*strip.task), tile, row, first,
                                              S::CAPPED ? 1.0f : scale);
          }
        });
    const ArkAttentionPlace<U> v(strip);
    if (!BOTH) {
      filled(v);
      if (U::SLOTS == 2) {
        fetch(v, 2 * n + 2, keys);
      } else {
        fetch(v, 2 * n + 3, values);
      }
    }
    if (seen) ark_attention_weighted<U>(shared, v, slot(v, 2 * n + 1), p, sums);
  }
}

// Computes the rows of a tile that `strip` selects, and stores the results.
template <class U, class S, class Q, class K, class V, class O, class N, class M, class L>
ARK_DEVICE void ark_attention_strip(char* shared, const ArkAttentionStrip& strip, float scale,
                                    float cap, const Q& query, const K& keys, const V& values,
                                    const O& output, const N& sinks, const M& mask,
                                    const L& logarithms) {
  const ArkAttentionPlace<U> w(strip);
  const bool works = U::CREWS > 1 || U::GROUPS * U::WARPS == ARK_WARPS || w.group < U::GROUPS;
  if (works) {
    const auto operand = query(*strip.task);
    const ark_u32 base = static_cast<ark_u32>(__cvta_generic_to_shared(shared));
    const auto from = [&](int row) {
      return ark_address(operand, 0, strip.tile.batch, strip.tile.row + row,
                         strip.tile.head * S::D);
    };
    ark_attention_copy<U, S::D, U::ROWS, U::GROUPS * U::THREADS>(
        base, w.group * U::THREADS + w.thread, 0, strip.rows, from);
    ark_copies_begun();
    const ark_u32 ring = base + w.ring();
    ark_attention_fetch<U, S>(strip.tile, keys(*strip.task), ring, w, 0);
    if (U::SLOTS > 2) {
      ark_attention_fetch<U, S>(strip.tile, values(*strip.task), ring + U::SLOT, w, 0);
    }
  }
  ark_copies_but<(U::SLOTS > 2 ? 2 : 1)>();
  w.meet_crew();
  ArkAttentionSums<U> sums;
  ark_attention_clear(sums, sinks(*strip.task), strip.tile.head, w.group);
  if (works) ark_attention_walk<U, S>(shared, strip, scale, cap, keys, values, mask, sums);
  ark_copies_but<0>();
  const ArkAttentionPlace<U> own(strip);
  char* const mine = shared + own.thread / 32 * U::PART;
#pragma unroll
  for (int step = 1; step < U::GROUPS; step *= 2) {
    own.meet_crew();
    char* const place = mine + own.group / (2 * step) * (U::WARPS * U::PART);
    if (own.group < U::GROUPS && own.group % (2 * step) == step) ark_attention_give(place, sums);
    own.meet_crew();
    if (own.group % (2 * step) == 0 && own.group + step < U::GROUPS) {
      ark_attention_take(place, sums);
    }
  }
  if (U::GROUPS == 1) own.meet_crew();
  const int first = 16 * own.slab;
  if (own.group > 0 || first >= strip.rows) return;
  float by[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    by[half] = ark_attention_share<S>(sums.powers[2 * half]);
  }
  if constexpr (decltype(logarithms(*strip.task))::given) {
    if (own.lane % 4 == 0 && own.part == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first + own.lane / 4 + 8 * half;
        if (row >= strip.rows) continue;
        *ark_address(logarithms(*strip.task), 0, strip.tile.batch, strip.tile.row + row,
                     strip.tile.head) =
            ark_attention_logarithm<S>(sums.top[half] / ARK_ATTENTION_LOG2E, sums.powers[2 * half]);
      }
    }
  }
  ark_attention_scale(sums, by);
  const auto operand = output(*strip.task);
  auto* to =
      ark_address(operand, 0, strip.tile.batch, strip.tile.row + first, strip.tile.head * S::D);
  ark_attention_out<U, S::D>(mine, sums.values, own.lane, own.part, strip.rows - first, to,
                             ark_at(operand, 0, 0, 1, 0));
}

// The loop of a crew (the warps of one tile) if each tile has one block of keys
// (attention_ahead.h).
template <class U, class S, class Q, class K, class V, class O, class P, class N, class M>
ARK_DEVICE void ark_attention_crew(char* shared, ArkAttentionStrip* strips, int crew, bool leads,
                                   float scale, float cap, const Q& query, const K& keys,
                                   const V& values, const O& output, const P& position,
                                   const N& sinks, const M& mask);

// Runs a task: attention of tiles of queries. query, keys, values, output, position, sinks, mask:
// functions that return this operand of a task. logarithms: the same, of an operand that has each
// row's logarithm of the sum of exponentials.
template <class U, class S, class Q, class K, class V, class O, class P, class N, class M,
          class L = ArkAttentionNone>
ARK_DEVICE void ark_attention_units(ArkCtx& c, const ArkTask& t, float scale, float cap,
                                    const Q& query, const K& keys, const V& values, const O& output,
                                    const P& position, const N& sinks, const M& mask,
                                    const L& logarithms = {}) {
  char* shared = ARK_SCRATCH(c);
  int crew = 0;
  if constexpr (U::CREWS > 1) {
    ark_sync();  // the previous task's data have left shared memory
    crew = ark_tid() / U::THREADS;
    if (crew >= U::CREWS) return;
    shared += crew * U::BYTES;
  }
  const bool leads = ark_tid() == crew * U::THREADS;
  ArkAttentionStrip& strip = *reinterpret_cast<ArkAttentionStrip*>(shared + U::STRIP);
  if (leads) {
    strip.context = &c, strip.task = &t;
    strip.round = crew, strip.left = 0, strip.zero = 0u;
  }
  if constexpr (U::AHEAD) {
    ark_attention_crew<U, S>(shared, &strip, crew, leads, scale, cap, query, keys, values, output,
                             position, sinks, mask);
    return;
  }
#pragma unroll 1
  for (;;) {
    ark_attention_meet_crew<U>(crew);  // earlier results have left shared memory
    if (leads) ark_attention_advance<U, S>(strip, position(*strip.task));
    ark_attention_meet_crew<U>(crew);
    if (strip.rows == 0) break;
    ark_check_pages<S::CONTEXT>(*strip.context, keys(*strip.task), position(*strip.task),
                                strip.tile.begin, strip.tile.end);
    ark_attention_strip<U, S>(shared, strip, scale, cap, query, keys, values, output, sinks, mask,
                              logarithms);
  }
}
