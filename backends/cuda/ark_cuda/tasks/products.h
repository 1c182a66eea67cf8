// Tiles of matrix products in the kernel variant `matrix`: the types that describe a tile, and the
// code that the loading thread runs. The computing warps run wgmma.h (sm_90a) or tcgen05.h
// (sm_100a). a and b are the left and right operands, and k is the dimension that is summed. A line
// is 128 bytes along k of one row of a or one column of b.

// The shape of a product whose tiles have ROWS (64 or 128) by COLUMNS elements. In tiles of 128
// rows a warpgroup stores half of the rows, in tiles of 64 rows half of the columns.
//
// DEAL: the assignment of tiles to tasks, an ArkDeal (tiles.h). HIGH: the number of rows of a that
// a stage of the ring holds; less than ROWS if a has fewer rows. LINES: a stage holds this number
// of consecutive lines of each of its rows of a and columns of b. ACROSS_A, ACROSS_B: true if k is
// not the contiguous dimension of that operand. OVERLAP: true if the products of a stage run while
// the warpgroup waits for the next stage.
template <class DEAL, typename T_, typename T_B, int ROWS, int COLUMNS, int HIGH, bool ACROSS_A,
          bool ACROSS_B, bool OVERLAP_, int LINES_>
struct ArkProduct {
  typedef DEAL deal;
  typedef T_ T;
  typedef T_B TB;
  static constexpr bool TALL = ROWS == 128;
  // OVERLAP keeps one more slot of the ring in use. In tiles of 64 rows each warpgroup uses half of
  // the slots, and with only two slots overlap would leave one of them for loads. Such tiles are
  // limited by loads: without overlap a product of 1024x768x3072 takes 15 us instead of 27 on an
  // H100.
  static constexpr bool OVERLAP = OVERLAP_ && (TALL || ARK_MATRIX_STAGES >= 8u);
  static constexpr bool A_ACROSS = ACROSS_A, B_ACROSS = ACROSS_B;
  static constexpr int ALL = COLUMNS, WIDE = TALL ? COLUMNS : COLUMNS / 2;  // that a group stores
  // LINE_BYTES, DEEP: bytes and elements of a line. A_BYTES: bytes of a in a stage. BYTES: bytes of
  // both operands in a stage. A_LINE, B_LINE: the distance from one line of all rows to the next
  // line, in units of 16 bytes.
  static constexpr int LINE_BYTES = 128, LINES = LINES_;
  static constexpr int DEEP = LINE_BYTES / static_cast<int>(sizeof(T));
  static constexpr int A_BYTES = HIGH * LINE_BYTES * LINES,
                       BYTES = LINE_BYTES * (HIGH + COLUMNS) * LINES;
  static constexpr int A_ROWS = HIGH, B_ROWS = COLUMNS;
  static constexpr ark_u32 A_LINE = HIGH * LINE_BYTES / 16, B_LINE = COLUMNS * LINE_BYTES / 16;
  // STEP: the distance between steps of 32 bytes along k in shared memory, in units of 16 bytes. If
  // k is the contiguous dimension, it is 32 bytes of a row; otherwise it is 16 rows of 128 bytes.
  // LEAD: the argument `lead` of ark_matrix_operand (matrix.h).
  static constexpr ark_u32 A_STEP = ACROSS_A ? 128u : 2u, A_LEAD = ACROSS_A ? 512u : 1u;
  static constexpr ark_u32 B_STEP = ACROSS_B ? 128u : 2u, B_LEAD = ACROSS_B ? 512u : 1u;
  // The bytes of the 64 rows of a that one warpgroup multiplies, which are the offset of the second
  // warpgroup's rows.
  static constexpr int A_HALF = TALL ? 8192 : 0;
  // True if a thread prefetches the right operand (matrix.h), which one task reads.
#ifdef ARK_HAS_TENSOR_MEMORY
  static constexpr bool AHEAD = false;
#else
  static constexpr bool AHEAD = !TALL && DEAL::single && !ACROSS_B;
#endif
};

// Selects a matrix of a batch in a tensor map. FIRST, SECOND: true if the map has the first or the
// second batch dimension. FLAT: true if the map has only the two dimensions of a matrix.
template <bool FLAT, bool FIRST, bool SECOND>
struct ArkBatch {};

// Loads one operand of a stage by box copies (TMA): ROWS rows (for b: columns) from `row` on.
// ACROSS: true if k is the outer dimension of the tensor map. The operand is then loaded by several
// boxes, each of DEEP rows of the map. With several LINES the map has three dimensions, and one box
// loads all lines.
template <bool ACROSS, int ROWS, int DEEP, int LINES, bool FLAT, bool FIRST, bool SECOND>
ARK_DEVICE void ark_matrix_boxes(char* to, ark_u64 map, int row, int k, int i0, int i1,
                                 ark_u64* full, ArkBatch<FLAT, FIRST, SECOND>,
                                 ark_u64 keep = ARK_BOX_STAYS) {
#pragma unroll
  for (int i = 0; i < (ACROSS ? ROWS / DEEP : 1); ++i) {
    char* at = to + 128 * DEEP * i;
    const int x = ACROSS ? row + DEEP * i : k, y = ACROSS ? k : row;
    if constexpr (LINES > 1) {
      ark_box_load(at, map, 0, row, k / DEEP, full, keep);
    } else if constexpr (FLAT) {
      ark_box_load(at, map, x, y, full, keep);
    } else {
      ark_box_load(at, map, x, y, SECOND ? i1 : 0, FIRST ? i0 : 0, full, keep);
    }
  }
}

// An operand that is the matrix of an image's convolution windows, which box copies read from the
// image itself (ark.tasks.matmul_windows). PLACES: windows per image, ACROSS of them in a row.
// CHANNELS: channels of the image. TAPS: elements of the kernel in a row. The other parameters are
// strides, padding and dilation in both directions. SPLIT: true if the rows of the matrix are the
// windows of all images.
template <bool SPLIT, int PLACES, int ACROSS, int CHANNELS, int TAPS, int STEP_DOWN,
          int STEP_ACROSS, int BEFORE_DOWN, int BEFORE_ACROSS, int APART_DOWN, int APART_ACROSS>
struct ArkWindows {
  ARK_DEVICE void load(char* to, ark_u64 map, int row, int k, int i0, ark_u64* full, ark_u64 keep) {
    const int image = SPLIT ? row / PLACES : i0, place = SPLIT ? row % PLACES : row;
    const int x = place % ACROSS * STEP_ACROSS - BEFORE_ACROSS;
    const int y = place / ACROSS * STEP_DOWN - BEFORE_DOWN;
    const int tap = k / CHANNELS;
    ark_window_load(to, map, k % CHANNELS, x, y, image, tap % TAPS * APART_ACROSS,
                    tap / TAPS * APART_DOWN, full, keep);
  }
};
template <bool ACROSS, int ROWS, int DEEP, int LINES, bool SPLIT, int... NUMBERS>
ARK_DEVICE void ark_matrix_boxes(char* to, ark_u64 map, int row, int k, int i0, int, ark_u64* full,
                                 ArkWindows<SPLIT, NUMBERS...>, ark_u64 keep = ARK_BOX_STAYS) {
  static_assert(!ACROSS, "k of windows lies side by side");
#pragma unroll
  for (int i = 0; i < LINES; ++i) {
    ArkWindows<SPLIT, NUMBERS...>::load(to + 128 * ROWS * i, map, row, k + DEEP * i, i0, full,
                                        keep);
  }
}

// Run by the prefetching thread: prefetches the right operand of a stage.
template <class P, bool FIRST, bool SECOND>
ARK_DEVICE void ark_matrix_prefetch(ark_u64 map, int row, int k, ArkBatch<true, FIRST, SECOND>) {
  if constexpr (P::LINES > 1) {
    ark_box_prefetch(map, 0, row, k / P::DEEP);
  } else {
    ark_box_prefetch(map, k, row);
  }
}
template <class P, class Batch>
ARK_DEVICE void ark_matrix_prefetch(ark_u64, int, int, Batch) {}
// Run by the prefetching thread: prefetches the stages of a task's tiles. ahead(n0, k): prefetches
// the right operand of a stage. Other arguments as for ark_matrix_load_stages.
template <class P, class Begin, class End, class Ahead>
ARK_DEVICE void ark_matrix_prefetch_stages(const ArkTask& t, ArkMatrixLoad& load,
                                           const Begin& begin, const End& end, const Ahead& ahead) {
  constexpr ark_u32 NS = ARK_STAGE_NS * (P::BYTES - P::A_BYTES) / ARK_STAGE_BYTES;
  ark_each_tile<typename P::deal, false>(t, [&](int, int i1, int, int n0) {
    const int last = end(i1);
    for (int k = begin(i1); k < last; k += P::DEEP * P::LINES) {
      bool wanted;
      if (!ark_matrix_due(load, NS, wanted)) {
        load.stopped = true;
        return false;
      }
      if (wanted) ahead(n0, k);
    }
    return true;
  });
}

// Run by the loading thread: loads the stages of a task's tiles. k is divided into parts.
// begin(i1), end(i1): the first element along k of part i1, and its last element + 1. left, right:
// functions that start the box copies of one operand for a stage. If load.early is true, only the
// right operand is loaded, for as many stages as are free.
template <class P, class Begin, class End, class Left, class Right>
ARK_DEVICE void ark_matrix_load_stages(ArkCtx& c, const ArkTask& t, ArkMatrixLoad& load,
                                       const Begin& begin, const End& end, const Left& left,
                                       const Right& right) {
  // The right operand of a product with an activation is weights, which are read once. They get the
  // L2 priority evict_first, so that instructions and activations stay in L2.
  const bool leaves = P::deal::once && (t.growth & ARK_LOADS_RIGHT) != 0u;
  const ark_u64 keep = leaves ? ARK_BOX_LEAVES : ARK_BOX_STAYS;
  ark_each_tile<typename P::deal, false>(t, [&](int i0, int i1, int m0, int n0) {
    const int last = end(i1);
    for (int k = begin(i1); k < last; k += P::DEEP * P::LINES) {
      if (!ark_matrix_free(load)) {
        load.stopped = true;
        return false;
      }
      ark_u64* full = &ark_matrix.full[load.at.slot];
      char* stage = ark_matrix_stage(c, load.at.slot);
      const bool unbegun = load.early || load.begun == 0u;
      if (load.early) {
        ark_matrix_expect_part(full, P::BYTES - P::A_BYTES);
      } else {
        ark_matrix_expect(full, unbegun ? P::BYTES : P::A_BYTES);
        left(stage, i0, i1, m0, n0, k, full, keep);
      }
      if (unbegun) {
        right(stage, i0, i1, m0, n0, k, full, keep);
        ark_matrix_loaded(load, P::AHEAD && (t.growth & ARK_LOADS_RIGHT) != 0u);
      }
      if (load.early) {
        ark_matrix_next(load.at);
        if (++load.begun == ARK_MATRIX_STAGES) return false;
        continue;
      }
      if (!unbegun) --load.begun;
      ark_matrix_issued(load);
    }
    return true;
  });
}
template <class P, class Begin, class End, class A, class B>
ARK_DEVICE void ark_matrix_load_product(ArkCtx& c, const ArkTask& t, ArkMatrixLoad& load,
                                        ark_u64 map_a, ark_u64 map_b, const Begin& begin,
                                        const End& end, A batch_a, B batch_b) {
  if (load.ahead) {
    if constexpr (P::AHEAD) {
      ark_matrix_prefetch_stages<P>(t, load, begin, end, [&](int n0, int k) {
        ark_matrix_prefetch<P>(map_b, n0, k, batch_b);
      });
    }
    return;
  }
  ark_matrix_load_stages<P>(
      c, t, load, begin, end,
      [&](char* stage, int i0, int i1, int m0, int, int k, ark_u64* full, ark_u64) {
        ark_matrix_boxes<P::A_ACROSS, P::A_ROWS, P::DEEP, P::LINES>(stage, map_a, m0, k, i0, i1,
                                                                    full, batch_a);
      },
      [&](char* stage, int i0, int i1, int, int n0, int k, ark_u64* full, ark_u64 keep) {
        ark_matrix_boxes<P::B_ACROSS, P::B_ROWS, P::DEEP, P::LINES>(stage + P::A_BYTES, map_b, n0,
                                                                    k, i0, i1, full, batch_b, keep);
      });
}
