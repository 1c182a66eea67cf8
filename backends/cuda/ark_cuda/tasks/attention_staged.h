// Steps of attention of one row whose keys and values are in stages in shared memory
// (attention_stream.h, attention_boxed.h). Scores are products on matrix units: queries are split
// into two parts of the keys' type, which together keep almost all of fp32's precision. So are the
// exponentials of scores, whose products with values are added up in fp32.

// True if loops over positions and parts are unrolled. With more query heads (G), loading the
// longer code from memory takes longer than unrolling saves, because a task runs these loops few
// times.
template <int G>
constexpr bool ARK_FEW_HEADS = G <= 4;

// Rounds two values to the type T (`high`), and returns their rounding errors in the same type
// (`low`).
template <typename T>
ARK_DEVICE void ark_split_pair(const T*, float a, float b, ark_u32& high, ark_u32& low) {
  T pair[2];
  ark_narrow(pair, a, b);
  high = *reinterpret_cast<const ark_u32*>(pair);
  const float2 taken = ark_pair(static_cast<const T*>(nullptr), high);
  ark_narrow(pair, a - taken.x, b - taken.y);
  low = *reinterpret_cast<const ark_u32*>(pair);
}

// Loads N neighbouring floats of shared memory. If N is a multiple of 4, they begin at a multiple
// of 16 bytes.
template <int N>
ARK_DEVICE void ark_floats(const float* from, float (&to)[N]) {
  if constexpr (N % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(from + i);
      to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = from[i];
  }
}

// Queries as operands of matrix units, 32 elements of a head at a time. Rows 0 to 7 of a tile are
// the heads rounded to the keys' type; rows 8 to 15 are the rounding errors. Lane l has the eight
// elements from 8 (l % 4) on of head l / 4, in the same order as those in 16 bytes of a key.
template <int G, int D, typename T>
ARK_DEVICE void ark_query_tiles(const float* query, uint4 (&a)[D / 32][2]) {
  const int head = ark_lane() / 4;
#pragma unroll
  for (int p = 0; p < D / 32; ++p) {
    float q[8] = {};
    if (head < G) ark_floats(query + head * D + 32 * p + ark_lane() % 4 * 8, q);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const T* type = nullptr;
      ark_split_pair(type, q[4 * i], q[4 * i + 1], a[p][i].x, a[p][i].y);
      ark_split_pair(type, q[4 * i + 2], q[4 * i + 3], a[p][i].z, a[p][i].w);
    }
  }
}

// Computes the scores of N positions, at most ROWS. Lane l gets the scores of head l / 4 for two
// positions of every eight, from 2 (l % 4) on. Lanes of odd positions take pairs of 16-byte pieces
// in reverse order, so that eight lanes access all banks of shared memory.
template <int D, int ROWS, typename T>
ARK_DEVICE void ark_stage_scores(const T* keys, const uint4 (&a)[D / 32][2], int n,
                                 float (&s)[ROWS / 4]) {
  const int row = ark_lane() / 4, other = D > 32 && (row & 1) != 0 ? 32 : 0;
#pragma unroll
  for (int tile = 0; tile < ROWS / 8; ++tile) {
    float d[2][4] = {};
    if (8 * tile < n) {
      const T* key = keys + (8 * tile + row) * D + ark_lane() % 4 * 8;
#pragma unroll
      for (int p = 0; p < D / 32; p += D > 32 ? 2 : 1) {
        uint4 k = *reinterpret_cast<const uint4*>(key + 32 * p + other);
        if constexpr (D > 32) {
          const uint4 second = *reinterpret_cast<const uint4*>(key + 32 * p + 32 - other);
          const uint4 first = k;
          k = other != 0 ? second : first;
          const uint4 l = other != 0 ? first : second;
          ark_mma(d[1], a[p + 1][0], l.x, l.y, keys);
          ark_mma(d[1], a[p + 1][1], l.z, l.w, keys);
        }
        ark_mma(d[0], a[p][0], k.x, k.y, keys);
        ark_mma(d[0], a[p][1], k.z, k.w, keys);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool there = 8 * tile + ark_lane() % 4 * 2 + i < n;
      const float sum = (d[0][i] + d[0][2 + i]) + (d[1][i] + d[1][2 + i]);
      s[2 * tile + i] = there ? sum : -1e30f;
    }
  }
}

// A warp's running softmax. top, den: the maximum and the denominator of head l / 4 in lane l; the
// denominator is only over the lane's own positions. o: sums of values of this head, which is
// divided into PARTS parts of 64 elements. For i = 0 and 1, the sum of element VEC * (2 (l % 4) +
// i) + j of part p is o[p][j][i] + o[p][j][2 + i].
template <int D>
struct ArkStagedSums {
  static constexpr int PARTS = D > 64 ? D / 64 : 1, VEC = D / PARTS / 8;
  float top, den;
  float o[PARTS][VEC][4];
};

// Raises the maximum of a running softmax to `m`, which is at least r.top.
template <int D>
ARK_DEVICE void ark_staged_raise(float m, ArkStagedSums<D>& r) {
  const float keep = ark_exp2(r.top - m);
  r.top = m;
  r.den *= keep;
  if (!__any_sync(0xffffffffu, keep != 1.0f)) return;
#pragma unroll
  for (int i = 0; i < D / 2; ++i) {
    r.o[i / 4 / ArkStagedSums<D>::VEC][i / 4 % ArkStagedSums<D>::VEC][i % 4] *= keep;
  }
}

// N words of a row of values.
template <int N>
struct alignas(4 * N) ArkStagedWords {
  ark_u32 v[N];
};
template <int N, bool SWAPPED, typename T>
ARK_DEVICE ArkStagedWords<N> ark_staged_words(const T* row) {
  if constexpr (!SWAPPED || N < 4) {
    return *reinterpret_cast<const ArkStagedWords<N>*>(row);
  } else {
    const bool odd = (ark_lane() & 1) != 0;
    const ArkStagedWords<2>* half = reinterpret_cast<const ArkStagedWords<2>*>(row);
    const ArkStagedWords<2> first = half[odd ? 1 : 0], second = half[odd ? 0 : 1];
    return {{odd ? second.v[0] : first.v[0], odd ? second.v[1] : first.v[1],
             odd ? first.v[0] : second.v[0], odd ? first.v[1] : second.v[1]}};
  }
}
// Adds the values of two tiles, whose exponentials are the tile `a` of matrix units, to the sums.
// rows: the lane's two rows of values in each of the tiles. ONE_BANK: true if all rows begin at the
// same bank of shared memory. Then odd and even lanes load halves in opposite order, so that only
// two lanes share a bank and not four.
template <int D, bool ONE_BANK, typename T>
ARK_DEVICE void ark_staged_values(const T* const (&rows)[4], const uint4& a, ArkStagedSums<D>& r) {
  constexpr int VEC = ArkStagedSums<D>::VEC;
#pragma unroll
  for (int part = 0; part < ArkStagedSums<D>::PARTS; ++part) {
    ArkStagedWords<VEC / 2> v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[i] = ark_staged_words<VEC / 2, ONE_BANK>(rows[i] + 64 * part);
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

// Adds N positions (at least 1, at most ROWS) to the running softmax, two tiles of eight positions
// at a time. Element i of a tile is position i.
template <int G, int D, int ROWS, typename T>
ARK_DEVICE void ark_stage_attend(const T* keys, const T* values, const uint4 (&a)[D / 32][2], int n,
                                 float*, ArkStagedSums<D>& r) {
  constexpr int TILES = ROWS / 8;
  float s[ROWS / 4];
  ark_stage_scores<D, ROWS>(keys, a, n, s);
  float m = r.top;
#pragma unroll
  for (int i = 0; i < ROWS / 4; ++i) m = fmaxf(m, s[i]);
  m = fmaxf(m, ark_shfl_xor(m, 1));
  m = fmaxf(m, ark_shfl_xor(m, 2));
  ark_staged_raise<D>(m, r);
  const T* const column = values + ark_lane() / 4 * ArkStagedSums<D>::VEC;
#pragma unroll
  for (int t = 0; t < TILES; t += 2) {
    if (8 * t >= n) break;
    uint4 power = {};
    const T* rows[4];
    float score[4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = 8 * (t + i / 2) + ark_lane() % 4 * 2 + i % 2;
      if (t + i / 2 < TILES) score[i] = ark_exp2(s[2 * (t + i / 2) + i % 2] - m);
      r.den += score[i];
      // An absent position's exponential is 0, but its values may be anything, also NaN. So those
      // of the first position are read instead.
      rows[i] = column + (at < n ? at * D : 0);
    }
    ark_split_pair(keys, score[0], score[1], power.x, power.y);
    ark_split_pair(keys, score[2], score[3], power.z, power.w);
    ark_staged_values<D, (D >= 64)>(rows, power, r);
  }
}

// Stores a warp's partial result for each of G heads to `part`: PITCH floats, which are the head's
// sums, then the maximum and the denominator. With ADDED, the result that another warp has stored
// there is added.
template <int G, int D, int PITCH, bool ADDED>
ARK_DEVICE void ark_staged_part(ArkStagedSums<D>& r, float* part) {
  constexpr float LN2 = 0.693147181f;
  constexpr int VEC = ArkStagedSums<D>::VEC;
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

// A warp's running softmax where heads are so wide that the registers do not suffice for
// ArkStagedSums. o: eight elements of every head's sum, over the positions that the lane has read.
template <int G>
struct ArkStagedSoftmax {
  float top;
  float den;
  float o[8 * G];
};

// Adds the values of N positions (at most ROWS), weighted by their exponentials, to the running
// softmax. powers: shared memory of the warp for the exponentials.
template <int G, int D, int ROWS, typename T>
ARK_DEVICE void ark_stage_attend(const T* keys, const T* values, const uint4 (&a)[D / 32][2], int n,
                                 float* powers, ArkStagedSoftmax<G>& r) {
  constexpr int LANES = D / 8;
  float s[ROWS / 4];
  ark_stage_scores<D, ROWS>(keys, a, n, s);
  float m = r.top;
#pragma unroll
  for (int i = 0; i < ROWS / 4; ++i) m = fmaxf(m, s[i]);
  m = fmaxf(m, ark_shfl_xor(m, 1));
  m = fmaxf(m, ark_shfl_xor(m, 2));
  const float keep = ark_exp2(r.top - m);
  r.top = m;
  const bool rescaled = keep != 1.0f && r.den != 0.0f;
  r.den *= keep;
  const int head = ark_lane() / 4;
#pragma unroll
  for (int i = 0; i < ROWS / 4; ++i) {
    const float power = ark_exp2(s[i] - m);
    r.den += power;
    if (head < G) powers[(i / 2 * 8 + ark_lane() % 4 * 2 + i % 2) * G + head] = power;
  }
  // Before the first positions all sums are zero.
  if (__any_sync(0xffffffffu, rescaled)) {
#pragma unroll
    for (int g = 0; g < G; ++g) {
      const float factor = __shfl_sync(0xffffffffu, keep, 4 * g);
#pragma unroll
      for (int i = 0; i < 8; ++i) r.o[8 * g + i] *= factor;
    }
  }
  __syncwarp();
  const T* row = values + ark_lane() % LANES * 8;
#pragma unroll(ARK_FEW_HEADS<G> ? 2 : 1)
  for (int e = ark_lane() / LANES; e < n; e += 32 / LANES) {
    float v[8], p[G];
    ark_unpack(v, *reinterpret_cast<const uint4*>(row + e * D), values);
    ark_floats(powers + e * G, p);
#pragma unroll
    for (int g = 0; g < G; ++g) {
#pragma unroll
      for (int i = 0; i < 8; ++i) r.o[8 * g + i] = fmaf(p[g], v[i], r.o[8 * g + i]);
    }
  }
  __syncwarp();
}

// Reduces N sums over groups of lanes, LANES or more lanes apart. In each step two groups exchange
// halves of their sums, so each group ends with the totals of some sums. Returns the index of the
// first of these.
template <int LANES, int N, int MASK = 16>
ARK_DEVICE int ark_fold_groups(float* v) {
  if constexpr (MASK < LANES) {
    return 0;
  } else {
    const bool upper = (ark_lane() & MASK) != 0;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const float send = upper ? v[i] : v[i + N / 2];
      v[i] = (upper ? v[i + N / 2] : v[i]) + ark_shfl_xor(send, MASK);
    }
    return (upper ? N / 2 : 0) + ark_fold_groups<LANES, N / 2, MASK / 2>(v);
  }
}

// Stores a warp's partial result to its own shared memory: each head's sum, then maximum and
// denominator.
template <int G, int D>
ARK_DEVICE void ark_stage_part(ArkStagedSums<D>& r, float* part) {
  ark_staged_part<G, D, D + 2, false>(r, part);
}
template <int G, int D>
ARK_DEVICE void ark_stage_part(ArkStagedSoftmax<G>& r, float* part) {
  constexpr int LANES = D / 8;
  constexpr float LN2 = 0.693147181f;
  r.den += ark_shfl_xor(r.den, 1);
  r.den += ark_shfl_xor(r.den, 2);
  const int first = ark_fold_groups<LANES, 8 * G>(r.o);
#pragma unroll
  for (int i = 0; i < G * LANES / 4; ++i) {
    const int at = first + i;
    part[at / 8 * (D + 2) + ark_lane() % LANES * 8 + at % 8] = r.o[i];
  }
  const int head = ark_lane() / 4;
  if (ark_lane() % 4 == 0 && head < G) {
    part[head * (D + 2) + D] = r.top * LN2;
    part[head * (D + 2) + D + 1] = r.den;
  }
}

// Writes the key or value of the current token, which is not in the cache yet, to its row of a
// stage.
template <int D, typename T>
ARK_DEVICE void ark_stage_newest(T* row, const float* current) {
  for (int i = 2 * ark_lane(); i < D; i += 64) ark_narrow(row + i, current[i], current[i + 1]);
}

// Combines the partial results s.own[0] to s.own[parts - 1] of warps and stores the task's result.
// Each thread computes pairs of elements. PITCH: floats of a head in a partial result, which are
// its sums, then the maximum and the denominator.
template <int G, int D, int SPLITS, int PITCH = D + 2, class S, class O>
ARK_DEVICE void ark_staged_join(ArkCtx& c, const ArkTask& t, const S& s, O output, int parts,
                                int thread, int threads) {
  const int row = t.coord[0], head = t.coord[1], split = t.coord[2];
#pragma unroll 1
  for (int i = 2 * thread; i < G * D; i += 2 * threads) {
    const int g = i / D, d = i % D, base = g * PITCH;
    float m = s.own[0][base + D], sum[2] = {}, all = 0.0f;
#pragma unroll(ARK_FEW_HEADS<G> ? 4 : 1)
    for (int w = 1; w < parts; ++w) m = fmaxf(m, s.own[w][base + D]);
#pragma unroll(ARK_FEW_HEADS<G> ? 4 : 1)
    for (int w = 0; w < parts; ++w) {
      const float share = ark_exp(s.own[w][base + D] - m);
      sum[0] = fmaf(share, s.own[w][base + d], sum[0]);
      sum[1] = fmaf(share, s.own[w][base + d + 1], sum[1]);
      all = fmaf(share, s.own[w][base + D + 1], all);
    }
    if constexpr (SPLITS == 1) {
      ark_publish(c, output, 0, 0, row, head * (G * D) + i, sum[0] / all);
      ark_publish(c, output, 0, 0, row, head * (G * D) + i + 1, sum[1] / all);
    } else {
      ark_publish(c, output, row, head * G + g, split, d, sum[0]);
      ark_publish(c, output, row, head * G + g, split, d + 1, sum[1]);
      if (d == 0) {
        ark_publish(c, output, row, head * G + g, split, D, m);
        ark_publish(c, output, row, head * G + g, split, D + 1, all);
      }
    }
  }
}
