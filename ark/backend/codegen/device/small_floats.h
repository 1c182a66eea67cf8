// 8-bit floats of the Open Compute Project, in software. Results are the same on every backend.

struct ark_e4m3 {
  unsigned char bits;
};
struct ark_e5m2 {
  unsigned char bits;
};

// Converts v to an 8-bit float with MANTISSA bits of mantissa and an exponent of this BIAS. LARGEST
// is the encoding of the largest finite value; greater values become OVER (NaN or infinity).
template <int MANTISSA, int BIAS, ark_u32 LARGEST, ark_u32 OVER>
ARK_DEVICE unsigned char ark_small_bits(float v) {
  const ark_u32 sign = (ark_float_bits(v) >> 24) & 0x80u;
  const ark_u32 bits = ark_float_bits(v) & 0x7fffffffu;
  if (bits > 0x7f800000u) return static_cast<unsigned char>(sign | 0x7fu);
  constexpr int drop = 23 - MANTISSA;
  const ark_u32 even = (bits + ((1u << (drop - 1)) - 1u) + ((bits >> drop) & 1u)) >> drop;
  const ark_u32 normal = even - (static_cast<ark_u32>(127 - BIAS) << MANTISSA);
  // For values below the least normal one, adding 2^23 times the least subnormal value rounds to a
  // multiple of the least subnormal value.
  const ark_u32 magic = static_cast<ark_u32>(127 + 1 - BIAS - MANTISSA + 23) << 23;
  const ark_u32 small = ark_float_bits(ark_bits_float(bits) + ark_bits_float(magic)) - magic;
  const ark_u32 code = bits < (static_cast<ark_u32>(128 - BIAS) << 23) ? small : normal;
  return static_cast<unsigned char>(sign | (code > LARGEST ? OVER : code));
}
template <int MANTISSA, int BIAS>
ARK_DEVICE float ark_small_float(ark_u32 bits) {
  const ark_u32 magnitude = (bits & 0x7fu) << (23 - MANTISSA);
  const float value =
      ark_bits_float(magnitude) * ark_bits_float(static_cast<ark_u32>(254 - BIAS) << 23);
  return (bits & 0x80u) != 0u ? -value : value;
}
ARK_DEVICE float ark_float(ark_e4m3 v) {
  if ((v.bits & 0x7fu) == 0x7fu) return ark_inf() - ark_inf();
  return ark_small_float<3, 7>(v.bits);
}
ARK_DEVICE float ark_float(ark_e5m2 v) {
  if ((v.bits & 0x7fu) > 0x7cu) return ark_inf() - ark_inf();
  if ((v.bits & 0x7fu) == 0x7cu) return v.bits == 0x7cu ? ark_inf() : -ark_inf();
  return ark_small_float<2, 15>(v.bits);
}
ARK_DEVICE ark_e4m3 ark_to_e4m3(float v) { return {ark_small_bits<3, 7, 0x7eu, 0x7fu>(v)}; }
ARK_DEVICE ark_e5m2 ark_to_e5m2(float v) { return {ark_small_bits<2, 15, 0x7bu, 0x7cu>(v)}; }
ARK_DEVICE float ark_get(const ark_e4m3* p, ark_i64 i) { return ark_float(p[i]); }
ARK_DEVICE float ark_get(const ark_e5m2* p, ark_i64 i) { return ark_float(p[i]); }
ARK_DEVICE void ark_put(ark_e4m3* p, ark_i64 i, float v) { p[i] = ark_to_e4m3(v); }
ARK_DEVICE void ark_put(ark_e5m2* p, ark_i64 i, float v) { p[i] = ark_to_e5m2(v); }
ARK_DEVICE float ark_plain(ark_e4m3 v) { return ark_float(v); }
ARK_DEVICE float ark_plain(ark_e5m2 v) { return ark_float(v); }
