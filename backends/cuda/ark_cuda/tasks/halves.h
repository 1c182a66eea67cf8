// Stores the results of products with rotary embedding by halves (element i of a head is rotated
// with element i + half), in the variant `matrix`. Both elements are in the registers of the same
// lane. A lane loads the first cosines and sines of its two rows before the sums are complete. For
// heads of 64 elements, cosines and sines are loaded once for all heads of the tile. For wider
// heads, a part of them is loaded at a time.

// The cosines and sines by which a lane rotates its elements. They belong to the warp's rows lane /
// 4 and lane / 4 + 8, and to two neighbouring columns in each of four blocks of eight columns.
template <typename C, typename S>
struct ArkTurn {
  static constexpr int BLOCKS = 4;
  decltype(ark_held<2>(static_cast<const C*>(nullptr))) cosines[2][BLOCKS];
  decltype(ark_held<2>(static_cast<const S*>(nullptr))) sines[2][BLOCKS];
};

// Like ark_hold, for two elements that are not aligned.
template <typename T>
ARK_DEVICE void ark_hold_two(ArkPack<T, 2>& to, const T* p) {
  to = ArkPack<T, 2>{{p[0], p[1]}};
}
template <typename T>
ARK_DEVICE void ark_hold_two(ArkWords<T, 2>& to, const T* p) {
  union {
    ArkPack<T, 2> pack;
    ArkWords<T, 2> words;
  } both = {ArkPack<T, 2>{{p[0], p[1]}}};
  to = both.words;
}

// Hides from the compiler that cosines and sines are the same for all heads. Otherwise the compiler
// would convert them once for all heads of a tile; the converted values take twice as many
// registers, so other values would be spilled. q: the head's first column, a small number.
template <typename T>
ARK_DEVICE void ark_hide(ArkPack<T, 2>&, ark_u32) {}
template <typename T>
ARK_DEVICE void ark_hide(ArkWords<T, 2>& pair, ark_u32 zero) {
  pair.words.v[0] += zero;
}
template <typename C, typename S>
ARK_DEVICE void ark_hide(ArkTurn<C, S>& turn, int q) {
  ark_u32 zero;
  asm volatile("shr.u32 %0, %1, 20;" : "=r"(zero) : "r"(q));
#pragma unroll
  for (int i = 0; i < 2 * turn.BLOCKS; ++i) {
    ark_hide(turn.cosines[i % 2][i / 2], zero);
    ark_hide(turn.sines[i % 2][i / 2], zero);
  }
}

// Loads the cosines and sines of four blocks of eight columns, from column `from` of the half head
// on. row(i): the row of both tables for the lane's row i (0 or 1). C_PITCH, S_PITCH: elements from
// row to row. aligned: true if two neighbouring elements of both tables can be loaded as a vector.
template <int C_PITCH, int S_PITCH, typename C, typename S, class Row>
ARK_DEVICE ArkTurn<C, S> ark_matrix_turn(const C* cosines, const S* sines, bool aligned,
                                         const Row& row, int from) {
  ArkTurn<C, S> turn = {};
#pragma unroll
  for (int high = 0; high < 2; ++high) {
    const int column = from + ark_lane() % 4 * 2;
    const C* cosine = cosines + static_cast<ark_i64>(row(high)) * C_PITCH + column;
    const S* sine = sines + static_cast<ark_i64>(row(high)) * S_PITCH + column;
    if (aligned) {
#pragma unroll
      for (int j = 0; j < turn.BLOCKS; ++j) {
        ark_hold(turn.cosines[high][j], cosine + 8 * j);
        ark_hold(turn.sines[high][j], sine + 8 * j);
      }
    } else {
#pragma unroll
      for (int j = 0; j < turn.BLOCKS; ++j) {
        ark_hold_two(turn.cosines[high][j], cosine + 8 * j);
        ark_hold_two(turn.sines[high][j], sine + 8 * j);
      }
    }
  }
  return turn;
}

// Stores 64 columns of a warp's 16 rows, from row `first` on, as whole 128-byte lines through the
// warp's slab.
template <typename T>
ARK_DEVICE void ark_matrix_store_lines(char* slab, const float* d, T* out, ark_i64 pitch, int first,
                                       int rows) {
  __syncwarp();
  ark_matrix_slab_fill<T, 64>(slab, d);
  __syncwarp();
  const int piece = ark_lane() % 8, row = first + ark_lane() / 8;
  T* to = out + row * pitch + 8 * piece;
#pragma unroll
  for (int i = 0; i < 4; ++i, to += 4 * pitch) {
    const int local = 4 * i + ark_lane() / 8;
    if (row + 4 * i >= rows) break;
    const char* from = slab + local * 128 + ((piece ^ (local & 7)) << 4);
    ark_store_pack<8>(to, *reinterpret_cast<const ArkPack<T, 8>*>(from));
  }
}
// Stores a lane's sums of 64 columns, two neighbours at a time, if the result in memory is not
// aligned.
template <typename T>
ARK_DEVICE void ark_matrix_store_each(const float* d, T* out, ark_i64 pitch, int first, int rows) {
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int row = first + ark_lane() / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + i % 2;
    if (row < rows) ark_put(out + row * pitch + column, ark_lane() % 4 * 2, d[i]);
  }
}

// Applies a rotary embedding, which pairs elements i and i + WIDTH / 2 of a head, to a warp's 16
// rows, from row `first` on, and stores them. own(row, column, sums): applies the epilogue
// expression to two neighbouring sums, in place. turned(from): loads the cosines and sines of the
// columns from `from` on (ark_matrix_turn). turn: those of turned(0), which the caller has loaded.
// aligned: true if the rows of the result can be stored as vectors. Other arguments as for
// ark_matrix_store; the tile and the result consist of whole heads.
template <int COLUMNS, int WIDTH, typename T, class Turn, class Turned, class Own>
ARK_DEVICE void ark_matrix_store_halves(ArkCtx& c, float (&d)[COLUMNS / 2], T* out, ark_i64 pitch,
                                        int first, int rows, int columns, bool aligned, Turn turn,
                                        const Turned& turned, const Own& own) {
  // Half a head has BLOCKS blocks of eight columns, of which SOME are rotated at a time.
  constexpr int BLOCKS = WIDTH / 16, SOME = Turn::BLOCKS;
  static_assert(COLUMNS % WIDTH == 0 && BLOCKS % SOME == 0, "whole heads");
  const int lane = ark_lane();
  // This is a loop instead of unrolled code, to reduce code size. Registers cannot be indexed by a
  // variable. So each round stores the sums in the first registers and then moves the remaining
  // sums down to these registers.
#pragma unroll 1
  for (int q = 0; q < COLUMNS && q < columns; q += WIDTH) {
    if constexpr (BLOCKS == SOME) ark_hide(turn, q);
#pragma unroll
    for (int from = 0; from < BLOCKS; from += SOME) {
#pragma unroll
      for (int i = 0; i < 2 * SOME; ++i) {
        const int j = i / 2, high = i % 2;
        float* near = d + 4 * (from + j) + 2 * high;
        float* far = near + 4 * BLOCKS;
        const int row = first + lane / 4 + 8 * high, column = q + 8 * (from + j) + lane % 4 * 2;
        own(row < rows ? row : rows - 1, column, near);
        own(row < rows ? row : rows - 1, column + WIDTH / 2, far);
        const auto cosine = ark_unpacked(turn.cosines[high][j]);
        const auto sine = ark_unpacked(turn.sines[high][j]);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const float a = near[k], b = far[k];
          near[k] = a * ark_get(cosine.v, k) - b * ark_get(sine.v, k);
          far[k] = b * ark_get(cosine.v, k) + a * ark_get(sine.v, k);
        }
      }
      if constexpr (BLOCKS > SOME) turn = turned((from + SOME) % BLOCKS * 8);
    }
#pragma unroll
    for (int some = 0; some < WIDTH; some += 64) {
      if (aligned) {
        char* slab = ark_matrix_slab(c, ark_warp());
        ark_matrix_store_lines(slab, d + some / 2, out + q + some, pitch, first, rows);
      } else {
        ark_matrix_store_each(d + some / 2, out + q + some, pitch, first, rows);
      }
    }
#pragma unroll
    for (int i = 0; i + WIDTH / 2 < COLUMNS / 2; ++i) d[i] = d[i + WIDTH / 2];
  }
}
