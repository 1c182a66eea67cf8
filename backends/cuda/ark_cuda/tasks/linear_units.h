// One row through a linear layer by matrix units: they take two operands where the scalar units
// convert and multiply one element after another, and a burst of stages is done the sooner, behind
// which the ring waits for its slots.

// A lane's share of the products of R rows of K weights with x, both in shared memory, by matrix
// units (m16n8k16), for a tenth of the instructions of other lanes' shares (ark_stage_dots). The
// tile's rows are rows of weights in SEGMENTS parts, its columns the same parts of x; of the
// products those of equal parts count. Neighbouring parts, which begin at one bank, take pairs of
// 64 bytes in turned order. What a lane loads at once, 8 elements, are two operands as they lie,
// since both sides are taken so.
template <int R>
constexpr int ARK_SEGMENTS = R == 4 ? 4 : 8;
template <int R, int K, typename T>
constexpr bool ARK_BY_UNITS =
    sizeof(T) == 2 && (R == 1 || R == 2 || R == 4) && K % (64 * ARK_SEGMENTS<R>) == 0;

template <int R, int K, typename T>
ARK_DEVICE void ark_stage_products(const T* w, const T* x, float (&sum)[R]) {
  constexpr int S = ARK_SEGMENTS<R>, PART = K / S, CHAINS = 2;
  const int row = ark_lane() / 4, segment = row % S, own = segment * PART + ark_lane() % 4 * 8;
  const int turned = segment % 2 * 32;
  const T* lower = w + row / S * K + own;
  const T* upper = lower + R / 2 * K;
  float d[2 * CHAINS][4] = {};
#pragma unroll 2
  for (int i = 0; i < PART; i += 64) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = i + (32 * h ^ turned);
      const uint4 b = *reinterpret_cast<const uint4*>(x + own + at);
      const uint4 l = *reinterpret_cast<const uint4*>(lower + at);
      uint4 u = make_uint4(0u, 0u, 0u, 0u);
      if constexpr (R > 1) u = *reinterpret_cast<const uint4*>(upper + at);
      ark_multiply_tile(w, d[2 * h], l.x, u.x, l.y, u.y, b.x, b.y);
      ark_multiply_tile(w, d[2 * h + 1], l.z, u.z, l.w, u.w, b.z, b.w);
    }
  }
  float all[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) all[e] = (d[0][e] + d[1][e]) + (d[2][e] + d[3][e]);
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
