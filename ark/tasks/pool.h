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

// The windows along a line that contain an element of a block: STRIDE elements from a multiple of
// STRIDE on. Window number `first` + d, counted from the block's number, contains element e of the
// block as its element number BEFORE + e - (first + d) * STRIDE, if the window has such an element.
// There are N windows.
template <int SIZE, int STRIDE, int BEFORE, int N>
struct ArkBlockWindows {
  static constexpr int size = SIZE, stride = STRIDE, before = BEFORE, windows = N;
  static constexpr int first = -((SIZE - 1 - BEFORE) / STRIDE);
  static constexpr int many = (STRIDE - 1 + BEFORE) / STRIDE - first + 1;
};

// Computes a tile of the gradient of a max pool in blocks of DOWN::stride rows and ACROSS::stride
// columns of packs of PACK neighbouring results, by all threads. All windows of a block are loaded
// before the first one is used, of U blocks at a time. values(i0, o1, o2, i3), places(i0, o1, o2,
// i3): the packs of a window. store(pack, i0, i1, i2, i3): stores results.
template <class TILE, int PACK, int U, class DOWN, class ACROSS, typename T, class Values,
          class Places, class Store>
ARK_DEVICE void ark_unpool_blocks(const ark_i32* coord, const Values& values, const Places& places,
                                  const Store& store) {
  constexpr int high = TILE::tile[1] / DOWN::stride, wide = TILE::tile[2] / ACROSS::stride;
  constexpr int packs = TILE::tile[3] / PACK, total = TILE::tile[0] * high * wide * packs;
  constexpr int D = DOWN::many, A = ACROSS::many;
  for (int begin = ark_tid(); begin < total; begin += U * ARK_THREADS) {
    ArkPack<T, PACK> value[U][D][A], place[U][D][A];
    int at[U][4];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int r = begin + u * ARK_THREADS < total ? begin + u * ARK_THREADS : begin;
      at[u][3] = coord[3] + r % packs * PACK;
      at[u][2] = coord[2] + r / packs % wide * ACROSS::stride;
      at[u][1] = coord[1] + r / (packs * wide) % high * DOWN::stride;
      at[u][0] = coord[0] + r / (packs * wide * high);
      const int i0 = ark_edge(at[u][0], TILE::size[0]);
      const int i3 = ark_edge(at[u][3], TILE::size[3] - PACK + 1);
#pragma unroll
      for (int d = 0; d < D; ++d) {
#pragma unroll
        for (int a = 0; a < A; ++a) {
          const int o1 = ark_edge(at[u][1] / DOWN::stride + DOWN::first + d, DOWN::windows);
          const int o2 = ark_edge(at[u][2] / ACROSS::stride + ACROSS::first + a, ACROSS::windows);
          value[u][d][a] = values(i0, o1, o2, i3);
          place[u][d][a] = places(i0, o1, o2, i3);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int i0 = at[u][0], i3 = at[u][3];
      const bool inside = i0 < TILE::size[0] && at[u][1] < TILE::size[1] &&
                          at[u][2] < TILE::size[2] && i3 < TILE::size[3];
      if (begin + u * ARK_THREADS >= total || !inside) continue;
#pragma unroll
      for (int e = 0; e < DOWN::stride * ACROSS::stride; ++e) {
        const int y = e / ACROSS::stride, x = e % ACROSS::stride;
        float sums[PACK] = {};
#pragma unroll
        for (int w = 0; w < D * A; ++w) {
          const int d = w / A, a = w % A;
          const int down = DOWN::before + y - (DOWN::first + d) * DOWN::stride;
          const int across = ACROSS::before + x - (ACROSS::first + a) * ACROSS::stride;
          if (down < 0 || down >= DOWN::size || across < 0 || across >= ACROSS::size) continue;
          const int o1 = at[u][1] / DOWN::stride + DOWN::first + d;
          const int o2 = at[u][2] / ACROSS::stride + ACROSS::first + a;
          const bool exists = o1 >= 0 && o1 < DOWN::windows && o2 >= 0 && o2 < ACROSS::windows;
          const float tap = exists ? static_cast<float>(down * ACROSS::size + across) : -1.0f;
#pragma unroll
          for (int j = 0; j < PACK; ++j) {
            const bool largest = ark_get(place[u][d][a].v, j) == tap;
            sums[j] += largest ? ark_get(value[u][d][a].v, j) : 0.0f;
          }
        }
        ArkPack<T, PACK> result;
#pragma unroll
        for (int j = 0; j < PACK; ++j) ark_put(result.v, j, sums[j]);
        store(result, i0, at[u][1] + y, at[u][2] + x, i3);
      }
    }
  }
}
