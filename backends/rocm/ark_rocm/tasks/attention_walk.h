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
  typedef ark_unit_sums Scored[U::OWN];  // a lane's scores of a block
  const auto buffer = [](int n) { return n % U::BUFFERS * U::BYTES; };
  Scored s, ahead;
  ArkAttentionPowers<U> p;
  float keep = 1.0f, most = 0.0f;
  constexpr int BESIDE = U::AHEAD || U::PARTS > 1 ? U::KEYS / 8 : U::KEYS / 4;
  constexpr int PAIRS = U::KEYS / 4, SCORES = U::OWN * ARK_UNIT_ELEMENTS;
  const auto weigh = [&](const Scored& scores, int from, int to) __attribute__((always_inline)) {
#pragma unroll
    for (int k = from; k < to; ++k) {
      p.template add<U::SPREAD>(scores, sums.top, factor, k);
      if (k == PAIRS - 1 || (!U::SPREAD && k % 4 == 3)) sums.weight += p.sum[0] + p.sum[1];
    }
  };
  const auto finish = [&](Scored& scores, int n) __attribute__((always_inline)) {
    ark_attention_finish<U, S>(scores, tile, scale, cap, mask, slab, first_of(n) + mine);
  };
  // The largest score of the lane's query in the block: the lane's own, m, and those of the lane
  // with the query's other keys.
  const auto largest = [](float m) { return __builtin_fmaxf(m, ark_shfl_xor(m, ARK_UNIT)); };
  const auto nothing = [](auto) {};
  // All products of scores or sums without anything beside them.
  const auto alone = [&](const auto& work) __attribute__((always_inline)) {
    ark_attention_each_part<U::FEW, true>(work, nothing);
  };
  typedef ArkAttentionScores<U, decltype(query)> Scores;
  typedef ArkAttentionAdded<U> Added;
  next_keys.fetch(head_keys, tile, tid(), first_of(0));
  next_values.fetch(head_values, tile, tid(), first_of(0));
  next_keys.place(shared, tid());
  next_keys.fetch(head_keys, tile, tid(), first_of(1));
  if constexpr (U::BUFFERS == 2) {
    next_values.place(shared, tid());
    next_values.fetch(head_values, tile, tid(), first_of(1));
  }
  ark_sync();
  if constexpr (U::AHEAD) {
    if (works) {
      alone(Scores{s, own_keys, query});
      if (U::SPREAD) {
        finish(s, 0);
        most = largest(ark_attention_most<U>(s, s[0][0], 1, SCORES));
      }
    }
    if (U::BUFFERS == 1) ark_sync();
    next_keys.place(shared + buffer(1), tid());
    next_keys.fetch(head_keys, tile, tid(), first_of(2));
    ark_sync();
  }
  // These pass a block from registers to shared memory and load the one that is as many blocks
  // later as the constants say. whole: true if all keys of the loaded block exist.
  constexpr int VALUES_AHEAD = U::BUFFERS, KEYS_AHEAD = U::AHEAD ? 3 : 2;
  constexpr bool WHOLE = U::KEPT && U::WIDTH % 32 == 0 && ArkAttentionHead<S, K>::EVEN &&
                         ArkAttentionHead<S, V>::EVEN && next_keys.TOTAL % ARK_THREADS == 0 &&
                         next_values.TOTAL % ARK_THREADS == 0;
  ark_u64 keys_at = 0, values_at = 0;
  const auto turn_values = [&](int n, int even, bool whole) __attribute__((always_inline)) {
    next_values.place(shared + buffer(even + U::BUFFERS - 1), tid());
    if constexpr (WHOLE) {
      if (whole) {
        asm volatile("" : "+s"(values_at));  // keeps it in scalar registers
        next_values.fetch_whole(values_at, head_values.step);
        values_at += U::ALL * head_values.step;
        return;
      }
    }
    next_values.fetch(head_values, tile, tid(), first_of(n + VALUES_AHEAD));
  };
  const auto turn_keys = [&](int n, int even, bool whole) __attribute__((always_inline)) {
    next_keys.place(shared + buffer(even), tid());
    if constexpr (WHOLE) {
      if (whole) {
        asm volatile("" : "+s"(keys_at));
        next_keys.fetch_whole(keys_at);
        keys_at += U::ALL * head_keys.step;
        return;
      }
    }
    next_keys.fetch(head_keys, tile, tid(), first_of(n + KEYS_AHEAD));
  };
  // Before block n's values are multiplied: rescales the sums for its exponentials.
  const auto rescale = [&]() __attribute__((always_inline)) {
    if (!ark_warp_all(keep == 1.0f)) ark_attention_scale(sums, keep);
  };
  if constexpr (!U::SPREAD) {
    const auto step = [&](int n, bool more) __attribute__((always_inline)) {
      turn_values(n, 0, false);
      if (works) {
        if (!U::AHEAD) alone(Scores{s, own_keys, query});
        finish(s, n);
        most = largest(ark_attention_most<U>(s, s[0][0], 1, SCORES));
        keep = ark_attention_raise<U>(most, sums, factor);
        if (U::AHEAD && more) alone(Scores{ahead, own_keys, query});
        weigh(s, 0, BESIDE);
      }
      ark_sync();
      turn_keys(n, 0, false);
      if (works) {
        rescale();
        weigh(s, BESIDE, PAIRS);
        alone(Added{sums, p.operand, own_values, last});
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
    return;
  }
  if (!works) {  // it only copies keys and values
#pragma unroll 1
    for (int n = 0; n < count; ++n) {
      turn_values(n, n, false);
      if (U::BUFFERS == 1) ark_sync();
      turn_keys(n, n, false);
      ark_sync();
    }
    return;
  }
  // The vector instructions of block n are spread over the products of the next block's scores and
  // over those of block n's values. PART: the number of pairs of exponentials of the first of
  // these.
  constexpr int PART = PAIRS * 5 / 8;
  const auto beside_scores = [&](const Scored& now, auto number) __attribute__((always_inline)) {
    constexpr int i = decltype(number)::value, PRODUCTS = Scores::COUNT;
    if constexpr (i == 0) keep = ark_attention_raise<U>(most, sums, factor);
    weigh(now, PART * i / PRODUCTS, PART * (i + 1) / PRODUCTS);
  };
  // The number of pairs that are computed before product i of the values.
  const auto due = [](int i) {
    constexpr int PRODUCTS = Added::COUNT;
    const int least = i < PRODUCTS ? 4 * (i / U::BLOCKS + 1) : PAIRS;
    const int even = PART + (PAIRS - PART) * i * 4 / (PRODUCTS * 3);
    return least > even ? least : even < PAIRS ? even : PAIRS;
  };
  // One round of the loop, for block n of keys. even: n modulo 2. `now` has the scores of block n;
  // `then` gets those of block n + 1, whose keys are in shared memory. With two buffers, shared
  // memory also has the values of block n, so that the round has one barrier, at its end.
  const auto step = [&](int n, int even, bool whole, Scored& now,
                        Scored& then) __attribute__((always_inline)) {
    const Scores scores{then, own_keys + buffer(even + 1), query};
    const Added added{sums, p.operand, own_values + buffer(even), last + buffer(even)};
    const auto between = [&]() __attribute__((always_inline)) {
      rescale();
      finish(then, n + 1);
      weigh(now, PART, due(0));
    };
    const auto beside_added = [&](auto number) __attribute__((always_inline)) {
      constexpr int i = decltype(number)::value, PRODUCTS = Added::COUNT;
      weigh(now, due(i), due(i + 1));
      if constexpr (i == 0) most = then[0][0];
      most = ark_attention_most<U>(then, most, SCORES * i / PRODUCTS, SCORES * (i + 1) / PRODUCTS);
    };
    if constexpr (U::BUFFERS == 2) {
      const auto beside = [&](auto number) __attribute__((always_inline)) {
        constexpr int i = decltype(number)::value;
        if constexpr (i >= Scores::COUNT) {
          beside_added(ArkNumber<i - Scores::COUNT>());
        } else {
          beside_scores(now, number);
        }
        if constexpr (i == 1) turn_values(n, even, whole);
        if constexpr (i == Scores::COUNT - 1) {
          between();
          turn_keys(n, even, whole);
        }
      };
      const ArkAttentionBoth<Scores, Added> both{scores, added};
      ark_attention_each_part<U::FEW, false>(both, beside);
    } else {
      turn_values(n, even, whole);
      ark_attention_each_part<U::FEW, false>(
          scores, [&](auto i) __attribute__((always_inline)) { beside_scores(now, i); });
      ark_sync();
      turn_keys(n, even, whole);
      between();
      ark_attention_each_part<U::FEW, false>(added, beside_added);
    }
    most = largest(most);
    ark_sync();
  };
  // The round of the last block.
  const auto last_step = [&](int n, Scored& now) __attribute__((always_inline)) {
    if (U::BUFFERS == 1) turn_values(n, 0, false);
    keep = ark_attention_raise<U>(most, sums, factor);
    rescale();
    if (U::BUFFERS == 1) ark_sync();
    const auto due = [](int i) {
      return 4 + 4 * i / U::BLOCKS < PAIRS ? 4 + 4 * i / U::BLOCKS : PAIRS;
    };
    weigh(now, 0, due(0));
    ark_attention_each_part<U::FEW, false>(
        Added{sums, p.operand, own_values + buffer(n), last + buffer(n)},
        [&](auto number) __attribute__((always_inline)) {
          constexpr int i = decltype(number)::value;
          weigh(now, due(i), due(i + 1));
        });
    ark_sync();
  };
  int n = 0;
  if constexpr (WHOLE) {
    next_keys.begin_whole(head_keys, tid());
    next_values.begin_whole(head_values, tid());
    keys_at = ark_uniform(head_keys.at(first_of(KEYS_AHEAD)));
    values_at = ark_uniform(head_values.at(first_of(VALUES_AHEAD)));
    const int all = (tile.end - tile.begin) / U::ALL - KEYS_AHEAD;  // they load whole blocks
#pragma unroll 1
    for (; n + 1 < all; n += 2) {  // the registers of both blocks' scores take turns
      step(n, 0, true, s, ahead);
      step(n + 1, 1, true, ahead, s);
    }
  }
#pragma unroll 1
  for (; n + 1 < count; ++n) {
    step(n, n % 2, false, s, ahead);
#pragma unroll
    for (int b = 0; b < U::OWN; ++b) s[b] = ahead[b];
  }
  last_step(n, s);
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
