// Operations along a line of a tensor (all elements along one axis), by one thread or by several.

// Scans N elements by one thread. Calls store(k, total) for each element k. The total is `start`
// joined with all elements up to and including k; with EXCLUSIVE, without element k. REVERSE: the
// scan runs from the last element to the first.
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

// Calls body(inside, i0, i1, i2, i3) for each line (all elements along one axis) of a tile; inside
// is false for a lane without a line. TEAM warps process a line together. With LINES > 1, a warp
// processes LINES lines that are neighbours in the last dimension, one per lane.
template <class TILE, int LINES, int TEAM, class Body>
ARK_DEVICE void ark_each_line(const ark_i32* coord, const Body& body) {
  constexpr int t1 = TILE::tile[1], t2 = TILE::tile[2], teams = ARK_WARPS / TEAM;
  constexpr int wide = (TILE::tile[3] + LINES - 1) / LINES, total = TILE::tile[0] * t1 * t2 * wide;
  const int e0 = ark_tile_end<TILE, 0>(coord), e1 = ark_tile_end<TILE, 1>(coord);
  const int e2 = ark_tile_end<TILE, 2>(coord), e3 = ark_tile_end<TILE, 3>(coord);
  const int lane = LINES > 1 ? ark_lane() : 0, team = teams == 1 ? 0 : ark_warp() / TEAM;
  if (team >= teams) return;
  for (int r = team; r < total; r += teams) {
    const int i3 = coord[3] + r % wide * LINES + lane, i2 = coord[2] + r / wide % t2;
    const int i1 = coord[1] + r / (wide * t2) % t1, i0 = coord[0] + r / (wide * t2 * t1);
    body(i0 < e0 && i1 < e1 && i2 < e2 && i3 < e3, i0, i1, i2, i3);
  }
}

// Scans a line of N elements (see ark_scan_line) by a team of TEAM warps. load(k, x) loads the pack
// (vector) of V elements at element k, and store(k, x) stores it. With ALONG, neighbouring lanes
// have neighbouring packs of one line. Otherwise each lane has a line of its own, and V is 1. A
// thread scans U packs while it loads the next U packs. Threads exchange their totals by shuffles
// and through `red` (shared memory for 2 * ARK_THREADS totals). The order of joins depends only on
// the shape.
//
// start: the neutral value; joining it changes nothing. first_total: the value that is joined
// before the line's first element. inside: false for a thread without a line. parity: the half of
// `red` that the next exchange uses, 0 or 1; successive exchanges use the halves alternately.
template <int N, bool REVERSE, bool EXCLUSIVE, bool ALONG, int TEAM, int U, int V, typename T,
          class Load, class Join, class Store>
ARK_DEVICE void ark_scan_pieces(T start, T first_total, bool inside, const Load& load,
                                const Join& join, const Store& store, char* red, int& parity) {
  constexpr int step = (ALONG ? ARK_LANES : 1) * V, piece = TEAM * U * step;
  const int warp = TEAM == 1 ? 0 : ark_warp() % TEAM;
  const int mine = warp * U * step + (ALONG ? ark_lane() * V : 0);
  T* sums = reinterpret_cast<T*>(red) + (ark_warp() - warp) * 2 * ARK_LANES;
  T ahead[U][V];
  const auto place = [](int n) { return REVERSE ? N - V - n : n; };
  const auto fetch = [&](int first) {
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int n = first + mine + u * step;
      if (inside && n < N) {
        load(place(n), ahead[u]);
      } else {
#pragma unroll
        for (int v = 0; v < V; ++v) ahead[u][v] = start;
      }
    }
  };
  T carried = first_total;
  fetch(0);
  for (int first = 0; first < N; first += piece) {
    T x[U][V], before[U], total = start;
#pragma unroll
    for (int u = 0; u < U; ++u) {
#pragma unroll
      for (int v = 0; v < V; ++v) x[u][v] = ahead[u][REVERSE ? V - 1 - v : v];
    }
    if (first + piece < N) fetch(first + piece);
#pragma unroll
    for (int u = 0; u < U; ++u) {
      T own = start, all = x[u][0];
#pragma unroll
      for (int v = 1; v < V; ++v) all = join(all, x[u][v]);
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
      ark_team_sync<TEAM>();
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
      T sum = join(base, before[u]), results[V];
#pragma unroll
      for (int v = 0; v < V; ++v) {
        T& result = results[REVERSE ? V - 1 - v : v];
        if (EXCLUSIVE) result = sum;
        sum = join(sum, x[u][v]);
        if (!EXCLUSIVE) result = sum;
      }
      if (inside && n < N) store(place(n), results);
    }
  }
}

// Calls body(x) for each of the SIZE elements of a window that is inside of the line. Elements of
// the window are DILATION apart in a line of N elements. The window of result i begins BEFORE
// elements before element i * STRIDE.
template <int SIZE, int STRIDE, int DILATION, int BEFORE, int N, class Body>
ARK_DEVICE void ark_each_in_window(int i, const Body& body) {
  for (int w = 0; w < SIZE; ++w) {
    const int x = i * STRIDE - BEFORE + w * DILATION;
    if (x >= 0 && x < N) body(x);
  }
}

// Calls body(x, inside) for each of the SIZE elements of a window (see ark_each_in_window). If an
// element is outside of the line, `inside` is false and x is the nearest element of the line.
template <int SIZE, int STRIDE, int DILATION, int BEFORE, int N, class Body>
ARK_DEVICE void ark_each_of_window(int i, const Body& body) {
#pragma unroll
  for (int w = 0; w < SIZE; ++w) {
    const int x = i * STRIDE - BEFORE + w * DILATION;
    body(ark_edge(x, N), x >= 0 && x < N);
  }
}

// Computes a tile of results, each from a window of the input, by all threads: calls
// store(window(i0, i1, i2, i3), i0, i1, i2, i3) for each result. A thread loads several windows
// before it stores their results.
template <class TILE, class Window, class Store>
ARK_DEVICE void ark_each_window(const ark_i32* coord, const Window& window, const Store& store) {
  constexpr int total = TILE::tile[0] * TILE::tile[1] * TILE::tile[2] * TILE::tile[3], U = 4;
  constexpr int n0 = TILE::size[0], n1 = TILE::size[1], n2 = TILE::size[2], n3 = TILE::size[3];
  for (int first = ark_tid(); first < total; first += U * ARK_THREADS) {
    float made[U];
    int at[U][4];
    bool inside[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int r = first + u * ARK_THREADS;
      inside[u] = ark_tile_place<TILE, 1>(coord, r, at[u][0], at[u][1], at[u][2], at[u][3]);
      inside[u] = r < total && inside[u];
      made[u] = window(ark_edge(at[u][0], n0), ark_edge(at[u][1], n1), ark_edge(at[u][2], n2),
                       ark_edge(at[u][3], n3));
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (inside[u]) store(made[u], at[u][0], at[u][1], at[u][2], at[u][3]);
    }
  }
}
