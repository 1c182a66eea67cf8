// Updates of a tensor at given indices. scatter.py describes operands and tasks.

// Bits of x that are 1.
ARK_DEVICE int ark_ones(ark_u64 x) {
  x -= x >> 1 & 0x5555555555555555ull;
  x = (x & 0x3333333333333333ull) + (x >> 2 & 0x3333333333333333ull);
  return static_cast<int>(((x + (x >> 4)) & 0x0f0f0f0f0f0f0f0full) * 0x0101010101010101ull >> 56);
}

// Calls body(n, k), in order of n, for each of N updates whose index k = id(n) is from first to
// last - 1. SIZE: the number of valid indices.
template <int N, int SIZE, class Id, class Body>
ARK_DEVICE void ark_each_update(ArkCtx& c, int first, int last, const Id& id, const Body& body) {
  for (int n = 0; n < N; ++n) {
    const int k = ark_looked_up(c, id(n), SIZE);
    if (k >= first && k < last) body(n, k);
  }
}

// A round in which all threads look at ark_round_updates of the N updates, ark_looks per thread,
// and the updates that it finds: at[i] is the number of an update, to[i] its index.
constexpr int ark_looks = 4, ark_round_updates = ark_looks * ARK_THREADS;
struct ArkUpdates {
  const int* at;
  const int* to;
  int count;
};

// ark_each_update by all threads: calls each(updates) with the updates that each round has found,
// in order. found: shared memory for 2 ark_round_updates + ark_looks ARK_WARPS integers.
template <int N, int SIZE, class Id, class Each>
ARK_DEVICE void ark_each_update_found(ArkCtx& c, int first, int last, const Id& id, char* found,
                                      const Each& each) {
  int* at = reinterpret_cast<int*>(found);
  int* to = at + ark_round_updates;
  int* counts = to + ark_round_updates;
  for (int begin = 0; begin < N; begin += ark_round_updates) {
    int place[ark_looks], before[ark_looks];
    decltype(id(0)) ids[ark_looks];  // all are loaded before the first one is checked
#pragma unroll
    for (int u = 0; u < ark_looks; ++u) {
      const int n = begin + u * ARK_THREADS + ark_tid();
      ids[u] = id(n < N ? n : N - 1);
    }
#pragma unroll
    for (int u = 0; u < ark_looks; ++u) {
      const int k = ark_looked_up(c, ids[u], SIZE);
      const bool own = begin + u * ARK_THREADS + ark_tid() < N && k >= first && k < last;
      place[u] = own ? k : -1;
    }
    ark_sync();
#pragma unroll
    for (int u = 0; u < ark_looks; ++u) {
      const ark_u64 all = ark_ballot(place[u] >= 0);
      before[u] = ark_ones(all & ((1ull << ark_lane()) - 1));
      if (ark_lane() == 0) counts[u * ARK_WARPS + ark_warp()] = ark_ones(all);
    }
    ark_sync();
    int total = 0;
    for (int w = 0; w < ark_looks * ARK_WARPS; ++w) {
      if (w % ARK_WARPS == ark_warp()) {
        const int u = w / ARK_WARPS, n = begin + u * ARK_THREADS + ark_tid();
#pragma unroll
        for (int v = 0; v < ark_looks; ++v) {
          if (v != u || place[v] < 0) continue;
          at[total + before[v]] = n;
          to[total + before[v]] = place[v];
        }
      }
      total += counts[w];
    }
    ark_sync();
    each(ArkUpdates{at, to, total});
  }
}

// Applies U updates of one line, in order; all their loads are in flight at once. Update n[u] is
// joined with the element at index k[u], unless k[u] is negative; k[0] is not. more(n): the value
// of update n. now(k): the element at index k. store(k, v): stores join(now(k), more(n)).
template <typename T, int U, class More, class Now, class Join, class Store>
ARK_DEVICE void ark_apply_few(const int (&k)[U], const int (&n)[U], const More& more,
                              const Now& now, const Join& join, const Store& store) {
  T x[U], made[U];
#pragma unroll
  for (int u = 0; u < U; ++u) {
    x[u] = made[u] = T();
    if (k[u] >= 0) x[u] = more(n[u]), made[u] = now(k[u]);
  }
#pragma unroll
  for (int u = 0; u < U; ++u) {
    T old = made[u];
#pragma unroll
    for (int w = 0; w < u; ++w) old = k[w] == k[u] ? made[w] : old;
    made[u] = join(old, x[u]);
  }
#pragma unroll
  for (int u = 0; u < U; ++u) {
    if (k[u] >= 0) store(k[u], made[u]);
  }
}

// Applies the updates that a round has found to one line.
template <typename T, class More, class Now, class Join, class Store>
ARK_DEVICE void ark_apply_updates(const ArkUpdates& updates, const More& more, const Now& now,
                                  const Join& join, const Store& store) {
  constexpr int U = 4;
  for (int i = 0; i < updates.count; i += U) {
    int k[U], n[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int j = i + u < updates.count ? i + u : i;
      k[u] = i + u < updates.count ? updates.to[j] : -1;
      n[u] = updates.at[j];
    }
    ark_apply_few<T>(k, n, more, now, join, store);
  }
}

// Applies all N updates of one line of SIZE elements, which one thread processes. Each update has
// its own index. With CLASSES > 1, so many threads share the line: this one applies the updates of
// the indices k for which k % CLASSES is `own`.
template <typename T, int N, int SIZE, int CLASSES, class Id, class More, class Now, class Join,
          class Store>
ARK_DEVICE void ark_apply_line(ArkCtx& c, int own, const Id& id, const More& more, const Now& now,
                               const Join& join, const Store& store) {
  constexpr int MOST = CLASSES > 1 ? 12 : 16, U = N < MOST ? N : MOST;  // registers
  decltype(id(0)) ahead[U];
  const auto fetch = [&](int first) {
#pragma unroll
    for (int u = 0; u < U; ++u) ahead[u] = id(first + u < N ? first + u : N - 1);
  };
  fetch(0);
  for (int first = 0; first < N; first += U) {
    int k[U], n[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const bool there = first + u < N;
      n[u] = there ? first + u : N - 1;
      const int at = static_cast<int>(ark_looked_up(c, ahead[u], SIZE));
      k[u] = there && (CLASSES == 1 || at % CLASSES == own) ? at : -1;
    }
    if (first + U < N) fetch(first + U);
    ark_apply_few<T>(k, n, more, now, join, store);
  }
}

// ark_apply_line for every line of a tile, by all threads: calls body(own, i0, i1, i2, i3) with the
// classes of indices and the lines that this thread has. If there are fewer lines than threads,
// several warps share them, so CLASSES is more than 1.
template <class TILE, class Body>
ARK_DEVICE void ark_each_shared_line(const ark_i32* coord, const Body& body) {
  constexpr int total = TILE::tile[0] * TILE::tile[1] * TILE::tile[2] * TILE::tile[3];
  constexpr int wide = (total + ARK_LANES - 1) / ARK_LANES;
  const int r = ark_warp() % wide * ARK_LANES + ark_lane(), own = ark_warp() / wide;
  int i0, i1, i2, i3;
  const bool inside = ark_tile_place<TILE, 1>(coord, r, i0, i1, i2, i3);
  if (inside && r < total && own < ARK_WARPS / wide) body(own, i0, i1, i2, i3);
}

// Applies the updates that a round has found to neighbouring lines, which form the tile TILE. A
// warp applies the updates of those indices k for which k % ARK_WARPS is its number, to all
// elements of the tile at once. more(n, i), now(k, i) and store(k, v, i) also have the four indices
// in the tile. listed: shared memory for ark_round_updates + ARK_WARPS integers.
template <typename T, class TILE, class More, class Now, class Join, class Store>
ARK_DEVICE void ark_apply_updates_by_place(const ark_i32* coord, const ArkUpdates& updates,
                                           char* listed, const More& more, const Now& now,
                                           const Join& join, const Store& store) {
  constexpr int total = TILE::tile[0] * TILE::tile[1] * TILE::tile[2] * TILE::tile[3];
  constexpr int C = (total + ARK_LANES - 1) / ARK_LANES, U = 4;
  int* mine = reinterpret_cast<int*>(listed);
  int* counts = mine + ark_round_updates;
  const auto each_own = [&](const auto& body) {
    int found = 0;
    for (int begin = 0; begin < updates.count; begin += ARK_LANES) {
      const int j = begin + ark_lane();
      const bool own = j < updates.count && updates.to[j] % ARK_WARPS == ark_warp();
      const ark_u64 all = ark_ballot(own);
      if (own) body(found + ark_ones(all & ((1ull << ark_lane()) - 1)), j);
      found += ark_ones(all);
    }
    return found;
  };
  const int count = each_own([](int, int) {});
  if (ark_lane() == 0) counts[ark_warp()] = count;
  ark_sync();
  for (int w = 0; w < ark_warp(); ++w) mine += counts[w];
  each_own([&](int n, int j) { mine[n] = j; });
  ark_sync();
  int at[C][4];
  bool inside[C];
#pragma unroll
  for (int e = 0; e < C; ++e) {
    const int r = e * ARK_LANES + ark_lane();
    inside[e] = ark_tile_place<TILE, 1>(coord, r, at[e][0], at[e][1], at[e][2], at[e][3]);
    inside[e] = r < total && inside[e];
  }
  for (int i = 0; i < count; i += U) {
    T x[U][C], made[U][C];
    int k[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int j = mine[i + u < count ? i + u : i];
      k[u] = updates.to[j];
#pragma unroll
      for (int e = 0; e < C; ++e) {
        if (inside[e]) x[u][e] = more(updates.at[j], at[e][0], at[e][1], at[e][2], at[e][3]);
        if (inside[e]) made[u][e] = now(k[u], at[e][0], at[e][1], at[e][2], at[e][3]);
      }
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (i + u >= count) break;
#pragma unroll
      for (int e = 0; e < C; ++e) {
        if (!inside[e]) continue;
        T old = made[u][e];
#pragma unroll
        for (int w = 0; w < u; ++w) old = k[w] == k[u] ? made[w][e] : old;
        made[u][e] = join(old, x[u][e]);
        store(k[u], made[u][e], at[e][0], at[e][1], at[e][2], at[e][3]);
      }
    }
  }
}

// The number of lanes before this one that have the same index. Indices are below 2^BITS.
#if !defined(ARK_HAS_SAME_BEFORE)
template <int BITS>
ARK_DEVICE int ark_same_before(ark_u32 place) {
  ark_u64 same = ~0ull;
#pragma unroll
  for (int bit = 0; bit < BITS; ++bit) {
    const bool mine = (place >> bit & 1u) != 0u;
    const ark_u64 all = ark_ballot(mine);
    same &= mine ? all : ~all;
  }
  return ark_ones(same & ((1ull << ark_lane()) - 1));
}
#endif
constexpr int ark_bits(int n) { return n <= 1 ? 0 : 1 + ark_bits(n / 2); }

// Copies a line of SIZE contiguous elements by one warp, in packs of V. PAST: true if the source is
// device memory that no other task reads.
template <int SIZE, int V, bool PAST, typename T, typename F>
ARK_DEVICE void ark_move_line(T* to, const F* from) {
  constexpr int U = 8, step = ARK_LANES * V;
  for (int first = ark_lane() * V; first < SIZE; first += U * step) {
    decltype(ark_held<V>(from)) some[U] = {};
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int k = first + u * step;
      if (k >= SIZE) continue;
      if constexpr (PAST) {
        ark_hold_past(some[u], from + k);
      } else {
        ark_hold(some[u], from + k);
      }
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int k = first + u * step;
      if (k < SIZE) ark_store_held(some[u], to + k);
    }
  }
}

// Applies N updates to one line of SIZE elements by one warp, with one update per lane. Updates of
// the same index are applied in order. id(n), more(n): the index and value of update n. update(k,
// v): joins v with the element at index k. meanwhile(): called while the first updates are being
// loaded.
template <int N, int SIZE, typename T, class Id, class More, class Meanwhile, class Update>
ARK_DEVICE void ark_update_line(ArkCtx& c, const Id& id, const More& more,
                                const Meanwhile& meanwhile, const Update& update) {
  constexpr int U = N > 4 * ARK_LANES ? 8 : 4, step = U * ARK_LANES;
  decltype(id(0)) at[U];
  T news[U];
  const auto fetch = [&](int first) {
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int n = first + u * ARK_LANES + ark_lane(), one = n < N ? n : N - 1;
      at[u] = id(one);
      news[u] = more(one);
    }
  };
  fetch(0);
  meanwhile();
  for (int first = 0; first < N; first += step) {
    int place[U];
    T value[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const bool there = first + u * ARK_LANES + ark_lane() < N;
      place[u] = there ? ark_looked_up(c, at[u], SIZE) : -1;
      value[u] = news[u];
    }
    if (first + step < N) fetch(first + step);
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (first + u * ARK_LANES >= N) break;
      const bool there = place[u] >= 0;
      const int before = ark_same_before<ark_bits(SIZE - 1)>(there ? place[u] : 0u);
      const int mine = there ? before : -1;
      for (int turn = 0; turn == 0 || ark_ballot(mine >= turn) != 0u; ++turn) {
        if (mine == turn) update(place[u], value[u]);
        ark_warp_sync();
      }
    }
  }
}

// Processes lines along the last dimension, each with N updates of its own, by one warp per line.
// ids, news, from and to(i0, i1, i2): the addresses of the line's first index, first update, first
// element before, and first result. IS, MS, STRIDE: the distances between indices, updates and
// results. COPIED: the line is copied first, in packs of V; to the warp's part of shared memory if
// there is room for ROOMS lines (ROOMS > 0). value(p, n): update n. update(line, k, v): joins v
// with the element at index k.
template <class TILE, int N, int SIZE, ark_i64 IS, ark_i64 MS, ark_i64 STRIDE, bool COPIED, int V,
          int ROOMS, typename T, class Ids, class News, class From, class To, class Value,
          class Update>
ARK_DEVICE void ark_scatter_lines(ArkCtx& c, const ArkTask& t, const Ids& ids, const News& news,
                                  const From& from, const To& to, const Value& value,
                                  const Update& update, ark_u64 addresses) {
  constexpr int lines = TILE::tile[0] * TILE::tile[1] * TILE::tile[2];
  constexpr int teams = ROOMS > 0 ? ROOMS : ARK_WARPS;
  if (ark_warp() >= teams) return;
  for (int r = ark_warp(); r < lines; r += teams) {
    int i0, i1, i2, i3;
    if (!ark_tile_place<TILE, 1>(t.coord, r, i0, i1, i2, i3)) continue;
    const auto* at = ids(i0, i1, i2);
    const auto* more = news(i0, i1, i2);
    const auto* source = from(i0, i1, i2);
    auto* result = to(i0, i1, i2);
    const auto place = [&](int n) { return at[n * IS]; };
    const auto update_of = [&](int n) -> T { return value(more, n * MS); };
    if constexpr (ARK_THREADS == 1) {
      if (COPIED) ark_vector_loop(0, SIZE, [&](int k) { result[k] = source[k]; });
      for (int n = 0; n < N; ++n) {
        const ark_i64 k = ark_looked_up(c, place(n), SIZE);
        update(result, k * STRIDE, update_of(n));
      }
    } else {
      constexpr ark_i64 BYTES = (SIZE * static_cast<ark_i64>(sizeof(*result)) + 15) / 16 * 16;
      auto* line = ROOMS > 0
                       ? reinterpret_cast<decltype(result)>(ARK_SCRATCH(c) + ark_warp() * BYTES)
                       : result;
      const bool packs = V == 1 || ark_aligned(addresses);
      const auto copy = [&] {
        if (COPIED && packs) ark_move_line<SIZE, V, true>(line, source);
        if (COPIED && !packs) ark_move_line<SIZE, 1, true>(line, source);
        if (COPIED) ark_warp_sync();
      };
      ark_update_line<N, SIZE, T>(c, place, update_of, copy,
                                  [&](int k, T v) { update(line, k * STRIDE, v); });
      if (ROOMS > 0 && packs) ark_move_line<SIZE, V, false>(result, line);
      if (ROOMS > 0 && !packs) ark_move_line<SIZE, 1, false>(result, line);
      if (ROOMS > 0) ark_warp_sync();
    }
  }
}
