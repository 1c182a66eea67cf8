// Attention of tiles of queries on matrix units: the loop over blocks of keys, with the code before
// and after it. attention_units.h describes how a tile is divided among waves and lanes.

// Sets the scores of keys that the lane's query does not see to -inf. place: the query's position.
// first: the first key of the scores.
template <class U, class S>
ARK_DEVICE void ark_attention_mask(ark_unit_sums (&s)[U::OWN], int place, int first) {
  const int own = first + ark_unit_first();
  const int begin = ark_attention_first<S>(place) - own, end = ark_attention_end<S>(place) - own;
#pragma unroll
  for (int i = 0; i < U::OWN * ARK_UNIT_ELEMENTS; ++i) {
    const int b = i / ARK_UNIT_ELEMENTS, e = i % ARK_UNIT_ELEMENTS;
    const int at = b * ARK_UNIT + ark_unit_row(e);
    s[b][e] = at >= begin && at < end ? s[b][e] : -ark_inf();
  }
}

// Applies a soft cap to a score: cap * tanh(v / cap). two_over: 2 log2(e) * scale / cap, where
// scale is the factor of all scores.
ARK_DEVICE float ark_attention_capped(float v, float cap, float two_over) {
  const float power = ark_attention_power(v * two_over);
  return __builtin_fmaf(-2.0f * cap, __builtin_amdgcn_rcpf(1.0f + power), cap);
}

// Applies the soft cap and masks to the scores of keys from `first` on. slab: the first row of the
// wave's queries in the tile.
template <class U, class S, class M>
ARK_DEVICE void ark_attention_finish(ark_unit_sums (&s)[U::OWN], const ArkAttentionTile& tile,
                                     float scale, float cap, const M& mask, int slab, int first) {
  const int own = tile.place + slab;
  if constexpr (S::CAPPED) {
    const float two_over = 2.0f * ARK_ATTENTION_LOG2E * scale / cap;
#pragma unroll
    for (int i = 0; i < U::OWN * ARK_UNIT_ELEMENTS; ++i) {
      const int b = i / ARK_UNIT_ELEMENTS, e = i % ARK_UNIT_ELEMENTS;
      s[b][e] = ark_attention_capped(s[b][e], cap, two_over);
    }
  }
  if constexpr (M::given) {
    const float by = S::CAPPED ? 1.0f : scale;
    const int row = slab + ark_lane() % ARK_UNIT, key = first + ark_unit_first();
#pragma unroll
    for (int i = 0; i < U::OWN * ARK_UNIT_ELEMENTS; ++i) {
      const int b = i / ARK_UNIT_ELEMENTS, e = i % ARK_UNIT_ELEMENTS;
      const int at = key + b * ARK_UNIT + ark_unit_row(e);
      s[b][e] = ark_attention_masked<S>(mask, tile, row, at, s[b][e] * by);
    }
  }
  const bool whole = first + U::KEYS <= ark_attention_end<S>(own) &&
                     (S::WINDOW == 0 || first >= ark_attention_first<S>(own + ARK_UNIT - 1));
  if (!whole) ark_attention_mask<U, S>(s, own + ark_lane() % ARK_UNIT, first);
}

// Computes attention of a tile of queries over all blocks of keys that it sees. row: the address of
// the lane's query.
template <class U, class S, class K, class V, class M>
ARK_DEVICE void ark_attention_walk(ark_local* shared, const ArkAttentionTile& tile, int rows,
                                   float scale, float cap, const typename U::Q* row, K keys,
                                   V values, const M& mask, ArkAttentionSums<U>& sums) {
  const float factor = (S::CAPPED || M::given ? 1.0f : scale) * ARK_ATTENTION_LOG2E;
  const int column = ark_lane() % ARK_UNIT, piece = ark_unit_piece();
  const int slab = U::slab() * ARK_UNIT, mine = U::group() * U::KEYS;
  const bool works = ark_warp() < U::TASKS && slab < rows;
  const ark_local* own_keys = ark_kept(shared + (piece * U::PITCH + mine + column) * 16);
  ark_local* own_values = shared + U::VALUES + (mine / 8 + piece) * U::WIDE * 16;
  const int d = U::slot(ark_unit_order(column)), end = (U::BLOCKS - 1) * ARK_UNIT;
  const int far = end + ark_unit_order(column);
  const ark_local* last = own_values + U::slot(far < U::WIDTH ? far : U::WIDTH - 1) * 16;
  own_values = ark_kept(own_values + d * 16);
  ArkAttentionParts<U> held[U::HELD ? U::STEPS : 1];
  if constexpr (U::HELD) {
#pragma unroll
    for (int k = 0; k < U::STEPS; ++k) held[k] = ark_attention_query<U>(row, k);
  }
  const auto query = [&](int k) __attribute__((always_inline)) {
    if constexpr (U::HELD) {
      return held[k];
    } else {
      return ark_attention_query<U>(row, k);
    }
  };
  int blocks = (tile.end - tile.begin + U::ALL - 1) / U::ALL;
  asm volatile("" : "+v"(blocks));  // keeps the compiler from unrolling a short loop
  const int count = __builtin_amdgcn_readfirstlane(blocks);
  const int known = ark_tid();
  const auto tid = [&]() __attribute__((always_inline)) { return U::KEPT ? known : ark_tid(); };
  ArkAttentionHead<S, K> head_keys;
  ArkAttentionHead<S, V> head_values;
  head_keys.begin(keys, tile);
  head_values.begin(values, tile);
  ArkAttentionKeys<U, S> next_keys;
  ArkAttentionValues<U, S> next_values;
  const auto first_of = [&](int n) { return tile.begin + n * U::ALL; };
  ark_unit_sums s[U::OWN], ahead[U::OWN];
  ArkAttentionParts<U> p[U::KEYS / 16];
  float keep = 1.0f;
  // Some exponentials are computed while the matrix units compute the next block's scores, the
  // others while the matrix units multiply values. So vector units and matrix units are busy at the
  // same time.
  constexpr int BESIDE = U::AHEAD || U::PARTS > 1 ? U::KEYS / 32 : U::KEYS / 16;
  const auto weigh = [&](int from, int to) __attribute__((always_inline)) {
#pragma unroll
    for (int k = from; k < to; ++k) p[k] = ark_attention_powers<U>(s, sums, factor, k);
  };
  next_keys.fetch(head_keys, tile, tid(), first_of(0));
  next_values.fetch(head_values, tile, tid(), first_of(0));
  next_keys.place(shared, tid());
  next_keys.fetch(head_keys, tile, tid(), first_of(1));
  ark_sync();
  if constexpr (U::AHEAD) {
    if (works) ark_attention_scores<U>(s, own_keys, query);
    ark_sync();
    next_keys.place(shared, tid());
    next_keys.fetch(head_keys, tile, tid(), first_of(2));
    ark_sync();
  }
  // One round of the loop, for block n of keys. Shared memory contains the keys of block n or, if
  // scores are computed one block ahead, the keys of block n + 1. more: true if there is a further
  // block.
  const auto step = [&](int n, bool more) __attribute__((always_inline)) {
    next_values.place(shared, tid());
    next_values.fetch(head_values, tile, tid(), first_of(n + 1));
    if (works) {
      if constexpr (!U::AHEAD) ark_attention_scores<U>(s, own_keys, query);
      ark_attention_finish<U, S>(s, tile, scale, cap, mask, slab, first_of(n) + mine);
      keep = ark_attention_raise<U>(s, sums, factor);
      if (U::AHEAD && more) ark_attention_scores<U>(ahead, own_keys, query);
      weigh(0, BESIDE);
    }
    ark_sync();
    next_keys.place(shared, tid());
    next_keys.fetch(head_keys, tile, tid(), first_of(n + (U::AHEAD ? 3 : 2)));
    if (works) {
      if (!ark_warp_all(keep == 1.0f)) ark_attention_scale(sums, keep);
      weigh(BESIDE, U::KEYS / 16);
      ark_attention_add<U>(sums, p, own_values, last);
      if (U::AHEAD && more) {
#pragma unroll
        for (int b = 0; b < U::OWN; ++b) s[b] = ahead[b];
      }
    }
    ark_sync();
  };
#pragma unroll 1
  for (int n = 0; n < count - 1; ++n) step(n, true);
  step(count - 1, false);
}

// Adds the sums of all groups of waves that have the same queries. The first group gets the totals.
template <class U>
ARK_DEVICE void ark_attention_join(ark_local* shared, ArkAttentionSums<U>& sums) {
  typedef ark_in_local<ark_unit_sums> block;
  typedef ark_in_local<float> number;
  const int lane = U::slab() * ARK_LANES + ark_lane();
  auto* blocks = (block*)shared + lane;
  auto* numbers = (number*)(shared + U::SLABS * ARK_LANES * sizeof(ark_unit_sums)) + lane;
  constexpr int MORE = U::SLABS * ARK_LANES;
#pragma unroll 1
  for (int group = 1; group < U::GROUPS; ++group) {
    const bool gives = U::group() == group, takes = U::group() == 0;
    if (gives) numbers[0] = sums.top, numbers[MORE] = sums.weight;
    ark_sync();
    float theirs = 0.0f;
    if (takes) {
      const float top = __builtin_fmaxf(sums.top, numbers[0]);
      theirs = ark_attention_power(numbers[0] - top);
      const float ours = ark_attention_power(sums.top - top);
      sums.weight = sums.weight * ours + numbers[MORE] * theirs;
      sums.top = top;
      ark_attention_scale(sums, ours);
    }
#pragma unroll
    for (int j = 0; j < U::BLOCKS; ++j) {
      if (gives) *blocks = sums.block[j];
      ark_sync();
      if (takes) sums.block[j] += theirs * *blocks;
      ark_sync();
    }
  }
}

template <class U, class S, class Q, class K, class V, class O, class P, class N, class M>
ARK_DEVICE void ark_attention_units(ArkCtx& c, const ArkTask& t, float scale, float cap, Q query,
                                    K keys, V values, O output, P position, N sinks, M mask) {
  auto* shared = (ark_local*)ARK_SCRATCH(c);
  ark_attention_each<S>(t, position, [&](const ArkAttentionTile& tile) {
    ark_check_pages<S::CONTEXT>(c, keys, position, tile.begin, tile.end);
    const int rows = tile.row + S::ROWS < S::M ? S::ROWS : S::M - tile.row;
    const int own = U::slab() * ARK_UNIT + ark_lane() % ARK_UNIT;
    const int place = own < rows ? own : rows - 1;
    ArkAttentionSums<U> sums;
#pragma unroll
    for (int j = 0; j < U::BLOCKS; ++j) sums.block[j] = 0.0f;
    sums.top = -1e30f;
    sums.weight = 0.0f;
    if constexpr (N::given) {
      sums.top = sinks.p[tile.head] * ARK_ATTENTION_LOG2E;
      sums.weight = ark_lane() < ARK_UNIT && U::group() == 0 ? 1.0f : 0.0f;
    }
    if (tile.begin < tile.end) {
      const auto* row = ark_address(query, 0, tile.batch, tile.row + place, tile.head * S::D);
      ark_attention_walk<U, S>(shared, tile, rows, scale, cap, row, keys, values, mask, sums);
    }
    sums.weight += ark_shfl_xor(sums.weight, ARK_UNIT);
    ark_attention_join<U>(shared, sums);
    if (U::group() > 0 || own >= rows) return;
    const float by = ark_attention_share<S>(sums.weight);
    auto* to = ark_address(output, 0, tile.batch, tile.row + own, tile.head * S::D);
#pragma unroll
    for (int i = 0; i < U::BLOCKS * ARK_UNIT_ELEMENTS / 4; ++i) {
      const int e = 4 * i % ARK_UNIT_ELEMENTS, j = 4 * i / ARK_UNIT_ELEMENTS;
      const int d = j * ARK_UNIT + ark_unit_row(e) + ark_unit_first();
      if (U::WIDTH % ARK_UNIT != 0 && d >= U::WIDTH) continue;
      const ark_unit_sums v = sums.block[j] * by;
      ark_attention_store(to + d, v[e], v[e + 1], v[e + 2], v[e + 3]);
    }
  });
}
