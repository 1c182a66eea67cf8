// How products with an expression leave registers as results of 16 bits, in the variant `matrix`:
// the expression is computed where the sums lie, two neighbours at a time, and its rounded results
// go through the warp's slab, in whole lines. What it reads beside the sums is asked for some
// columns ahead, at first before the sums are there.

// Columns at a time, of a tile's; the last ones may lie beyond the tile, and are not stored.
constexpr int ark_pairs_some(int columns) {
  return columns < 64 ? columns : columns % 64 != 0 && columns % 48 == 0 ? 48 : 64;
}

struct ArkNothing {};
// What a lane has asked for: operands of one row, at its pairs of some columns, and 16-byte pieces
// of a residual, which has all of the result's elements.
template <class Beside, bool REST>
struct ArkAside {
  Beside beside;
  ArkPack<ark_u32, 4> rest[REST ? 4 : 1];
};

// Asks for what belongs to the columns from q on. beside(column) has the pairs at `column`, and
// eight columns on, and so on. ahead(row, column, there) has eight neighbours of the residual;
// `there` is false where the result ends.
template <int COLUMNS, bool REST, class Beside, class Ahead>
ARK_DEVICE auto ark_matrix_aside(int first, int q, int rows, int columns, const Beside& beside,
                                 const Ahead& ahead) {
  const int lane = ark_lane(), piece = lane % 8;
  ArkAside<decltype(beside(0)), REST> aside;
  aside.beside = beside(q + lane % 4 * 2);
  if constexpr (REST) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first + 4 * i + lane / 8, column = q + 8 * piece;
      const bool there = row < rows && column < columns && piece < ark_pairs_some(COLUMNS) / 8;
      aside.rest[i] = ahead(row, column, there);
    }
  }
  return aside;
}

// Stores a warp's 16 rows from `first` on. d: its sums, two(row, sums, beside, i, rest, made) what
// makes two results of two sums, of which the operands of one row are the i-th, and the residual's
// elements the halves of `rest`. aside: what ark_matrix_aside gave for the first columns. The rest
// as of ark_matrix_store, at multiples of 16 bytes; ROUNDS: of the loop at a time, 1 for the code's
// size: then the sums move up meanwhile. `columns` is a multiple of eight.
template <int COLUMNS, bool REST, int ROUNDS, typename T, typename S, class Aside, class Beside,
          class Ahead, class Two>
ARK_DEVICE void ark_matrix_pairs(ArkCtx& c, S (&d)[COLUMNS / 2], T* out, ark_i64 pitch, int first,
                                 int rows, int columns, Aside aside, const Beside& beside,
                                 const Ahead& ahead, const Two& two) {
  constexpr int SOME = ark_pairs_some(COLUMNS), BLOCKS = SOME / 8;
  char* slab = ark_matrix_slab(c, ark_warp());
  const int lane = ark_lane();
  T* type = nullptr;
#pragma unroll ROUNDS
  for (int q = 0; q < COLUMNS; q += SOME) {
    __syncwarp();
    if constexpr (REST) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int local = 4 * i + lane / 8;
        char* to = slab + local * 128 + ((lane % 8 ^ (local & 7)) << 4);
        *reinterpret_cast<ArkPack<ark_u32, 4>*>(to) = aside.rest[i];
      }
      __syncwarp();
    }
#pragma unroll
    for (int j = 0; j < BLOCKS; j += 2) {
      ark_u32 words[4] = {};  // of block j and the next one: of the first 8 rows and the others
      if constexpr (REST) ark_matrix_slab_take(slab, j, words);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = first + lane / 4 + i % 2 * 8;
        float made[2];
        two(row < rows ? row : rows - 1, d + 4 * j + 2 * i, aside.beside, j + i / 2, words[i],
            made);
        words[i] = ark_pack_pair(type, made[0], made[1]);
      }
      ark_matrix_slab_put(slab, j, words);
    }
#pragma unroll
    for (int i = 0; i + SOME / 2 < COLUMNS / 2; ++i) d[i] = d[i + SOME / 2];
    if (q + SOME < COLUMNS) {
      aside = ark_matrix_aside<COLUMNS, REST>(first, q + SOME, rows, columns, beside, ahead);
    }
    __syncwarp();
    const int end = columns < COLUMNS ? columns : COLUMNS, column = q + lane % 8 * 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int local = 4 * i + lane / 8, row = first + local;
      if (row >= rows || column >= end || lane % 8 >= BLOCKS) continue;
      const char* from = slab + local * 128 + ((lane % 8 ^ (local & 7)) << 4);
      ark_store_pack<8>(out + row * pitch + column, *reinterpret_cast<const ArkPack<T, 8>*>(from));
    }
  }
}
