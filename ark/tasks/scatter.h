// Updates of a tensor at given indices. scatter.py describes operands and tasks.

// The number of bits of x that are 1.
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

// The updates that a task must apply are searched in rounds: in a round all threads together
// examine the indices of ark_round_updates of the N updates, ark_looks per thread. This struct has
// the updates that were found in a round: at[i] is the number of an update, to[i] the index that it
// updates.
constexpr int ark_looks = 4, ark_round_updates = ark_looks * ARK_THREADS;
struct ArkUpdates {
  const int* at;
  const int* to;
  int count;
};

// Like ark_each_update, by all threads of the block. Calls each(updates) with the updates that each
// round has found, in order. found: shared memory for 2 ark_round_updates + ark_looks ARK_WARPS
// integers.
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

// Applies U updates of one line, in order. All their loads are in flight at once. Update number
// n[u] is joined with the element at index k[u]. If k[u] is negative, update u is skipped; k[0] is
// never negative. more(n): the value of update n. now(k): the element at index k. store(k, v):
// stores the joined value.
template <typename T, int U, class More, class Now, class Join, class Store>
ARK_DEVICE void ark_apply_few(const int (&k)[U], const int (&n)[U], const More& more,
                              const Now& now, const Join& join, const Store& store) {
  T x[U], made[U];
#pragma unroll
  for (int u = 0; u < U; ++u) {
    x[u] = more(n[u]);
    made[u] = now(k[u] < 0 ? k[0] : k[u]);
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

// Applies the updates that a round has found to one line (all elements along the axis).
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
// its own index.
template <typename T, int N, int SIZE, class Id, class More, class Now, class Join, class Store>
ARK_DEVICE void ark_apply_line(ArkCtx& c, const Id& id, const More& more, const Now& now,
                               const Join& join, const Store& store) {
  constexpr int U = N < 16 ? N : 16;
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
      k[u] = there ? static_cast<int>(ark_looked_up(c, ahead[u], SIZE)) : -1;
    }
    if (first + U < N) fetch(first + U);
    ark_apply_few<T>(k, n, more, now, join, store);
  }
}

// Applies the updates that a round has found to all lines of a tile. Updates are divided among
// warps by their index k: warp k % ARK_WARPS applies them, to all lines of the tile. more, now and
// store are those of ark_apply_few, with the element's four indices i in the tile as a further
// argument. listed: shared memory for ark_round_updates + ARK_WARPS integers.
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
    T x[U][C] = {}, made[U][C] = {};
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
