// Which tiles of a matrix product a task has, and what vendors' bodies for a tile take.

// Tiles of ROWS by COLUMNS, dealt to TASKS tasks; 0: a task has the tile at its coordinates. They
// are numbered down GROUP of DOWN rows of tiles, then along ACROSS columns, then on to the next
// rows and the next of COUNT matrices, of which INNER are numbered by i1. A task has every
// TASKS-th.
template <int TASKS, int COUNT, int INNER, int DOWN, int ACROSS, int GROUP, int ROWS, int COLUMNS>
struct ArkDeal {
  static constexpr bool several = TASKS > 0;
  static constexpr int tasks = TASKS, tiles = COUNT * DOWN * ACROSS;
  // All tiles of a column are taken side by side: nobody reads its part of b again.
  static constexpr bool once = COUNT * DOWN <= GROUP;
  // Of tile number `tile` the matrix's place in the batch, the first row and the first column.
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

// body(i0, i1, m0, n0) for each tile of a task, until one returns false. MEET: the threads meet
// between two tiles.
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

// One side of a tile's product: element (row, k) lies at at[row * row_stride + k * k_stride].
template <typename T>
struct ArkSide {
  const T* at;
  ark_i64 row_stride, k_stride;
  int rows, depth;  // that are there; beyond them everything counts as zero
  bool wide;        // eight elements along k lie side by side, at multiples of 16 bytes
};

// The side that begins at row `first` of ROWS, of a tile TILE high. EVEN: if the first element of
// all lies at a multiple of 16 bytes, so does every eighth of a row.
template <int TILE, int ROWS, int DEPTH, ark_i64 ROW_STRIDE, ark_i64 K_STRIDE, bool EVEN,
          typename T>
ARK_DEVICE ArkSide<T> ark_side(const T* matrix, int first) {
  const T* at = matrix + static_cast<ark_i64>(first) * ROW_STRIDE;
  const int rows = first + TILE < ROWS ? TILE : ROWS - first;
  return {at,   ROW_STRIDE, K_STRIDE,
          rows, DEPTH,      EVEN && ark_aligned(reinterpret_cast<ark_u64>(at))};
}

// The side's elements `begin` to `end` of k, which begin at a multiple of 128 bytes of it.
template <typename T>
ARK_DEVICE ArkSide<T> ark_part_of_k(ArkSide<T> side, int begin, int end) {
  side.at += begin * side.k_stride;
  side.depth = end - begin;
  return side;
}
