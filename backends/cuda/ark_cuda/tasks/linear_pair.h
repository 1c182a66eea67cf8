// A linear layer of two input rows on matrix units, with stages that hold whole rows of weights
// (linear_units.h).

// The layout of a lane's sums (see ArkRowsTile) for two input rows, PITCH elements apart, and four
// rows of weights. Each input row uses four of the tile's columns. Lanes whose numbers differ only
// in bits 0, 2 and 3 have the same sums; the lowest of these lanes stores them.
struct ArkUnitsTile {
  static constexpr int COLUMNS = 1, ALL = 2;
  static constexpr int FIRST_ROW = 16, LAST_ROW = 32;
  ARK_DEVICE int row() { return ark_lane() / 16 * 2; }
  ARK_DEVICE int column() { return ark_lane() / 2 % 2; }
  ARK_DEVICE int at(int e) { return (ark_lane() & 13) == 0 ? (row() + e) * 2 + column() : -1; }
};
template <int R, int M, int K, typename T>
constexpr bool ARK_PAIR_BY_UNITS = R == 4 && M == 2 && ARK_BY_UNITS<R, K, T>;
template <bool UNITS, int R, int M>
struct ArkTileOf {
  using Tile = ArkRowsTile<(R > 8), R, M>;
};
template <int R, int M>
struct ArkTileOf<true, R, M> {
  using Tile = ArkUnitsTile;
};

template <int K, int PITCH, typename T>
ARK_DEVICE void ark_pair_products(const T* w, const T* x, float (&sum)[2]) {
  constexpr int S = ARK_SEGMENTS<4>;
  const int row = ark_lane() / 4, segment = row % S;
  const int own = segment * (K / S) + ark_lane() % 4 * 8;
  const T* lower = w + row / S * 2 * K + own;  // two neighbours belong to one lane
  float all[4];
  ark_units_sums<4, K>(lower, lower + K, x + row / S * PITCH + own, all);
  // A lane has results of two columns of the product. Each column is one part (range of k) of an
  // input row, and each row is one part of a row of weights. Only the results of equal parts are
  // used, which is at most one of the two columns.
  const bool mine = ark_lane() % 2 == segment / 2, odd = segment % 2 != 0;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float total = mine ? (odd ? all[2 * r + 1] : all[2 * r]) : 0.0f;
    total += ark_shfl_xor(total, 1);
    total += ark_shfl_xor(total, 4);
    sum[r] = total + ark_shfl_xor(total, 8);
  }
}
