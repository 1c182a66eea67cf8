// Tiles of products that leave by the processor's copy unit (sm_90 and later): the sums, rounded,
// lie in the slabs until they have been read, and the next tile is multiplied meanwhile. One thread
// starts the copies, through tensor maps of the memory that they go to; few large ones, because
// whoever starts many waits for room (docs/performance.md). `landed` waits until a tile is there.

// A tile in the slabs: blocks of 64 columns, 128 rows of 128 bytes each, swizzled as maps are.
constexpr int ARK_PUSH_WIDE = 64, ARK_PUSH_BLOCK = 128 * 128;
ARK_DEVICE ark_u32 ark_push_place(int row, int piece) {
  return static_cast<ark_u32>(piece / 8 * ARK_PUSH_BLOCK + row * 128 +
                              ((piece % 8 ^ (row & 7)) << 4));
}

// What is stored is the rounded sums as they are.
struct ArkAsSummed {};
template <typename T, int COLUMNS>
ARK_DEVICE void ark_push_add(char*, const ArkAsSummed&, int, int) {}
// add(first row, rows from one to the next, column, values): what becomes of so many pieces of 16
// bytes; of a warp's 16 rows from `first` on a lane has pieces of the same column.
template <typename T, int COLUMNS, class Add>
ARK_DEVICE void ark_push_add(char* tile, const Add& add, int first, int columns) {
  constexpr int PIECES = COLUMNS / 8, DOWN = 32 / PIECES, PASSES = 16 / DOWN;
  constexpr int SOME = PASSES < 8 ? PASSES : 8;
  const int row = first + ark_lane() / PIECES, piece = ark_lane() % PIECES;
  if (8 * piece >= columns) return;
#pragma unroll
  for (int pass = 0; pass < PASSES; pass += SOME) {
    ArkPack<T, 8> own[SOME];
    const int at = row + pass * DOWN;
#pragma unroll
    for (int i = 0; i < SOME; ++i) {
      own[i] = *reinterpret_cast<const ArkPack<T, 8>*>(tile + ark_push_place(at + i * DOWN, piece));
    }
    add(at, DOWN, 8 * piece, own);
#pragma unroll
    for (int i = 0; i < SOME; ++i) {
      *reinterpret_cast<ArkPack<T, 8>*>(tile + ark_push_place(at + i * DOWN, piece)) = own[i];
    }
  }
}

// Sends the tile in the slabs, which all computing threads have written, to the matrices of some
// maps, from row m0 and column n0 on. columns: how many of them follow n0. name: what `landed`
// knows the tile by.
template <int COLUMNS, int MANY>
ARK_DEVICE void ark_push_tile(const char* tile, const ark_u64 (&maps)[MANY], int m0, int n0,
                              int columns, const void* name) {
  // What was written by ordinary stores is there for the copies too.
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  ark_sync();
  if (ark_tid() != 0) return;
#pragma unroll
  for (int i = 0; i < MANY; ++i) {
#pragma unroll
    for (int q = 0; q < COLUMNS / ARK_PUSH_WIDE; ++q) {
      if (ARK_PUSH_WIDE * q >= columns) break;
      asm volatile(
          "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(
              maps[i]),
          "r"(n0 + ARK_PUSH_WIDE * q), "r"(m0), "r"(ark_shared_address(tile + q * ARK_PUSH_BLOCK))
          : "memory");
    }
  }
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  ark_matrix.pushed = reinterpret_cast<ark_u64>(name);
}

// A product's tile, called by all computing threads. maps, m0, n0, columns, name: as above. first:
// a warp's first row in the tile.
template <int COLUMNS, typename T, int MANY, class Add>
ARK_DEVICE void ark_matrix_push(ArkCtx& c, const float* d, const ark_u64 (&maps)[MANY], int m0,
                                int n0, int first, int columns, const T* name, const Add& add) {
  static_assert(
      COLUMNS / ARK_PUSH_WIDE * ARK_PUSH_BLOCK <= static_cast<int>(ARK_MATRIX_SLAB * ARK_WARPS),
      "a tile fits the slabs");
  char* tile = ark_matrix_slab(c, 0);
  const int lane = ark_lane();
  ark_matrix_slab_free();
  T* type = nullptr;
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; j += 2) {
    const ark_u32 to = ark_push_place(first + (lane & 15), j + (lane >> 4));
    ark_matrix_slab_store(ark_shared_address(tile) + to, type, d + 4 * j);
  }
  __syncwarp();
  ark_push_add<T, COLUMNS>(tile, add, first, columns);
  ark_push_tile<COLUMNS>(tile, maps, m0, n0, columns, name);
}

// ROWS rows of 256 elements of 16 bits of a matrix with m rows and n columns, as they are: each
// warp its rows, of which a lane has 16 bytes each.
template <int ROWS, typename T>
ARK_DEVICE void ark_matrix_carry(ArkCtx& c, const T* from, ark_i64 pitch, ark_u64 map, int m0,
                                 int n0, int m, int n, const void* name) {
  constexpr int EACH = (ROWS + ARK_WARPS - 1) / ARK_WARPS, SOME = EACH < 16 ? EACH : 16;
  char* tile = ark_matrix_slab(c, 0);
  const int lane = ark_lane(), column = n0 + 8 * lane;
  ark_matrix_slab_free();
  for (int pass = 0; pass < EACH; pass += SOME) {
    ArkPack<ark_u32, 4> held[SOME];
#pragma unroll
    for (int i = 0; i < SOME; ++i) {
      const int row = m0 + ark_warp() * EACH + pass + i;
      if (row < m && column < n) {
        held[i] = ark_load_pack<4>(reinterpret_cast<const ark_u32*>(from + row * pitch + column));
      }
    }
#pragma unroll
    for (int i = 0; i < SOME; ++i) {
      const int row = ark_warp() * EACH + pass + i;
      if (row < ROWS) {
        *reinterpret_cast<ArkPack<ark_u32, 4>*>(tile + ark_push_place(row, lane)) = held[i];
      }
    }
  }
  const ark_u64 maps[] = {map};
  ark_push_tile<256>(tile, maps, m0, n0, n - n0, name);
}

// The copies of a tile have arrived: of the thread's groups, one a tile, only the newest may be
// left under way, unless it is this one.
ARK_DEVICE void ark_matrix_landed(const void* name) {
  if (ark_tid() != 0) return;
  if (ark_matrix.pushed == reinterpret_cast<ark_u64>(name)) {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  } else {
    asm volatile("cp.async.bulk.wait_group 1;" ::: "memory");
  }
  ark_proxy_fence();
}
