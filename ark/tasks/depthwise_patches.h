// Depthwise convolutions of images whose channels are the last dimension, with the image in shared
// memory. First, the part of the image that the tile reads is copied to shared memory, with zeros
// for elements outside of the image. The weights are copied in fp32. Then a thread computes a patch
// of DOWN rows and ACROSS columns of results for two neighbouring channels. It loads and converts
// each image row once, and adds it to the sums of all result rows whose windows contain it.

template <class WINDOW, class TILE, int DOWN, int ACROSS, typename T>
struct ArkPatches {
  static constexpr int images = TILE::tile[0], channels = TILE::tile[3], pairs = channels / 2;
  static constexpr int bands = (TILE::tile[1] + DOWN - 1) / DOWN;
  static constexpr int groups = (TILE::tile[2] + ACROSS - 1) / ACROSS;
  static constexpr int in_band = groups * pairs, units = images * bands * in_band;
  // A thread computes one unit at a time: a patch of results for two neighbouring channels. The
  // number of units is rounded up, so that all threads take part in the last pass too.
  static constexpr int units_up = (units + ARK_THREADS - 1) / ARK_THREADS * ARK_THREADS;
  // Rows and columns of the image that a patch reads, and those that all patches of a tile read.
  static constexpr int reach_down = (WINDOW::down - 1) * WINDOW::apart_down + 1;
  static constexpr int reach_across = (WINDOW::across - 1) * WINDOW::apart_across + 1;
  static constexpr int high = (DOWN - 1) * WINDOW::step_down + reach_down;
  static constexpr int wide = (ACROSS - 1) * WINDOW::step_across + reach_across;
  static constexpr int rows = (bands * DOWN - 1) * WINDOW::step_down + reach_down;
  static constexpr int columns = (groups * ACROSS - 1) * WINDOW::step_across + reach_across;
  static constexpr int line = columns * channels;  // elements
  static constexpr int lines = images * rows;
  // A band is DOWN rows of results, the height of a patch. Returns the number of image rows,
  // counted over all images of the tile, up to the last row that band number `band` reads.
  static constexpr int lines_of(int band) {
    return band / bands * rows + band % bands * DOWN * WINDOW::step_down + high;
  }
  static constexpr int bytes = (images * rows * line * static_cast<int>(sizeof(T)) + 15) / 16 * 16;
};

// Copies rows of the part of the image that the tile reads to shared memory: the rows of all images
// from number `begin` on and before number `end_line`. Each warp copies whole rows, so the address
// of a row is computed once for all lanes. For results past the tile's end, which are not stored,
// zeros are copied.
template <class WINDOW, class TILE, class PATCHES, typename T, class Source>
ARK_DEVICE void ark_depthwise_copy(const ArkTask& t, T* image, int begin, int end_line,
                                   const Source& source) {
  constexpr int PACK = 16 / static_cast<int>(sizeof(T)), PACKS = PATCHES::channels / PACK;
  const int top = t.coord[1] * WINDOW::step_down - WINDOW::before_down;
  const int left = t.coord[2] * WINDOW::step_across - WINDOW::before_across;
  const int rows = ark_tile_end<TILE, 1>(t.coord) - t.coord[1];
  const int columns = ark_tile_end<TILE, 2>(t.coord) - t.coord[2];
  const int bottom = top + (rows - 1) * WINDOW::step_down + PATCHES::reach_down - 1;
  const int right = left + (columns - 1) * WINDOW::step_across + PATCHES::reach_across - 1;
  const int c0 = t.coord[3], end = ark_tile_end<TILE, 3>(t.coord);
  for (int line = begin + ark_warp(); line < end_line; line += ARK_WARPS) {
    const int n = t.coord[0] + line / PATCHES::rows, row = top + line % PATCHES::rows;
    if (n >= TILE::size[0]) break;
    const bool in_rows = row >= 0 && row <= bottom && row < WINDOW::height;
    const int y = ark_edge(row <= bottom ? row : bottom, WINDOW::height);
    T* to = image + line * PATCHES::line;
#pragma unroll 4
    for (int place = ark_lane(); place < PATCHES::columns * PACKS; place += ARK_LANES) {
      const int column = left + place / PACKS, c = c0 + place % PACKS * PACK;
      const bool inside = in_rows && column >= 0 && column <= right && column < WINDOW::width;
      const int x = ark_edge(column <= right ? column : right, WINDOW::width);
      ark_copy_pack(to + place * PACK, source(n, y, x, c < end ? c : c0), inside && c < end);
    }
  }
}

// Loads two neighbouring channels. Two elements of bf16 are converted as one word, by one
// instruction for each.
template <typename T>
ARK_DEVICE void ark_depthwise_pair(float (&to)[2], const T* from) {
  const auto pack = ark_load_pack<2>(from);
  to[0] = ark_get(pack.v, 0), to[1] = ark_get(pack.v, 1);
}
ARK_DEVICE void ark_depthwise_pair(float (&to)[2], const ark_bf16* from) {
  const ark_u32 word = ark_load_pack<1>(reinterpret_cast<const ark_u32*>(from)).v[0];
  to[0] = ark_bits_float(word << 16), to[1] = ark_bits_float(word & 0xffff0000u);
}

// Computes the task's tile, like ark_depthwise (depthwise.h). BYTES: bytes of scratch memory. A
// thread computes two neighbouring channels. channel(c) loads the two channels' operands of the
// expression once; finish(n, y, x, c, sums, loaded) gets these for each result. If a thread
// computes several patches one after another, the image rows for the second half of its patches are
// copied while it computes the first half.
template <class WINDOW, class TILE, int DOWN, int ACROSS, int BYTES, typename T, class Weight,
          class Source, class Channel, class Finish>
ARK_DEVICE void ark_depthwise_patches(ArkCtx&, const ArkTask& t, char* scratch,
                                      const Weight& weight, const Source& source,
                                      const Channel& channel, const Finish& finish) {
  using P = ArkPatches<WINDOW, TILE, DOWN, ACROSS, T>;
  constexpr int PACK = 16 / static_cast<int>(sizeof(T)), PACKS = P::channels / PACK;
  static_assert(P::bytes + 4 * WINDOW::down * WINDOW::across * P::channels == BYTES, "scratch");
  T* image = reinterpret_cast<T*>(scratch);
  float* factors = reinterpret_cast<float*>(scratch + P::bytes);
  const int c0 = t.coord[3], end = ark_tile_end<TILE, 3>(t.coord);
  // In each pass, every thread computes one patch. FIRST: the number of patches that the block
  // computes in the first half of its passes. LINES: the number of image rows that these patches
  // read.
  constexpr int FIRST = (P::units + 2 * ARK_THREADS - 1) / (2 * ARK_THREADS) * ARK_THREADS;
  constexpr int LINES = P::units <= FIRST ? P::lines : P::lines_of((FIRST - 1) / P::in_band);
  ark_depthwise_copy<WINDOW, TILE, P>(t, image, 0, LINES, source);
  ark_copies_begun();
  ark_depthwise_copy<WINDOW, TILE, P>(t, image, LINES, P::lines, source);
  ark_copies_begun();
  for (int i = ark_tid(); i < WINDOW::down * WINDOW::across * PACKS; i += ARK_THREADS) {
    const int tap = i / PACKS, c = i % PACKS * PACK;
    if (c0 + c >= end) continue;
    const auto pack = ark_load_pack<PACK>(weight(tap, c0 + c));
#pragma unroll
    for (int j = 0; j < PACK; ++j) factors[tap * P::channels + c + j] = ark_get(pack.v, j);
  }
  ark_copies_but<1>();
  ark_sync();
  const int end_down = ark_tile_end<TILE, 1>(t.coord), end_across = ark_tile_end<TILE, 2>(t.coord);
#pragma unroll 1
  for (int unit = ark_tid(); unit < P::units_up; unit += ARK_THREADS) {
    if (LINES < P::lines && unit / ARK_THREADS == FIRST / ARK_THREADS) {
      ark_copies_but<0>();
      ark_sync();
    }
    const int pair = unit % P::pairs, group = unit / P::pairs % P::groups;
    const int band = unit / (P::pairs * P::groups) % P::bands;
    const int image_number = unit / (P::pairs * P::groups * P::bands);
    const int n = t.coord[0] + image_number, c = c0 + 2 * pair;
    const int y = ark_tile_begin<TILE, 1>(t.coord) + band * DOWN;
    const int x = ark_tile_begin<TILE, 2>(t.coord) + group * ACROSS;
    if (unit >= P::units || n >= TILE::size[0] || y >= end_down || x >= end_across || c >= end) {
      continue;
    }
    const T* from = image + (image_number * P::rows + band * DOWN * WINDOW::step_down) * P::line +
                    group * ACROSS * WINDOW::step_across * P::channels + 2 * pair;
    const int top = y * WINDOW::step_down - WINDOW::before_down;
    float sums[DOWN][ACROSS][2] = {};
#pragma unroll 1
    for (int i = 0; i < P::high; ++i, from += P::line) {
      if (top + i < 0 || top + i >= WINDOW::height) continue;
      float values[P::wide][2];
#pragma unroll
      for (int at = 0; at < P::wide; ++at) {
        if (!ark_window_reads<WINDOW, ACROSS>(at)) continue;
        ark_depthwise_pair(values[at], from + at * P::channels);
#if defined(ARK_HAS_KEEP)
        ark_keep(values[at][0]), ark_keep(values[at][1]);
#endif
      }
#pragma unroll
      for (int r = 0; r < DOWN; ++r) {
        const int down = i - r * WINDOW::step_down;
        if (down < 0 || down >= P::reach_down || down % WINDOW::apart_down != 0) continue;
        const float* row =
            factors + down / WINDOW::apart_down * (WINDOW::across * P::channels) + 2 * pair;
#pragma unroll
        for (int tap = 0; tap < WINDOW::across; ++tap) {
          const auto factor = ark_load_pack<2>(row + tap * P::channels);
#pragma unroll
          for (int a = 0; a < ACROSS; ++a) {
            const int at = a * WINDOW::step_across + tap * WINDOW::apart_across;
            sums[r][a][0] += values[at][0] * factor.v[0];
            sums[r][a][1] += values[at][1] * factor.v[1];
          }
        }
      }
    }
    const auto loaded = channel(c);
#pragma unroll
    for (int r = 0; r < DOWN; ++r) {
      if (y + r >= end_down) break;
#pragma unroll
      for (int a = 0; a < ACROSS; ++a) {
        if (x + a < end_across) finish(n, y + r, x + a, c, sums[r][a], loaded);
      }
    }
  }
}
