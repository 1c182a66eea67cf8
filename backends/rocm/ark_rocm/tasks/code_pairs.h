// Conversions of codes to bf16, which represents each code exactly, as operands of matrix units
// (linear_codes.h, linear_matrix_codes.h).

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
