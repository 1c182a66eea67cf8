// The loops over a tile for the task kind `fusion`: elementwise expressions, and sums between them,
// that one task computes. fusion.py describes the task kind.

// Computes a fusion for each index of a tile. Calls first(i0, i1, i2, i3, k, v, kept) once, then
// `each` with the same arguments for k from 0 to COUNT - 1 (the elements of the summed dimension),
// then `last` once. The three functions pass values to each other in kept[KEPT][LANES]. A single
// thread that runs a task processes LANES neighbouring indices at a time, so that the compiler
// vectorises. v is the number of the index among these.
template <class TILE, int COUNT, int KEPT, int LANES, class First, class Each, class Last>
ARK_DEVICE void ark_fused(const ark_i32* coord, const First& first, const Each& each,
                          const Last& last) {
  if constexpr (LANES == 1) {
    ark_each_index<TILE>(coord, [&](int i0, int i1, int i2, int i3) {
      float kept[KEPT][1];
      first(i0, i1, i2, i3, 0, 0, kept);
      for (int k = 0; k < COUNT; ++k) each(i0, i1, i2, i3, k, 0, kept);
      last(i0, i1, i2, i3, 0, 0, kept);
    });
  } else {
    const int e0 = ark_tile_end<TILE, 0>(coord), e1 = ark_tile_end<TILE, 1>(coord);
    const int e2 = ark_tile_end<TILE, 2>(coord), e3 = ark_tile_end<TILE, 3>(coord);
    for (int i0 = ark_tile_begin<TILE, 0>(coord); i0 < e0; ++i0) {
      for (int i1 = ark_tile_begin<TILE, 1>(coord); i1 < e1; ++i1) {
        for (int i2 = ark_tile_begin<TILE, 2>(coord); i2 < e2; ++i2) {
          for (int i3 = ark_tile_begin<TILE, 3>(coord); i3 < e3; i3 += LANES) {
            const int lanes = e3 - i3 < LANES ? e3 - i3 : LANES;
            float kept[KEPT][LANES];
            ark_vector_loop(0, lanes, [&](int v) { first(i0, i1, i2, i3 + v, 0, v, kept); });
            for (int k = 0; k < COUNT; ++k) {
              ark_vector_loop(0, lanes, [&](int v) { each(i0, i1, i2, i3 + v, k, v, kept); });
            }
            ark_vector_loop(0, lanes, [&](int v) { last(i0, i1, i2, i3 + v, 0, v, kept); });
          }
        }
      }
    }
  }
}
