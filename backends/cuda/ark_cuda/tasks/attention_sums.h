// Attention of tiles of queries on mma.sync: the products and sums that one warp computes, and
// their exchange between warps. attention_units.h describes how a block's warps share a tile.

// Computes the scores of a slab (16 rows of queries) with SCORES keys.
template <class U>
ARK_DEVICE void ark_attention_scores(float (&s)[U::SCORES / 2], ark_u32 queries, ark_u32 keys,
                                     const ark_u32 (&held)[U::HELD ? U::STEPS : 1][4]) {
  const typename U::type* type = nullptr;
#pragma unroll
  for (int i = 0; i < U::SCORES / 2; ++i) s[i] = 0.0f;
#pragma unroll
  for (int k = 0; k < U::STEPS; ++k) {
    ark_u32 q[4];
    if constexpr (U::HELD) {
#pragma unroll
      for (int i = 0; i < 4; ++i) q[i] = held[k][i];
    } else {
      ark_load_tiles(q, ark_attention_step(queries, k));
    }
#pragma unroll
    for (int j = 0; j < U::SCORES / 16; ++j) {
      ark_u32 b[4];
      ark_load_tiles(b, ark_attention_step(keys, k) + j * 16 * U::PITCH);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float (&d)[4] = *reinterpret_cast<float (*)[4]>(s + 8 * j + 4 * n);
        ark_mma(d, q[0], q[1], q[2], q[3], b[2 * n], b[2 * n + 1], type);
      }
    }
  }
}

// A warp's results so far for its rows: the sum of values times exponentials, in OWN blocks of 16
// columns; the sums of exponentials, which are computed as products with ones; and the maxima to
// which the exponentials are relative.
template <class U>
struct ArkAttentionSums {
  float values[8 * U::OWN];
  float powers[4];  // two equal ones per row
  float top[2];
};
ARK_DEVICE ark_u32 ark_attention_ones(const ark_bf16*) { return 0x3f803f80u; }
ARK_DEVICE ark_u32 ark_attention_ones(const ark_f16*) { return 0x3c003c00u; }

// Adds to the sums, from column step `first` on, the values of 16 keys times these keys'
// exponentials.
template <class U>
ARK_DEVICE void ark_attention_values(ArkAttentionSums<U>& sums, const ark_u32 (&p)[4],
                                     ark_u32 values, int first) {
  const typename U::type* type = nullptr;
  const ark_u32 ones = ark_attention_ones(type);
  ark_mma(sums.powers, p[0], p[1], p[2], p[3], ones, ones, type);
#pragma unroll
  for (int j = 0; j < U::OWN; ++j) {
    ark_u32 b[4];
    ark_load_tiles_turned(b, ark_attention_step(values, first + j));
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float (&d)[4] = *reinterpret_cast<float (*)[4]>(sums.values + 8 * j + 4 * n);
      ark_mma(d, p[0], p[1], p[2], p[3], b[2 * n], b[2 * n + 1], type);
    }
  }
}

// Applies a soft cap to a score: cap * tanh(v), accurate to a few units in cap's last place.
ARK_DEVICE float ark_attention_capped(float v, float cap) {
  const float power = ark_attention_power(v * 2.88539008f);  // e^2v
  return cap - 2.0f * cap * ark_reciprocal_flushed(1.0f + power);
}

template <class U>
ARK_DEVICE void ark_attention_scale(ArkAttentionSums<U>& sums, const float (&by)[2]) {
#pragma unroll
  for (int i = 0; i < 8 * U::OWN; ++i) sums.values[i] *= by[i / 2 % 2];
#pragma unroll
  for (int i = 0; i < 4; ++i) sums.powers[i] *= by[i / 2];
}

// Converts a warp's scores to exponentials relative to the running maximum. If the maximum rises,
// rescales the warp's sums.
template <class U>
ARK_DEVICE void ark_attention_weigh(float (&s)[U::SCORES / 2], ArkAttentionSums<U>& sums,
                                    ark_u32 (&p)[U::KEYS / 4], float factor,
                                    const ArkAttentionStrip& strip, char* shared) {
  typedef typename U::type T;
  float m[2], keep[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) m[half] = ark_attention_largest<U::SCORES>(s, half);
  if constexpr (U::TEAM > 1) {
    const ArkAttentionPlace<U> w(strip);
    float* tops = reinterpret_cast<float*>(shared + w.team() + U::KEYS * 32) + w.lane / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (w.lane % 4 == 0) tops[16 * w.part + 8 * half] = m[half];
    }
    w.meet();
#pragma unroll
    for (int i = 0; i < U::TEAM; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) m[half] = fmaxf(m[half], tops[16 * i + 8 * half]);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    keep[half] = ark_attention_raise<U::SCORES>(s, sums.top[half], half, m[half], factor);
  }
  if (__any_sync(0xffffffffu, keep[0] != 1.0f || keep[1] != 1.0f)) {
    ark_attention_scale(sums, keep);
  }
  if constexpr (U::TEAM == 1) {
    ark_attention_round<T, U::KEYS>(s, p);
  } else {
    // The exponentials as operands of the product with the values: four words of a lane for every
    // 16 keys.
    const ArkAttentionPlace<U> w(strip);
    ark_u32 own[U::SCORES / 4];
    ark_attention_round<T, U::SCORES>(s, own);
    uint4* all = reinterpret_cast<uint4*>(shared + w.team()) + 2 * U::SCORES * w.part + w.lane;
#pragma unroll
    for (int k = 0; k < U::SCORES / 16; ++k) {
      all[32 * k] = make_uint4(own[4 * k], own[4 * k + 1], own[4 * k + 2], own[4 * k + 3]);
    }
    w.meet();
  }
}

// Moves partial results between warps: ark_attention_give stores a warp's sums to shared memory,
// and another warp adds them to its own sums by ark_attention_take.
template <class U>
ARK_DEVICE void ark_attention_give(char* to, const ArkAttentionSums<U>& sums) {
  float4* at = reinterpret_cast<float4*>(to) + ark_lane();
#pragma unroll
  for (int i = 0; i < 2 * U::OWN; ++i) {
    const float* v = sums.values + 4 * i;
    at[32 * i] = make_float4(v[0], v[1], v[2], v[3]);
  }
  at[64 * U::OWN] = make_float4(sums.top[0], sums.top[1], sums.powers[0], sums.powers[2]);
}
template <class U>
ARK_DEVICE void ark_attention_take(const char* from, ArkAttentionSums<U>& sums) {
  const float4* at = reinterpret_cast<const float4*>(from) + ark_lane();
  const float4 other = at[64 * U::OWN];
  const float top[2] = {other.x, other.y}, powers[2] = {other.z, other.w};
  float keep[2], share[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float m = fmaxf(sums.top[half], top[half]);
    keep[half] = ark_attention_power(sums.top[half] - m);
    share[half] = ark_attention_power(top[half] - m);
    sums.top[half] = m;
  }
  ark_attention_scale(sums, keep);
#pragma unroll
  for (int i = 0; i < 4; ++i) sums.powers[i] += powers[i / 2] * share[i / 2];
#pragma unroll
  for (int i = 0; i < 2 * U::OWN; ++i) {
    const float4 v = at[32 * i];
    const float all[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) sums.values[4 * i + j] += all[j] * share[j / 2];
  }
}

// Stores a warp's results to memory through shared memory, so that they are written as whole
// 16-byte pieces. out: the destination of the slab's first row. rows: how many of the slab's 16
// rows exist.
template <class U, int D>
ARK_DEVICE void ark_attention_out(char* shared, const float (&v)[8 * U::OWN], int lane, int part,
                                  int rows, typename U::type* out, ark_i64 pitch) {
  typename U::type* type = nullptr;
  __syncwarp();  // another warp's sums that were stored there have been read
#pragma unroll
  for (int i = 0; i < 4 * U::OWN; ++i) {
    const int row = lane / 4 + i % 2 * 8;
    char* to = shared + ark_attention_piece<U::OUT_PITCH>(row, i / 2) + lane % 4 * 4;
    *reinterpret_cast<ark_u32*>(to) = ark_pack_pair(type, v[2 * i], v[2 * i + 1]);
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < U::OWN; ++i) {
    const int e = 32 * i + lane, row = e / (2 * U::OWN), piece = e % (2 * U::OWN);
    const int column = 16 * U::OWN * part + 8 * piece;
    const auto all =
        *reinterpret_cast<const uint4*>(shared + ark_attention_piece<U::OUT_PITCH>(row, piece));
    const ark_u32 words[4] = {all.x, all.y, all.z, all.w};
    if (row < rows && column < D) ark_store_words(out + row * pitch + column, words);
  }
}
