// Loops over the indices of a task's tile (a box of up to four dimensions). The caller passes the
// work at an index as a function.

// A tile with T0 to T3 indices in four dimensions, of a result with sizes N0 to N3.
template <int T0, int T1, int T2, int T3, int N0, int N1, int N2, int N3>
struct ArkTile {
  static constexpr int tile[4] = {T0, T1, T2, T3}, size[4] = {N0, N1, N2, N3};
};

// The first index in dimension D of the tile that begins at `coord`, and the index after its last.
template <class TILE, int D>
ARK_DEVICE int ark_tile_begin(const ark_i32* coord) {
  constexpr int size = TILE::size[D];
  return size == 1 ? 0 : coord[D];
}
template <class TILE, int D>
ARK_DEVICE int ark_tile_end(const ark_i32* coord) {
  constexpr int tile = TILE::tile[D], size = TILE::size[D];
  if (size == 1) return 1;
  return coord[D] + tile < size ? coord[D] + tile : size;
}

// Computes the tile's index in dimension D for pack number r, and stores it in `index`. A pack is a
// vector of PACK elements of the last dimension; the packs of a tile are numbered with the last
// dimension fastest. The function is called for dimension 3 first, then 2, 1 and 0. Each call
// divides r by the tile's number of packs (or indices) in its dimension, for the next call. OUTER:
// the number of the tile's indices in the dimensions before D. Returns false if the index is
// outside of the result.
template <class TILE, int D, int PACK, int OUTER>
ARK_DEVICE bool ark_tile_index(const ark_i32* coord, int& r, int& index) {
  constexpr int size = TILE::size[D], tile = TILE::tile[D];
  constexpr int pack = D == 3 ? PACK : 1, places = tile / pack;
  index = coord[D] + (places == 1 ? 0 : OUTER == 1 ? r : r % places) * pack;
  if (OUTER > 1 && places > 1) r /= places;
  return size % tile == 0 || index < size - size % pack;
}
template <class TILE, int PACK>
ARK_DEVICE bool ark_tile_place(const ark_i32* coord, int r, int& i0, int& i1, int& i2, int& i3) {
  constexpr int t0 = TILE::tile[0], t1 = TILE::tile[1], t2 = TILE::tile[2];
  bool ok = ark_tile_index<TILE, 3, PACK, t0 * t1 * t2>(coord, r, i3);
  ok = ark_tile_index<TILE, 2, PACK, t0 * t1>(coord, r, i2) && ok;
  ok = ark_tile_index<TILE, 1, PACK, t0>(coord, r, i1) && ok;
  return ark_tile_index<TILE, 0, PACK, 1>(coord, r, i0) && ok;
}

// A round: ROUNDS packs (vectors of neighbouring elements) that one thread loads before it uses any
// of them. first: the number of the round's first pack in the tile.
template <class TILE, int PACK, int ROUNDS>
struct ArkRound {
  const ark_i32* coord;
  int first;
};
// Calls body(u, inside, i0, i1, i2, i3) for each pack u of a round, with the indices of its first
// element.
template <class TILE, int PACK, int ROUNDS, class Body>
ARK_DEVICE void ark_each_pack(const ArkRound<TILE, PACK, ROUNDS>& round, const Body& body) {
  constexpr int total = TILE::tile[0] * TILE::tile[1] * TILE::tile[2] * (TILE::tile[3] / PACK);
  constexpr bool whole = total % (ROUNDS * ARK_THREADS) == 0;  // every round is inside of the tile
#pragma unroll
  for (int u = 0; u < ROUNDS; ++u) {
    const int r = round.first + u * ARK_THREADS;
    int i0, i1, i2, i3;
    const bool inside = ark_tile_place<TILE, PACK>(round.coord, r, i0, i1, i2, i3);
    body(u, (whole || r < total) && inside, i0, i1, i2, i3);
  }
}
// Processes a tile by all threads: calls body(round) for every round.
template <class TILE, int PACK, int ROUNDS, class Body>
ARK_DEVICE void ark_each_round(const ark_i32* coord, const Body& body) {
  constexpr int total = TILE::tile[0] * TILE::tile[1] * TILE::tile[2] * (TILE::tile[3] / PACK);
  if constexpr (total == ROUNDS * ARK_THREADS) {
    body(ArkRound<TILE, PACK, ROUNDS>{coord, ark_tid()});
  } else {
    for (int first = ark_tid(); first < total; first += ROUNDS * ARK_THREADS) {
      body(ArkRound<TILE, PACK, ROUNDS>{coord, first});
    }
  }
}
// Like ark_each_round, but each thread loads its next round while it computes the current one. The
// registers of a thread must hold the operands of two rounds (HELD). load(held, first) loads the
// round that begins with pack number `first`; finish(held) computes a loaded round.
template <class HELD, class TILE, int PACK, int ROUNDS, class Load, class Finish>
ARK_DEVICE void ark_each_round_ahead(const Load& load, const Finish& finish) {
  constexpr int total = TILE::tile[0] * TILE::tile[1] * TILE::tile[2] * (TILE::tile[3] / PACK);
  constexpr int STEP = ROUNDS * ARK_THREADS;
  HELD now = {}, ahead = {};
  int first = ark_tid();
  if (first < total) load(now, first);
#pragma unroll 1
  for (; first < total; first += 2 * STEP) {
    if (first + STEP < total) load(ahead, first + STEP);
    finish(now);
    if (first + 2 * STEP < total) load(now, first + 2 * STEP);
    if (first + STEP < total) finish(ahead);
  }
}
// Processes the ends of rows. If a row's size is not a multiple of a pack (vector), its last tile
// ends with elements that do not fill a pack: calls body(i0, i1, i2, i3) for each of these. The
// last threads come first, because they have the fewest packs.
template <class TILE, int PACK, class Body>
ARK_DEVICE void ark_each_left(const ark_i32* coord, const Body& body) {
  constexpr int size = TILE::size[3], rest = size % PACK;
  constexpr int t0 = TILE::tile[0], t1 = TILE::tile[1], t2 = TILE::tile[2];
  if (coord[3] + TILE::tile[3] < size) return;
  for (int e = ARK_THREADS - 1 - ark_tid(); e < t0 * t1 * t2 * rest; e += ARK_THREADS) {
    int r = e / rest, i0, i1, i2;
    bool ok = ark_tile_index<TILE, 2, 1, t0 * t1>(coord, r, i2);
    ok = ark_tile_index<TILE, 1, 1, t0>(coord, r, i1) && ok;
    ok = ark_tile_index<TILE, 0, 1, 1>(coord, r, i0) && ok;
    if (ok) body(i0, i1, i2, size - rest + e % rest);
  }
}

// Stores N neighbouring results as one pack. make(to, j) writes result j to to[j].
template <int N, typename T, class Make>
ARK_DEVICE void ark_store_made(bool inside, T* to, const Make& make) {
  ArkPack<T, N> pack;
#pragma unroll
  for (int j = 0; j < N; ++j) make(pack.v, j);
  if (inside) ark_store_pack<N>(to, pack);
}

// Stores N neighbouring results as one pack. make(to, j, later) writes result j to to[j]. Some
// functions need slow code for rare arguments (see math16.h). In this case `make` only sets
// `later`, and then all results of the pack are computed again by make(to, j, ark_rare), with the
// slow code.
template <int N, typename T, class Make>
ARK_DEVICE void ark_store_rare(bool inside, T* to, const Make& make) {
  ArkRareLater later{false};
  ArkPack<T, N> pack;
#pragma unroll
  for (int j = 0; j < N; ++j) make(pack.v, j, later);
  if (later.found) {
#pragma unroll
    for (int j = 0; j < N; ++j) make(pack.v, j, ark_rare);
  }
  if (inside) ark_store_pack<N>(to, pack);
}

// Processes a tile by all threads, element by element: calls body(i0, i1, i2, i3).
template <class TILE, class Body>
ARK_DEVICE void ark_each_index(const ark_i32* coord, const Body& body) {
  constexpr int total = TILE::tile[0] * TILE::tile[1] * TILE::tile[2] * TILE::tile[3];
  for (int r = ark_tid(); r < total; r += ARK_THREADS) {
    int i0, i1, i2, i3;
    if (ark_tile_place<TILE, 1>(coord, r, i0, i1, i2, i3)) body(i0, i1, i2, i3);
  }
}

// Processes a tile of elements of less than 8 bits by all threads. A byte has EACH elements. Calls
// body(i0, i1, i2, i3, last) for each byte, with the indices of its first element and the last
// index of its row, which may be before the byte's last element.
template <class TILE, int EACH, class Body>
ARK_DEVICE void ark_each_byte(const ark_i32* coord, const Body& body) {
  constexpr int t1 = TILE::tile[1], t2 = TILE::tile[2];
  constexpr int bytes = (TILE::tile[3] + EACH - 1) / EACH, total = TILE::tile[0] * t1 * t2 * bytes;
  for (int e = ark_tid(); e < total; e += ARK_THREADS) {
    const int i3 = coord[3] + e % bytes * EACH, i2 = coord[2] + e / bytes % t2;
    const int i1 = coord[1] + e / (bytes * t2) % t1, i0 = coord[0] + e / (bytes * t2 * t1);
    constexpr int n0 = TILE::size[0], n1 = TILE::size[1], n2 = TILE::size[2], n3 = TILE::size[3];
    if (i0 < n0 && i1 < n1 && i2 < n2 && i3 < n3) body(i0, i1, i2, i3, n3 - 1);
  }
}

// Processes a tile by one thread, in order. The innermost loop, over the last dimension with more
// than one index, can be vectorised.
template <class Body>
ARK_DEVICE void ark_vector_loop(int begin, int end, const Body& body) {
  ARK_VECTOR_LOOP
  for (int i = begin; i < end; ++i) body(i);
}
template <class TILE, class Body>
ARK_DEVICE void ark_each_in_order(const ark_i32* coord, const Body& body) {
  const int b0 = ark_tile_begin<TILE, 0>(coord), e0 = ark_tile_end<TILE, 0>(coord);
  const int b1 = ark_tile_begin<TILE, 1>(coord), e1 = ark_tile_end<TILE, 1>(coord);
  const int b2 = ark_tile_begin<TILE, 2>(coord), e2 = ark_tile_end<TILE, 2>(coord);
  const int b3 = ark_tile_begin<TILE, 3>(coord), e3 = ark_tile_end<TILE, 3>(coord);
  if constexpr (TILE::size[3] > 1) {
    for (int i0 = b0; i0 < e0; ++i0) {
      for (int i1 = b1; i1 < e1; ++i1) {
        for (int i2 = b2; i2 < e2; ++i2) {
          ark_vector_loop(b3, e3, [&](int i3) { body(i0, i1, i2, i3); });
        }
      }
    }
  } else if constexpr (TILE::size[2] > 1) {
    for (int i0 = b0; i0 < e0; ++i0) {
      for (int i1 = b1; i1 < e1; ++i1) {
        ark_vector_loop(b2, e2, [&](int i2) { body(i0, i1, i2, 0); });
      }
    }
  } else if constexpr (TILE::size[1] > 1) {
    for (int i0 = b0; i0 < e0; ++i0) {
      ark_vector_loop(b1, e1, [&](int i1) { body(i0, i1, 0, 0); });
    }
  } else {
    ark_vector_loop(b0, e0, [&](int i0) { body(i0, 0, 0, 0); });
  }
}
