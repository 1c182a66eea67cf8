// A linear layer of one or few input rows on matrix units, for stages that hold whole rows of
// weights. Matrix units multiply many elements per instruction, while scalar instructions convert
// and multiply one element after another. So if several stages arrive at once, matrix units process
// them sooner, and the loading warp waits less for free slots of the ring.

// Products of R rows of K weights with x (one or a few input rows) on matrix units (m16n8k16). They
// take a tenth of the instructions of ark_stage_dots, which computes the same by scalar
// instructions. Weights and x are in shared memory.
//
// Each row of weights is cut along k into ARK_SEGMENTS parts, and each part is a row of the matrix
// unit's tile. Each row of x is cut into the same parts, and each part is a column of the tile.
// Only the products of a part of weights with the same part of x are used.
//
// Neighbouring parts begin at the same bank, so lanes of neighbouring parts load pairs of 64 bytes
// in opposite order. The 8 elements that a lane loads at once are used as two operands without a
// rearrangement, because weights and x have the same order of elements.
template <int R>
constexpr int ARK_SEGMENTS = R == 4 ? 4 : 8;
template <int R, int K, typename T>
constexpr bool ARK_BY_UNITS =
    sizeof(T) == 2 && (R == 1 || R == 2 || R == 4) && K % (64 * ARK_SEGMENTS<R>) == 0;

// Computes the sums of the matrix unit's tile. x: the address of the lane's elements of x. lower,
// upper: the addresses of the lane's elements of two rows of weights; with one row both are the
// same.
template <int R, int K, typename T>
ARK_DEVICE void ark_units_sums(const T* lower, const T* upper, const T* x, float (&all)[4]) {
  constexpr int S = ARK_SEGMENTS<R>, CHAINS = 2;
  const int turned = ark_lane() / 4 % S % 2 * 32;
  float d[2 * CHAINS][4] = {};
#pragma unroll 2
  for (int i = 0; i < K / S; i += 64) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = i + (32 * h ^ turned);
      const uint4 b = *reinterpret_cast<const uint4*>(x + at);
      const uint4 l = *reinterpret_cast<const uint4*>(lower + at);
      uint4 u = make_uint4(0u, 0u, 0u, 0u);
      if constexpr (R > 1) u = *reinterpret_cast<const uint4*>(upper + at);
      ark_mma(d[2 * h], l.x, u.x, l.y, u.y, b.x, b.y, lower);
      ark_mma(d[2 * h + 1], l.z, u.z, l.w, u.w, b.z, b.w, lower);
    }
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) all[e] = (d[0][e] + d[1][e]) + (d[2][e] + d[3][e]);
}

// For one row of x: computes this lane's share of the product of x with each row of weights.
template <int R, int K, typename T>
ARK_DEVICE void ark_stage_products(const T* w, const T* x, float (&sum)[R]) {
  constexpr int S = ARK_SEGMENTS<R>;
  const int row = ark_lane() / 4, segment = row % S;
  const int own = segment * (K / S) + ark_lane() % 4 * 8;
  const T* lower = w + row / S * K + own;
  float all[4];
  ark_units_sums<R, K>(lower, lower + R / 2 * K, x + own, all);
  const bool mine = ark_lane() % 4 == segment / 2, odd = segment % 2 != 0;
  const float low = mine ? (odd ? all[1] : all[0]) : 0.0f;
  const float high = mine ? (odd ? all[3] : all[2]) : 0.0f;
  if constexpr (R == 4) {
    const bool first = row < S;
    sum[0] = first ? low : 0.0f, sum[1] = first ? 0.0f : low;
    sum[2] = first ? high : 0.0f, sum[3] = first ? 0.0f : high;
  } else {
    sum[0] = low;
    if constexpr (R == 2) sum[1] = high;
  }
}
