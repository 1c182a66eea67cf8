// Stores the sums of products from the registers of a warpgroup to memory, in the variant `matrix`.
// Each warp stores its own rows as whole lines, through its slab of shared memory.

// For stmatrix and ldmatrix: the shared address that a lane passes to access 16 rows of two
// neighbouring blocks of eight columns, j and j + 1, in its warp's slab. A row of the slab has 128
// bytes. Its 16-byte pieces are swizzled by the row number, so that an access has no bank
// conflicts.
ARK_DEVICE ark_u32 ark_matrix_slab_at(char* slab, int j) {
  const int row = ark_lane() & 15, piece = j + (ark_lane() >> 4);
  return ark_shared_address(slab) + row * 128 + ((piece ^ (row & 7)) << 4);
}
// Writes a lane's pairs of 16-bit values of two blocks to the slab, from the register layout of
// wgmma's sums: words[0] and words[1] are the first block's pairs in rows 0 to 7 and in rows 8 to
// 15, words[2] and words[3] those of the second block.
ARK_DEVICE void ark_matrix_slab_put(char* slab, int j, const ark_u32 (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   ark_matrix_slab_at(slab, j)),
               "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}
// Reads two blocks' pairs from the slab in the layout of ark_matrix_slab_put.
ARK_DEVICE void ark_matrix_slab_take(char* slab, int j, ark_u32 (&words)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(ark_matrix_slab_at(slab, j))
               : "memory");
}
// Rounds a warp's 16 rows of up to 64 columns of sums and writes them to its slab.
template <typename T, int COLUMNS>
ARK_DEVICE void ark_matrix_slab_fill(char* slab, const float* d) {
  T* type = nullptr;
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; j += 2) {
    ark_u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = ark_pack_pair(type, d[4 * j + 2 * i], d[4 * j + 2 * i + 1]);
    }
    ark_matrix_slab_put(slab, j, words);
  }
}
// Returns 16 bytes of the 32 bytes `low`, `high`: those that begin `bytes` (an even number below
// 16) after the start of `low`.
ARK_DEVICE ArkPack<ark_u32, 4> ark_matrix_shifted(const ArkPack<ark_u32, 4>& low,
                                                  const ArkPack<ark_u32, 4>& high, int bytes) {
  ark_u32 v[7] = {low.v[0], low.v[1], low.v[2], low.v[3], high.v[0], high.v[1], high.v[2]};
  const ark_u32 last = high.v[3];
#pragma unroll
  for (int i = 0; i < 7; ++i) v[i] = (bytes & 8) == 0 ? v[i] : i < 5 ? v[i + 2] : last;
#pragma unroll
  for (int i = 0; i < 6; ++i) v[i] = (bytes & 4) == 0 ? v[i] : v[i + 1];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const ark_u64 two = static_cast<ark_u64>(v[i + 1]) << 32 | v[i];
    v[i] = static_cast<ark_u32>(two >> (bytes & 2) * 8);
  }
  return ArkPack<ark_u32, 4>{{v[0], v[1], v[2], v[3]}};
}
// Stores the first `count` elements of a pack. If these are all elements, they are stored as one
// vector.
template <typename T>
ARK_DEVICE void ark_matrix_store_some(T* to, const ArkPack<ark_u32, 4>& pack, int count) {
  constexpr int SIZE = sizeof(T), PIECE = 16 / SIZE;
  if (count >= PIECE) {
    ark_store_pack<4>(reinterpret_cast<ark_u32*>(to), pack);
    return;
  }
#pragma unroll
  for (int j = 0; j < PIECE - 1; ++j) {
    const ArkPack<ark_u32, 1> word{{pack.v[j * SIZE / 4] >> j * SIZE % 4 * 8}};
    if (j < count) to[j] = *reinterpret_cast<const T*>(&word);
  }
}
// If rows in memory are not aligned to 16 bytes, a vector store can span the end of one range of
// columns and the beginning of the next. This struct keeps the last 16 bytes of the range that was
// just stored, for each of a lane's four rows.
struct ArkMatrixRest {
  ArkPack<ark_u32, 4> pieces[4];
};
// Stores 16 rows of 128 bytes of a slab to rows in memory that need not be aligned to 16 bytes. The
// aligned 16-byte parts of a row in memory are stored as vectors, each assembled from two pieces of
// the slab. The first and the last part of a row are stored element by element. out: the address in
// memory of the slab's first element. rows, columns: the number of rows and columns from there to
// the end of the result. BEGINS: false if this warp has stored the preceding columns too; then
// `rest` has their last pieces. ENDS: false if more columns follow; then `rest` is updated for
// them.
template <bool BEGINS, bool ENDS, typename T>
ARK_DEVICE void ark_matrix_slab_scatter(const char* slab, T* out, ark_i64 pitch, int rows,
                                        int columns, ArkMatrixRest& rest) {
  constexpr int SIZE = sizeof(T), PIECE = 16 / SIZE;
  const int number = (ark_lane() + 1) % 8;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int local = 4 * i + ark_lane() / 8;
    const auto piece = [&](int at) {
      return *reinterpret_cast<const ArkPack<ark_u32, 4>*>(slab + local * 128 +
                                                           ((at ^ (local & 7)) << 4));
    };
    T* row = out + local * pitch;
    // The number of elements of the row before the first address that is a multiple of 16 bytes.
    const int head =
        static_cast<int>(0u - static_cast<ark_u32>(reinterpret_cast<ark_u64>(row)) / SIZE) &
        (PIECE - 1);
    // If the row is aligned to 16 bytes in memory, each vector is one piece of the slab. Otherwise
    // a vector is assembled from two pieces.
    const auto high = piece(number), loaded = piece(head == 0 ? number : (number + 7) % 8);
    const auto low = !BEGINS && number == 0 && head > 0 ? rest.pieces[i] : loaded;
    rest.pieces[i] = loaded;
    if (local >= rows) continue;
    auto pack = ark_matrix_shifted(low, high, head * SIZE);
    int column = PIECE * (head == 0 ? number : number - 1) + head, count = columns - column;
    if (BEGINS && column < 0) {
      pack = high;
      column = 0;
      count = columns < head ? columns : head;
    }
    ark_matrix_store_some(row + column, pack, count);
    if (ENDS && number == 0 && head > 0) {
      const int last = 7 * PIECE + head;
      const auto end = ark_matrix_shifted(loaded, loaded, head * SIZE);
      ark_matrix_store_some(row + last, end, columns - last);
    }
  }
}
// Stores a warp's slab: 16 rows from `first` on, 128 bytes of columns from q on. out, rows,
// columns: as for ark_matrix_store_from. COLUMNS: columns of the tile.
template <int COLUMNS, typename T>
ARK_DEVICE void ark_matrix_slab_store(const char* slab, T* out, ark_i64 pitch, int first, int q,
                                      int rows, int columns) {
  constexpr int PIECE = 16 / sizeof(T);
  if (!ark_aligned(reinterpret_cast<ark_u64>(out)) || pitch % PIECE != 0) {
    const int end = (columns < COLUMNS ? columns : COLUMNS) - q;
    ArkMatrixRest rest = {};
    ark_matrix_slab_scatter<true, true>(slab, out + first * pitch + q, pitch, rows - first,
                                        end < 8 * PIECE ? end : 8 * PIECE, rest);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int local = 4 * i + ark_lane() / 8, piece = ark_lane() % 8;
    const int row = first + local, column = q + PIECE * piece;
    if (column >= COLUMNS) continue;
    const auto pack = *reinterpret_cast<const ArkPack<T, PIECE>*>(slab + local * 128 +
                                                                  ((piece ^ (local & 7)) << 4));
    if (row >= rows) continue;
    if (column + PIECE <= columns) {
      ark_store_pack<PIECE>(out + row * pitch + column, pack);
      continue;
    }
    for (int j = 0; j < PIECE && column + j < columns; ++j) {
      out[row * pitch + column + j] = pack.v[j];
    }
  }
}
// Stores COLUMNS columns of a tile from Q on. Each warp stores its 16 rows from `first` on as whole
// lines, without a barrier. out: the tile's first element; rows, columns: the size of the result
// from that element to its end. rest: see ark_matrix_slab_scatter.
template <typename T, int COLUMNS, int Q>
ARK_DEVICE void ark_matrix_store_from(ArkCtx& c, const float* d, T* out, ark_i64 pitch, int first,
                                      int rows, int columns, ArkMatrixRest& rest) {
  constexpr int SOME = COLUMNS - Q < 64 ? COLUMNS - Q : 64;
  char* slab = ark_matrix_slab(c, ark_warp());
  __syncwarp();
  ark_matrix_slab_fill<T, SOME>(slab, d + Q / 2);
  __syncwarp();
  if (pitch % (16 / static_cast<int>(sizeof(T))) == 0) {
    ark_matrix_slab_store<COLUMNS>(slab, out, pitch, first, Q, rows, columns);
  } else {
    const int end = columns < COLUMNS ? columns : COLUMNS;
    ark_matrix_slab_scatter<Q == 0, Q + SOME == COLUMNS>(slab, out + first * pitch + Q, pitch,
                                                         rows - first, end - Q, rest);
  }
  if constexpr (Q + SOME < COLUMNS) {
    ark_matrix_store_from<T, COLUMNS, Q + SOME>(c, d, out, pitch, first, rows, columns, rest);
  }
}
template <typename T, int COLUMNS>
ARK_DEVICE void ark_matrix_store(ArkCtx& c, const float* d, T* out, ark_i64 pitch, int first,
                                 int rows, int columns) {
  ArkMatrixRest rest = {};
  ark_matrix_store_from<T, COLUMNS, 0>(c, d, out, pitch, first, rows, columns, rest);
}
// Like ark_matrix_store, for a tile that does not exceed the result's columns.
template <int COLUMNS, typename T>
ARK_DEVICE void ark_matrix_store_all(ArkCtx& c, const float* d, T* out, ark_i64 pitch, int first,
                                     int rows) {
  ark_matrix_store<T, COLUMNS>(c, d, out, pitch, first, rows, COLUMNS);
}
// Like ark_matrix_store, for a product with gates (SwiGLU): columns of gates and of gated values
// are interleaved, so that a lane has both. COLUMNS: columns of the tile's result. columns: columns
// of the whole result from the tile's first one on.
template <int COLUMNS, typename T>
ARK_DEVICE void ark_matrix_store_gated(ArkCtx& c, float (&d)[COLUMNS], T* out, ark_i64 pitch,
                                       int first, int rows, int columns) {
  constexpr int SOME = 128 / sizeof(T);  // columns at a time
  char* slab = ark_matrix_slab(c, ark_warp());
  const int lane = ark_lane();
  // This is a loop instead of unrolled code, to reduce code size. Registers cannot be indexed by a
  // variable. So each round stores the sums in the first registers and then moves the remaining
  // sums down to these registers.
#pragma unroll 1
  for (int q = 0; q < COLUMNS; q += SOME) {
    __syncwarp();
#pragma unroll
    for (int j = 0; j < SOME && j < COLUMNS; j += 4) {
#pragma unroll
      for (int high = 0; high < 2; ++high) {
        const float gate = ark_silu(d[j + 2 * high]), pass = d[j + 2 * high + 1];
        const int row = lane / 4 + 8 * high, at = (j + lane % 4) * static_cast<int>(sizeof(T));
        ark_put(reinterpret_cast<T*>(slab + row * 128 + (at ^ (row & 7) << 4)), 0, gate * pass);
      }
    }
#pragma unroll
    for (int i = 0; i + SOME < COLUMNS; ++i) d[i] = d[i + SOME];
    __syncwarp();
    ark_matrix_slab_store<COLUMNS>(slab, out, pitch, first, q, rows, columns);
  }
}
// Stores the columns of a query-key-value projection as ark_rope_kv does: rotates queries and keys
// (RoPE), and stores queries, keys and values at their destinations. If each row belongs to a
// sequence of its own, a thread stores its pairs; otherwise each round stores SOME columns, all of
// one head. m0, column: the position of the tile's first element in the projection. rows: the
// number of rows from there to the end.
template <int COLUMNS, class R>
ARK_DEVICE void ark_matrix_store_rope(ArkCtx& c, float (&d)[COLUMNS / 2], const R& rope, int m0,
                                      int column, int first, int rows) {
  constexpr int SOME = COLUMNS < 64 ? COLUMNS : 64;
  static_assert(R::D % SOME == 0, "columns of one head");
  const int lane = ark_lane(), place = rope.position + m0;
  if constexpr (R::CACHED > 0) {
#pragma unroll
    for (int i = 0; i < COLUMNS / 4; ++i) {
      const int row = first + lane / 4 + 8 * (i % 2), at = column + i / 2 * 8 + lane % 4 * 2;
      if (row >= rows || at >= R::COLUMNS) continue;
      ark_rope_pair(c, rope, m0 + row, at, d[2 * i], d[2 * i + 1]);
    }
    return;
  }
  // This is a loop instead of unrolled code, to reduce code size. Registers cannot be indexed, so
  // each round stores the sums in the first registers and then moves the others to these.
#pragma unroll 1
  for (int q = 0; q < COLUMNS && column < R::COLUMNS; q += SOME, column += SOME) {
    if (column < R::ROTATED) {
      const int row = first + lane / 4;
#pragma unroll
      for (int j = 0; j < SOME / 8; ++j) {
#pragma unroll
        for (int high = 0; high < 2; ++high) {
          float* pair = d + 4 * j + 2 * high;
          const int at = column + 8 * j + lane % 4 * 2;
          float sine, cosine;
          ark_sincos(ark_rope_angle(rope, m0 + row + 8 * high, at), sine, cosine);
          ark_rotate(pair[0], pair[1], sine, cosine);
        }
      }
    }
    if (column < R::QUERIES) {
      auto* to = ark_address(rope.output, 0, 0, m0, column);
      ark_matrix_store_all<SOME>(c, d, to, ark_at(rope.output, 0, 0, 1, 0), first, rows);
    } else {
      const bool key = column < R::ROTATED;
      const int i = column - (key ? R::QUERIES : R::ROTATED), room = R::CONTEXT - place;
      auto* to = key ? ark_address(rope.keys, 0, i / R::D, place, i % R::D)
                     : ark_address(rope.values, 0, i / R::D, place, i % R::D);
      ark_matrix_store_all<SOME>(c, d, to, R::D, first, place < 0 ? 0 : room < rows ? room : rows);
    }
#pragma unroll
    for (int i = 0; i + SOME / 2 < COLUMNS / 2; ++i) d[i] = d[i + SOME / 2];
  }
}
// Like ark_matrix_store, for sums of 32 bits that are stored without conversion. Each lane stores
// its pairs of neighbouring columns. The pairs of four lanes fill a 32-byte sector.
template <int COLUMNS, typename T>
ARK_DEVICE void ark_matrix_store_whole(const T* d, T* out, ark_i64 pitch, int first, int rows,
                                       int columns) {
  static_assert(sizeof(T) == 4, "accumulators");
  const int lane = ark_lane();
  const bool wide = (reinterpret_cast<ark_u64>(out) & 7u) == 0u && pitch % 2 == 0;
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j) {
#pragma unroll
    for (int high = 0; high < 2; ++high) {
      const T* pair = d + 4 * j + 2 * high;
      const int row = first + lane / 4 + 8 * high, column = 8 * j + lane % 4 * 2;
      if (row >= rows || column >= columns) continue;
      T* to = out + row * pitch + column;
      if (wide && column + 1 < columns) {
        ark_store_pack<2>(to, ArkPack<T, 2>{{pair[0], pair[1]}});
        continue;
      }
      to[0] = pair[0];
      if (column + 1 < columns) to[1] = pair[1];
    }
  }
}
// The address of 16-byte piece `at` of a row of a warp's slab. The pieces of a row are permuted so
// that neither writing pairs nor reading eight results at a time has bank conflicts.
ARK_DEVICE char* ark_slab_piece(char* slab, int row, int at) {
  return slab + row * 128 + ((at ^ ((row & 3) << 1 | (row & 1))) << 4);
}
// Writes the first 32 columns of a warp's sums to its slab, in pairs. Registers cannot be indexed
// by a variable. So this uses the sums in the first registers and then moves the remaining sums
// down to these registers.
template <int COLUMNS, typename S>
ARK_DEVICE void ark_slab_write(char* slab, S (&d)[COLUMNS / 2]) {
  constexpr int SOME = COLUMNS < 32 ? COLUMNS : 32;
  const int lane = ark_lane();
#pragma unroll
  for (int j = 0; j < SOME / 8; ++j) {
#pragma unroll
    for (int high = 0; high < 2; ++high) {
      const S* pair = d + 4 * j + 2 * high;
      char* to = ark_slab_piece(slab, lane / 4 + 8 * high, 2 * j + (lane & 3) / 2) + 8 * (lane & 1);
      *reinterpret_cast<ArkPack<S, 2>*>(to) = ArkPack<S, 2>{{pair[0], pair[1]}};
    }
  }
#pragma unroll
  for (int i = 0; i + 16 < COLUMNS / 2; ++i) d[i] = d[i + 16];
}
// Reads the lane's eight neighbouring results of a row of the slab.
template <typename S>
ARK_DEVICE void ark_slab_read(char* slab, int row, S (&v)[8]) {
  const int at = ark_lane() % 4 * 2;
  const auto low = *reinterpret_cast<const ArkPack<S, 4>*>(ark_slab_piece(slab, row, at));
  const auto high = *reinterpret_cast<const ArkPack<S, 4>*>(ark_slab_piece(slab, row, at + 1));
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = low.v[i], v[4 + i] = high.v[i];
}
// Calls `eight(row, column, values, count)` for each eight neighbouring results of a tile. count:
// how many of the eight are inside of the result. Each warp's 16 rows of 32 columns pass through
// its slab without rounding.
template <int COLUMNS, typename S, class Eight>
ARK_DEVICE void ark_matrix_each(ArkCtx& c, S (&d)[COLUMNS / 2], int first, int rows, int columns,
                                const Eight& eight) {
  char* slab = ark_matrix_slab(c, ark_warp());
  const int lane = ark_lane();
  // This is a loop so that the code of the epilogue is emitted once.
#pragma unroll 1
  for (int q = 0; q < COLUMNS; q += 32) {
    __syncwarp();
    ark_slab_write<COLUMNS>(slab, d);
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      const int local = 8 * i + lane / 4, row = first + local, column = q + lane % 4 * 8;
      S v[8];
      ark_slab_read(slab, local, v);
      const int left = columns - column < 8 ? columns - column : 8;
      if (row < rows && left > 0 && column < COLUMNS) eight(row, column, v, left);
    }
  }
}
