// Matrix products in the kernel variant `matrix`, for inputs of at most 64 rows and quantised
// weights (ArkRow). The loading thread copies boxes of codes and of their scales. The computing
// warps convert codes to operands of matrix units (mma.sync m16n8k16) in registers. A warpgroup
// computes half of a tile's columns. Each of its four warps multiplies a different 64 elements
// along k of every stage. At the tile's end the sums of the four warps are added up, and each warp
// stores 16 rows, as in wgmma.h.
//
// A lane has 16 consecutive codes of a row of weights, and the elements with the same k of its rows
// of the input. This differs from the instruction's order along k, which is correct because both
// operands have the same order.

template <typename A, typename B>
constexpr bool ARK_SAME = false;
template <typename A>
inline constexpr bool ARK_SAME<A, A> = true;

// The shape of a product whose tiles have COLUMNS columns. DEAL: the assignment of tiles to tasks,
// an ArkDeal (tiles.h). ROW: the type of a row of weights, an ArkRow. HIGH: the number of rows of
// the input that a stage holds, rounded up to a multiple of 8. SCALE_BYTES: bytes per row of
// weights of the box that loads a stage's scales, and of the box that loads its zero points; 0 if
// there are no such boxes.
template <class DEAL, typename T_, class ROW, int COLUMNS, int HIGH, int SCALE_BYTES>
struct ArkCodeProduct;
template <class DEAL, typename T_, class C_, int K, int GROUP_, class S_, bool ZEROS_, int COLUMNS,
          int HIGH_, int SCALE_BYTES_>
struct ArkCodeProduct<DEAL, T_, ArkRow<C_, K, GROUP_, S_, ZEROS_>, COLUMNS, HIGH_, SCALE_BYTES_> {
  typedef DEAL deal;
  typedef T_ T;
  typedef C_ C;
  typedef S_ S;
  typedef ArkRow<C_, K, GROUP_, S_, ZEROS_> Row;
  static constexpr bool ZEROS = ZEROS_;
  static constexpr int ALL = COLUMNS, WIDE = COLUMNS / 2, HIGH = HIGH_, GROUP = GROUP_;
  static constexpr int LINE_BYTES = 128, DEEP = 64, LINES = 4, BLOCKS = HIGH / 8;
  static constexpr bool AHEAD = true;  // codes are prefetched
  static_assert(HIGH % 8 == 0, "rows of a box are whole groups of swizzled ones");
  static_assert(LINES * 2 == ARK_WARPS && sizeof(T) == 2, "a warp has a line of half the columns");
  // These constants determine when scales are applied. WHOLE: a row of weights has one scale, by
  // which the complete sums are multiplied. BY_LINES: each line (128 bytes along k) of a row has
  // one scale, by which the sums of the line are multiplied. If neither is true, a line has several
  // scales or zero points, and the weights are scaled before they are multiplied.
  static constexpr bool WHOLE = GROUP == K && !ZEROS;
  static constexpr bool BY_LINES = !WHOLE && !ZEROS && GROUP % DEEP == 0;
  static constexpr int CODE_BYTES = DEEP * LINES * ARK_CODE_BITS<C> / 8, SCALE_BYTES = SCALE_BYTES_;
  // The offsets in a stage, in bytes, of the codes, the scales and the zero points. The input's
  // rows are at offset 0.
  static constexpr int A_BYTES = HIGH * LINE_BYTES * LINES,
                       SCALES_AT = A_BYTES + COLUMNS * CODE_BYTES;
  static constexpr int ZEROS_AT = SCALES_AT + COLUMNS * SCALE_BYTES;
  static constexpr int BYTES = ZEROS_AT + (ZEROS ? COLUMNS * SCALE_BYTES : 0);
};

// The byte of a row of scales (or zero points) at which a stage's box begins, a multiple of 16. at:
// the byte of the row's first scale (or zero point). k: the stage's first element along k.
template <class P>
ARK_DEVICE int ark_scales_begin(int at, int k) {
  return (at + k / P::GROUP * static_cast<int>(sizeof(typename P::S))) & ~15;
}
// The address of scale (or zero point) number `group` of a row in a stage. from: the stage's boxes
// of scales or zero points.
template <class P>
ARK_DEVICE const typename P::S* ark_scale_of(const char* from, int at, int k, int row, int group) {
  const int byte =
      at + group * static_cast<int>(sizeof(typename P::S)) - ark_scales_begin<P>(at, k);
  return reinterpret_cast<const typename P::S*>(from + row * P::SCALE_BYTES + byte);
}
template <class P>
ARK_DEVICE const typename P::S* ark_stage_scale(const char* stage, int k, int row, int group) {
  return ark_scale_of<P>(stage + P::SCALES_AT, P::Row::SCALES_AT, k, row, group);
}
template <class P>
ARK_DEVICE float ark_stage_zero(const char* stage, int k, int row, int group) {
  if constexpr (!P::ZEROS) return 0.0f;
  return ark_get(ark_scale_of<P>(stage + P::ZEROS_AT, P::Row::ZEROS_AT, k, row, group), 0);
}

// Converts 16 codes of a lane's row of weights, from the address `from` on, to eight pairs of
// 16-bit floats.
template <class P>
ARK_DEVICE void ark_code_operands(const char* from, ark_u32 (&pairs)[8]) {
  constexpr int WORDS = ARK_CODE_BITS<typename P::C> / 2, EACH = 8 / WORDS;
  const typename P::T* type = nullptr;
  const typename P::C* code = nullptr;
  ark_u32 words[WORDS];
  if constexpr (WORDS == 4) {
    const uint4 all = *reinterpret_cast<const uint4*>(from);
    words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
  } else {
    const uint2 all = *reinterpret_cast<const uint2*>(from);
    words[0] = all.x, words[1] = all.y;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) pairs[i] = ark_code_pair_as(type, code, words[i / EACH], i % EACH);
}

// Converts pairs of codes that share a scale and a zero point to dequantised values: (code - zero
// point) * scale.
template <class P>
ARK_DEVICE void ark_scale_operands(const char* stage, int k, int row, int group,
                                   ark_u32 (&pairs)[8]) {
  typename P::T* type = nullptr;
  const typename P::S* from = ark_stage_scale<P>(stage, k, row, group);
  if constexpr (!P::ZEROS && ARK_SAME<typename P::T, typename P::S>) {
    const ark_u32 scale = from->bits * 0x10001u;
#pragma unroll
    for (int i = 0; i < 8; ++i) pairs[i] = ark_both_fma(type, pairs[i], scale, 0x80008000u);
  } else {
    const float scale = ark_get(from, 0), zero = ark_stage_zero<P>(stage, k, row, group);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 codes = ark_pair(type, pairs[i]);
      pairs[i] = ark_pack_pair(type, (codes.x - zero) * scale, (codes.y - zero) * scale);
    }
  }
}

// Adds a warp's products for one line (128 bytes along k) of a stage. half: which half of the
// tile's columns. k: the stage's first element along k. Rows of weights are the instruction's rows,
// 16 at a time. Rows of the input are its columns, eight at a time. So a lane converts only the
// codes of its two rows of weights, and loads rows of the input without a conversion.
template <class P>
ARK_DEVICE void ark_code_line(const char* stage, int line, int half, int k,
                              float (&sum)[P::WIDE / 16][P::BLOCKS][4]) {
  typedef typename P::T T;
  const T* type = nullptr;
  const int g = ark_lane() / 4, t = ark_lane() % 4;
  ark_u32 x[P::BLOCKS][8];
#pragma unroll
  for (int b = 0; b < P::BLOCKS; ++b) {
    const char* from = stage + (line * P::HIGH + 8 * b + g) * P::LINE_BYTES;
#pragma unroll
    for (int piece = 0; piece < 2; ++piece) {
      const uint4 v = *reinterpret_cast<const uint4*>(from + (((2 * t + piece) ^ g) << 4));
      ark_u32* to = x[b] + 4 * piece;
      to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    }
  }
  const int at = k + P::DEEP * line;
  const char* codes =
      stage + P::A_BYTES + (P::DEEP * line + 16 * t) * ARK_CODE_BITS<typename P::C> / 8;
#pragma unroll
  for (int j = 0; j < P::WIDE / 16; ++j) {
    const int row = half * P::WIDE + 16 * j + g;
    ark_u32 low[8], high[8];
    ark_code_operands<P>(codes + row * P::CODE_BYTES, low);
    ark_code_operands<P>(codes + (row + 8) * P::CODE_BYTES, high);
    if constexpr (!P::WHOLE && !P::BY_LINES) {
      const int group = (at + 16 * t) / P::GROUP;
      ark_scale_operands<P>(stage, k, row, group, low);
      ark_scale_operands<P>(stage, k, row + 8, group, high);
    }
    float own[P::BLOCKS][4] = {};
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
#pragma unroll
      for (int b = 0; b < P::BLOCKS; ++b) {
        ark_mma(P::BY_LINES ? own[b] : sum[j][b], low[i], high[i], low[i + 1], high[i + 1], x[b][i],
                x[b][i + 1], type);
      }
    }
    if constexpr (P::BY_LINES) {
      const int group = at / P::GROUP;
      const float scale[2] = {ark_get(ark_stage_scale<P>(stage, k, row, group), 0),
                              ark_get(ark_stage_scale<P>(stage, k, row + 8, group), 0)};
#pragma unroll
      for (int b = 0; b < P::BLOCKS; ++b) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[j][b][e] = fmaf(scale[e / 2], own[b][e], sum[j][b][e]);
      }
    }
  }
}

// The index in shared memory of a sum, in an array of rows of the input by WIDE columns. Groups of
// eight columns are permuted by the row's number (swizzled), so that lanes store to different
// banks.
template <int WIDE>
ARK_DEVICE int ark_code_place(int row, int column) {
  return row * WIDE + (column ^ (row / 2 * 8 & (WIDE - 1)));
}

// Adds up the sums of a warpgroup's four warps in a fixed order, and transposes them: warp w gets
// the totals of input rows 16 w to 16 w + 15, in the register layout of wgmma's sums. The sums are
// exchanged through the slabs in shared memory, 16 input rows at a time.
template <class P>
ARK_DEVICE void ark_code_join(ArkCtx& c, const float (&sum)[P::WIDE / 16][P::BLOCKS][4],
                              float (&made)[P::WIDE / 2]) {
  constexpr int WIDE = P::WIDE, SIZE = 16 * WIDE;
  static_assert(ARK_WARPS * SIZE * sizeof(float) <= ARK_MATRIX_SLABS, "sums fit the slabs");
  float* room = reinterpret_cast<float*>(ark_matrix_slab(c, 0));
  const int warp = ark_warp(), own = warp % 4, g = ark_lane() / 4, t = ark_lane() % 4;
#pragma unroll
  for (int b = 0; b < P::BLOCKS; b += 2) {
    ark_sync();
#pragma unroll
    for (int j = 0; j < WIDE / 16; ++j) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const int row = e / 4 * 8 + 2 * t + e % 2, column = 16 * j + e % 4 / 2 * 8 + g;
        if (b + e / 4 >= P::BLOCKS) continue;
        room[warp * SIZE + ark_code_place<WIDE>(row, column)] = sum[j][b + e / 4][e % 4];
      }
    }
    ark_sync();
    if (own != b / 2) continue;
#pragma unroll
    for (int i = 0; i < WIDE / 2; ++i) {
      const int row = i % 4 / 2 * 8 + g, column = i / 4 * 8 + 2 * t + i % 2;
      float total = 0.0f;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        total += room[(warp - own + w) * SIZE + ark_code_place<WIDE>(row, column)];
      }
      made[i] = total;
    }
  }
  ark_sync();
}

// Run by the computing warps: computes the tiles of a task. k is divided into parts. begin(i1),
// last(i1): the first element along k of part i1, and its last element + 1. end: see
// ark_matrix_product. bytes: the quantised matrix, which has N rows.
template <class P, int N, class Begin, class Last, class End>
ARK_DEVICE void ark_code_product(ArkCtx& c, const ArkTask& t, const unsigned char* bytes,
                                 const Begin& begin, const Last& last, const End& end) {
  const typename P::Row* rows = reinterpret_cast<const typename P::Row*>(bytes);
  const int half = ark_warp() / 4, line = ark_warp() % 4;
  ark_u32 full = ark_shared_address(ark_matrix.full);
  ark_u32 empty = ark_shared_address(ark_matrix.empty);
  ArkMatrixSlot at = ark_matrix_place_of();
  ark_each_tile<typename P::deal, false>(t, [&](int i0, int i1, int m0, int n0) {
    float sum[P::WIDE / 16][P::BLOCKS][4] = {};
    const int left = n0 + half * P::WIDE;
    const auto store = end(i0, i1, m0, n0, 16 * line, left);
    float scale[P::WHOLE ? P::WIDE / 4 : 1];
    if constexpr (P::WHOLE) {
#pragma unroll
      for (int i = 0; i < P::WIDE / 4; ++i) {
        const int row = left + i / 2 * 8 + ark_lane() % 4 * 2 + i % 2;
        scale[i] = ark_row_scale(rows[row < N ? row : N - 1], 0);
      }
    }
    const int k1 = last(i1);
    for (int k = begin(i1); k < k1; k += P::DEEP * P::LINES) {
      ark_matrix_filled(c, full + 8u * at.slot, at.parity);
      if (k + P::DEEP * line < k1) {
        ark_code_line<P>(ark_matrix_stage(c, at.slot), line, half, k, sum);
      }
      __syncwarp();
      if (ark_lane() == 0) ark_matrix_release_warp(empty + 8u * at.slot);
      ark_matrix_next(at);
    }
    float made[P::WIDE / 2] = {};
    ark_code_join<P>(c, sum, made);
    if constexpr (P::WHOLE) {
#pragma unroll
      for (int i = 0; i < P::WIDE / 2; ++i) made[i] *= scale[i / 4 * 2 + i % 2];
    }
    store(made);
    return true;
  });
  ark_matrix_keep_place(at);
}

// Run by the loading thread: loads the stages of a task's tiles.
template <class P, class Begin, class Last>
ARK_DEVICE void ark_code_load_product(ArkCtx& c, const ArkTask& t, ArkMatrixLoad& load,
                                      ark_u64 map_a, ark_u64 map_codes, ark_u64 map_scales,
                                      const Begin& begin, const Last& last) {
  if (load.ahead) {
    ark_matrix_prefetch_stages<P>(t, load, begin, last, [&](int n0, int k) {
      ark_box_prefetch(map_codes, k * ARK_CODE_BITS<typename P::C> / 8, n0);
    });
    return;
  }
  ark_matrix_load_stages<P>(
      c, t, load, begin, last,
      [&](char* stage, int, int, int m0, int, int k, ark_u64* full, ark_u64) {
        ark_box_load(stage, map_a, 0, m0, k / P::DEEP, full);
      },
      [&](char* stage, int, int, int, int n0, int k, ark_u64* full, ark_u64 keep) {
        ark_box_load(stage + P::A_BYTES, map_codes, k * ARK_CODE_BITS<typename P::C> / 8, n0, full,
                     keep);
        if constexpr (!P::WHOLE) {
          const int scales = ark_scales_begin<P>(P::Row::SCALES_AT, k);
          ark_box_load(stage + P::SCALES_AT, map_scales, scales, n0, full, keep);
        }
        if constexpr (P::ZEROS) {
          const int zeros = ark_scales_begin<P>(P::Row::ZEROS_AT, k);
          ark_box_load(stage + P::ZEROS_AT, map_scales, zeros, n0, full, keep);
        }
      });
}
