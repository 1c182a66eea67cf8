// Pooling with windows of one element in the last dimension. Neighbouring results then read
// neighbouring elements, so they are computed as packs.

// Calls body(o, k) for each window o, of N windows along a line, that contains element i of the
// line; k is the number of the element in the window. Window o begins BEFORE elements before
// element o * STRIDE, and its SIZE elements are DILATION apart.
template <int SIZE, int STRIDE, int DILATION, int BEFORE, int N, class Body>
ARK_DEVICE void ark_each_window_of(int i, const Body& body) {
#pragma unroll
  for (int k = 0; k < SIZE; ++k) {
    const int at = i + BEFORE - k * DILATION;
    if (at >= 0 && at % STRIDE == 0 && at / STRIDE < N) body(at / STRIDE, k);
  }
}

// Computes a tile of results in packs of PACK neighbouring results, by all threads: calls
// store(window(i0, i1, i2, i3), i0, i1, i2, i3) for each pack, with the indices of its first
// result. A thread computes U packs before it stores them.
template <class TILE, int PACK, int U, class Window, class Store>
ARK_DEVICE void ark_each_window_pack(const ark_i32* coord, const Window& window,
                                     const Store& store) {
  constexpr int total = TILE::tile[0] * TILE::tile[1] * TILE::tile[2] * (TILE::tile[3] / PACK);
  constexpr int n0 = TILE::size[0], n1 = TILE::size[1], n2 = TILE::size[2], n3 = TILE::size[3];
  for (int first = ark_tid(); first < total; first += U * ARK_THREADS) {
    decltype(window(0, 0, 0, 0)) packs[U];
    int at[U][4];
    bool inside[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int r = first + u * ARK_THREADS;
      inside[u] = ark_tile_place<TILE, PACK>(coord, r, at[u][0], at[u][1], at[u][2], at[u][3]);
      inside[u] = r < total && inside[u];
      packs[u] = window(ark_edge(at[u][0], n0), ark_edge(at[u][1], n1), ark_edge(at[u][2], n2),
                        ark_edge(at[u][3], n3 - PACK + 1));
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (inside[u]) store(packs[u], at[u][0], at[u][1], at[u][2], at[u][3]);
    }
  }
}
