// Converts codes of quantised matrices to operands of matrix units: from 32-bit words of codes to
// pairs of 16-bit floats, which represent each code exactly. linear_codes.h has the conversions to
// fp16.

template <class C>
ARK_DEVICE ark_u32 ark_code_pair_as(const ark_f16*, const C* code, ark_u32 word, int j) {
  return ark_code_pair(code, word, j);
}

// Converts unsigned or signed 4-bit codes to bf16. Placing a code in the mantissa of the bf16
// number 128 gives 128 plus the code; then 128 is subtracted. SIGN: 0 for unsigned codes. It is 8
// for signed codes: their highest bit is flipped first, which adds 8, and 8 is subtracted at the
// end.
template <ark_u32 SIGN>
ARK_DEVICE ark_u32 ark_whole_bf16(ark_u32 word, int j) {
  constexpr ark_u32 BASE = 0x43004300u | SIGN * 0x00010001u;
  const ark_bf16* type = nullptr;
  // One fused multiply-add for both values of the word: times 1, minus (128 + SIGN).
  return ark_both_fma(type, (word >> 4 * j & 0x000f000fu) ^ BASE, 0x3f803f80u, BASE ^ 0x80008000u);
}
ARK_DEVICE ark_u32 ark_code_pair_as(const ark_bf16*, const ark_int4*, ark_u32 word, int j) {
  return ark_whole_bf16<8>(word, j);
}
ARK_DEVICE ark_u32 ark_code_pair_as(const ark_bf16*, const ark_uint4*, ark_u32 word, int j) {
  return ark_whole_bf16<0>(word, j);
}
// Converts 4-bit float codes: exponent and mantissa of a code are moved to those of a bf16. A
// multiplication then corrects the exponent's bias.
ARK_DEVICE ark_u32 ark_code_pair_as(const ark_bf16* type, const ark_fp4*, ark_u32 word, int j) {
  const ark_u32 codes = word >> 4 * j;
  const ark_u32 floats = (codes & 0x00070007u) << 6 | (codes & 0x00080008u) << 12;
  return ark_both_fma(type, floats, 0x7e807e80u, 0x80008000u);  // 2^126
}
template <int MANTISSA, ark_u32 FACTOR>
ARK_DEVICE ark_u32 ark_small_bf16(ark_u32 word, int j) {
  constexpr int SHIFT = MANTISSA + 1;
  constexpr ark_u32 SIZE = 0x7f007f00u >> SHIFT & (0x7f00u >> SHIFT) * 0x10001u;
  const ark_bf16* type = nullptr;
  const ark_u32 codes = __byte_perm(word, 0u, j == 0 ? 0x1404u : 0x3424u);
  const ark_u32 floats = (codes >> SHIFT & SIZE) | (codes & 0x80008000u);
  return ark_both_fma(type, floats, FACTOR * 0x10001u, 0x80008000u);
}
ARK_DEVICE ark_u32 ark_code_pair_as(const ark_bf16*, const ark_e4m3*, ark_u32 word, int j) {
  return ark_small_bf16<3, 0x7b80u>(word, j);  // 2^120
}
ARK_DEVICE ark_u32 ark_code_pair_as(const ark_bf16*, const ark_e5m2*, ark_u32 word, int j) {
  return ark_small_bf16<2, 0x7780u>(word, j);  // 2^112
}
// Converts unsigned or signed 8-bit codes to bf16. Placing a code in the mantissa of the fp32
// number 2^23 gives 2^23 plus the code; then 2^23 is subtracted. The result has at most 8
// significant bits, so the upper half of the fp32 is the bf16.
template <ark_u32 SIGN>
ARK_DEVICE ark_u32 ark_byte_pair_bf16(ark_u32 word, int j) {
  const ark_u32 codes = word ^ SIGN * 0x01010101u;
  const float low = ark_bits_float(__byte_perm(codes, 0x4b000000u, j == 0 ? 0x7440u : 0x7442u));
  const float high = ark_bits_float(__byte_perm(codes, 0x4b000000u, j == 0 ? 0x7441u : 0x7443u));
  const float base = 8388608.0f + SIGN;
  return __byte_perm(ark_float_bits(low - base), ark_float_bits(high - base), 0x7632u);
}
ARK_DEVICE ark_u32 ark_code_pair_as(const ark_bf16*, const signed char*, ark_u32 word, int j) {
  return ark_byte_pair_bf16<128>(word, j);
}
ARK_DEVICE ark_u32 ark_code_pair_as(const ark_bf16*, const unsigned char*, ark_u32 word, int j) {
  return ark_byte_pair_bf16<0>(word, j);
}
