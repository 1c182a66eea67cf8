// Multiplies weights by a few rows of an input. The weights were loaded by a box copy (TMA,
// ark_fill_box).
//
// A box has blocks of 64 elements of each of R rows. A row of a block has 128 bytes. The copy is
// swizzled: chunk c (16 bytes) of row r is stored as chunk c ^ r % 8. Eight lanes that read two
// rows' chunks therefore access all banks.
//
// The 16 bytes that a lane loads are an operand of matrix units (m16n8k16) without a conversion.
// Rows r and r + 8 of the operand tile are both row r of the weights: one has the first half of a
// chunk's elements, the other the second half. Each half is multiplied by its own columns of the
// other operand. With up to four input rows, one product computes both halves: columns 0 to 3 are
// the input rows for the first half, and columns 4 to 7 are those for the second half. The
// product's other results are ignored. With more input rows there is one product for each half.

constexpr int ARK_BOX_BLOCK = 64;

template <int R, int M>
struct ArkBox {
  static constexpr bool BOTH = M <= 4;        // one product for both halves
  static constexpr int SETS = R / 8;          // of eight rows of weights
  static constexpr int NEXT = R > 8 ? 2 : 1;  // from a lane's first chunk of a block to its second
  static constexpr int CHAINS = BOTH && R > 8 ? 2 : 4;  // independent sums of a set
  static_assert(R == 8 || R == 16, "one set of rows or two");

  // Of each block of 64 elements a lane loads some 16-byte chunks. Returns the number of the first
  // of them.
  ARK_DEVICE_MEMBER static int chunk() {
    const int t = ark_lane() % 4;
    return R > 8 ? (t & 1) | (t >> 1) << 2 : 2 * t;
  }
  // The row of the input whose elements a lane holds. If BOTH, the lane's column also selects which
  // half of the elements. Columns from M on are ignored, whatever they contain.
  ARK_DEVICE_MEMBER static int input() {
    const int column = BOTH ? ark_lane() / 4 % 4 : ark_lane() / 4;
    return column < M ? column : 0;
  }
  ARK_DEVICE_MEMBER static int half() { return ark_lane() / 16; }
};

// The index in shared memory of elements `place` (an even number) and `place` + 1 of an input row.
// The elements of a row are reordered, so that a lane loads the elements that it needs with one
// access. A chunk of 8 elements has two halves: elements 0, 1, 4, 5 and elements 2, 3, 6, 7. The
// first halves of chunks 2 t and 2 t + 1 are 16 contiguous bytes, and so are their second halves.
ARK_DEVICE int ark_box_place(int place) {
  const int word = place / 2 % 32;
  return place / ARK_BOX_BLOCK * ARK_BOX_BLOCK + 2 * (word >> 1 | (word & 1) << 4);
}

// Adds the products of BLOCKS blocks of a box with the input. x(i, half): the input elements for
// block i, as four words: this lane's half of its first chunk and of its second chunk.
template <int R, int M, int BLOCKS, int UNROLLED, typename T, class X>
ARK_DEVICE void ark_box_products(const T* w, const X& x,
                                 float (&d)[ArkBox<R, M>::SETS][ArkBox<R, M>::CHAINS][4]) {
  using Box = ArkBox<R, M>;
  const uint4* from[Box::SETS][2];
#pragma unroll
  for (int s = 0; s < Box::SETS; ++s) {
    const int row = ark_lane() / 4 * Box::SETS + s, chunk = Box::chunk() ^ row % 8;
    from[s][0] = reinterpret_cast<const uint4*>(w) + row * 8 + chunk;
    from[s][1] = reinterpret_cast<const uint4*>(w) + row * 8 + (chunk ^ Box::NEXT);
  }
#pragma unroll UNROLLED
  for (int i = 0; i < BLOCKS; ++i) {
    uint4 b[2];
    b[0] = x(i, Box::BOTH ? Box::half() : 0);
    if constexpr (!Box::BOTH) b[1] = x(i, 1);
#pragma unroll
    for (int s = 0; s < Box::SETS; ++s) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const uint4 a = from[s][k][i * R * 8];
#pragma unroll
        for (int h = 0; h < (Box::BOTH ? 1 : 2); ++h) {
          const int chain = Box::BOTH ? (k + 2 * i) % Box::CHAINS : k + 2 * h;
          ark_mma(d[s][chain], a.x, a.y, a.z, a.w, k == 0 ? b[h].x : b[h].z,
                  k == 0 ? b[h].y : b[h].w, w);
        }
      }
    }
  }
}

// Adds up a lane's sums for one set of eight rows of weights. The lane gets the products of the
// set's row `ark_lane() / 4` with two input rows, 2 t and 2 t + 1. t is ark_lane() % 4, or t % 2 if
// one product computed both halves.
template <int R, int M>
ARK_DEVICE void ark_box_sums(const float (&d)[ArkBox<R, M>::CHAINS][4], float (&sum)[2]) {
  using Box = ArkBox<R, M>;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    if constexpr (Box::BOTH) {
      const bool first = ark_lane() % 4 < 2;
      float all = 0.0f;
#pragma unroll
      for (int i = 0; i < Box::CHAINS; ++i) all += first ? d[i][e] : d[i][2 + e];
      sum[e] = all + ark_shfl_xor(all, 2);
    } else {
      sum[e] = (d[0][e] + d[1][e]) + (d[2][2 + e] + d[3][2 + e]);
    }
  }
}

// Moves sums between lanes to get the layout of ArkRowsTile.
template <int R, int M>
ARK_DEVICE void ark_box_tile(const float (&d)[ArkBox<R, M>::SETS][ArkBox<R, M>::CHAINS][4],
                             float (&sum)[R > 8 ? 4 : 2]) {
  float own[ArkBox<R, M>::SETS][2];
#pragma unroll
  for (int s = 0; s < ArkBox<R, M>::SETS; ++s) ark_box_sums<R, M>(d[s], own[s]);
  if constexpr (R > 8) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sum[e] = own[e / 2][e % 2];
  } else {
    const int column = ark_lane() / 4;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int lane = (ark_lane() % 4 * 2 + e) * 4 + column / 2;
      const float even = __shfl_sync(0xffffffffu, own[0][0], lane);
      const float odd = __shfl_sync(0xffffffffu, own[0][1], lane);
      sum[e] = column % 2 == 0 ? even : odd;
    }
  }
}
