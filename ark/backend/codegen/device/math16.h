// Elementwise functions whose results are rounded to 16 bits: bf16 with 8 significant bits, or fp16
// with 11. Their errors before the rounding are at most 2^-16 of the result, so that a result
// differs from the nearest number by at most 1/2 + 1/32 units in the last place. At infinities, at
// zeros and outside of their domains they return the same values as the functions of math.h. Their
// polynomials minimise the maximum relative error.

#if !defined(ARK_HAS_LOG2_FLUSHED)
ARK_DEVICE float ark_log2_flushed(float v) { return 1.44269504f * ark_log(v); }
#endif
#if !defined(ARK_HAS_SQRT_FLUSHED)
ARK_DEVICE float ark_sqrt_flushed(float v) { return ark_sqrt(v); }
#endif

ARK_DEVICE float ark_size16(float v) { return ark_bits_float(ark_float_bits(v) & 0x7fffffffu); }
// The magnitude `size` with the sign of v.
ARK_DEVICE float ark_signed16(float size, float v) {
  return ark_bits_float(ark_float_bits(size) | (ark_float_bits(v) & 0x80000000u));
}

// tanh(v) = 1 - 2 / (1 + e^(2 |v|)) with the sign of v; near 0 it is v - v^3 / 3.
ARK_DEVICE float ark_tanh16(float v) {
  const float a = ark_size16(v), power = ark_power_of_two(2.88539008f * a);
  const float far = ark_fma(-2.0f, ark_reciprocal_flushed(power + 1.0f), 1.0f);
  const float near = ark_fma(-0.333333333f * a, a * a, a);
  return ark_signed16(a < 0.0625f ? near : far, v);
}
// sinh(v), computed from h = e^|v| / 2, which is finite whenever sinh(v) is.
ARK_DEVICE float ark_sinh16(float v) {
  const float a = ark_size16(v), h = ark_power_of_two(ark_fma(1.44269504f, a, -1.0f));
  const float far = ark_fma(-0.25f, ark_reciprocal_flushed(h), h);
  const float near = ark_fma(0.166666667f * a, a * a, a);
  return ark_signed16(a < 0.125f ? near : far, v);
}
ARK_DEVICE float ark_cosh16(float v) {
  const float h = ark_power_of_two(ark_fma(1.44269504f, ark_size16(v), -1.0f));
  return ark_fma(0.25f, ark_reciprocal_flushed(h), h);
}

// Selects how a function treats rare arguments for which it needs a slower formula (its long form).
// With ArkRareNow, the function branches to the long form. With ArkRareLater it has no branch, so
// that the instructions of several elements can overlap. It only sets `found` if an argument needs
// the long form, and the caller then computes all elements again with ArkRareNow.
//
// Generated expressions pass the name `ark_rare`, which by default is the enumerator of ArkRareNow.
// A caller selects ArkRareLater by declaring a local variable `ark_rare` of that type.
enum ArkRareNow { ark_rare };
struct ArkRareLater {
  bool found;
};

// An angle that is reduced for sine and cosine. `rest` is the angle minus the nearest multiple of a
// quarter turn (pi/2). The lowest bits of `quarters` are the number of quarter turns. It is rounded
// to an integer by adding 1.5 x 2^23.
struct ArkAngle16 {
  float rest;
  ark_u32 quarters;
};
constexpr float ARK_FAR_ANGLE16 = 1e5f;
ARK_DEVICE ArkAngle16 ark_angle16(float v) {
  const float biased = ark_fma(v, 0.636619772f, 12582912.0f);
  const float turns = ark_plus(biased, -12582912.0f);
  const float rest = ark_fma(turns, -7.54978942e-8f, ark_fma(turns, -1.57079625f, v));
  return {rest, ark_float_bits(biased)};
}
ARK_DEVICE float ark_sine_near16(float r, float s) {
  return ark_fma(r * s, ark_fma(0.00816311222f, s, -0.166633844f), r);
}
ARK_DEVICE float ark_cosine_near16(float s) {
  return ark_fma(s, ark_fma(ark_fma(-0.00136484718f, s, 0.0416610613f), s, -0.5f), 1.0f);
}
ARK_COLD float ark_sin_far16(float v) { return ark_sin(v); }
ARK_COLD float ark_cos_far16(float v) { return ark_cos(v); }
ARK_COLD float ark_tan_far16(float v) { return ark_tan(v); }
ARK_DEVICE float ark_sine16(float v, ark_u32 turned) {
  const ArkAngle16 angle = ark_angle16(v);
  const float r = angle.rest, s = r * r;
  const ark_u32 quarters = angle.quarters + turned;
  const float made = (quarters & 1u) != 0u ? ark_cosine_near16(s) : ark_sine_near16(r, s);
  return ark_bits_float(ark_float_bits(made) ^ ((quarters & 2u) << 30));
}
ARK_DEVICE float ark_tangent16(float v) {
  const ArkAngle16 angle = ark_angle16(v);
  const float r = angle.rest, s = r * r;
  const float sine = ark_sine_near16(r, s), cosine = ark_cosine_near16(s);
  const bool odd = (angle.quarters & 1u) != 0u;
  return (odd ? -cosine : sine) * ark_reciprocal_flushed(odd ? sine : cosine);
}
ARK_DEVICE bool ark_is_far16(float v) { return ark_size16(v) > ARK_FAR_ANGLE16; }
ARK_DEVICE float ark_sin16(float v, ArkRareNow) {
  return ark_is_far16(v) ? ark_sin_far16(v) : ark_sine16(v, 0u);
}
ARK_DEVICE float ark_cos16(float v, ArkRareNow) {
  return ark_is_far16(v) ? ark_cos_far16(v) : ark_sine16(v, 1u);
}
ARK_DEVICE float ark_tan16(float v, ArkRareNow) {
  return ark_is_far16(v) ? ark_tan_far16(v) : ark_tangent16(v);
}
ARK_DEVICE float ark_sin16(float v, ArkRareLater& rare) {
  rare.found |= ark_is_far16(v);
  return ark_sine16(v, 0u);
}
ARK_DEVICE float ark_cos16(float v, ArkRareLater& rare) {
  rare.found |= ark_is_far16(v);
  return ark_sine16(v, 1u);
}
ARK_DEVICE float ark_tan16(float v, ArkRareLater& rare) {
  rare.found |= ark_is_far16(v);
  return ark_tangent16(v);
}

// The inverse tangent of v, from the smaller of |v| and 1 / |v|.
ARK_DEVICE float ark_atan16(float v) {
  const float a = ark_size16(v), over = ark_reciprocal_flushed(a);
  const bool far = a > 1.0f;
  const float x = far ? over : a, s = x * x;
  float p = -0.0139550902f;
  p = ark_fma(p, s, 0.0587702282f);
  p = ark_fma(p, s, -0.122514993f);
  p = ark_fma(p, s, 0.196183085f);
  p = ark_fma(p, s, -0.333088994f);
  const float near = ark_fma(x * s, p, x);
  return ark_signed16(far ? 1.57079633f - near : near, v);
}

// The inverse sine of s, for s up to 1/2, with z = s^2 (as in math.h).
ARK_DEVICE float ark_asin_near16(float s, float z) {
  const float p = ark_fma(ark_fma(0.0641073063f, z, 0.071899794f), z, 0.166801259f);
  return ark_fma(s * z, p, s);
}
ARK_DEVICE float ark_asin16(float v) {
  const float a = ark_size16(v);
  const bool far = a > 0.5f;
  const float z = far ? ark_fma(-0.5f, a, 0.5f) : a * a;
  const float made = ark_asin_near16(far ? ark_sqrt_flushed(z) : a, z);
  return ark_signed16(far ? ark_fma(-2.0f, made, 1.57079633f) : made, v);
}
// The inverse cosine: sqrt(1 - |v|) times a polynomial (the form of Abramowitz and Stegun 4.4.45).
ARK_DEVICE float ark_acos16(float v) {
  const float a = ark_size16(v);
  float p = -0.00430705911f;
  p = ark_fma(p, a, 0.0192733631f);
  p = ark_fma(p, a, -0.0448921286f);
  p = ark_fma(p, a, 0.0878526047f);
  p = ark_fma(p, a, -0.214509428f);
  p = ark_fma(p, a, 1.57079518f);
  const float made = ark_sqrt_flushed(1.0f - a) * p;
  return v < 0.0f ? 3.14159265f - made : made;
}

ARK_DEVICE float ark_log1p16(float v) {
  const float p = ark_fma(ark_fma(-0.250693887f, v, 0.33398211f), v, -0.499999583f);
  const float near = ark_fma(v * v, p, v), far = 0.693147181f * ark_log2_flushed(1.0f + v);
  return ark_size16(v) < 0.0625f ? near : far;
}
// softplus(v) = ln(1 + e^v). e^-|v| may be subnormal and must not be flushed to 0, because for very
// negative v it is the result.
ARK_DEVICE float ark_softplus16(float v) {
  return (v > 0.0f ? v : 0.0f) + ark_log1p16(ark_exp(-ark_size16(v)));
}
// asinh(v) = ln(|v| + sqrt(v^2 + 1)) with the sign of v. The square is that of v / 2, so that it
// does not overflow.
ARK_DEVICE float ark_asinh16(float v) {
  const float a = ark_size16(v), s = a * a;
  const float root = a < 1e9f ? ark_sqrt_flushed(s + 1.0f) : a;
  const float log = ark_log2_flushed(ark_fma(0.5f, a, 0.5f * root));
  const float far = ark_fma(0.693147181f, log, 0.693147181f);
  const float near = ark_fma(a * s, ark_fma(0.0712947398f, s, -0.166596219f), a);
  return ark_signed16(a < 0.25f ? near : far, v);
}
