// What threads do along a line of a tensor: one alone, or all together.

// Bits of x that are 1.
ARK_DEVICE int ark_ones(ark_u64 x) {
  x -= x >> 1 & 0x5555555555555555ull;
  x = (x & 0x3333333333333333ull) + (x >> 2 & 0x3333333333333333ull);
  return static_cast<int>(((x + (x >> 4)) & 0x0f0f0f0f0f0f0f0full) * 0x0101010101010101ull >> 56);
}

// The running joins of N elements from `start` on: store(k, total) with element k, or before it.
template <int N, bool REVERSE, bool EXCLUSIVE, typename T, class Load, class Join, class Store>
ARK_DEVICE void ark_scan_line(T start, const Load& load, const Join& join, const Store& store) {
  T total = start;
  for (int n = 0; n < N; ++n) {
    const int k = REVERSE ? N - 1 - n : n;
    const T x = load(k);
    if (EXCLUSIVE) store(k, total);
    total = join(total, x);
    if (!EXCLUSIVE) store(k, total);
  }
}

// body(inside, i0, i1, i2, i3) for the lines of a tile, by TEAM warps each: one line, or LINES
// neighbours in the last dimension, a lane each.
template <class TILE, int LINES, int TEAM, class Body>
ARK_DEVICE void ark_each_line(const ark_i32* coord, const Body& body) {
  constexpr int t1 = TILE::tile[1], t2 = TILE::tile[2];
  constexpr int wide = (TILE::tile[3] + LINES - 1) / LINES, total = TILE::tile[0] * t1 * t2 * wide;
  const int e0 = ark_tile_end<TILE, 0>(coord), e1 = ark_tile_end<TILE, 1>(coord);
  const int e2 = ark_tile_end<TILE, 2>(coord), e3 = ark_tile_end<TILE, 3>(coord);
  const int lane = LINES > 1 ? ark_lane() : 0;
  for (int r = TEAM == 1 ? ark_warp() : 0; r < total; r += TEAM == 1 ? ARK_WARPS : 1) {
    const int i3 = coord[3] + r % wide * LINES + lane, i2 = coord[2] + r / wide % t2;
    const int i1 = coord[1] + r / (wide * t2) % t1, i0 = coord[0] + r / (wide * t2 * t1);
    body(i0 < e0 && i1 < e1 && i2 < e2 && i3 < e3, i0, i1, i2, i3);
  }
}

// The same running joins by TEAM warps: lanes have neighbours of one line (ALONG), or a line each.
// A thread has U elements, the next ones on their way; totals of threads before it come by
// shuffles and through `red`, 2 TEAM ARK_LANES totals of shared memory. The form follows from the
// shape alone. start joined with anything changes nothing.
template <int N, bool REVERSE, bool EXCLUSIVE, bool ALONG, int TEAM, int U, typename T, class Load,
          class Join, class Store>
ARK_DEVICE void ark_scan_pieces(T start, bool inside, const Load& load, const Join& join,
                                const Store& store, char* red, int& parity) {
  constexpr int step = ALONG ? ARK_LANES : 1, piece = TEAM * U * step;
  const int warp = TEAM == 1 ? 0 : ark_warp();
  const int mine = warp * U * step + (ALONG ? ark_lane() : 0);
  T* sums = reinterpret_cast<T*>(red);
  T ahead[U];
  const auto fetch = [&](int first) {
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int n = first + mine + u * step;
      ahead[u] = inside && n < N ? T(load(REVERSE ? N - 1 - n : n)) : start;
    }
  };
  T carried = start;
  fetch(0);
  for (int first = 0; first < N; first += piece) {
    T x[U], before[U], total = start;
#pragma unroll
    for (int u = 0; u < U; ++u) x[u] = ahead[u];
    if (first + piece < N) fetch(first + piece);
#pragma unroll
    for (int u = 0; u < U; ++u) {
      T own = start, all = x[u];
      if (ALONG) {
#pragma unroll
        for (int mask = 1; mask < ARK_LANES; mask <<= 1) {
          const T other = ark_shfl_bits(all, mask);
          const bool later = (ark_lane() & mask) != 0;
          own = later ? join(other, own) : own;
          all = later ? join(other, all) : join(all, other);
        }
      }
      before[u] = join(total, own);
      total = join(total, all);
    }
    T base = carried;
    if (TEAM > 1) {
      T* totals = sums + parity * TEAM * ARK_LANES + ark_lane();
      parity ^= 1;
      totals[warp * ARK_LANES] = total;
      ark_sync();
#pragma unroll
      for (int w = 0; w < TEAM; ++w) {
        base = w == warp ? carried : base;
        carried = join(carried, totals[w * ARK_LANES]);
      }
    } else {
      carried = join(carried, total);
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int n = first + mine + u * step;
      const T sum = join(base, before[u]);
      if (inside && n < N) store(REVERSE ? N - 1 - n : n, EXCLUSIVE ? sum : join(sum, x[u]));
    }
  }
}

// body(n, k) for those of N updates, in order, whose place k = id(n) of SIZE is in first..last - 1.
template <int N, int SIZE, class Id, class Body>
ARK_DEVICE void ark_each_update(ArkCtx& c, int first, int last, const Id& id, const Body& body) {
  for (int n = 0; n < N; ++n) {
    const int k = ark_looked_up(c, id(n), SIZE);
    if (k >= first && k < last) body(n, k);
  }
}

// How many of N updates a round of all threads looks at, and the updates found: at[i] is the number
// of one, to[i] its place.
constexpr int ark_looks = 4, ark_round_updates = ark_looks * ARK_THREADS;
struct ArkUpdates {
  const int* at;
  const int* to;
  int count;
};

// The same by all threads: each(updates) for the updates that a round found, in order.
// found: 2 ark_round_updates + ark_looks ARK_WARPS numbers.
template <int N, int SIZE, class Id, class Each>
ARK_DEVICE void ark_each_update_found(ArkCtx& c, int first, int last, const Id& id, char* found,
                                      const Each& each) {
  int* at = reinterpret_cast<int*>(found);
  int* to = at + ark_round_updates;
  int* counts = to + ark_round_updates;
  for (int begin = 0; begin < N; begin += ark_round_updates) {
    int place[ark_looks], before[ark_looks];
#pragma unroll
    for (int u = 0; u < ark_looks; ++u) {
      const int n = begin + u * ARK_THREADS + ark_tid();
      const int k = n < N ? ark_looked_up(c, id(n), SIZE) : -1;
      place[u] = k >= first && k < last ? k : -1;
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

// Updates of one line, in order, a few under way at once: more(n) is the n-th, now(k) what is at
// place k, join(now, more) what store(k, v) puts there.
template <typename T, class More, class Now, class Join, class Store>
ARK_DEVICE void ark_apply_updates(const ArkUpdates& updates, const More& more, const Now& now,
                                  const Join& join, const Store& store) {
  constexpr int U = 4;
  for (int i = 0; i < updates.count; i += U) {
    T x[U], made[U];
    int k[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int j = i + u < updates.count ? i + u : i;
      k[u] = i + u < updates.count ? updates.to[j] : -1;
      x[u] = more(updates.at[j]);
      made[u] = now(updates.to[j]);
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
}

// The same of lines that lie side by side, the tile TILE of them, by warps: each applies the
// updates of its own places, k with k % ARK_WARPS its number, and has all elements of the tile
// under way. more(n, i), now(k, i) and store(k, v, i) take four indices of the tile too. listed:
// ark_round_updates + ARK_WARPS numbers.
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

// body(x) for each of SIZE places of a window, DILATION apart, that lies in the N elements; the
// window of result i begins BEFORE elements before element i * STRIDE.
template <int SIZE, int STRIDE, int DILATION, int BEFORE, int N, class Body>
ARK_DEVICE void ark_each_in_window(int i, const Body& body) {
  for (int w = 0; w < SIZE; ++w) {
    const int x = i * STRIDE - BEFORE + w * DILATION;
    if (x >= 0 && x < N) body(x);
  }
}
