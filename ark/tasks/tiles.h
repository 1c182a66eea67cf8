// How a matrix product's tiles are assigned to tasks, and the types that the device functions of
// all backends use for a tile.

// Divides tiles of ROWS by COLUMNS elements among TASKS tasks; a task has every TASKS-th tile. If
// TASKS is 0, each task has the one tile at its coordinates. A matrix has DOWN by ACROSS tiles.
// Tiles are numbered down a band of GROUP rows of tiles, then along the columns, then band by band
// and matrix by matrix. There are COUNT matrices in two batch dimensions; INNER is the size of the
// inner one.
template <int TASKS, int COUNT, int INNER, int DOWN, int ACROSS, int GROUP, int ROWS, int COLUMNS>
struct ArkDeal {
  static constexpr bool several = TASKS > 0;
  static constexpr int tasks = TASKS, tiles = COUNT * DOWN * ACROSS;
  // True if a band contains all rows of tiles of all matrices. Then all tiles that share columns of
  // b are computed at about the same time, and these columns are read from memory only once.
  static constexpr bool once = COUNT * DOWN <= GROUP;
  static constexpr bool single = DOWN == 1;  // true if a column of tiles is one tile
  // Returns the batch indices of the matrix that contains tile number `tile`, and the tile's first
  // row and column.
  ARK_DEVICE void place(int tile, int& i0, int& i1, int& m0, int& n0) {
    const int matrix = tile / (DOWN * ACROSS), within = tile % (DOWN * ACROSS);
    const int band = within / (GROUP * ACROSS) * GROUP;
    const int high = band + GROUP < DOWN ? GROUP : DOWN - band;
    m0 = (band + within % (GROUP * ACROSS) % high) * ROWS;
    n0 = within % (GROUP * ACROSS) / high * COLUMNS;
    i0 = matrix / INNER;
    i1 = matrix % INNER;
  }
};

// Calls body(i0, i1, m0, n0) for each tile of a task until it returns false. MEET: true if the
// threads synchronise between two tiles.
template <class DEAL, bool MEET, class Body>
ARK_DEVICE void ark_each_tile(const ArkTask& t, const Body& body) {
  if constexpr (DEAL::several) {
    for (int tile = t.coord[0]; tile < DEAL::tiles; tile += DEAL::tasks) {
      int i0, i1, m0, n0;
      DEAL::place(tile, i0, i1, m0, n0);
      if (!body(i0, i1, m0, n0)) return;
      if (MEET) ark_sync();
    }
  } else {
    body(t.coord[0], t.coord[1], t.coord[2], t.coord[3]);
  }
}

// An input of a tile's product. Element (row, k) is at at[row * row_stride + k * k_stride].
template <typename T>
struct ArkSide {
  const T* at;
  ark_i64 row_stride, k_stride;
  int rows, depth;  // sizes; elements beyond them count as zero
  bool wide;        // true if each eight elements along k are contiguous and 16-byte aligned
};

// The ROWS rows of an input that a tile of TILE rows reads, from row `first` on. EVEN: true if
// every eighth element of a row is aligned to 16 bytes whenever the first element of the matrix is.
template <int TILE, int ROWS, int DEPTH, ark_i64 ROW_STRIDE, ark_i64 K_STRIDE, bool EVEN,
          typename T>
ARK_DEVICE ArkSide<T> ark_side(const T* matrix, int first) {
  const T* at = matrix + static_cast<ark_i64>(first) * ROW_STRIDE;
  const int rows = first + TILE < ROWS ? TILE : ROWS - first;
  return {at,   ROW_STRIDE, K_STRIDE,
          rows, DEPTH,      EVEN && ark_aligned(reinterpret_cast<ark_u64>(at))};
}

// The part of an input between indices `begin` and `end` along k, for split-K products. `begin` is
// a multiple of 128 bytes.
template <typename T>
ARK_DEVICE ArkSide<T> ark_part_of_k(ArkSide<T> side, int begin, int end) {
  side.at += begin * side.k_stride;
  side.depth = end - begin;
  return side;
}
