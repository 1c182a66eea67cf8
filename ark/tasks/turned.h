// Copies by index arithmetic in which the source's last dimension becomes the target's first one.
// Squares of places by channels pass through shared memory (ark_transpose).

// Up to SIDE places by SIDE channels: channel i0 + c of place `first + r` is copied to
// to[c * to_row + r]. Places are counted from row i2 of image i1, with WIDE places in a row.
// from(i0, i1, i2, i3): the address of the element's source, or null for a zero.
template <int WIDE, typename T, class From>
struct ArkTurnedSquare {
  const From& from;
  int i0, i1, i2, first;
  T* to;
  int rows, columns;
};
template <int WIDE, typename T, class From, class Held>
ARK_DEVICE void ark_hold_square(Held& held, const ArkTurnedSquare<WIDE, T, From>& square, int r,
                                int c) {
  const int place = square.first + r;
  const T* at = square.from(square.i0 + c, square.i1, square.i2 + place / WIDE, place % WIDE);
  held = {};
  if (at != nullptr) ark_hold(held, at);
}

// Copies a task's tile, which has whole rows of places (dimensions 2 and 3). to(i0, i1, i2, i3):
// the address of an element of the target. Without vectors (V = 1), one square is loaded at a time.
template <class TILE, int SIDE, int V, int COUNT, typename T, class From, class To>
ARK_DEVICE void ark_turned_squares(ArkCtx& c, const ArkTask& t, ark_i64 to_row, const From& from,
                                   const To& to) {
  constexpr int wide = TILE::tile[3];
  const int places = (ark_tile_end<TILE, 2>(t.coord) - t.coord[2]) * wide;
  const int channels = ark_tile_end<TILE, 0>(t.coord) - t.coord[0];
  const int across = (places + SIDE - 1) / SIDE, down = (channels + SIDE - 1) / SIDE;
  const int squares = across * down * (ark_tile_end<TILE, 1>(t.coord) - t.coord[1]);
  const auto place = [&](int s) -> ArkTurnedSquare<wide, T, From> {
    const int first = s % across * SIDE, channel = s / across % down * SIDE;
    const int i0 = t.coord[0] + channel, i1 = t.coord[1] + s / across / down, i2 = t.coord[2];
    const int rows = places - first, columns = channels - channel;
    return {from,
            i0,
            i1,
            i2,
            first,
            to(i0, i1, i2, 0) + first,
            rows < SIDE ? rows : SIDE,
            columns < SIDE ? columns : SIDE};
  };
  ark_transpose<SIDE, V, COUNT, T>(squares, to_row, ARK_SCRATCH(c), place);
}

template <class TILE, int SIDE, int V, int COUNT, typename T, class From, class To>
ARK_DEVICE void ark_turned_tile(ArkCtx& c, const ArkTask& t, ark_i64 to_row, const From& from,
                                const To& to, ark_u64 addresses) {
  if (V == 1 || ark_aligned(addresses)) {
    ark_turned_squares<TILE, SIDE, V, COUNT, T>(c, t, to_row, from, to);
  } else if constexpr (V > 1) {
    ark_turned_squares<TILE, SIDE, 1, 1, T>(c, t, to_row, from, to);
  }
}
