// Stores the sums of a tile after all of k has been multiplied. Sums are either stored directly, or
// pass through the epilogue, eight neighbouring ones at a time. The epilogue's code is emitted
// once: each wave copies its blocks one after another to its own part of shared memory, and the
// epilogue reads them from there.

// Stores sums without an epilogue: the sum at (row, column) of the tile is stored to
// out[row * down + column * across].
template <typename O>
struct ArkTileSums {
  O* out;
  ark_i64 down, across;
};

template <typename O>
ARK_DEVICE ArkTileSums<O> ark_tile_sums(O* out, ark_i64 down, ark_i64 across) {
  return {out, down, across};
}

// Passes sums to an epilogue, eight at a time: several(row, column, values, count), where count is
// how many of the eight values are inside of the result.
template <class Several>
struct ArkTilePacks {
  const Several& several;
};
template <class Several>
ARK_DEVICE ArkTilePacks<Several> ark_tile_packs(const Several& several) {
  return {several};
}

// Waits until all sums are complete. Results of CDNA's matrix units are available after up to 19
// wait states, which software must insert. If a loop is entered on several paths, the compiler
// inserts too few on some of them (the emulator detected this for gfx90a), so 20 are inserted here.
template <int BLOCKS_M, int BLOCKS_N, typename Sums>
ARK_DEVICE void ark_settle(Sums (&sums)[BLOCKS_M][BLOCKS_N]) {
#if defined(__GFX9__)
  const auto each = [&]() __attribute__((always_inline)) {
#pragma unroll
    for (int i = 0; i < BLOCKS_M; ++i) {
#pragma unroll
      for (int j = 0; j < BLOCKS_N; ++j) asm volatile("" : "+v"(sums[i][j]));
    }
  };
  each();
  asm volatile("s_nop 15\n\ts_nop 3");
  each();
#endif
}

// Stores a wave's blocks of SIZE rows and columns. The first block begins at row `top` and column
// `left` of the tile. The distances between blocks are STEP_M rows and STEP_N columns. Element e of
// a lane is at row row_of(e) of a block and in the lane's column. rows, columns: how many rows and
// columns of the tile exist in the result.
template <int SIZE, int STEP_M, int STEP_N, int BLOCKS_M, int BLOCKS_N, typename Sums, class RowOf,
          typename O>
ARK_DEVICE void ark_tile_blocks(char*, Sums (&sums)[BLOCKS_M][BLOCKS_N], int top, int left,
                                int rows, int columns, const RowOf& row_of,
                                const ArkTileSums<O>& end) {
  constexpr int ELEMENTS = sizeof(Sums) / sizeof(float);
#pragma unroll
  for (int i = 0; i < BLOCKS_M; ++i) {
#pragma unroll
    for (int j = 0; j < BLOCKS_N; ++j) {
      const int column = left + j * STEP_N + ark_lane() % SIZE;
#pragma unroll
      for (int e = 0; e < ELEMENTS; ++e) {
        const int row = top + i * STEP_M + row_of(e);
        if (row < rows && column < columns) {
          ark_put(end.out, row * end.down + column * end.across, sums[i][j][e]);
        }
      }
    }
  }
}

template <int SIZE, int STEP_M, int STEP_N, int BLOCKS_M, int BLOCKS_N, typename Sums, class RowOf,
          class Several>
ARK_DEVICE void ark_tile_blocks(char* shared, Sums (&sums)[BLOCKS_M][BLOCKS_N], int top, int left,
                                int rows, int columns, const RowOf& row_of,
                                const ArkTilePacks<Several>& end) {
  constexpr int ELEMENTS = sizeof(Sums) / sizeof(float);
  constexpr int PITCH = SIZE + 4, ACROSS = SIZE / 8;  // pieces of 16 bytes, without bank conflicts
  ark_settle(sums);
  ark_sync();  // slow waves may still read the last step
  float* slab = reinterpret_cast<float*>(shared) + ark_warp() * SIZE * PITCH;
#pragma unroll 1
  for (int block = 0; block < BLOCKS_M * BLOCKS_N; ++block) {
#pragma unroll
    for (int i = 0; i < BLOCKS_M; ++i) {
#pragma unroll
      for (int j = 0; j < BLOCKS_N; ++j) {
        if (block != i * BLOCKS_N + j) continue;
#pragma unroll
        for (int e = 0; e < ELEMENTS; ++e) {
          slab[row_of(e) * PITCH + ark_lane() % SIZE] = sums[i][j][e];
        }
      }
    }
    ark_warp_sync();
    const int above = top + block / BLOCKS_N * STEP_M, before = left + block % BLOCKS_N * STEP_N;
#pragma unroll 1
    for (int p = ark_lane(); p < SIZE * ACROSS; p += ARK_LANES) {
      const int row = above + p / ACROSS, column = before + p % ACROSS * 8;
      if (row >= rows || column >= columns) continue;
      const float* from = slab + p / ACROSS * PITCH + p % ACROSS * 8;
      float v[8];
#pragma unroll
      for (int half = 0; half < 8; half += 4) {
        const auto four = ark_load_pack<4>(from + half);
#pragma unroll
        for (int j = 0; j < 4; ++j) v[half + j] = four.v[j];
      }
      end.several(row, column, v, columns - column < 8 ? columns - column : 8);
    }
    ark_warp_sync();
  }
}
