// Transposes squares of SIDE by SIDE elements through shared memory. Packs (vectors) are read along
// the source's rows and written along the target's rows. The next squares are loaded while the
// current ones are written. place(s): square number s, an ArkSquare or another type with `to`,
// `rows` and `columns`, and with an ark_hold_square of its own.

template <typename T>
struct ArkSquare {
  const T* from;  // element [r][c] is at from[r * from_row + c]
  ark_i64 from_row;
  T* to;              // and is copied to to[c * to_row + r]
  int rows, columns;  // valid ones, at most SIDE
};
// Loads the pack that begins at element [r][c] of a square.
template <typename T, class Held>
ARK_DEVICE void ark_hold_square(Held& held, const ArkSquare<T>& square, int r, int c) {
  ark_hold(held, square.from + r * square.from_row + c);
}

template <int SIDE, int V, int COUNT, typename T, class Place>
ARK_DEVICE void ark_transpose(int squares, ark_i64 to_row, char* scratch, const Place& place) {
  constexpr int PITCH = SIDE + 4 / (sizeof(T) < 4 ? sizeof(T) : 4), ROW = SIDE / V;
  constexpr int PACKS = (SIDE * ROW + ARK_THREADS - 1) / ARK_THREADS;
  static_assert(SIDE * PITCH * sizeof(T) <= ARK_SCRATCH_BYTES - ARK_LOOP_BYTES, "a square fits");
  T* transposed = reinterpret_cast<T*>(scratch);
  ArkHeld<T, V> ahead[COUNT][PACKS] = {}, now[COUNT][PACKS];
  const auto load = [&](int first) {
#pragma unroll
    for (int s = 0; s < COUNT; ++s) {
      if (first + s >= squares) break;
      const auto square = place(first + s);
#pragma unroll
      for (int i = 0; i < PACKS; ++i) {
        const int e = ark_tid() + i * ARK_THREADS, r = e / ROW, c = e % ROW * V;
        if (r < square.rows && c < square.columns) {
          ark_hold_square(ahead[s][i], square, r, c);
        }
      }
    }
  };
  load(0);
  for (int first = 0; first < squares; first += COUNT) {
#pragma unroll
    for (int s = 0; s < COUNT; ++s) {
#pragma unroll
      for (int i = 0; i < PACKS; ++i) now[s][i] = ahead[s][i];
    }
    if (first + COUNT < squares) load(first + COUNT);
#pragma unroll
    for (int s = 0; s < COUNT; ++s) {
      if (first + s >= squares) break;
      const auto square = place(first + s);
      ark_sync();
#pragma unroll
      for (int i = 0; i < PACKS; ++i) {
        const int e = ark_tid() + i * ARK_THREADS, r = e / ROW, c = e % ROW * V;
        if (r >= SIDE) continue;
        const ArkPack<T, V> pack = ark_unpacked(now[s][i]);
#pragma unroll
        for (int j = 0; j < V; ++j) transposed[r * PITCH + c + j] = pack.v[j];
      }
      ark_sync();
#pragma unroll
      for (int i = 0; i < PACKS; ++i) {
        const int e = ark_tid() + i * ARK_THREADS, c = e / ROW, r = e % ROW * V;
        if (c >= square.columns || r >= square.rows) continue;
        ArkPack<T, V> pack;
#pragma unroll
        for (int j = 0; j < V; ++j) pack.v[j] = transposed[(r + j) * PITCH + c];
        ark_store_pack<V>(square.to + c * to_row + r, pack);
      }
    }
  }
}

// Transposes `squares` squares of SIDE by SIDE elements by one thread. The thread copies a strip of
// a square, as wide as a cache line, to a buffer and from there to the target. Without the buffer,
// cache lines would be read several times: the distance between the source's rows is often a power
// of two, so all rows map to the same sets of the cache. A backend that can transpose blocks of 16
// bytes by as many rows in registers defines ARK_HAS_BLOCKS.
template <int SIDE, typename T, class Place>
ARK_DEVICE void ark_transpose_alone(int squares, ark_i64 from_row, ark_i64 to_row,
                                    const Place& place) {
  constexpr int WIDE =
      64 / static_cast<int>(sizeof(T)) < SIDE ? 64 / static_cast<int>(sizeof(T)) : SIDE;
  T strip[WIDE][SIDE];
  for (int s = 0; s < squares; ++s) {
    const ArkSquare<T> square = place(s);
    for (int first = 0; first < square.columns; first += WIDE) {
      const int wide = square.columns - first < WIDE ? square.columns - first : WIDE;
      if (wide == WIDE) {
        int done = 0;
#if defined(ARK_HAS_BLOCKS)
        if constexpr (sizeof(T) <= 2) {
          constexpr int N = 16 / static_cast<int>(sizeof(T));
          for (; done + N <= square.rows; done += N) {
            for (int c = 0; c < WIDE; c += N) {
              const T* from = square.from + done * from_row + first + c;
              ark_transpose_block(from, from_row, &strip[c][done], SIDE);
            }
          }
        }
#endif
        for (int r = done; r < square.rows; ++r) {
          const T* from = square.from + r * from_row + first;
          for (int c = 0; c < WIDE; ++c) strip[c][r] = from[c];
        }
      } else {
        for (int r = 0; r < square.rows; ++r) {
          for (int c = 0; c < wide; ++c) strip[c][r] = square.from[r * from_row + first + c];
        }
      }
      for (int c = 0; c < wide; ++c) {
        T* to = square.to + (first + c) * to_row;
        ARK_VECTOR_LOOP
        for (int r = 0; r < square.rows; ++r) to[r] = strip[c][r];
      }
    }
  }
}

// Transposes a tile that contains whole rows of the source, of ROW elements each, which are
// contiguous in memory. A thread loads V rows as ROW packs (vectors of V elements), and stores them
// transposed as ROW packs of V elements.
template <class TILE, int ROW, int V, typename T, class From, class To>
ARK_DEVICE void ark_transpose_rows(const ArkTask& t, ark_i64 to_row, const From& from,
                                   const To& to) {
  constexpr int ACROSS = TILE::tile[3] / V, total = TILE::tile[0] * TILE::tile[1] * ACROSS;
  for (int e = ark_tid(); e < total; e += ARK_THREADS) {
    const int i3 = t.coord[3] + e % ACROSS * V, i1 = t.coord[1] + e / ACROSS % TILE::tile[1];
    const int i0 = t.coord[0] + e / ACROSS / TILE::tile[1];
    if (i3 >= TILE::size[3] || i1 >= TILE::size[1] || i0 >= TILE::size[0]) continue;
    const T* at = from(i0, i1, 0, i3);
    ArkPack<T, V> held[ROW];
#pragma unroll
    for (int r = 0; r < ROW; ++r) held[r] = ark_load_pack<V>(at + r * V);
#pragma unroll
    for (int r = 0; r < ROW; ++r) {
      ArkPack<T, V> made;
#pragma unroll
      for (int j = 0; j < V; ++j) made.v[j] = held[(j * ROW + r) / V].v[(j * ROW + r) % V];
      ark_store_pack<V>(to(i0, i1, 0, i3) + r * to_row, made);
    }
  }
}
// Like ark_transpose_rows, but for whole rows of the result: ROW elements each, contiguous in
// memory. Their elements come from ROW rows of the source. A thread loads ROW packs of V elements,
// and stores them as V rows of the result.
template <class TILE, int ROW, int V, typename T, class From, class To>
ARK_DEVICE void ark_transpose_columns(const ArkTask& t, ark_i64 from_row, const From& from,
                                      const To& to) {
  constexpr int DOWN = TILE::tile[2] / V, total = TILE::tile[0] * TILE::tile[1] * DOWN;
  for (int e = ark_tid(); e < total; e += ARK_THREADS) {
    const int i2 = t.coord[2] + e % DOWN * V, i1 = t.coord[1] + e / DOWN % TILE::tile[1];
    const int i0 = t.coord[0] + e / DOWN / TILE::tile[1];
    if (i2 >= TILE::size[2] || i1 >= TILE::size[1] || i0 >= TILE::size[0]) continue;
    const T* at = from(i0, i1, i2, 0);
    ArkPack<T, V> held[ROW];
#pragma unroll
    for (int r = 0; r < ROW; ++r) held[r] = ark_load_pack<V>(at + r * from_row);
    T* into = to(i0, i1, i2, 0);
#pragma unroll
    for (int r = 0; r < ROW; ++r) {
      ArkPack<T, V> made;
#pragma unroll
      for (int j = 0; j < V; ++j) made.v[j] = held[(r * V + j) % ROW].v[(r * V + j) / ROW];
      ark_store_pack<V>(into + r * V, made);
    }
  }
}

// Calls ark_transpose_columns if COLUMNS is true, otherwise ark_transpose_rows. row: the distance
// between rows of the source or, if COLUMNS is false, of the result.
template <class TILE, bool COLUMNS, int ROW, int V, typename T, class From, class To>
ARK_DEVICE void ark_transpose_short(ArkCtx&, const ArkTask& t, ark_i64 row, const From& from,
                                    const To& to, ark_u64 addresses) {
  constexpr bool one = V == 1;
  if (one || ark_aligned(addresses)) {
    if constexpr (COLUMNS) {
      ark_transpose_columns<TILE, ROW, V, T>(t, row, from, to);
    } else {
      ark_transpose_rows<TILE, ROW, V, T>(t, row, from, to);
    }
  } else if constexpr (COLUMNS) {
    ark_transpose_columns<TILE, ROW, 1, T>(t, row, from, to);
  } else {
    ark_transpose_rows<TILE, ROW, 1, T>(t, row, from, to);
  }
}

// Transposes a task's tile in squares of its last dimension and dimension ACROSS, which is the
// source's last. from(i0, i1, i2, i3), to(i0, i1, i2, i3): the source and target addresses of an
// element.
template <class TILE, int ACROSS, int SIDE, int V, int COUNT, typename T, class From, class To>
ARK_DEVICE void ark_transpose_tile(ArkCtx& c, const ArkTask& t, ark_i64 from_row, ark_i64 to_row,
                                   const From& from, const To& to, ark_u64 addresses) {
  const int end[4] = {ark_tile_end<TILE, 0>(t.coord), ark_tile_end<TILE, 1>(t.coord),
                      ark_tile_end<TILE, 2>(t.coord), ark_tile_end<TILE, 3>(t.coord)};
  int many[4], squares = 1;
#pragma unroll
  for (int d = 0; d < 4; ++d) {
    const int side = d == ACROSS || d == 3 ? SIDE : 1;
    many[d] = (end[d] - t.coord[d] + side - 1) / side;
    squares *= many[d];
  }
  const auto place = [&](int s) -> ArkSquare<T> {
    int i[4];
    i[ACROSS] = t.coord[ACROSS] + s % many[ACROSS] * SIDE;
    s /= many[ACROSS];
    i[3] = t.coord[3] + s % many[3] * SIDE;
    s /= many[3];
#pragma unroll
    for (int d = 2; d >= 0; --d) {
      if (d == ACROSS) continue;
      i[d] = t.coord[d] + s % many[d];
      s /= many[d];
    }
    const int rows = end[3] - i[3], columns = end[ACROSS] - i[ACROSS];
    return {from(i[0], i[1], i[2], i[3]), from_row, to(i[0], i[1], i[2], i[3]),
            rows < SIDE ? rows : SIDE, columns < SIDE ? columns : SIDE};
  };
  if constexpr (ARK_THREADS == 1) {
    ark_transpose_alone<SIDE, T>(squares, from_row, to_row, place);
  } else if (V == 1 || ark_aligned(addresses)) {
    ark_transpose<SIDE, V, COUNT, T>(squares, to_row, ARK_SCRATCH(c), place);
  } else if constexpr (V > 1) {
    ark_transpose<SIDE, 1, 1, T>(squares, to_row, ARK_SCRATCH(c), place);
  }
}
