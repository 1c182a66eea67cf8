// What a warp computes of a stage of keys and values in the variant `matrix` (attention_boxed.h).
// Both the scores and the sums of values are products on matrix units. Queries and the exponentials
// of scores are split into two parts of the keys' type, in rows 0 to 7 and 8 to 15 of a tile, which
// together keep almost all of fp32's precision.
//
// A tile is eight positions: in each quarter of a stage, two neighbouring positions. So a lane
// reads values of two neighbouring rows of one quarter, which is lane % 4, and the four quarters
// begin 32 bytes apart modulo 128 bytes: lanes that read at the same time read from different
// banks.

// The positions of a stage that one warp processes. quarter: positions in a quarter of the stage.
// first, rows: in each quarter, the warp's first position and the number of its positions, which is
// even. n: positions of the stage.
struct ArkBoxedPlace {
  int quarter, first, rows, n;
  // The position in the stage of element `i` of tile `tile`, whose elements are two in each of the
  // four quarters.
  ARK_DEVICE_MEMBER int at(int tile, int i) const {
    return i / 2 * quarter + first + 2 * tile + i % 2;
  }
  ARK_DEVICE_MEMBER bool has(int tile, int i) const { return 2 * tile < rows && at(tile, i) < n; }
};
constexpr int ARK_BOXED_SKEW = 32;  // bytes between two quarters of the values in a stage

// A warp's running softmax. top, den: the maximum and the denominator of head l / 4 in lane l; the
// denominator is only over the lane's own positions. o: sums of values of this head, which is
// divided into PARTS parts of 64 elements. For i = 0 and 1, the sum of element VEC * (2 (l % 4) +
// i) + j of part p is o[p][j][i] + o[p][j][2 + i].
template <int D>
struct ArkBoxedSums {
  static constexpr int PARTS = D > 64 ? D / 64 : 1, VEC = D / PARTS / 8;
  float top, den;
  float o[PARTS][VEC][4];
};

// Scores of the eight positions of a tile: the lane gets those of elements 2 (l % 4) and 2 (l % 4)
// + 1 for head l / 4. key: the lane's key, of element l / 4. Lanes of odd positions take pairs of
// 16-byte pieces in reverse order, so that eight lanes access all banks of shared memory.
template <int D, typename T>
ARK_DEVICE void ark_boxed_scores(const T* key, const uint4 (&a)[D / 32][2], float (&s)[2]) {
  const int other = D > 32 && (ark_lane() / 4 & 1) != 0 ? 32 : 0;
  float d[2][4] = {};
  key += ark_lane() % 4 * 8;
#pragma unroll
  for (int p = 0; p < D / 32; p += D > 32 ? 2 : 1) {
    uint4 k = *reinterpret_cast<const uint4*>(key + 32 * p + other);
    if constexpr (D > 32) {
      const uint4 second = *reinterpret_cast<const uint4*>(key + 32 * p + 32 - other);
      const uint4 first = k;
      k = other != 0 ? second : first;
      const uint4 l = other != 0 ? first : second;
      ark_mma(d[1], a[p + 1][0], l.x, l.y, key);
      ark_mma(d[1], a[p + 1][1], l.z, l.w, key);
    }
    ark_mma(d[0], a[p][0], k.x, k.y, key);
    ark_mma(d[0], a[p][1], k.z, k.w, key);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) s[i] = (d[0][i] + d[0][2 + i]) + (d[1][i] + d[1][2 + i]);
}

// N words of a row of values.
template <int N>
struct alignas(4 * N) ArkBoxedWords {
  ark_u32 v[N];
};
// Adds the values of two tiles, whose exponentials are the tile `a` of matrix units, to the sums.
// rows: the lane's two rows of values in each of the tiles.
template <int D, typename T>
ARK_DEVICE void ark_boxed_values(const T* const (&rows)[4], const uint4& a, ArkBoxedSums<D>& r) {
  constexpr int VEC = ArkBoxedSums<D>::VEC;
#pragma unroll
  for (int part = 0; part < ArkBoxedSums<D>::PARTS; ++part) {
    ArkBoxedWords<VEC / 2> v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[i] = *reinterpret_cast<const ArkBoxedWords<VEC / 2>*>(rows[i] + 64 * part);
    }
#pragma unroll
    for (int w = 0; w < VEC / 2; ++w) {
      ark_mma(r.o[part][2 * w], a, (v[0].v[w] & 0xffffu) | v[1].v[w] << 16,
              (v[2].v[w] & 0xffffu) | v[3].v[w] << 16, rows[0]);
      ark_mma(r.o[part][2 * w + 1], a, v[0].v[w] >> 16 | (v[1].v[w] & 0xffff0000u),
              v[2].v[w] >> 16 | (v[3].v[w] & 0xffff0000u), rows[0]);
    }
  }
}

// Adds a warp's positions of a stage to its running softmax, four tiles at a time. a: the queries
// (ark_query_tiles).
template <int D, typename T>
ARK_DEVICE void ark_boxed_attend(const T* keys, const T* values, const uint4 (&a)[D / 32][2],
                                 const ArkBoxedPlace& place, ArkBoxedSums<D>& r) {
  constexpr int TILES = 4, SKEW = ARK_BOXED_SKEW / static_cast<int>(sizeof(T));
  const int quarter = ark_lane() % 4, column = ark_lane() / 4 * ArkBoxedSums<D>::VEC;
#pragma unroll 1
  for (int first = 0; 2 * first < place.rows && place.at(first, 0) < place.n; first += TILES) {
    float s[TILES][2], m = r.top;
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      ark_boxed_scores<D>(keys + place.at(first + t, ark_lane() / 4) * D, a, s[t]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        // An absent position's score is less than any maximum, so that its exponential is 0.
        s[t][i] = place.has(first + t, 2 * quarter + i) ? s[t][i] : -2e30f;
        m = fmaxf(m, s[t][i]);
      }
    }
    m = fmaxf(m, ark_shfl_xor(m, 1));
    m = fmaxf(m, ark_shfl_xor(m, 2));
    const float keep = ark_exp2(r.top - m);
    r.top = m;
    r.den *= keep;
    if (__any_sync(0xffffffffu, keep != 1.0f)) {
#pragma unroll
      for (int i = 0; i < D / 2; ++i) {
        r.o[i / 4 / ArkBoxedSums<D>::VEC][i / 4 % ArkBoxedSums<D>::VEC][i % 4] *= keep;
      }
    }
#pragma unroll
    for (int t = 0; t < TILES; t += 2) {
      uint4 power;
      const T* rows[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int tile = first + t + i / 2, element = 2 * quarter + i % 2;
        float& score = s[t + i / 2][i % 2];
        score = ark_exp2(score - m);
        r.den += score;
        // The exponential of an absent position is 0, but its values may be anything, also NaN. So
        // those of the stage's first position are read instead.
        const int at = place.at(tile, element) * D + quarter * SKEW;
        rows[i] = values + (place.has(tile, element) ? at : 0) + column;
      }
      ark_split_pair(keys, s[t][0], s[t][1], power.x, power.y);
      ark_split_pair(keys, s[t + 1][0], s[t + 1][1], power.z, power.w);
      ark_boxed_values<D>(rows, power, r);
    }
  }
}

// Stores a warp's partial result for each of G heads to `part`: PITCH floats, which are the head's
// sums, then the maximum and the denominator. With ADDED, the result that another warp has stored
// there is added.
template <int G, int D, int PITCH, bool ADDED>
ARK_DEVICE void ark_boxed_part(ArkBoxedSums<D>& r, float* part) {
  constexpr float LN2 = 0.693147181f;
  constexpr int VEC = ArkBoxedSums<D>::VEC;
  const int head = ark_lane() / 4;
  r.den += ark_shfl_xor(r.den, 1);
  r.den += ark_shfl_xor(r.den, 2);
  float top = r.top * LN2, keep = 1.0f, share = 0.0f;
  float* to = part + head * PITCH;
  if (ADDED && head < G) {
    const float own = top, other = to[D];
    top = fmaxf(own, other);
    keep = ark_exp(own - top), share = ark_exp(other - top);
    r.den = fmaf(r.den, keep, to[D + 1] * share);
  }
  __syncwarp();  // all lanes of a head have read its maximum and denominator
  if (head >= G) return;
#pragma unroll
  for (int i = 0; i < D / 4; ++i) {
    const int p = i / (2 * VEC), half = i / VEC % 2, j = i % VEC;
    float& at = to[64 * p + VEC * (2 * (ark_lane() % 4) + half) + j];
    const float sum = r.o[p][j][half] + r.o[p][j][2 + half];
    at = ADDED ? fmaf(at, share, sum * keep) : sum;
  }
  if (ark_lane() % 4 == 0) to[D] = top, to[D + 1] = r.den;
}
