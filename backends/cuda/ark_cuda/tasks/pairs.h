// Stores the results of products with an epilogue expression, in the variant `matrix`. The
// expression is computed in the registers that hold the sums, two neighbouring sums at a time.
// Results of 16 bits go through the warp's slab of shared memory and are stored as whole lines.
// Results of 32 bits are stored as pairs, and the pairs of four lanes fill a 32-byte sector.
//
// The expression's other operands, such as a residual, are loaded SOME columns ahead. The operands
// for the first columns are loaded before the sums are complete. A residual of 16 bits is loaded in
// whole lines and distributed to the lanes through the slab.

struct ArkNothing {};

// Operands of the epilogue that a lane has loaded ahead, for its pairs of the next columns. beside:
// operands with a single row, such as a bias. rest: the lane's part of a residual, a tensor of the
// result's size, as 16-byte pieces in the slab's layout or as pairs.
template <typename T, int SOME, bool REST, class Beside>
struct ArkAside {
  static constexpr bool SLAB = sizeof(T) == 2;
  static constexpr int WORDS = SLAB ? 4 : 2, COUNT = !REST ? 1 : SLAB ? 4 : SOME / 4;
  Beside beside;
  ArkPack<ark_u32, WORDS> rest[COUNT];
};

// Loads the residual for columns q and following. ahead(row, column, there) loads a piece or a pair
// of the residual; `there` is false past the result's end.
template <int SOME, bool REST, class Aside, class Ahead>
ARK_DEVICE void ark_matrix_rest(Aside& aside, int first, int q, int rows, int columns,
                                const Ahead& ahead) {
  const int lane = ark_lane(), pair = q + lane % 4 * 2;
  if constexpr (REST && Aside::SLAB) {
#pragma unroll
    for (int i = 0; i < Aside::COUNT; ++i) {
      const int row = first + 4 * i + lane / 8, column = q + lane % 8 * 8;
      const bool there = row < rows && column < columns && lane % 8 < SOME / 8;
      aside.rest[i] = ahead(row, column, there);
    }
  } else if constexpr (REST) {
#pragma unroll
    for (int i = 0; i < Aside::COUNT; ++i) {
      const int row = first + lane / 4 + i % 2 * 8, column = pair + i / 2 * 8;
      aside.rest[i] = ahead(row, column, row < rows && column < columns);
    }
  }
}
// Loads the epilogue's operands for columns q and following. beside(column) loads the pairs at
// `column`, at `column` + 8, and so on. ahead: as for ark_matrix_rest.
template <typename T, int SOME, bool REST, class Beside, class Ahead>
ARK_DEVICE auto ark_matrix_aside(int first, int q, int rows, int columns, const Beside& beside,
                                 const Ahead& ahead) {
  ArkAside<T, SOME, REST, decltype(beside(0))> aside;
  aside.beside = beside(q + ark_lane() % 4 * 2);
  ark_matrix_rest<SOME, REST>(aside, first, q, rows, columns, ahead);
  return aside;
}

// Computes the epilogue of a warp's 16 rows, from row `first` on, and stores the results. d: the
// warp's sums. two(row, sums, beside, i, rest, made): computes two neighbouring results. Its
// arguments are two sums, pair i of the one-row operands in `beside`, and the residual's elements
// in the words of `rest`. aside: the result of ark_matrix_aside for the first columns. Other
// arguments as for ark_matrix_store; the results of a row begin at a multiple of 16 bytes, and
// `columns` is a multiple of eight. ROUNDS: the unrolling of the loop. With 1 the code is small,
// and each round moves the remaining sums down in the registers.
template <int COLUMNS, int SOME, bool REST, int ROUNDS, typename T, typename S, class Aside,
          class Beside, class Ahead, class Two>
ARK_DEVICE void ark_matrix_pairs(ArkCtx& c, S (&d)[COLUMNS / 2], T* out, ark_i64 pitch, int first,
                                 int rows, int columns, Aside aside, const Beside& beside,
                                 const Ahead& ahead, const Two& two) {
  constexpr int BLOCKS = SOME / 8;
  char* slab = ark_matrix_slab(c, ark_warp());
  const int lane = ark_lane(), end = columns < COLUMNS ? columns : COLUMNS;
#pragma unroll ROUNDS
  for (int q = 0; q < COLUMNS; q += SOME) {
    if constexpr (Aside::SLAB) {
      __syncwarp();
      if constexpr (REST) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int local = 4 * i + lane / 8;
          char* to = slab + local * 128 + ((lane % 8 ^ (local & 7)) << 4);
          *reinterpret_cast<ArkPack<ark_u32, 4>*>(to) = aside.rest[i];
        }
        __syncwarp();
        if (q + SOME < COLUMNS) {
          ark_matrix_rest<SOME, REST>(aside, first, q + SOME, rows, columns, ahead);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < BLOCKS; j += 2) {
      ark_u32 words[4] = {};  // of block j and the next one: of the first 8 rows and the others
      if constexpr (Aside::SLAB && REST) ark_matrix_slab_take(slab, j, words);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = first + lane / 4 + i % 2 * 8, column = q + 8 * j + i / 2 * 8 + lane % 4 * 2;
        const ark_u32* rest = Aside::SLAB ? words + i : aside.rest[REST ? 2 * j + i : 0].v;
        float made[2];
        two(row < rows ? row : rows - 1, d + 4 * j + 2 * i, aside.beside, j + i / 2, rest, made);
        if constexpr (Aside::SLAB) {
          words[i] = ark_pack_pair(out, made[0], made[1]);
        } else if (row < rows && column < end) {
          ark_store_pack<2>(out + row * pitch + column, ArkPack<T, 2>{{made[0], made[1]}});
        }
      }
      if constexpr (Aside::SLAB) ark_matrix_slab_put(slab, j, words);
    }
#pragma unroll
    for (int i = 0; i + SOME / 2 < COLUMNS / 2; ++i) d[i] = d[i + SOME / 2];
    if (q + SOME < COLUMNS) {
      aside.beside = beside(q + SOME + lane % 4 * 2);
      if constexpr (!Aside::SLAB) {
        ark_matrix_rest<SOME, REST>(aside, first, q + SOME, rows, columns, ahead);
      }
    }
    if constexpr (Aside::SLAB) {
      __syncwarp();
      const int column = q + lane % 8 * 8;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int local = 4 * i + lane / 8, row = first + local;
        if (row >= rows || column >= end || lane % 8 >= BLOCKS) continue;
        const char* from = slab + local * 128 + ((lane % 8 ^ (local & 7)) << 4);
        ark_store_pack<8>(out + row * pitch + column,
                          *reinterpret_cast<const ArkPack<T, 8>*>(from));
      }
    }
  }
}
