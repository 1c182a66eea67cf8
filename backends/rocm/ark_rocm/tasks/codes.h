// Converts codes of 4 and 8 bits with the hardware's instructions, for linear_codes.h and
// linear_rows.h.

#if defined(__gfx942__)
// Replaces codes of -0 by 0. gfx942's 8-bit floats have no -0. Their exponent bias is also
// different (FNUZ), so the same bits mean half the value.
ARK_DEVICE ark_u32 ark_without_minus_zeros(ark_u32 codes) {
  const ark_u32 sizes = codes & 0x7f7f7f7fu;
  return (codes & (sizes + 0x7f7f7f7fu)) | sizes;
}
#endif

// The bf16 values of four fp4 codes of a word: their lower bytes and their upper bytes. The bytes
// are looked up in tables of eight entries, indexed by the three bits of a code's magnitude. The
// four codes are codes 0, 4, 1 and 5 of the word, or codes 2, 6, 3 and 7.
struct ArkFp4Bytes {
  ark_u32 low, high;
};
ARK_DEVICE ArkFp4Bytes ark_fp4_bytes(ark_u32 word, int second) {
  const ark_u32 codes = word >> (4 * second), which = codes & 0x07070707u;
  const ark_u32 low = __builtin_amdgcn_perm(0xc0804000u, 0xc0800000u, which);
  const ark_u32 size = __builtin_amdgcn_perm(0x40404040u, 0x3f3f3f00u, which);
  return {low, size | (codes << 4 & 0x80808080u)};
}

// Converts four codes of a word, from code number `first` on, to floats.
template <class C>
ARK_DEVICE void ark_four_codes(const C* type, ark_u32 word, int first, float (&to)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) to[j] = ark_code(type, word, first + j);
}
#if defined(__gfx950__)
// Like the function above, for fp4. Byte `first / 4` of a word has codes `first` and `first + 2`.
// The byte two bytes after it has codes `first + 1` and `first + 3`.
ARK_DEVICE void ark_four_codes(const ark_fp4*, ark_u32 word, int first, float (&to)[4]) {
  const ark_u32 bytes = first == 0 ? word : word >> 8;
  const auto even = __builtin_amdgcn_cvt_scalef32_pk_f32_fp4(bytes, 1.0f, 0);
  const auto odd = __builtin_amdgcn_cvt_scalef32_pk_f32_fp4(bytes, 1.0f, 2);
  to[0] = even[0];
  to[1] = odd[0];
  to[2] = even[1];
  to[3] = odd[1];
}
#else
ARK_DEVICE void ark_four_codes(const ark_fp4*, ark_u32 word, int first, float (&to)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const ArkFp4Bytes bytes = ark_fp4_bytes(word, j / 2);
    const ark_u32 byte = static_cast<ark_u32>(first / 4 + j % 2 * 2);
    const ark_u32 places = (byte + 4u) << 24 | byte << 16 | 0x0c0cu;  // 0x0c: a zero byte
    to[j] = ark_bits_float(__builtin_amdgcn_perm(bytes.high, bytes.low, places));
  }
}
#endif
#if defined(__gfx950__)
ARK_DEVICE void ark_four_codes(const ark_e4m3*, ark_u32 word, int, float (&to)[4]) {
  const auto low = __builtin_amdgcn_cvt_scalef32_pk_f32_fp8(word, 1.0f, false);
  const auto high = __builtin_amdgcn_cvt_scalef32_pk_f32_fp8(word, 1.0f, true);
  to[0] = low[0];
  to[1] = low[1];
  to[2] = high[0];
  to[3] = high[1];
}
#elif defined(__gfx942__)
ARK_DEVICE void ark_four_codes(const ark_e4m3*, ark_u32 word, int, float (&to)[4]) {
  const ark_u32 codes = ark_without_minus_zeros(word);
  const auto low = __builtin_amdgcn_cvt_pk_f32_fp8(codes, false) * 2.0f;
  const auto high = __builtin_amdgcn_cvt_pk_f32_fp8(codes, true) * 2.0f;
  to[0] = low[0];
  to[1] = low[1];
  to[2] = high[0];
  to[3] = high[1];
}
#endif
