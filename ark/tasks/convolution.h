// Convolutions that read their windows directly from the image, without an im2col matrix. A tap is
// an element of the window. The caller passes three functions:
//
// - weight(g, m, channel, tap) returns the address of a weight of group g and output channel m.
// - begin(g, tap, n) returns the address of the first channel of group g at a tap of window n, or
//   null if the tap is outside of the image.
// - finish(g, m, n, sum) stores a result.

// The number of lanes among which each sum is divided if a tile has fewer results than threads.
constexpr int ark_convolution_lanes(int results, int parts) {
  int lanes = 1;
  while (2 * lanes * results <= ARK_THREADS && 2 * lanes <= ARK_LANES && 2 * lanes <= parts) {
    lanes *= 2;
  }
  return lanes;
}

// The number of rows of weights by which a thread multiplies each element of the input that it
// loads. It is the largest number for which all threads have work.
constexpr int ark_convolution_rows(int rows, int others, int most) {
  int each = 1;
  while (2 * each <= most && 2 * each <= rows && rows / (2 * each) * others >= ARK_THREADS) {
    each *= 2;
  }
  return each;
}

// Computes a tile of the result, which has G groups of M output channels of N pixels. The tile has
// GROUPS groups, ROWS output channels and COLUMNS pixels, from g0, m0 and n0 on. STEP: the distance
// in elements from a channel of the input to the next. TAP: the distance from a tap (element of the
// window) of the weights to the next. MOST: the largest number of output channels of a thread.
template <int GROUPS, int ROWS, int COLUMNS, int G, int M, int N, int CHANNELS, int TAPS,
          ark_i64 STEP, ark_i64 TAP, int MOST, class Weight, class Begin, class Finish>
ARK_DEVICE void ark_convolution(ArkCtx&, const ArkTask&, int g0, int m0, int n0,
                                const Weight& weight, const Begin& begin, const Finish& finish) {
  constexpr int EACH = ark_convolution_rows(ROWS, GROUPS * COLUMNS, MOST);
  constexpr int BANDS = (ROWS + EACH - 1) / EACH, RESULTS = GROUPS * BANDS * COLUMNS;
  constexpr int WINDOW = TAPS <= 9 ? TAPS : 7;  // taps whose loads are in flight together
  constexpr int WINDOWS = (TAPS + WINDOW - 1) / WINDOW;
  constexpr int LANES = ark_convolution_lanes(RESULTS, CHANNELS * WINDOWS);
  constexpr int WIDE = ARK_THREADS / LANES;
  const int lane = ark_tid() % LANES;
  for (int base = 0; base < RESULTS; base += WIDE) {
    const int e = base + ark_tid() / LANES;
    const int g = g0 + e / (BANDS * COLUMNS);
    const int m = m0 + e / COLUMNS % BANDS * EACH, n = n0 + e % COLUMNS;
    const bool here = e < RESULTS && g < G && m < M && n < N;
    float sums[EACH];
#pragma unroll
    for (int r = 0; r < EACH; ++r) sums[r] = 0.0f;
    for (int part = lane; here && part < CHANNELS * WINDOWS; part += LANES) {
      const int channel = part % CHANNELS, first = WINDOWS > 1 ? part / CHANNELS * WINDOW : 0;
      decltype(begin(0, 0, 0)) x[WINDOW];
#pragma unroll
      for (int w = 0; w < WINDOW; ++w) {
        x[w] = TAPS % WINDOW == 0 || first + w < TAPS ? begin(g, first + w, n) : nullptr;
      }
      float v[WINDOW];
#pragma unroll
      for (int w = 0; w < WINDOW; ++w) {
        v[w] = x[w] != nullptr ? ark_get(x[w], channel * STEP) : 0.0f;
      }
#pragma unroll
      for (int r = 0; r < EACH; ++r) {
        const auto* row = weight(g, m + r < M ? m + r : M - 1, channel, first);
#pragma unroll
        for (int w = 0; w < WINDOW; ++w) {
          if (TAPS % WINDOW == 0 || first + w < TAPS) sums[r] += v[w] * ark_get(row, w * TAP);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < EACH; ++r) {
      for (int mask = 1; mask < LANES; mask *= 2) sums[r] += ark_shfl_xor(sums[r], mask);
      if (here && lane == 0 && r < ROWS - (m - m0) && m + r < M) {
        finish(g, m + r, n, sums[r]);
      }
    }
  }
}

// The window of a 2-D convolution (kernel size, stride, dilation, padding before) and the sizes of
// its image and result, for ark_convolution_columns.
template <int K_DOWN, int K_ACROSS, int STEP_DOWN, int STEP_ACROSS, int APART_DOWN,
          int APART_ACROSS, int BEFORE_DOWN, int BEFORE_ACROSS, int HEIGHT, int WIDTH, int DOWN,
          int ACROSS>
struct ArkWindow {
  static constexpr int down = K_DOWN, across = K_ACROSS;
  static constexpr int step_down = STEP_DOWN, step_across = STEP_ACROSS;
  static constexpr int apart_down = APART_DOWN, apart_across = APART_ACROSS;
  static constexpr int before_down = BEFORE_DOWN, before_across = BEFORE_ACROSS;
  static constexpr int height = HEIGHT, width = WIDTH;  // of the input
  static constexpr int rows = DOWN, columns = ACROSS;   // of the result
};

// Computes a tile of the result of a convolution with one output channel per group. The tile has
// GROUPS groups and COLUMNS pixels (whole rows of pixels), from g0 and n0 on. A thread computes R
// neighbouring results of one column of the image. W: the convolution's ArkWindow. weight(g,
// channel, tap) and source(g, channel, y, x) are addresses of elements; finish(g, 0, n, sum) stores
// a result.
template <class W, int GROUPS, int COLUMNS, int G, int CHANNELS, int R, class Weight, class Source,
          class Finish>
ARK_DEVICE void ark_convolution_columns(ArkCtx&, const ArkTask&, int g0, int n0,
                                        const Weight& weight, const Source& source,
                                        const Finish& finish) {
  static_assert(COLUMNS % W::columns == 0, "whole rows");
  constexpr int HIGH = COLUMNS / W::columns, BANDS = (HIGH + R - 1) / R;
  constexpr int SPAN = (R - 1) * W::step_down + (W::down - 1) * W::apart_down + 1;
  constexpr int TOGETHER = W::across <= 3 ? W::across : 1;  // columns of a window, loaded together
  const int first = n0 / W::columns, end = first + HIGH < W::rows ? first + HIGH : W::rows;
  for (int unit = ark_tid(); unit < GROUPS * BANDS * W::columns; unit += ARK_THREADS) {
    const int g = g0 + unit / (BANDS * W::columns), x = unit % W::columns;
    const int y = first + unit / W::columns % BANDS * R;
    if (g >= G) break;
    const int top = y * W::step_down - W::before_down;
    const int left = x * W::step_across - W::before_across;
    float sums[R] = {};
    for (int channel = 0; channel < CHANNELS; ++channel) {
#pragma unroll TOGETHER
      for (int across = 0; across < W::across; ++across) {
        const int column = left + across * W::apart_across;
        const bool inside = column >= 0 && column < W::width;
        float v[SPAN];
#pragma unroll
        for (int i = 0; i < SPAN; ++i) {
          const bool here = inside && top + i >= 0 && top + i < W::height;
          v[i] = here ? ark_get(source(g, channel, top + i, column), 0) : 0.0f;
        }
#pragma unroll
        for (int down = 0; down < W::down; ++down) {
          const float factor = ark_get(weight(g, channel, down * W::across + across), 0);
#pragma unroll
          for (int r = 0; r < R; ++r) {
            sums[r] += v[r * W::step_down + down * W::apart_down] * factor;
          }
        }
      }
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (y + r < end) finish(g, 0, (y + r) * W::columns + x, sums[r]);
    }
  }
}
