// Matrix products by one thread. Parts of both operands are packed into panels, and dots.h
// multiplies the panels (Goto and van de Geijn, "Anatomy of high-performance matrix
// multiplication", ACM TOMS 2008, section 4). The inner dimension k is cut into parts of equal
// depth, which are summed in order. So the tile size does not change the result.

// Transposes a square of N by N groups of 4 bytes in registers, N = 16 or 4, and stores the first
// `rows` rows of the result. In each of log2(N) rounds, rows i and i + N / 2 are interleaved group
// by group to rows 2 i and 2 i + 1. from_row, to_row: groups between rows in memory.
#if ARK_VECTOR_BYTES == 64
typedef ark_u32 ark_groups __attribute__((vector_size(64), aligned(1), may_alias));
#define ARK_LOW_HALVES 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define ARK_HIGH_HALVES 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#else
typedef ark_u32 ark_groups __attribute__((vector_size(16), aligned(1), may_alias));
#define ARK_LOW_HALVES 0, 4, 1, 5
#define ARK_HIGH_HALVES 2, 6, 3, 7
#endif
#if defined(ARK_HAS_BLOCKS)
ARK_DEVICE void ark_transpose_square(const ark_group* from, int from_row, ark_group* to, int to_row,
                                     int rows) {
  constexpr int N = sizeof(ark_groups) / 4;
  ark_groups row[N], mixed[N];
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) row[i] = *reinterpret_cast<const ark_groups*>(from + i * from_row);
#pragma GCC unroll 4
  for (int rounds = 1; rounds < N; rounds *= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < N / 2; ++i) {
      mixed[2 * i] = __builtin_shufflevector(row[i], row[i + N / 2], ARK_LOW_HALVES);
      mixed[2 * i + 1] = __builtin_shufflevector(row[i], row[i + N / 2], ARK_HIGH_HALVES);
    }
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) row[i] = mixed[i];
  }
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) {
    if (i < rows) *reinterpret_cast<ark_groups*>(to + i * to_row) = row[i];
  }
}
#else
ARK_DEVICE void ark_transpose_square(const ark_group* from, int from_row, ark_group* to, int to_row,
                                     int rows) {
  constexpr int N = sizeof(ark_groups) / 4;
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < N; ++j) to[i * to_row + j] = from[j * from_row + i];
  }
}
#endif

ARK_DEVICE void ark_to_part(signed char& to, const signed char* from) { to = *from; }
ARK_DEVICE void ark_to_part(int16_t& to, const signed char* from) { to = *from; }
ARK_DEVICE void ark_to_part(ark_i32& to, const signed char* from) { to = *from; }
ARK_DEVICE void ark_to_part(uint16_t& to, const ark_bf16* from) { to = from->bits; }
template <typename T>
ARK_DEVICE void ark_to_part(float& to, const T* from) {
  to = ark_get(from, 0);
}

// Reads COUNT elements, STEP elements apart, and converts them to panel elements. Only the first
// `some` elements exist; zeros are stored for the others.
template <int COUNT, int STEP, typename P, typename T>
ARK_DEVICE void ark_read_parts(P* to, const T* from, int some) {
  constexpr int BYTES = COUNT * static_cast<int>(sizeof(P)), EACH = sizeof(ark_groups);
  // If the operand's elements have the size of panel elements, they are the same type. Then whole
  // groups are copied without a conversion.
  constexpr bool COPIED = sizeof(T) == sizeof(P) && STEP == 1 && BYTES % EACH == 0;
  if (COPIED && some >= COUNT) {
    ark_groups* groups = reinterpret_cast<ark_groups*>(to);
    for (int i = 0; i < BYTES / EACH; ++i) groups[i] = reinterpret_cast<const ark_groups*>(from)[i];
  } else if (some >= COUNT) {
    ARK_VECTOR_LOOP
    for (int i = 0; i < COUNT; ++i) ark_to_part(to[i], from + i * STEP);
  } else {
    memset(to, 0, COUNT * sizeof(P));
    for (int i = 0; i < some; ++i) ark_to_part(to[i], from + i * STEP);
  }
}

// The next two functions pack a block: ARK_BLOCK_GROUPS groups of k of N lines. A line is a row of
// the left operand or a column of the right one. Only `lines` lines and `depth` elements of k
// exist; zeros are stored for the rest. at(line, k): the address of an element.
//
// ark_block_by_lines reads along k: the groups of line i are stored at to + i * row.
template <int N, int K_STEP, typename P, class At>
ARK_DEVICE void ark_block_by_lines(P* to, int row, int lines, int depth, const At& at) {
  constexpr int BLOCK = ARK_BLOCK_BYTES / static_cast<int>(sizeof(P));
  for (int i = 0; i < N; ++i) {
    const bool here = i < lines;
    ark_read_parts<BLOCK, K_STEP>(to + i * row, at(here ? i : 0, 0), here ? depth : 0);
  }
}
// ark_block_by_groups reads along the lines, which are neighbours in memory: group g of all lines
// is stored at to + g * row.
template <int N, typename P, class At>
ARK_DEVICE void ark_block_by_groups(P* to, int row, int lines, int depth, const At& at) {
  constexpr int GROUP = 4 / static_cast<int>(sizeof(P));
  for (int g = 0; g < ARK_BLOCK_GROUPS; ++g, to += row) {
    P some[GROUP][N];
#pragma GCC unroll 4
    for (int j = 0; j < GROUP; ++j) {
      const int k = g * GROUP + j;
      ark_read_parts<N, 1>(GROUP == 1 ? to : some[j], at(0, k < depth ? k : 0),
                           k < depth ? lines : 0);
    }
    if constexpr (GROUP > 1) {
      constexpr ark_u32 MASK = 0xffffffffu >> (32 - 32 / GROUP);
      ark_group* groups = reinterpret_cast<ark_group*>(to);
      ARK_VECTOR_LOOP
      for (int i = 0; i < N; ++i) {
        ark_u32 group = 0u;
#pragma GCC unroll 4
        for (int j = 0; j < GROUP; ++j) {
          const ark_u32 part = some[j][i] & MASK;
          group |= part << (j * 32 / GROUP);
        }
        groups[i] = group;
      }
    }
  }
}

// Packs an operand of a matrix product into panels of WIDTH lines. A line is a row of the left
// operand (LEFT) or a column of the right one. The operand has `count` lines of `depth` elements
// along k. at(line, k): the address of an element. LINE_STEP, K_STEP: the distances in memory, in
// elements, from a line to the next one and from k to k + 1. Blocks are read along the lines if
// only LINE_STEP is 1, otherwise along k. A left panel stores blocks along k, a right panel along
// the lines. A block that was read in the other direction is transposed.
template <int WIDTH, bool LEFT, int LINE_STEP, int K_STEP, typename P, class At>
ARK_DEVICE void ark_pack_panels(P* to, int count, int depth, const At& at) {
  constexpr int GROUP = 4 / static_cast<int>(sizeof(P)), BLOCK = ARK_BLOCK_GROUPS * GROUP;
  constexpr int SQUARE = sizeof(ark_groups) / 4, SOME = WIDTH < 16 ? WIDTH : 16;
  constexpr bool BY_LINES = LINE_STEP != 1 || K_STEP == 1;
  constexpr int ROW = LEFT ? ARK_BLOCK_GROUPS : WIDTH, DOWN = LEFT ? SOME : ARK_BLOCK_GROUPS;
  constexpr int ACROSS = LEFT ? ARK_BLOCK_GROUPS : SOME;
  static_assert(WIDTH % SOME == 0, "panels consist of whole blocks");
  for (int first = 0; first < count; first += WIDTH) {
    for (int k = 0; k < depth; k += BLOCK, to += WIDTH * BLOCK) {
      for (int w = 0; w < WIDTH; w += SOME) {
        const int lines = count - first - w;
        const auto here = [&](int i, int j) { return at(lines > 0 ? first + w + i : 0, k + j); };
        P* block = to + w * (LEFT ? BLOCK : GROUP);
        alignas(64) P other[16 * BLOCK];
        P* lain = BY_LINES == LEFT ? block : other;
        if constexpr (BY_LINES) {
          ark_block_by_lines<SOME, K_STEP>(lain, BLOCK, lines, depth - k, here);
        } else {
          ark_block_by_groups<SOME>(lain, (LEFT ? 16 : WIDTH) * GROUP, lines, depth - k, here);
        }
        if constexpr (BY_LINES != LEFT) {
          const ark_group* from = reinterpret_cast<const ark_group*>(other);
          ark_group* target = reinterpret_cast<ark_group*>(block);
          for (int i = 0; i < DOWN; i += SQUARE) {
            for (int j = 0; j < ACROSS; j += SQUARE) {
              ark_transpose_square(from + j * 16 + i, 16, target + i * ROW + j, ROW, DOWN - i);
            }
          }
        }
      }
    }
  }
}

// Computes the tile of ROWS by COLUMNS at row m0, column n0 of a product of M by N elements, summed
// over k0 to k1. PART_BYTES: the depth of a part of k, in bytes of panel elements of a line.
// a(m, k), b(k, n): the address of an element of the operands. finish(m, n, sum) stores an element
// of the result, or if DISTANCE > 0 finish(m, n, sum, next) those of columns n and n + DISTANCE.
// A_LINE, A_K, B_LINE, B_K: LINE_STEP and K_STEP of ark_pack_panels for each operand.
template <int ROWS, int COLUMNS, int M, int N, int PART_BYTES, int DISTANCE, int A_LINE, int A_K,
          int B_LINE, int B_K, class A, class B, class Finish>
ARK_DEVICE void ark_matmul_panels(ArkCtx& c, const ArkTask&, int m0, int n0, int k0, int k1,
                                  const A& a, const B& b, const Finish& finish) {
  typedef typename ArkPart<decltype(a(0, 0)), decltype(b(0, 0))>::type P;
  typedef typename ArkDot<P>::sum Sum;
  constexpr int GROUP = 4 / static_cast<int>(sizeof(P)), DEPTH = PART_BYTES / 4 * GROUP;
  constexpr int R = ark_panel_rows<P>(), V = ARK_PANEL_COLUMNS;
  constexpr int DOWN = (ROWS + R - 1) / R * R, ACROSS = (COLUMNS + V - 1) / V * V;
  constexpr int STRIDE =
      ACROSS + 16;  // a distance that is not a power of two keeps rows in different cache sets
  Sum* sums = reinterpret_cast<Sum*>(ARK_SCRATCH(c));
  P* left = reinterpret_cast<P*>(sums + DOWN * STRIDE);
  P* right = left + DOWN * DEPTH;
  const int rows = M - m0 < ROWS ? M - m0 : ROWS, columns = N - n0 < COLUMNS ? N - n0 : COLUMNS;
#if defined(ARK_HAS_TILES)
  if (sizeof(P) < 4 && ark_tiles_granted) ark_begin_tiles();
#endif
  for (int k = k0; k < k1; k += DEPTH) {
    const int depth = k1 - k < DEPTH ? k1 - k : DEPTH, groups = (depth + GROUP - 1) / GROUP;
    const int pitch = (groups + ARK_BLOCK_GROUPS - 1) / ARK_BLOCK_GROUPS * ARK_BLOCK_GROUPS * GROUP;
    ark_pack_panels<R, true, A_LINE, A_K>(left, rows, depth,
                                          [&](int m, int j) { return a(m0 + m, k + j); });
    ark_pack_panels<V, false, B_LINE, B_K>(right, columns, depth,
                                           [&](int n, int j) { return b(k + j, n0 + n); });
    for (int m = 0; m < rows; m += R) {
      Sum* band = sums + (k1 - k0 > DEPTH ? m * STRIDE : 0);
      for (int n = 0; n < columns; n += V) {
        ark_multiply_panels<STRIDE>(left + m * pitch, right + n * pitch, groups, band + n, k > k0);
      }
      if (k + depth < k1) continue;
      for (int r = 0; r < R && m + r < rows; ++r) {
        const Sum* row = band + r * STRIDE;
        if constexpr (DISTANCE > 0) {
          for (int begin = 0; begin < columns; begin += 2 * DISTANCE) {
            for (int n = begin; n < begin + DISTANCE; ++n) {
              finish(m0 + m + r, n0 + n, row[n], row[n + DISTANCE]);
            }
          }
        } else {
          ARK_VECTOR_LOOP
          for (int n = 0; n < columns; ++n) finish(m0 + m + r, n0 + n, row[n]);
        }
      }
    }
  }
#if defined(ARK_HAS_TILES)
  if (sizeof(P) < 4 && ark_tiles_granted) ark_end_tiles();
#endif
}
