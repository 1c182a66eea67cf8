// Convolutions in groups on mma.sync, of images whose channels are the last dimension. A task
// copies its part of the image and its weights to shared memory. A warp then multiplies 16 M
// results of a group by N times 8 of the group's outputs. Along k, half of an instruction
// multiplies eight neighbouring channels at one element of the window. An image with channels first
// and at most eight channels, as a network's input, gets zeros as further channels in shared
// memory.

// The layout of a task's shared memory: 16 bytes of zeros, the weights, and the image's pixels.
// Rows are an odd number of 16 bytes apart, so that eight consecutive rows are in different banks.
template <class WINDOW, class TILE, int EACH, int OUTPUTS>
struct ArkGroups {
  static constexpr int IMAGES = TILE::tile[0], ROWS = TILE::tile[1], COLUMNS = TILE::tile[2];
  static constexpr int DEPTH = WINDOW::down * WINDOW::across * EACH, HALVES = DEPTH / 8;
  static constexpr int CHANNELS = TILE::tile[3] / OUTPUTS * EACH;
  static constexpr int HIGH =
      (ROWS - 1) * WINDOW::step_down + (WINDOW::down - 1) * WINDOW::apart_down + 1;
  static constexpr int WIDE =
      (COLUMNS - 1) * WINDOW::step_across + (WINDOW::across - 1) * WINDOW::apart_across + 1;
  static constexpr int PIXEL = (CHANNELS / 8 | 1) * 16, WEIGHT = (TILE::tile[3] / 8 | 1) * 16;
  static constexpr int WEIGHTS = 16, PIXELS = WEIGHTS + DEPTH * WEIGHT;

  // The byte offset, from a window's first pixel, of the window's vector `number`. A vector is
  // eight channels at one element (tap) of the window, and is half of the k of an instruction. A
  // window has EACH / 8 vectors per tap.
  static constexpr int half(int number) {
    const int tap = number / (EACH / 8), part = number % (EACH / 8);
    const int y = tap / WINDOW::across * WINDOW::apart_down;
    return (y * WIDE + tap % WINDOW::across * WINDOW::apart_across) * PIXEL + part * 16;
  }
};

// Returns, for one dimension, the end (last index + 1) of the input pixels that a task's tile
// needs. Results past the output's end are not stored, so their input pixels are not needed.
template <int TILE, int SIZE, int K, int STEP, int APART, int BEFORE, int IMAGE>
ARK_DEVICE int ark_groups_end(int coord) {
  const int last = (coord + TILE < SIZE ? coord + TILE : SIZE) - 1;
  const int end = last * STEP - BEFORE + (K - 1) * APART + 1;
  return end < IMAGE ? end : IMAGE;
}

// Starts copies to shared memory of rows `first` to `end` - 1 of the part of the image that a tile
// reads. Pixels that are not read or are outside of the image become zero. source(n, y, x, c) is
// the address of eight channels.
template <class WINDOW, class TILE, class G, int ALL, class Source>
ARK_DEVICE void ark_groups_copy(const ArkTask& t, ark_u32 to, int first, int end, int channel,
                                const Source& source) {
  constexpr int VECTORS = G::CHANNELS / 8;
  const int top = t.coord[1] * WINDOW::step_down - WINDOW::before_down;
  const int left = t.coord[2] * WINDOW::step_across - WINDOW::before_across;
  const int bottom =
      ark_groups_end<G::ROWS, TILE::size[1], WINDOW::down, WINDOW::step_down, WINDOW::apart_down,
                     WINDOW::before_down, WINDOW::height>(t.coord[1]);
  const int right =
      ark_groups_end<G::COLUMNS, TILE::size[2], WINDOW::across, WINDOW::step_across,
                     WINDOW::apart_across, WINDOW::before_across, WINDOW::width>(t.coord[2]);
  for (int e = first * G::WIDE * VECTORS + ark_tid(); e < end * G::WIDE * VECTORS;
       e += ARK_THREADS) {
    const int c = channel + e % VECTORS * 8, pixel = e / VECTORS, row = pixel / G::WIDE;
    const int n = t.coord[0] + row / G::HIGH, y = top + row % G::HIGH, x = left + pixel % G::WIDE;
    const bool here = n < TILE::size[0] && c < ALL && y >= 0 && y < bottom && x >= 0 && x < right;
    const auto* from = here ? source(n, y, x, c) : source(0, 0, 0, 0);
    ark_copy_words(to + static_cast<ark_u32>(pixel * G::PIXEL + e % VECTORS * 16), from,
                   here ? 16 : 0);
  }
}

// Copies the part of an image that a tile reads to shared memory, like ark_groups_copy, for an
// image with channels first and FEW channels. Neighbouring threads load neighbouring pixels of a
// row. A thread loads BATCH pixels before it stores the first one. source(n, y, x, c): the address
// of a single channel. to: where the pixels begin in shared memory.
template <class WINDOW, class TILE, class G, int FEW, class Source>
ARK_DEVICE void ark_groups_copy_few(const ArkTask& t, char* to, const Source& source) {
  constexpr int END = G::IMAGES * G::HIGH * G::WIDE, BATCH = 8;
  typedef decltype(ark_load_pack<8>(source(0, 0, 0, 0))) Pixel;
  const int top = t.coord[1] * WINDOW::step_down - WINDOW::before_down;
  const int left = t.coord[2] * WINDOW::step_across - WINDOW::before_across;
#pragma unroll 1
  for (int first = ark_tid(); first < END; first += BATCH * ARK_THREADS) {
    Pixel loaded[BATCH] = {};
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int pixel = first + i * ARK_THREADS, row = pixel / G::WIDE;
      const int n = t.coord[0] + row / G::HIGH, y = top + row % G::HIGH;
      const int x = left + pixel % G::WIDE;
      if (n < TILE::size[0] && y >= 0 && y < WINDOW::height && x >= 0 && x < WINDOW::width) {
#pragma unroll
        for (int c = 0; c < FEW; ++c) loaded[i].v[c] = *source(n, y, x, c);
      }
    }
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int pixel = first + i * ARK_THREADS;
      if (pixel < END) *reinterpret_cast<Pixel*>(to + pixel * G::PIXEL) = loaded[i];
    }
  }
}

// Computes a task's tile of the result (images, rows, columns, output channels). ALL: the channels
// of the image. FEW: 0, or the channels of an image with channels first, whose EACH is 8. M, N: a
// warp computes 16 M pixels of 8 N output channels at a time. BANDS: the tile's rows are divided
// into BANDS parts; while one part is multiplied, the next ones are copied to shared memory.
// weight(k, c): the address of the weights of eight output channels. finish(n, y, x, c, sums):
// stores the results of two neighbouring output channels.
template <class T, class WINDOW, class TILE, int EACH, int OUTPUTS, int ALL, int FEW, int M, int N,
          int BANDS, class Weight, class Source, class Finish>
ARK_DEVICE void ark_groups(ArkCtx& c, const ArkTask& t, const Weight& weight, const Source& source,
                           const Finish& finish) {
  typedef ArkGroups<WINDOW, TILE, EACH, OUTPUTS> G;
  constexpr int LINES = G::IMAGES * G::ROWS, BAND = (LINES + BANDS - 1) / BANDS;
  constexpr int STEPS = (G::HALVES + 1) / 2, QUADS = (G::HALVES + 3) / 4;
  constexpr int SIDES = TILE::tile[3] / (8 * N);  // the N times 8 outputs of the tile
  char* scratch = ARK_SCRATCH(c);
  const ark_u32 zeros = static_cast<ark_u32>(__cvta_generic_to_shared(scratch));
  const ark_u32 weights = zeros + G::WEIGHTS, pixels = zeros + G::PIXELS;
  const int lane = ark_lane(), channel = t.coord[3] / OUTPUTS * EACH;
  ark_sync();
  if (ark_tid() < 4) reinterpret_cast<ark_u32*>(scratch)[ark_tid()] = 0u;
  for (int e = ark_tid(); e < G::DEPTH * (TILE::tile[3] / 8); e += ARK_THREADS) {
    const int k = e / (TILE::tile[3] / 8), v = e % (TILE::tile[3] / 8);
    const int output = t.coord[3] + v * 8;
    // If the image has its channels first, k runs over channels and, for each channel, over the
    // window.
    const int from = FEW == 0 ? k : k % 8 * (WINDOW::down * WINDOW::across) + k / 8;
    const bool here = output < TILE::size[3] && (FEW == 0 || k % 8 < FEW);
    ark_copy_words(weights + static_cast<ark_u32>(k * G::WEIGHT + v * 16),
                   here ? weight(from, output) : weight(0, 0), here ? 16 : 0);
  }
  // The number of rows, of the image part in shared memory, that the tile's results before row
  // `line` need.
  const auto read = [](int line) {
    const int last = (line < LINES ? line : LINES) - 1;
    return last / G::ROWS * G::HIGH + last % G::ROWS * WINDOW::step_down +
           (WINDOW::down - 1) * WINDOW::apart_down + 1;
  };
#pragma unroll
  for (int band = 0; band < BANDS; ++band) {
    const int first = band > 0 ? read(band * BAND) : 0, end = read((band + 1) * BAND);
    if constexpr (FEW == 0) {
      ark_groups_copy<WINDOW, TILE, G, ALL>(t, pixels, first, end, channel, source);
    }
    ark_copies_begun();
  }
  if constexpr (FEW > 0) {
    ark_groups_copy_few<WINDOW, TILE, G, FEW>(t, scratch + G::PIXELS, source);
  }
#pragma unroll 1
  for (int band = 0; band < BANDS; ++band) {
    if (band + 3 < BANDS) {
      ark_copies_but<3>();
    } else if (band + 2 < BANDS) {
      ark_copies_but<2>();
    } else if (band + 1 < BANDS) {
      ark_copies_but<1>();
    } else {
      ark_copies_but<0>();
    }
    ark_sync();
    const int begin = band * BAND * G::COLUMNS;
    const int end = (band + 1 < BANDS ? (band + 1) * BAND : LINES) * G::COLUMNS;
    const int blocks = (end - begin + 16 * M - 1) / (16 * M), all = SIDES * blocks;
    const int per = (all + ARK_WARPS - 1) / ARK_WARPS, from = ark_warp() * per;
    int held = -1;
    ark_u32 b[N][QUADS * 4];
    for (int unit = from; unit < from + per && unit < all; ++unit) {
      const int side = unit / blocks, output = side * 8 * N, group = output / OUTPUTS;
      if (t.coord[3] + output >= TILE::size[3]) break;
      if (side != held) {
        held = side;
#pragma unroll
        for (int n = 0; n < N; ++n) {
#pragma unroll
          for (int quad = 0; quad < QUADS; ++quad) {
            const int half = quad * 4 + lane / 8;
            const int at = (half * 8 + lane % 8) * G::WEIGHT + (output + n * 8) * 2;
            ark_u32 v[4];
            ark_load_tiles_turned(v, half < G::HALVES ? weights + static_cast<ark_u32>(at) : zeros);
#pragma unroll
            for (int i = 0; i < 4; ++i) b[n][quad * 4 + i] = v[i];
          }
        }
      }
      const int first = begin + unit % blocks * 16 * M;
      ark_u32 at[M];
#pragma unroll
      for (int m = 0; m < M; ++m) {  // the lane's row of a block: the window of one result
        const int wanted = first + m * 16 + lane % 16, p = wanted < end ? wanted : end - 1;
        const int line = p / G::COLUMNS, x = p % G::COLUMNS * WINDOW::step_across;
        const int y = line / G::ROWS * G::HIGH + line % G::ROWS * WINDOW::step_down;
        at[m] = pixels + static_cast<ark_u32>((y * G::WIDE + x) * G::PIXEL + group * EACH * 2);
      }
      float sums[M][N][4] = {};
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const bool missing = 2 * step + 1 >= G::HALVES && lane >= 16;
        const ark_u32 apart = static_cast<ark_u32>(lane < 16 ? G::half(2 * step)
                                                   : missing ? 0
                                                             : G::half(2 * step + 1));
#pragma unroll
        for (int m = 0; m < M; ++m) {
          ark_u32 a[4];
          ark_load_tiles(a, missing ? zeros : at[m] + apart);
#pragma unroll
          for (int n = 0; n < N; ++n) {
            ark_mma(sums[m][n], a[0], a[1], a[2], a[3], b[n][2 * step], b[n][2 * step + 1],
                    static_cast<const T*>(nullptr));
          }
        }
      }
#pragma unroll
      for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int p = first + m * 16 + lane / 4 + i * 8, line = p / G::COLUMNS;
          const int n = t.coord[0] + line / G::ROWS, y = t.coord[1] + line % G::ROWS;
          const int x = t.coord[2] + p % G::COLUMNS;
          if (p >= end || n >= TILE::size[0] || y >= TILE::size[1] || x >= TILE::size[2]) continue;
#pragma unroll
          for (int j = 0; j < N; ++j) {
            const float two[2] = {sums[m][j][2 * i], sums[m][j][2 * i + 1]};
            finish(n, y, x, t.coord[3] + output + j * 8 + lane % 4 * 2, two);
          }
        }
      }
    }
  }
}
