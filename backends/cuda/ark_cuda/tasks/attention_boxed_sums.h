// What a warp computes of a stage of keys and values in the variant `matrix` (attention_boxed.h).
// Both the scores and the sums of values are products on matrix units. Queries and the exponentials
// of scores are split into two parts of the keys' type, in rows 0 to 7 and 8 to 15 of a tile, which
// together keep almost all of fp32's precision.
//
// A tile is eight positions: two rows of each quarter of a stage. Elements 2 i and 2 i + 1 of a
// tile are in quarters that are two apart, and the elements of equal parity in four different
// quarters. The two halves of the keys, and of the values, begin 64 bytes apart modulo 128 bytes.
// So if a row has at least 128 bytes, lanes that read at the same time read from different banks.

// The positions of a stage that one warp processes. quarter: positions in a quarter of the stage.
// first, rows: in each quarter, the warp's first position and the number of its positions, which is
// even. n: positions of the stage.
struct ArkBoxedPlace {
  int quarter, first, rows, n;
  // The quarter of element `i` of a tile. Its row there is i % 2 after the tile's first row.
  ARK_DEVICE int quarter_of(int i) { return (i / 2 + i % 2 * 2) % 4; }
  // The position in the stage of element `i` of the tile whose first row is `row` of the warp's.
  ARK_DEVICE_MEMBER int at(int row, int i) const {
    return quarter_of(i) * quarter + first + row + i % 2;
  }
  ARK_DEVICE_MEMBER bool has(int row, int i) const { return row < rows && at(row, i) < n; }
  // True if the stage has all positions of `count` rows from `row` on.
  ARK_DEVICE_MEMBER bool full(int row, int count) const {
    return row + count <= rows && 3 * quarter + first + row + count <= n;
  }
};
constexpr ark_u32 ARK_BOXED_UNIT = 8u;  // positions of a tile
constexpr int ARK_BOXED_SKEW = 64;      // bytes between two halves of the keys or values

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

// Raises the maximum of a running softmax to `m`, which is at least r.top.
template <int D>
ARK_DEVICE void ark_boxed_raise(float m, ArkBoxedSums<D>& r) {
  const float keep = ark_exp2(r.top - m);
  r.top = m;
  r.den *= keep;
  if (!__any_sync(0xffffffffu, keep != 1.0f)) return;
#pragma unroll
  for (int i = 0; i < D / 2; ++i) {
    r.o[i / 4 / ArkBoxedSums<D>::VEC][i / 4 % ArkBoxedSums<D>::VEC][i % 4] *= keep;
  }
}

// N words of a row of values.
template <int N>
struct alignas(4 * N) ArkBoxedWords {
  ark_u32 v[N];
};
// Loads N words of a row of values. If these are 16 bytes, odd and even lanes load halves of 8
// bytes in opposite order, because the quarters of a half begin at the same bank.
template <int N, typename T>
ARK_DEVICE ArkBoxedWords<N> ark_boxed_words(const T* row) {
  if constexpr (N < 4) {
    return *reinterpret_cast<const ArkBoxedWords<N>*>(row);
  } else {
    const bool odd = (ark_lane() & 1) != 0;
    const ArkBoxedWords<2>* half = reinterpret_cast<const ArkBoxedWords<2>*>(row);
    const ArkBoxedWords<2> first = half[odd ? 1 : 0], second = half[odd ? 0 : 1];
    return {{odd ? second.v[0] : first.v[0], odd ? second.v[1] : first.v[1],
             odd ? first.v[0] : second.v[0], odd ? first.v[1] : second.v[1]}};
  }
}
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
      v[i] = ark_boxed_words<VEC / 2>(rows[i] + 64 * part);
    }
#pragma unroll
    for (int w = 0; w < VEC / 2; ++w) {
      ark_mma(r.o[part][2 * w], a, __byte_perm(v[0].v[w], v[1].v[w], 0x5410u),
              __byte_perm(v[2].v[w], v[3].v[w], 0x5410u), rows[0]);
      ark_mma(r.o[part][2 * w + 1], a, __byte_perm(v[0].v[w], v[1].v[w], 0x7632u),
              __byte_perm(v[2].v[w], v[3].v[w], 0x7632u), rows[0]);
    }
  }
}

// Scores of the eight positions of a tile: the lane gets those of elements 2 (l % 4) and 2 (l % 4)
// + 1 for head l / 4. key: the lane's part of the key of element l / 4.
template <int D, typename T>
ARK_DEVICE void ark_boxed_scores(const T* key, const uint4 (&a)[D / 32][2], float (&s)[2]) {
  float d[4] = {};
#pragma unroll
  for (int p = 0; p < D / 32; ++p) {
    const uint4 k = *reinterpret_cast<const uint4*>(key + 32 * p);
    ark_mma(d, a[p][0], k.x, k.y, key);
    ark_mma(d, a[p][1], k.z, k.w, key);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) s[i] = d[i] + d[2 + i];
}

// Adds a warp's positions of a stage to its running softmax, four tiles at a time. a: the queries
// (ark_query_tiles).
template <int D, typename T>
ARK_DEVICE void ark_boxed_attend(const T* keys, const T* values, const uint4 (&a)[D / 32][2],
                                 const ArkBoxedPlace& place, ArkBoxedSums<D>& r) {
  constexpr int TILES = 4, ROWS = 2 * TILES, SIZE = static_cast<int>(sizeof(T));
  constexpr int SKEW = ARK_BOXED_SKEW / SIZE;
  const int element = ark_lane() / 4, column = ark_lane() / 4 * ArkBoxedSums<D>::VEC;
  // The lane's key of the first tile, and its two rows of values.
  const T* key =
      keys + place.at(0, element) * D + place.quarter_of(element) / 2 * SKEW + ark_lane() % 4 * 8;
  const T* value[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int of = 2 * (ark_lane() % 4) + i;
    value[i] = values + place.at(0, of) * D + place.quarter_of(of) / 2 * SKEW + column;
  }
#pragma unroll 1
  for (int row = 0; row < place.rows && place.first + row < place.n; row += ROWS) {
    float s[TILES][2];
    const T* from[TILES][2];
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      ark_boxed_scores<D>(key + (row + 2 * t) * D, a, s[t]);
#pragma unroll
      for (int i = 0; i < 2; ++i) from[t][i] = value[i] + (row + 2 * t) * D;
    }
    if (!place.full(row, ROWS)) {
#pragma unroll
      for (int t = 0; t < TILES; ++t) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (place.has(row + 2 * t, 2 * (ark_lane() % 4) + i)) continue;
          // An absent position's score is less than any maximum, so that its exponential is 0. Its
          // values may be anything, also NaN, so those of the stage's first position are read.
          s[t][i] = -2e30f;
          from[t][i] = values + column;
        }
      }
    }
    float m = r.top;
#pragma unroll
    for (int t = 0; t < TILES; ++t) m = fmaxf(m, fmaxf(s[t][0], s[t][1]));
    m = fmaxf(m, ark_shfl_xor(m, 1));
    m = fmaxf(m, ark_shfl_xor(m, 2));
    ark_boxed_raise<D>(m, r);
#pragma unroll
    for (int t = 0; t < TILES; t += 2) {
      uint4 power;
      const T* const rows[4] = {from[t][0], from[t][1], from[t + 1][0], from[t + 1][1]};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& score = s[t + i / 2][i % 2];
        score = ark_exp2(score - m);
        r.den += score;
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
