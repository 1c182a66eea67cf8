// Products by one thread with vectors: parts of both matrices are packed into panels, and a few
// rows by two vectors of columns are summed in registers over a part of k (Goto and van de Geijn,
// "Anatomy of high-performance matrix multiplication", ACM TOMS 2008, section 4). Sums are over k
// in order, by parts of DEPTH, whatever the tile.

#if defined(ARK_VECTOR_BYTES)
template <typename S>
struct ArkVectorOf {
  typedef S type __attribute__((vector_size(ARK_VECTOR_BYTES), aligned(4)));
};
constexpr int ARK_VECTOR = ARK_VECTOR_BYTES / 4, ARK_PANEL_COLUMNS = 2 * ARK_VECTOR;

// sums (STRIDE wide) += the product of a panel of R rows and one of two vectors of columns.
template <int R, int STRIDE, typename S>
ARK_DEVICE void ark_panels(const S* a, const S* b, int depth, S* sums) {
  typedef typename ArkVectorOf<S>::type ark_vector;
  ark_vector total[R][2] = {};
  for (int k = 0; k < depth; ++k, a += R, b += ARK_PANEL_COLUMNS) {
    const ark_vector low = *reinterpret_cast<const ark_vector*>(b);
    const ark_vector high = *reinterpret_cast<const ark_vector*>(b + ARK_VECTOR);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      total[r][0] += a[r] * low;
      total[r][1] += a[r] * high;
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    ark_vector* to = reinterpret_cast<ark_vector*>(sums + r * STRIDE);
    to[0] += total[r][0];
    to[1] += total[r][1];
  }
}

// Panels of WIDTH of the `count` lines of `depth` elements, zeros where lines end. at(line, k)
// gives an element's place. ALONG: a line's elements are neighbours in memory, so they are read
// side by side and transposed in a small buffer.
template <int WIDTH, bool ALONG, typename S, class At>
ARK_DEVICE void ark_pack_panels(S* to, int count, int depth, const At& at) {
  constexpr int SOME = 16;
  for (int first = 0; first < count; first += WIDTH, to += WIDTH * depth) {
    const int width = count - first < WIDTH ? count - first : WIDTH;
    int k = 0;
    if (width < WIDTH) {
      for (int i = 0; i < WIDTH * depth; ++i) to[i] = 0;
    } else if (ALONG) {
      for (; k + SOME <= depth; k += SOME) {
        S transposed[WIDTH][SOME];
        for (int i = 0; i < WIDTH; ++i) {
          const auto* line = at(first + i, k);
          ARK_VECTOR_LOOP
          for (int j = 0; j < SOME; ++j) transposed[i][j] = ark_factor(line + j);
        }
        for (int j = 0; j < SOME; ++j) {
          ARK_VECTOR_LOOP
          for (int i = 0; i < WIDTH; ++i) to[(k + j) * WIDTH + i] = transposed[i][j];
        }
      }
    } else {
      for (; k < depth; ++k) {
        ARK_VECTOR_LOOP
        for (int i = 0; i < WIDTH; ++i) to[k * WIDTH + i] = ark_factor(at(first + i, k));
      }
    }
    for (; k < depth; ++k) {
      for (int i = 0; i < width; ++i) to[k * WIDTH + i] = ark_factor(at(first + i, k));
    }
  }
}

// The tile of ROWS by COLUMNS at m0, n0 of a product of M by N; the rest as ark_matmul. PAIRS:
// finish has neighbouring columns, as of ark_matmul_pairs. TA, TB: is the matrix transposed?
template <int ROWS, int COLUMNS, int M, int N, int DEPTH, bool PAIRS, bool TA, bool TB, class A,
          class B, class Finish>
ARK_DEVICE void ark_matmul_blocked(ArkCtx& c, const ArkTask&, int m0, int n0, int k0, int k1,
                                   const A& a, const B& b, const Finish& finish) {
  constexpr int R = ROWS < ARK_PANEL_ROWS ? ROWS : ARK_PANEL_ROWS, V = ARK_PANEL_COLUMNS;
  constexpr int DOWN = (ROWS + R - 1) / R * R, ACROSS = (COLUMNS + V - 1) / V * V;
  typedef decltype(ark_factor(a(0, 0))) Sum;
  Sum* sums = reinterpret_cast<Sum*>(ARK_SCRATCH(c));
  Sum* left = sums + DOWN * ACROSS;
  Sum* right = left + DOWN * DEPTH;
  const int rows = M - m0 < ROWS ? M - m0 : ROWS, columns = N - n0 < COLUMNS ? N - n0 : COLUMNS;
  for (int i = 0; i < DOWN * ACROSS; ++i) sums[i] = 0;
  for (int k = k0; k < k1; k += DEPTH) {
    const int depth = k1 - k < DEPTH ? k1 - k : DEPTH;
    ark_pack_panels<R, !TA>(left, rows, depth, [&](int m, int j) { return a(m0 + m, k + j); });
    ark_pack_panels<V, TB>(right, columns, depth, [&](int n, int j) { return b(k + j, n0 + n); });
    for (int n = 0; n < columns; n += V) {
      for (int m = 0; m < rows; m += R) {
        ark_panels<R, ACROSS>(left + m * depth, right + n * depth, depth, sums + m * ACROSS + n);
      }
    }
  }
  for (int m = 0; m < rows; ++m) {
    const Sum* row = sums + m * ACROSS;
    if constexpr (PAIRS) {
      for (int n = 0; n < columns; n += 2) finish(m0 + m, n0 + n, row[n], row[n + 1]);
    } else {
      ARK_VECTOR_LOOP
      for (int n = 0; n < columns; ++n) finish(m0 + m, n0 + n, row[n]);
    }
  }
}
#endif
