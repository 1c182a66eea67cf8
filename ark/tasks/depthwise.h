// Depthwise convolutions of images whose channels are the last dimension. A thread computes W
// neighbouring results of one row of the image, for PACK neighbouring channels.

// Computes a task's tile of the result (images, rows, columns, channels). weight(tap, c): the
// address of the weights of one tap (element of the window) for PACK channels from c on. source(n,
// y, x, c): the address of PACK channels of a pixel. finish(n, y, x, c, sums): stores a pixel's
// results for PACK channels.
template <class WINDOW, class TILE, int PACK, int W, class Weight, class Source, class Finish>
ARK_DEVICE void ark_depthwise(ArkCtx&, const ArkTask& t, const Weight& weight, const Source& source,
                              const Finish& finish) {
  constexpr int IMAGES = TILE::tile[0], ROWS = TILE::tile[1], COLUMNS = TILE::tile[2];
  constexpr int PACKS = TILE::tile[3] / PACK, BANDS = (COLUMNS + W - 1) / W;
  constexpr int SPAN = ARK_WINDOW_SPAN<WINDOW, W>;
  constexpr int LOADS = WINDOW::down * (SPAN + WINDOW::across);
  constexpr int TOGETHER = LOADS <= 32 ? WINDOW::down : 1;  // rows of a window, loaded together
  const int last = t.coord[2] + COLUMNS < TILE::size[2] ? t.coord[2] + COLUMNS : TILE::size[2];
  // The last image column that a stored result of the tile reads. Results past the tile's end are
  // computed but not stored; their loads are limited to this column.
  const int end = (last - 1) * WINDOW::step_across - WINDOW::before_across +
                  (WINDOW::across - 1) * WINDOW::apart_across;
  for (int unit = ark_tid(); unit < IMAGES * ROWS * BANDS * PACKS; unit += ARK_THREADS) {
    const int c = t.coord[3] + unit % PACKS * PACK;
    const int first = t.coord[2] + unit / PACKS % BANDS * W;
    const int y = t.coord[1] + unit / (PACKS * BANDS) % ROWS;
    const int n = t.coord[0] + unit / (PACKS * BANDS * ROWS);
    if (n >= TILE::size[0] || y >= TILE::size[1] || first >= last || c >= TILE::size[3]) continue;
    const int left = first * WINDOW::step_across - WINDOW::before_across;
    float sums[W][PACK] = {};
#pragma unroll TOGETHER
    for (int down = 0; down < WINDOW::down; ++down) {
      const int row = y * WINDOW::step_down - WINDOW::before_down + down * WINDOW::apart_down;
      const bool in_rows = row >= 0 && row < WINDOW::height;
      const int near = ark_edge(row, WINDOW::height);
      decltype(ark_load_pack<PACK>(weight(0, 0))) factors[WINDOW::across];
#pragma unroll
      for (int tap = 0; tap < WINDOW::across; ++tap) {
        factors[tap] = ark_load_pack<PACK>(weight(down * WINDOW::across + tap, c));
      }
      decltype(ark_load_pack<PACK>(source(0, 0, 0, 0))) loaded[SPAN];
#pragma unroll
      for (int i = 0; i < SPAN; ++i) {
        if (ark_window_reads<WINDOW, W>(i)) {
          const int column = ark_edge(left + i < end ? left + i : end, WINDOW::width);
          loaded[i] = ark_load_pack<PACK>(source(n, near, column, c));
        }
      }
#pragma unroll
      for (int i = 0; i < SPAN; ++i) {
        if (!ark_window_reads<WINDOW, W>(i)) continue;
        const bool inside = in_rows && left + i >= 0 && left + i < WINDOW::width;
#pragma unroll
        for (int j = 0; j < PACK; ++j) {
          const float value = inside ? ark_get(loaded[i].v, j) : 0.0f;
#pragma unroll
          for (int x = 0; x < W; ++x) {
#pragma unroll
            for (int tap = 0; tap < WINDOW::across; ++tap) {
              if (x * WINDOW::step_across + tap * WINDOW::apart_across == i) {
                sums[x][j] += value * ark_get(factors[tap].v, j);
              }
            }
          }
        }
      }
    }
#pragma unroll
    for (int x = 0; x < W; ++x) {
      if (first + x < last) finish(n, y, first + x, c, sums[x]);
    }
  }
}
