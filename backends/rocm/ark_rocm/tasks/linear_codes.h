// Quantised weights for linear layers of several input rows (linear_several.h). Codes are converted
// to bf16, which represents each code exactly. The scales of the codes multiply the sums.

// The hardware's conversion of a code may give a number that is too small by a constant factor
// (codes.h). This is the factor.
template <class C>
constexpr float ARK_CODE_UNIT = 1.0f;
// How the eight codes that a lane converts at once form pairs. False: neighbours form pairs. True:
// they form the pairs given on the right.
template <class C>
constexpr bool ARK_PAIRS_APART = false;  // 0 and 2, 4 and 6, 1 and 3, 5 and 7: bytes of fp4

// Converts eight codes, beginning at `words`, to four pairs of bf16.
template <class C>
ARK_DEVICE ark_u32x4 ark_code_pairs(const C* type, const ark_u32* words) {
  constexpr int EACH = ARK_CODES_OF_WORD<C>;
  ark_u32x4 pairs;
#pragma unroll
  for (int e = 0; e < 8; e += 2) {
    const float low = ark_code(type, words[e / EACH], e % EACH);
    pairs[e / 2] = ark_upper_pair(low, ark_code(type, words[e / EACH], e % EACH + 1));
  }
  return pairs;
}

#if defined(__gfx950__)
typedef __bf16 ark_bf16x2 __attribute__((ext_vector_type(2)));

template <>
inline constexpr bool ARK_PAIRS_APART<ark_fp4> = true;
ARK_DEVICE ark_u32x4 ark_code_pairs(const ark_fp4*, const ark_u32* words) {
  const auto pair = [](ark_bf16x2 v) { return __builtin_bit_cast(ark_u32, v); };
  return {pair(__builtin_amdgcn_cvt_scalef32_pk_bf16_fp4(words[0], 1.0f, 0)),
          pair(__builtin_amdgcn_cvt_scalef32_pk_bf16_fp4(words[0], 1.0f, 1)),
          pair(__builtin_amdgcn_cvt_scalef32_pk_bf16_fp4(words[0], 1.0f, 2)),
          pair(__builtin_amdgcn_cvt_scalef32_pk_bf16_fp4(words[0], 1.0f, 3))};
}
ARK_DEVICE ark_u32x4 ark_code_pairs(const ark_e4m3*, const ark_u32* words) {
  const auto pair = [](ark_bf16x2 v) { return __builtin_bit_cast(ark_u32, v); };
  return {pair(__builtin_amdgcn_cvt_scalef32_pk_bf16_fp8(words[0], 1.0f, false)),
          pair(__builtin_amdgcn_cvt_scalef32_pk_bf16_fp8(words[0], 1.0f, true)),
          pair(__builtin_amdgcn_cvt_scalef32_pk_bf16_fp8(words[1], 1.0f, false)),
          pair(__builtin_amdgcn_cvt_scalef32_pk_bf16_fp8(words[1], 1.0f, true))};
}
ARK_DEVICE ark_u32x4 ark_code_pairs(const ark_e5m2*, const ark_u32* words) {
  const auto pair = [](ark_bf16x2 v) { return __builtin_bit_cast(ark_u32, v); };
  return {pair(__builtin_amdgcn_cvt_scalef32_pk_bf16_bf8(words[0], 1.0f, false)),
          pair(__builtin_amdgcn_cvt_scalef32_pk_bf16_bf8(words[0], 1.0f, true)),
          pair(__builtin_amdgcn_cvt_scalef32_pk_bf16_bf8(words[1], 1.0f, false)),
          pair(__builtin_amdgcn_cvt_scalef32_pk_bf16_bf8(words[1], 1.0f, true))};
}
#else
ARK_DEVICE ark_u32x4 ark_code_pairs(const ark_fp4*, const ark_u32* words) {
  ark_u32x4 pairs;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const ArkFp4Bytes bytes = ark_fp4_bytes(words[0], h);
    pairs[h] = __builtin_amdgcn_perm(bytes.high, bytes.low, 0x06020400u);
    pairs[h + 2] = __builtin_amdgcn_perm(bytes.high, bytes.low, 0x07030501u);
  }
  return pairs;
}
#if defined(__gfx942__)
template <>
inline constexpr float ARK_CODE_UNIT<ark_e4m3> = 2.0f;
template <>
inline constexpr float ARK_CODE_UNIT<ark_e5m2> = 2.0f;
ARK_DEVICE ark_u32x4 ark_code_pairs(const ark_e4m3*, const ark_u32* words) {
  const ark_u32 first = ark_without_minus_zeros(words[0]);
  const ark_u32 last = ark_without_minus_zeros(words[1]);
  const auto pair = [](auto v) { return ark_upper_pair(v[0], v[1]); };
  return {pair(__builtin_amdgcn_cvt_pk_f32_fp8(first, false)),
          pair(__builtin_amdgcn_cvt_pk_f32_fp8(first, true)),
          pair(__builtin_amdgcn_cvt_pk_f32_fp8(last, false)),
          pair(__builtin_amdgcn_cvt_pk_f32_fp8(last, true))};
}
ARK_DEVICE ark_u32x4 ark_code_pairs(const ark_e5m2*, const ark_u32* words) {
  const ark_u32 first = ark_without_minus_zeros(words[0]);
  const ark_u32 last = ark_without_minus_zeros(words[1]);
  const auto pair = [](auto v) { return ark_upper_pair(v[0], v[1]); };
  return {pair(__builtin_amdgcn_cvt_pk_f32_bf8(first, false)),
          pair(__builtin_amdgcn_cvt_pk_f32_bf8(first, true)),
          pair(__builtin_amdgcn_cvt_pk_f32_bf8(last, false)),
          pair(__builtin_amdgcn_cvt_pk_f32_bf8(last, true))};
}
#endif
#endif

// The weights of a linear layer, stored as rows of codes. For each product a lane has eight
// neighbouring codes. A product multiplies 32 codes of a row, which have one scale. ROWS, lane: see
// ArkSeveralDense.
template <class ROW, int ROWS>
struct ArkSeveralCodes;
template <class C, int K, int GROUP, class S, bool ZERO, int R>
struct ArkSeveralCodes<ArkRow<C, K, GROUP, S, ZERO>, R> {
  typedef ArkRow<C, K, GROUP, S, ZERO> Row;
  static_assert(GROUP % 32 == 0 || GROUP == K, "a product's elements share a scale");
  static constexpr bool ZEROS = ZERO;
  static constexpr int STEPS = 4, HALF = STEPS * ARK_STEP;  // HALF: elements of a half of a chunk
  static constexpr int SCALES = GROUP % HALF == 0 || GROUP == K ? 1 : STEPS;
  static constexpr int ROW_BYTES = sizeof(Row);
  static constexpr int ROWS = R, BITS = ARK_CODE_BITS<C>, MOST = R == 8 ? 4 : 8, NEXT = 2,
                       EARLY = MOST;
  typedef ark_u32 Load __attribute__((ext_vector_type(BITS / 4)));  // eight codes
  struct Piece {
    Load words[STEPS];
    S scales[SCALES];
    S zeros[ZERO ? SCALES : 1];
  };
  const ark_global<char>* bytes;
  int rows;
  int lane;

  ARK_METHOD int half() const { return ROWS == 8 ? lane / 8 % 2 : 0; }
  ARK_METHOD int place(int s, int half) const { return half * HALF + s * 32 + lane / 16 * 8; }
  ARK_METHOD int place(int s) const { return place(s, half()); }
  static constexpr int order(int e) { return ARK_PAIRS_APART<C> ? e % 4 * 2 + e / 4 : e; }
  // Loads this lane's codes and scales of a chunk. Rows and elements past the end are replaced, as
  // in ArkSeveralDense::load.
  ARK_METHOD Piece load(int top, int chunk) const {
    const int row = top + lane % ROWS < rows ? top + lane % ROWS : rows - 1;
    const ark_u32 begin = static_cast<ark_u32>(row) * static_cast<ark_u32>(sizeof(Row));
    Piece piece;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      const int k = ark_chunk_at<K, ArkSeveralCodes>(chunk, place(s));
      const auto* from = bytes + (begin + static_cast<ark_u32>(k / 8 * BITS));
      piece.words[s] = __builtin_nontemporal_load((const ark_global<Load>*)from);
    }
#pragma unroll
    for (int i = 0; i < SCALES; ++i) {
      const int at = half() * HALF + i * (HALF / SCALES);
      const int group = ark_chunk_at<K, ArkSeveralCodes>(chunk, at) / GROUP;
      const auto* from = bytes + (begin + static_cast<ark_u32>(group * sizeof(S)));
      piece.scales[i] = *(const ark_global<S>*)(from + Row::SCALES_AT);
      if constexpr (ZERO) piece.zeros[i] = *(const ark_global<S>*)(from + Row::ZEROS_AT);
    }
    return piece;
  }
  ARK_DEVICE ark_u32x4 step(const Piece& piece, int s) {
    ark_u32 words[BITS / 4];
#pragma unroll
    for (int i = 0; i < BITS / 4; ++i) words[i] = piece.words[s][i];
    return ark_code_pairs(static_cast<const C*>(nullptr), words);
  }
  ARK_DEVICE float scale(const Piece& piece, int i) {
    return ARK_CODE_UNIT<C> * ark_plain(piece.scales[i]);
  }
  ARK_DEVICE float zero(const Piece& piece, int i) {
    return ark_plain(piece.zeros[i]) / ARK_CODE_UNIT<C>;
  }
};
