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
  const auto asked = [&](int i, int q) {
    const int row = first + 8 * i + lane / 4, column = q + place;
    return ahead(row, column, row < rows && columns - column >= 8 && column < COLUMNS);
  };
  auto low_next = asked(0, 0), high_next = asked(1, 0);
  // This is a loop instead of unrolled code, to reduce code size.
#pragma unroll 1
  for (int q = 0; q < COLUMNS; q += 32) {
    const auto low_beside = low_next, high_beside = high_next;
    if (q + 32 < COLUMNS) {
      low_next = asked(0, q + 32);
      high_next = asked(1, q + 32);
    }
    __syncwarp();
    ark_slab_write<COLUMNS>(slab, d);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int local = 8 * i + lane / 4, row = first + local, column = q + place;
      S v[8];
      ark_slab_read(slab, local, v);
      const int left = columns - column < 8 ? columns - column : 8;
      if (row < rows && left > 0 && column < COLUMNS) {
        eight(row, column, v, left, i == 0 ? low_beside : high_beside);
      }
    }
  }
}
