// Converts codes of quantised matrices to operands of matrix units: from 32-bit words of codes to
// pairs of fp16, which represent each code exactly. A code that is placed in the mantissa of the
// fp16 number 1024 gives 1024 plus the code, or 1024 plus 16 times the code. Then 1024 is
// subtracted.

// Converts pair j of the four pairs of 4-bit codes in a word to fp16. SIGN: 8 for signed codes,
// whose highest bit is flipped and 8 is then subtracted; 0 for unsigned codes.
template <ark_u32 SIGN>
ARK_DEVICE ark_u32 ark_whole_pair(ark_u32 word, int j) {
  constexpr ark_u32 LOW = 0x64006400u | SIGN * 0x00010001u;
  constexpr ark_u32 HIGH = 0x64006400u | SIGN * 0x00100010u;
  const ark_u32 codes = j < 2 ? word : word >> 8;
  if (j % 2 == 0) return ark_pair_sum((codes & ark_kept(0x000f000fu)) ^ LOW, LOW ^ 0x80008000u);
  // The word's upper codes are in the mantissa times 16. One fused multiply-add divides by 16 and
  // subtracts 64 (1024 / 16) and the sign's weight.
  return ark_pair_fma((codes & ark_kept(0x00f000f0u)) ^ HIGH, ark_kept(0x2c002c00u),
                      SIGN ? 0xd480d480u : 0xd400d400u);
}
ARK_DEVICE ark_u32 ark_code_pair(const ark_int4*, ark_u32 word, int j) {
  return ark_whole_pair<8>(word, j);
}
ARK_DEVICE ark_u32 ark_code_pair(const ark_uint4*, ark_u32 word, int j) {
  return ark_whole_pair<0>(word, j);
}
// Converts 4-bit float codes: exponent and mantissa of a code are moved to those of an fp16, which
// gives a number that is too small by a factor of 2^14.
ARK_DEVICE ark_u32 ark_code_pair(const ark_fp4*, ark_u32 word, int j) {
  const ark_u32 codes = word >> 4 * j;
  const ark_u32 floats = (codes & 0x00070007u) << 9 | (codes & 0x00080008u) << 12;
  return ark_pair_fma(floats, 0x74007400u, 0u);
}

// Converts pair j of a word's two pairs of 8-bit codes to fp16.
ARK_DEVICE ark_u32 ark_code_pair(const signed char*, ark_u32 word, int j) {
  const ark_u32 codes = word ^ 0x80808080u;
  return ark_pair_sum(__byte_perm(codes, ark_kept(0x64646464u), j == 0 ? 0x4140u : 0x4342u),
                      0xe480e480u);
}
ARK_DEVICE ark_u32 ark_code_pair(const unsigned char*, ark_u32 word, int j) {
  return ark_pair_sum(__byte_perm(word, ark_kept(0x64646464u), j == 0 ? 0x4140u : 0x4342u),
                      0xe400e400u);
}
ARK_DEVICE ark_u32 ark_code_pair(const ark_e4m3*, ark_u32 word, int j) {
  return ark_pair_of_e4m3(j == 0 ? word : word >> 16);
}
ARK_DEVICE ark_u32 ark_code_pair(const ark_e5m2*, ark_u32 word, int j) {
  return __byte_perm(word, 0u, j == 0 ? 0x1404u : 0x3424u);
}
