// Convolutions in groups of few channels, of images whose channels are the last dimension. A thread
// computes W neighbouring results of one row of the image, for PACK neighbouring outputs of a
// group, from VECTOR channels of the group at a time. Neighbouring threads compute neighbouring
// outputs.

// Computes a task's tile of the result (images, rows, columns, output channels). A group has EACH
// input channels and OUTPUTS output channels. FIRST: true if the weights of all taps (elements of
// the window) of one channel are neighbours in memory, false if the weights of all channels of one
// tap are. weight(k, c): the address of the weights of PACK output channels from c on, where k
// numbers the pairs of channel and tap. source(n, y, x, c): the address of VECTOR input channels of
// a pixel. finish(n, y, x, c, sums): stores a pixel's results for PACK output channels.
template <class WINDOW, class TILE, bool FIRST, int EACH, int OUTPUTS, int PACK, int VECTOR, int W,
          class Weight, class Source, class Finish>
ARK_DEVICE void ark_grouped(ArkCtx&, const ArkTask& t, const Weight& weight, const Source& source,
                            const Finish& finish) {
  constexpr int IMAGES = TILE::tile[0], ROWS = TILE::tile[1], COLUMNS = TILE::tile[2];
  constexpr int PACKS = TILE::tile[3] / PACK, BANDS = (COLUMNS + W - 1) / W;
  constexpr int SPAN = ARK_WINDOW_SPAN<WINDOW, W>;
  constexpr int VECTORS = EACH / VECTOR;
  // If pixels have at most four channels that are loaded one by one, as at a network's input, the
  // loads of all channels are issued before the first one is used.
  constexpr int TOGETHER = VECTOR == 1 && VECTORS <= 4 ? VECTORS : 1;
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
    const int channels = c / OUTPUTS * EACH;
    float sums[W][PACK] = {};
#pragma unroll TOGETHER
    for (int part = 0; part < WINDOW::down * VECTORS; ++part) {
      const int down = part / VECTORS, channel = part % VECTORS * VECTOR;
      const int row = y * WINDOW::step_down - WINDOW::before_down + down * WINDOW::apart_down;
      if (row < 0 || row >= WINDOW::height) continue;
      decltype(ark_load_pack<VECTOR>(source(0, 0, 0, 0))) loaded[SPAN];
#pragma unroll
      for (int i = 0; i < SPAN; ++i) {
        if (ark_window_reads<WINDOW, W>(i)) {
          const int column = ark_edge(left + i < end ? left + i : end, WINDOW::width);
          loaded[i] = ark_load_pack<VECTOR>(source(n, row, column, channels + channel));
        }
      }
#pragma unroll
      for (int tap = 0; tap < WINDOW::across; ++tap) {
        constexpr int TAPS = WINDOW::down * WINDOW::across;
        const int at = down * WINDOW::across + tap;
        const int k = FIRST ? channel * TAPS + at : at * EACH + channel;
        decltype(ark_load_pack<PACK>(weight(0, 0))) factors[VECTOR];
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) {
          factors[v] = ark_load_pack<PACK>(weight(k + v * (FIRST ? TAPS : 1), c));
        }
#pragma unroll
        for (int x = 0; x < W; ++x) {
          constexpr int STEP = WINDOW::step_across, APART = WINDOW::apart_across;
          const int i = x * STEP + tap * APART;
          const bool inside = left + i >= 0 && left + i < WINDOW::width;
#pragma unroll
          for (int v = 0; v < VECTOR; ++v) {
            const float value = inside ? ark_get(loaded[i].v, v) : 0.0f;
#pragma unroll
            for (int j = 0; j < PACK; ++j) sums[x][j] += value * ark_get(factors[v].v, j);
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
