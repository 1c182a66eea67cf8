// The input of linear layers of several rows (linear_several.h). A lane loads its elements of a
// chunk along k and converts them to operands of the matrix units.

constexpr int ARK_CHUNK = 128, ARK_CHUNK_STEPS = 4;  // elements along k, and products of 32 of them

// The index in a row of K elements of element `place` of a chunk. Past the row's end, the index of
// an existing element.
template <int K>
ARK_DEVICE int ark_chunk_at(int chunk, int place) {
  const int begin = chunk * ARK_CHUNK;
  if constexpr (K % ARK_CHUNK == 0) return (begin < K ? begin : 0) + place;
  return begin + place < K ? begin + place : 0;
}

// Packs the upper 16 bits of two floats into a word.
ARK_DEVICE ark_u32 ark_upper_pair(float low, float high) {
  return __builtin_amdgcn_perm(ark_float_bits(high), ark_float_bits(low), 0x07060302u);
}

// Splits a lane's floats of the input into parts of 8 bits, as operands of the products. Of each
// eight floats a lane has four; the lane whose number differs by eight has the other four.
// INFINITE: true if some may be infinite or NaN; these have one part only.
template <class W, bool INFINITE, int PARTS, int EACH>
ARK_DEVICE void ark_several_parts(const float (&v)[EACH], ark_u32x4 (&to)[PARTS]) {
  float rest[EACH];
#pragma unroll
  for (int e = 0; e < EACH; ++e) rest[e] = v[e];
#pragma unroll
  for (int p = 0; p < PARTS; ++p) {
#pragma unroll
    for (int e = 0; e < 8; e += 2) {
      const int low = W::order(e), high = W::order(e + 1);
      const ark_u32 pair = ark_upper_pair(rest[low % EACH], rest[high % EACH]);
      to[p][e / 2] = low < EACH ? pair : ark_row_move<0x128>(pair);  // row_ror 8
    }
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const bool none = INFINITE && (ark_float_bits(rest[e]) & 0x7f800000u) == 0x7f800000u;
      rest[e] = none ? 0.0f : rest[e] - ark_bits_float(ark_float_bits(rest[e]) & 0xffff0000u);
    }
  }
}
template <class W, int PARTS, int EACH>
ARK_DEVICE void ark_several_parts(const float (&v)[ARK_CHUNK_STEPS][EACH],
                                  ark_u32x4 (&to)[ARK_CHUNK_STEPS][PARTS]) {
  float most = 0.0f;
#pragma unroll
  for (int s = 0; s < ARK_CHUNK_STEPS; ++s) {
    ark_several_parts<W, false>(v[s], to[s]);
#pragma unroll
    for (int e = 0; e < EACH; ++e) most = __builtin_fmaxf(most, __builtin_fabsf(v[s][e]));
  }
  if (PARTS == 1 || ark_ballot(most == ark_inf()) == 0u) return;
#pragma unroll
  for (int s = 0; s < ARK_CHUNK_STEPS; ++s) ark_several_parts<W, true>(v[s], to[s]);
}

// If two lanes share an operand of an input row, each loads half of its eight elements. Returns the
// first element of this lane's half, 0 or 4.
template <int EACH>
ARK_DEVICE int ark_several_half(int lane) {
  return EACH == 4 ? lane / 8 % 2 * 4 : 0;
}

// A lane's elements of a chunk of input row m. One method issues the loads, another returns the
// elements. ALIGNED: true if rows begin at multiples of 16 bytes and their elements are contiguous.
template <class X, int EACH, bool ALIGNED>
struct ArkSeveralInput {
  static constexpr bool BF16 = false;
  float v[ARK_CHUNK_STEPS][EACH];

  template <int K, class W>
  ARK_METHOD void ask(ArkCtx& c, const X& x, int m, int chunk, const W& weights) {
#pragma unroll
    for (int s = 0; s < ARK_CHUNK_STEPS; ++s) {
      const int from = ark_chunk_at<K>(chunk, weights.place(s));
#pragma unroll
      for (int e = 0; e < EACH; ++e) {
        v[s][e] = ark_load(c, x, 0, 0, m, from + ark_several_half<EACH>(weights.lane) + e);
      }
    }
  }
  ARK_METHOD void take(int s, float (&to)[EACH]) const {
#pragma unroll
    for (int e = 0; e < EACH; ++e) to[e] = v[s][e];
  }
};
template <int EACH, ark_i64 S0, ark_i64 S1, ark_i64 S2, ark_i64 S3, bool SYSTEM>
struct ArkSeveralInput<ArkOperand<const float, S0, S1, S2, S3, SYSTEM>, EACH, true> {
  static constexpr bool BF16 = false;
  ark_f32x4 v[ARK_CHUNK_STEPS][EACH / 4];

  template <int K, class W>
  ARK_METHOD void ask(ArkCtx&, const ArkOperand<const float, S0, S1, S2, S3, SYSTEM>& x, int m,
                      int chunk, const W& weights) {
    const auto* base = (const ark_global<char>*)ark_address(x, 0, 0, 0, 0);
    const int row = m * static_cast<int>(S2) + ark_several_half<EACH>(weights.lane);
#pragma unroll
    for (int s = 0; s < ARK_CHUNK_STEPS; ++s) {
      const int at = row + ark_chunk_at<K>(chunk, weights.place(s));
      const auto* from = (const ark_global<ark_f32x4>*)(base + static_cast<ark_u32>(at) * 4u);
#pragma unroll
      for (int i = 0; i < EACH / 4; ++i) v[s][i] = from[i];
    }
  }
  ARK_METHOD void take(int s, float (&to)[EACH]) const {
#pragma unroll
    for (int e = 0; e < EACH; ++e) to[e] = v[s][e / 4][e % 4];
  }
};
template <int EACH, ark_i64 S0, ark_i64 S1, ark_i64 S2, ark_i64 S3, bool SYSTEM>
struct ArkSeveralInput<ArkOperand<const ark_bf16, S0, S1, S2, S3, SYSTEM>, EACH, true> {
  static constexpr bool BF16 = true;
  typedef ark_u32 Words __attribute__((ext_vector_type(EACH / 2)));
  Words v[ARK_CHUNK_STEPS];

  template <int K, class W>
  ARK_METHOD void ask(ArkCtx&, const ArkOperand<const ark_bf16, S0, S1, S2, S3, SYSTEM>& x, int m,
                      int chunk, const W& weights) {
    const auto* base = (const ark_global<char>*)ark_address(x, 0, 0, 0, 0);
    const int row = m * static_cast<int>(S2) + ark_several_half<EACH>(weights.lane);
#pragma unroll
    for (int s = 0; s < ARK_CHUNK_STEPS; ++s) {
      const int at = row + ark_chunk_at<K>(chunk, weights.place(s));
      v[s] = *(const ark_global<Words>*)(base + static_cast<ark_u32>(at) * 2u);
    }
  }
  ARK_METHOD void take(int s, float (&to)[EACH]) const {
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const ark_u32 pair = v[s][e / 2];
      to[e] = ark_bits_float(e % 2 == 0 ? pair << 16 : pair & 0xffff0000u);
    }
  }
};

// Loads the norm's weights for the same elements of a row that ArkSeveralInput loads.
template <class P, int EACH, bool NORM = P::norm>
struct ArkSeveralFactors {
  template <int K, class W>
  ARK_METHOD void ask(const P&, int, const W&) {}
  ARK_DEVICE float at(int, int) { return 1.0f; }
};
template <class P, int EACH>
struct ArkSeveralFactors<P, EACH, true> {
  float v[ARK_CHUNK_STEPS][EACH];

  template <int K, class W>
  ARK_METHOD void ask(const P& prologue, int chunk, const W& weights) {
#pragma unroll
    for (int s = 0; s < ARK_CHUNK_STEPS; ++s) {
      const int place = weights.place(s) + ark_several_half<EACH>(weights.lane);
      const int from = ark_chunk_at<K>(chunk, place);
#pragma unroll
      for (int e = 0; e < EACH; ++e) v[s][e] = ark_get(prologue.weight.p, from + e);
    }
  }
  ARK_METHOD float at(int s, int e) const { return v[s][e]; }
};
