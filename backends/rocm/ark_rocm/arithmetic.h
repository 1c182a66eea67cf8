// Conversions of numbers and mathematical functions of the device ABI on AMD GPUs.

ARK_DEVICE float ark_float(ark_bf16 v) {
  return ark_bits_float(static_cast<ark_u32>(v.bits) << 16);
}
ARK_DEVICE float ark_float(ark_f16 v) {
  return static_cast<float>(__builtin_bit_cast(_Float16, v.bits));
}
ARK_DEVICE ark_bf16 ark_bfloat(float v) {
  return ark_bf16{__builtin_bit_cast(ark_u16, static_cast<__bf16>(v))};
}
ARK_DEVICE ark_f16 ark_half(float v) {
  return ark_f16{__builtin_bit_cast(ark_u16, static_cast<_Float16>(v))};
}

ARK_DEVICE float ark_inf() { return __builtin_huge_valf(); }
// e^v as 2^p, where p = v log2(e) is corrected to first order for its rounding error. The error is
// at most 45 units in the last place.
ARK_DEVICE float ark_exp(float v) {
  constexpr float log2_e = 1.44269502f, log2_e_rest = 1.92596303e-8f;
  const float p = v * log2_e, power = __builtin_elementwise_exp2(p);
  const float rest = __builtin_fmaf(v, log2_e_rest, __builtin_fmaf(v, log2_e, -p));
  const bool finite = power > 0.0f && power < __builtin_huge_valf();
  return finite ? __builtin_fmaf(power, 0.693147181f * rest, power) : power;
}
ARK_DEVICE float ark_log(float v) { return __builtin_elementwise_log(v); }
ARK_DEVICE float ark_fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
ARK_DEVICE float ark_sqrt(float v) { return __builtin_elementwise_sqrt(v); }
// The inverse square root, accurate to one unit in the last place. The hardware's instruction
// treats subnormal inputs as zero, so small inputs are scaled.
ARK_DEVICE float ark_rsqrt(float v) {
  const bool small = v < 0x1p-100f;
  const float root = __builtin_amdgcn_rsqf(small ? v * 0x1p100f : v);
  return small ? root * 0x1p50f : root;
}
ARK_DEVICE float ark_tanh(float v) {
  const float a = __builtin_fabsf(v);
  if (a < 0.35f) {
    // A Taylor series is used near 0, where the closed form below loses digits.
    const float s = v * v;
    float t = -1382.0f / 155925.0f;
    t = t * s + 62.0f / 2835.0f;
    t = t * s - 17.0f / 315.0f;
    t = t * s + 2.0f / 15.0f;
    t = t * s - 1.0f / 3.0f;
    return v + v * s * t;
  }
  const float e = ark_exp(-2.0f * a);
  return __builtin_copysignf((1.0f - e) / (1.0f + e), v);
}

// Reduces an angle of at least 2^31 to a quadrant and a remainder (Payne and Hanek, "Radian
// reduction for trigonometric functions", SIGNUM 1983). The angle's 24-bit significand is
// multiplied by 96 bits of 2/pi. Higher bits of 2/pi would only add whole turns, and lower bits are
// too small to matter.
struct ArkFarAngle {  // returned by value: a reference argument would need scratch memory
  float rest;
  int quarter;
};
ARK_COLD ArkFarAngle ark_far_angle(float v) {
  const ark_u32 digits[] = {0xa2f9836eu, 0x4e441529u, 0xfc2757d1u, 0xf534ddc0u,
                            0xdb629599u, 0x3c439041u, 0xfe5163abu};
  const ark_u32 bits = ark_float_bits(v) & 0x7fffffffu;
  const ark_u64 whole = (bits & 0x7fffffu) | 0x800000u;
  const int from = static_cast<int>(bits >> 23) - 152;  // v is `whole` times 2^(from + 2)
  ark_u64 words[3];
  for (int i = 0; i < 3; ++i) {
    const int at = from / 32 + i, shift = from % 32;
    const ark_u64 two = static_cast<ark_u64>(digits[at]) << 32 | digits[at + 1];
    words[i] = two << shift >> 32;
  }
  const ark_u64 low = whole * words[2], middle = whole * words[1] + (low >> 32);
  const ark_u64 high = ((whole * words[0] + (middle >> 32)) << 32) | (middle & 0xffffffffu);
  // `high` has two bits of the quadrant and 62 bits of the remainder. Adding half a quadrant rounds
  // to the nearest quadrant.
  constexpr ark_u64 HALF = static_cast<ark_u64>(1) << 61;
  const ark_u64 nearest = high + HALF;
  const int quarter = static_cast<int>(nearest >> 62);
  const ark_i64 beyond =
      static_cast<ark_i64>(nearest & (2 * HALF - 1)) - static_cast<ark_i64>(HALF);
  const double rest = static_cast<double>(beyond) * 3.40612158008655459166e-19;  // pi/2 2^-62
  const bool below = ark_float_bits(v) >> 31 != 0u;
  return {static_cast<float>(below ? -rest : rest), below ? -quarter : quarter};
}
// sin(v + quarter * pi/2). The angle is reduced in double precision, because angles (positions
// times frequencies) reach 1e5. The sine of the reduced angle, in [-pi/4, pi/4], is a Taylor
// series.
ARK_DEVICE float ark_sine(float v, int quarter) {
  float r;
  if (__builtin_fabsf(v) < 0x1p31f) {
    const double turns = __builtin_rint(static_cast<double>(v) * 0.63661977236758134308);
    double rest = __builtin_fma(turns, -1.57079632679489655800, static_cast<double>(v));
    rest = __builtin_fma(turns, -6.12323399573676603587e-17, rest);
    r = static_cast<float>(rest);
    quarter += static_cast<int>(turns);
  } else if (__builtin_fabsf(v) < ark_inf()) {
    const ArkFarAngle far = ark_far_angle(v);
    r = far.rest;
    quarter += far.quarter;
  } else {
    r = v - v;
  }
  const float s = r * r;
  float sine = -1.0f / 39916800.0f;
  sine = sine * s + 1.0f / 362880.0f;
  sine = sine * s - 1.0f / 5040.0f;
  sine = sine * s + 1.0f / 120.0f;
  sine = sine * s - 1.0f / 6.0f;
  sine = r + r * s * sine;
  float cosine = -1.0f / 3628800.0f;
  cosine = cosine * s + 1.0f / 40320.0f;
  cosine = cosine * s - 1.0f / 720.0f;
  cosine = cosine * s + 1.0f / 24.0f;
  cosine = cosine * s - 0.5f;
  cosine = 1.0f + s * cosine;
  const float value = (quarter & 1) != 0 ? cosine : sine;
  return (quarter & 2) != 0 ? -value : value;
}
ARK_DEVICE float ark_floor(float v) { return __builtin_floorf(v); }
ARK_DEVICE float ark_round(float v) { return __builtin_rintf(v); }
ARK_DEVICE float ark_sin(float v) { return ark_sine(v, 0); }
ARK_DEVICE float ark_cos(float v) { return ark_sine(v, 1); }
