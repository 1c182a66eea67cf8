// Updates of whole lines, each by one warp. scatter.py describes operands and tasks.

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

// Applies N updates to each line of a tile, by all threads. In each round, all threads load ROUND
// updates of every line, in memory order, into shared memory. A warp then applies the updates of
// its own lines, with one update per lane. Updates of the same index are applied in order. id(n,
// i), more(n, i): the index and value of update n of the line whose four indices are i. now(k, i),
// store(k, v, i): read and write the element at index k. staged: shared memory for (ROUND + 1)
// integers and values per line.
template <typename T, class TILE, int N, int SIZE, int ROUND, class Id, class More, class Now,
          class Join, class Store>
ARK_DEVICE void ark_apply_lines(ArkCtx& c, const ark_i32* coord, char* staged, const Id& id,
                                const More& more, const Now& now, const Join& join,
                                const Store& store) {
  constexpr int lines = TILE::tile[0] * TILE::tile[1] * TILE::tile[2] * TILE::tile[3];
  constexpr int LINE_PITCH = ROUND + 1;  // lines begin in different banks
  constexpr int E = (ROUND * lines + ARK_THREADS - 1) / ARK_THREADS;
  constexpr int C = (lines + ARK_WARPS - 1) / ARK_WARPS;
  T* values = reinterpret_cast<T*>(staged);
  int* places = reinterpret_cast<int*>(staged + (lines * LINE_PITCH * sizeof(T) + 3) / 4 * 4);
  decltype(id(0, 0, 0, 0, 0)) ids[E] = {};
  T news[E] = {};
  // Calls body(e, n, line, i) for each update that this thread loads in the round that begins with
  // update `first`: its number e among the thread's loads, number n in the line, the line, and the
  // line's indices i.
  const auto each_loaded = [&](int first, const auto& body) {
#pragma unroll
    for (int e = 0; e < E; ++e) {
      const ark_u32 at = static_cast<ark_u32>(e * ARK_THREADS + ark_tid());
      const int line = static_cast<int>(at % lines), n = static_cast<int>(at / lines);
      int i0, i1, i2, i3;
      const bool inside = ark_tile_place<TILE, 1>(coord, line, i0, i1, i2, i3);
      if (n < ROUND) body(e, n, line, inside && first + n < N, i0, i1, i2, i3);
    }
  };
  const auto fetch = [&](int first) {
    each_loaded(first, [&](int e, int n, int, bool there, int i0, int i1, int i2, int i3) {
      if (!there) return;
      ids[e] = id(first + n, i0, i1, i2, i3);
      news[e] = more(first + n, i0, i1, i2, i3);
    });
  };
  int at[C][4];
  bool inside[C];
#pragma unroll
  for (int e = 0; e < C; ++e) {
    const int line = e * ARK_WARPS + ark_warp();
    inside[e] = ark_tile_place<TILE, 1>(coord, line, at[e][0], at[e][1], at[e][2], at[e][3]);
    inside[e] = line < lines && inside[e];
  }
  fetch(0);
  for (int first = 0; first < N; first += ROUND) {
    ark_sync();
    each_loaded(first, [&](int e, int n, int line, bool there, int, int, int, int) {
      places[line * LINE_PITCH + n] = there ? static_cast<int>(ark_looked_up(c, ids[e], SIZE)) : -1;
      if (there) values[line * LINE_PITCH + n] = news[e];
    });
    ark_sync();
    if (first + ROUND < N) fetch(first + ROUND);
    for (int n = ark_lane(); n - ark_lane() < ROUND; n += ARK_LANES) {
      int place[C], turn[C];
      T value[C] = {};
#pragma unroll
      for (int e = 0; e < C; ++e) {
        const int from = (e * ARK_WARPS + ark_warp()) * LINE_PITCH + n;
        place[e] = inside[e] && n < ROUND ? places[from] : -1;
        if (place[e] >= 0) value[e] = values[from];
      }
#pragma unroll
      for (int e = 0; e < C; ++e) {
        const int before = ark_same_before<ark_bits(SIZE - 1)>(place[e] >= 0 ? place[e] : 0u);
        turn[e] = place[e] >= 0 ? before : -1;
      }
      bool rest = true;
      for (int now_on = 0; rest; ++now_on) {
        T old[C] = {};
#pragma unroll
        for (int e = 0; e < C; ++e) {
          if (turn[e] == now_on) old[e] = now(place[e], at[e][0], at[e][1], at[e][2], at[e][3]);
        }
        rest = false;
#pragma unroll
        for (int e = 0; e < C; ++e) {
          const auto store_here = [&](T v) {
            store(place[e], v, at[e][0], at[e][1], at[e][2], at[e][3]);
          };
          if (turn[e] == now_on) store_here(join(old[e], value[e]));
          rest |= turn[e] > now_on;
        }
        ark_warp_sync();
        rest = ark_ballot(rest) != 0u;
      }
    }
  }
}

// Copies a line of SIZE contiguous elements by one warp, in packs of V. PAST: true if no other task
// reads the source, so that it need not be cached.
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
// v): joins v with the element at index k. meanwhile(): work that is done while the first updates
// are being loaded.
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
