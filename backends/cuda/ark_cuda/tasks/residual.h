// Stores the results of products whose epilogue reads a residual: a tensor of the result's size. It
// works like ark_matrix_each. The residual's elements are loaded while the preceding 32 columns are
// stored, so that no store waits for a load.

// Like ark_matrix_each (matrix_store.h), for an epilogue that reads a residual. Calls eight(row,
// column, values, count, elements) for each eight neighbouring results; `elements` are the
// residual's elements at the same positions. ahead(row, column, there): loads these elements before
// the results are computed; `there` is false past the result's end.
template <int COLUMNS, typename S, class Ahead, class Eight>
ARK_DEVICE void ark_matrix_each_residual(ArkCtx& c, S (&d)[COLUMNS / 2], int first, int rows,
                                         int columns, const Ahead& ahead, const Eight& eight) {
  char* slab = ark_matrix_slab(c, ark_warp());
  const int lane = ark_lane(), place = lane % 4 * 8;
  constexpr int SOME = COLUMNS < 32 ? COLUMNS : 32;  // columns at a time
  const auto piece = [&](int row, int at) {
    return slab + row * 128 + ((at ^ ((row & 3) << 1 | (row & 1))) << 4);
  };
  const auto asked = [&](int i, int q) {
    const int row = first + 8 * i + lane / 4, column = q + place;
    return ahead(row, column, row < rows && columns - column >= 8 && column < COLUMNS);
  };
  auto low_next = asked(0, 0), high_next = asked(1, 0);
  // This is a loop instead of unrolled code, to reduce code size. Registers cannot be indexed by a
  // variable. So each round uses the sums in the first registers and then moves the remaining sums
  // down to these registers.
#pragma unroll 1
  for (int q = 0; q < COLUMNS; q += 32) {
    const auto low_beside = low_next, high_beside = high_next;
    if (q + 32 < COLUMNS) {
      low_next = asked(0, q + 32);
      high_next = asked(1, q + 32);
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < SOME / 8; ++j) {
#pragma unroll
      for (int high = 0; high < 2; ++high) {
        const S* pair = d + 4 * j + 2 * high;
        char* to = piece(lane / 4 + 8 * high, 2 * j + (lane & 3) / 2) + 8 * (lane & 1);
        *reinterpret_cast<ArkPack<S, 2>*>(to) = ArkPack<S, 2>{{pair[0], pair[1]}};
      }
    }
#pragma unroll
    for (int i = 0; i + 16 < COLUMNS / 2; ++i) d[i] = d[i + 16];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int local = 8 * i + lane / 4, row = first + local, column = q + place;
      const auto low = *reinterpret_cast<const ArkPack<S, 4>*>(piece(local, lane % 4 * 2));
      const auto high = *reinterpret_cast<const ArkPack<S, 4>*>(piece(local, lane % 4 * 2 + 1));
      const S v[8] = {low.v[0],  low.v[1],  low.v[2],  low.v[3],
                      high.v[0], high.v[1], high.v[2], high.v[3]};
      const int left = columns - column < 8 ? columns - column : 8;
      if (row < rows && left > 0 && column < COLUMNS) {
        eight(row, column, v, left, i == 0 ? low_beside : high_beside);
      }
    }
  }
}
