// Elementwise functions that are the same for every vendor. They use only the mathematical
// functions of the device ABI (docs/device-abi.md).

// Sums and products that no compiler may reassociate with others. So an expression is evaluated in
// the order in which it is written, overflows and rounds as written, and has equal results on all
// ranks.
#if !defined(ARK_ORDERED_SUM)
#define ARK_ORDERED_SUM(T, a, b) ((a) + (b))
#define ARK_ORDERED_PRODUCT(T, a, b) ((a) * (b))
#endif

// Integers wrap around.
ARK_DEVICE float ark_plus(float a, float b) { return ARK_ORDERED_SUM(float, a, b); }
ARK_DEVICE double ark_plus(double a, double b) { return ARK_ORDERED_SUM(double, a, b); }
ARK_DEVICE ark_u32 ark_plus(ark_u32 a, ark_u32 b) { return a + b; }
ARK_DEVICE ark_i32 ark_plus(ark_i32 a, ark_i32 b) {
  return static_cast<ark_i32>(static_cast<ark_u32>(a) + static_cast<ark_u32>(b));
}
ARK_DEVICE ark_i64 ark_plus(ark_i64 a, ark_i64 b) {
  return static_cast<ark_i64>(static_cast<ark_u64>(a) + static_cast<ark_u64>(b));
}
ARK_DEVICE float ark_times(float a, float b) { return ARK_ORDERED_PRODUCT(float, a, b); }
ARK_DEVICE double ark_times(double a, double b) { return ARK_ORDERED_PRODUCT(double, a, b); }
ARK_DEVICE ark_u32 ark_times(ark_u32 a, ark_u32 b) { return a * b; }
ARK_DEVICE ark_i32 ark_times(ark_i32 a, ark_i32 b) {
  return static_cast<ark_i32>(static_cast<ark_u32>(a) * static_cast<ark_u32>(b));
}
ARK_DEVICE ark_i64 ark_times(ark_i64 a, ark_i64 b) {
  return static_cast<ark_i64>(static_cast<ark_u64>(a) * static_cast<ark_u64>(b));
}

// Returns v unchanged; v is the result of a minimum, a maximum or a selection. Some compilers
// wrongly merge several of these operations on integers. A backend with such a compiler overloads
// this function to keep the operations separate.
template <typename T>
ARK_DEVICE T ark_chosen(T v) {
  return v;
}

// Rounds v towards zero to a whole number.
ARK_DEVICE float ark_trunc(float v) {
  const float a = v < 0.0f ? -v : v;
  const float down = ark_floor(a);
  return v < 0.0f ? -down : down;
}

// The remainder of a / b with the sign of a (ark_fmod, as in C) and with the sign of b (ark_mod, as
// in Python), and the quotient rounded down (ark_floor_divide, as in Python).

// The remainder of `rest`, which is at least 0, divided by `size`, a normal number. Each round
// subtracts the largest possible multiple size * 2^k, which is exact.
ARK_DEVICE float ark_less_multiples(float rest, float size) {
  for (int round = 0; round < 256 && rest >= size; ++round) {
    const ark_u32 up = (ark_float_bits(rest) >> 23) - (ark_float_bits(size) >> 23);
    const float part = ark_bits_float(ark_float_bits(size) + (up << 23));
    rest -= part > rest ? 0.5f * part : part;
  }
  return rest;
}
// The remainder a / b with the sign of a, for arguments of any size. ark_fmod calls it for
// quotients that are too large for the fast path. A subnormal divisor is multiplied by 2^24 first,
// and the remainder divided by it at the end.
ARK_COLD float ark_fmod_far(float a, float b) {
  const float size = b < 0.0f ? -b : b, left = a < 0.0f ? -a : a, inf = ark_inf();
  if (!(size > 0.0f && left < inf)) return inf - inf;
  const bool tiny = size < 1.17549435e-38f;
  const float unit = tiny ? size * 16777216.0f : size;
  float rest = ark_less_multiples(left, unit);
  if (tiny) rest = ark_less_multiples(rest * 16777216.0f, unit) * 5.96046448e-8f;
  return ark_bits_float(ark_float_bits(rest) | (ark_float_bits(a) & 0x80000000u));
}
ARK_COLD float ark_floor_divide_far(float a, float b) {
  if (b == 0.0f) return a / b;
  const float rest = ark_fmod_far(a, b);
  const bool below = rest != 0.0f && (rest < 0.0f) != (b < 0.0f);
  return ark_plus(ark_round(ark_plus(a, -rest) / b), below ? -1.0f : 0.0f);
}
// The integer part and the remainder of |a| / |b|, for quotients below 2^20. The quotient is
// rounded to the nearest integer, for which the remainder is exact, and corrected by one if
// necessary.
struct ArkDivided {
  float whole, rest;
  bool near;  // false if the quotient is too large; whole and rest are then not computed
};
ARK_DEVICE ArkDivided ark_divided(float a, float b) {
  const float left = a < 0.0f ? -a : a, size = b < 0.0f ? -b : b;
  const bool near = size > 1e-30f && size < 1e30f && left < 1048576.0f * size;
  const float biased = ark_fma(left, ark_reciprocal_flushed(size), 12582912.0f);
  const float whole = ark_plus(biased, -12582912.0f), rest = ark_fma(-whole, size, left);
  const bool over = rest < 0.0f, less = left < size;
  return {less   ? 0.0f
          : over ? ark_plus(whole, -1.0f)
                 : whole,
          less   ? left
          : over ? ark_plus(rest, size)
                 : rest,
          near};
}
ARK_DEVICE float ark_fmod(float a, float b) {
  const ArkDivided divided = ark_divided(a, b);
  if (!divided.near) return ark_fmod_far(a, b);
  return ark_bits_float(ark_float_bits(divided.rest) | (ark_float_bits(a) & 0x80000000u));
}
ARK_DEVICE float ark_mod(float a, float b) {
  const float rest = ark_fmod(a, b);
  return rest != 0.0f && (rest < 0.0f) != (b < 0.0f) ? rest + b : rest;
}
ARK_DEVICE float ark_floor_divide(float a, float b) {
  const ArkDivided divided = ark_divided(a, b);
  if (!divided.near) return ark_floor_divide_far(a, b);
  const bool below = (ark_float_bits(a) ^ ark_float_bits(b)) >> 31 != 0u;
  const float up = divided.rest != 0.0f ? ark_plus(divided.whole, 1.0f) : divided.whole;
  return below ? -up : divided.whole;
}

// a to the power of b: e^(b ln |a|), negative if a is negative and b an odd integer. The logarithm
// is computed to 48 bits, in two floats, because b multiplies its error. It is e ln 2 + 2 artanh((m
// - 1) / (m + 1)), where |a| = m 2^e.
ARK_DEVICE float ark_pow(float a, float b) {
  const float size = a < 0.0f ? -a : a;
  const float inf = ark_inf();
  const bool tiny = size < 1.17549435e-38f;
  const ark_u32 bits = ark_float_bits(tiny ? size * 16777216.0f : size);
  const ark_i32 e = static_cast<ark_i32>(bits - 0x3f3504f3u) >> 23;
  const float m = ark_bits_float(bits - (static_cast<ark_u32>(e) << 23));
  const float whole_e = static_cast<float>(tiny ? e - 24 : e);
  const float t = m - 1.0f, d = ark_plus(2.0f, t), d_rest = t - ark_plus(d, -2.0f);
  const float over = ark_reciprocal(d), s = t * over, q = s * s;
  const float s_rest = over * ark_fma(-s, d_rest, ark_fma(-s, d, t));
  float series = 1.0f / 9.0f + q * (1.0f / 11.0f);
  series = 1.0f / 5.0f + q * (1.0f / 7.0f + q * series);
  series = 2.0f * s * q * (1.0f / 3.0f + q * series);
  // near and log are rounded sums. near_rest and rest are the exact rounding errors of these sums,
  // so each sum and its error have 48 bits together.
  const float near = ark_plus(2.0f * s, series), large = whole_e * 0.693145752f;
  const float near_rest = ark_plus(series, -ark_plus(near, -2.0f * s));
  const float log = ark_plus(large, near), rest = ark_plus(near, -ark_plus(log, -large));
  const float log_rest = whole_e * 1.42860677e-6f + 2.0f * s_rest + near_rest + rest;
  const float up = b * (size < inf ? log : size);
  const float up_rest = ark_fma(b, log, -up) + b * log_rest;
  float made = ark_exp(up);
  if (made > 0.0f && made < inf && size < inf) made = ark_fma(made, up_rest, made);
  if (size == 0.0f && b == b) made = b > 0.0f ? 0.0f : inf;
  if (b == 1.0f) made = size;
  if (b == 0.0f || size == 1.0f) made = 1.0f;
  const bool whole = ark_trunc(b) == b;
  const float half = 0.5f * b;
  if (a < 0.0f && !whole && size < inf) return inf - inf;
  const bool below = ark_float_bits(a) >> 31 != 0u;  // true for -0, too
  return below && whole && ark_trunc(half) != half ? -made : made;
}

// e^v - 1 and ln(1 + v). Near 0 they are series, which keep the digits that the definitions lose:
// the Taylor series, and ln(1 + v) = 2 artanh(v / (2 + v)).
ARK_DEVICE float ark_expm1(float v) {
  float near = 1.0f / 5040.0f;
  near = 1.0f / 720.0f + near * v;
  near = 1.0f / 120.0f + near * v;
  near = 1.0f / 24.0f + near * v;
  near = 1.0f / 6.0f + near * v;
  near = v + v * v * (0.5f + near * v);
  const float far = ark_exp(v) - 1.0f;
  return v > -0.35f && v < 0.35f ? near : far;
}
ARK_DEVICE float ark_log1p(float v) {
  const float z = v * ark_reciprocal(2.0f + v), s = z * z;
  float near = 1.0f / 11.0f;
  near = 1.0f / 9.0f + near * s;
  near = 1.0f / 7.0f + near * s;
  near = 0.2f + near * s;
  near = 1.0f / 3.0f + near * s;
  near = 2.0f * (z + z * s * near);
  const float far = ark_log(1.0f + v);
  return v > -0.4f && v < 0.6f ? near : far;
}

// ln(1 + e^v), without overflow.
ARK_DEVICE float ark_softplus(float v) {
  const float size = v < 0.0f ? -v : v;
  return ark_plus(v > 0.0f ? v : 0.0f, ark_log1p(ark_exp(-size)));
}

#if !defined(ARK_HAS_POWER_OF_TWO)
ARK_DEVICE float ark_power_of_two(float v) { return ark_exp(0.693147181f * v); }
#endif
// v / (1 + e^-v), with a relative error of at most 4e-7 + |v| 8e-8. It is 0 for v below -87.
ARK_DEVICE float ark_silu(float v) {
  const float power = ark_power_of_two(v * -1.44269504f);
  return ark_times(v, ark_reciprocal_flushed(1.0f + power));
}
// GELU with tanh (Hendrycks and Gimpel 2016). v / 2 (1 + tanh(u)) is computed as v / (1 + 2^(-2 u /
// ln 2)), which is accurate for small results of negative v, down to 1e-37.
ARK_DEVICE float ark_gelu(float v) {
  const float power = ark_power_of_two(v * (-2.30220820f - 0.102943240f * (v * v)));
  return v * ark_reciprocal_flushed(1.0f + power);
}
// The normal distribution's tail beyond a, for a from 0 to 16. Its logarithm is a polynomial of
// least weighted error on [0, 6].
ARK_DEVICE float ark_normal_tail(float a) {
  float p = -3.18799977e-7f;
  p = 5.18092611e-6f + p * a;
  p = -2.55013333e-7f + p * a;
  p = -0.000651419046f + p * a;
  p = 0.00782489777f + p * a;
  p = -0.0530758612f + p * a;
  p = -0.459009498f + p * a;
  p = -1.15112698f + p * a;
  p = -1.0f + p * a;
  return ark_power_of_two(p);
}
// GELU by its definition with erf, without branches. It is computed as max(v, 0) - |v| Q, so that
// there is no cancellation for v < 0. Q is the normal distribution's tail beyond |v|. The absolute
// error is at most 4e-7. For negative v, the error relative to the result is at most 2e-5 down to
// v = -4, and 4e-5 down to v = -6.
ARK_DEVICE float ark_gelu_erf(float v) {
  const float size = v < 0.0f ? -v : v, a = size < 16.0f ? size : 16.0f;
  return (v < 0.0f ? 0.0f : v) - a * ark_normal_tail(a);
}
// The derivative of ark_gelu_erf: the normal distribution function, plus v times its density.
ARK_DEVICE float ark_gelu_erf_slope(float v) {
  const float size = v < 0.0f ? -v : v, tail = ark_normal_tail(size < 16.0f ? size : 16.0f);
  const float density = 0.398942280f * ark_power_of_two(-0.721347520f * (v * v));
  return (v < 0.0f ? tail : 1.0f - tail) + v * density;
}

#if !defined(ARK_HAS_ERF)
// The error function: its Taylor series up to 1, formula 7.1.26 of Abramowitz and Stegun beyond.
ARK_DEVICE float ark_erf(float v) {
  const float a = v < 0.0f ? -v : v;
  const float s = v * v;
  float near = 1.0f / 6894720.0f;
  near = 1.0f / 685440.0f - near * s;
  near = 1.0f / 75600.0f - near * s;
  near = 1.0f / 9360.0f - near * s;
  near = 1.0f / 1320.0f - near * s;
  near = 1.0f / 216.0f - near * s;
  near = 1.0f / 42.0f - near * s;
  near = 1.0f / 10.0f - near * s;
  near = 1.0f / 3.0f - near * s;
  near = 1.12837917f * (v - near * s * v);
  const float t = 1.0f / (1.0f + 0.3275911f * a);
  float far = 1.061405429f;
  far = -1.453152027f + far * t;
  far = 1.421413741f + far * t;
  far = -0.284496736f + far * t;
  far = 0.254829592f + far * t;
  far = 1.0f - far * t * ark_exp(-s);
  return a < 1.0f ? near : v < 0.0f ? -far : v == v ? far : v;
}
#endif

// The complementary error function. From 1/2 on, where 1 - erf loses digits, it is t e^(p(t) - v^2)
// with t = 1 / (1 + |v| / 2) and a polynomial p of least maximum error. It is 0 from 11 on.
ARK_DEVICE float ark_erfc(float v) {
  const float size = v < 0.0f ? -v : v, a = size < 11.0f ? size : 11.0f;
  const float s = a * a, s_rest = ark_fma(a, a, -s), t = ark_reciprocal(1.0f + 0.5f * a);
  float p = 0.148791149f;
  p = -0.701847255f + p * t;
  p = 1.20616949f + p * t;
  p = -0.761984169f + p * t;
  p = -0.0259946827f + p * t;
  p = -0.0275120921f + p * t;
  p = 0.0443623438f + p * t;
  p = 0.384606361f + p * t;
  p = 0.998868406f + p * t;
  p = -1.26545954f + p * t;
  const float far = t * ark_exp(-s) * ark_exp(p - s_rest);
  const float near = 1.0f - ark_erf(v);
  return v != v ? v : size < 0.5f ? near : v < 0.0f ? 2.0f - far : far;
}

// The binary logarithm: the exponent plus the logarithm of the rest, which is between 1 / sqrt(2)
// and sqrt(2). Results for powers of two are exact.
ARK_DEVICE float ark_log2(float v) {
  const bool tiny = v < 1.17549435e-38f;
  const ark_u32 bits = ark_float_bits(tiny ? v * 16777216.0f : v);
  const ark_i32 e = static_cast<ark_i32>(bits - 0x3f3504f3u) >> 23;
  const float m = ark_bits_float(bits - (static_cast<ark_u32>(e) << 23));
  const float result = static_cast<float>(tiny ? e - 24 : e) + 1.44269504f * ark_log(m);
  return v > 0.0f && v < ark_inf() ? result : ark_log(v);
}

// The inverse tangent. The addition theorem reduces the argument to |v| <= tan(pi/8). There a
// polynomial of least maximum relative error is evaluated, as in the functions below.
ARK_DEVICE float ark_atan(float v) {
  const float a = v < 0.0f ? -v : v;
  const bool large = a > 2.41421356f, middle = !large && a > 0.414213562f;
  const float over = large ? -1.0f : a - 1.0f, under = large ? a : a + 1.0f;
  const float x = large || middle ? over * ark_reciprocal(under) : a;
  const float s = x * x;
  float p = -0.0607820936f;
  p = 0.105938084f + p * s;
  p = -0.142435327f + p * s;
  p = 0.199984714f + p * s;
  p = -0.333333164f + p * s;
  const float base = large ? 1.57079633f : middle ? 0.785398163f : 0.0f;
  const float made = base + (x + x * s * p);
  return v < 0.0f ? -made : made;
}

// The inverse tangent of v from 0 to 1, by a longer polynomial, without a division.
ARK_DEVICE float ark_atan_near(float v) {
  const float s = v * v;
  float p = 0.00292069162f;
  p = ark_fma(p, s, -0.0163679253f);
  p = ark_fma(p, s, 0.043211855f);
  p = ark_fma(p, s, -0.0755221396f);
  p = ark_fma(p, s, 0.106660046f);
  p = ark_fma(p, s, -0.142110556f);
  p = ark_fma(p, s, 0.199937731f);
  p = ark_fma(p, s, -0.333331525f);
  return ark_fma(v * s, p, v);
}

// The angle of the point (x, y), from the ratio of the smaller to the larger coordinate. Signs,
// also those of zeros, determine the quadrant. There is no branch, so that the instructions of
// several elements can overlap. Both coordinates are scaled, so that the reciprocal is neither
// subnormal nor infinite.
ARK_DEVICE float ark_atan2(float y, float x) {
  const float a = ark_bits_float(ark_float_bits(x) & 0x7fffffffu);
  const float b = ark_bits_float(ark_float_bits(y) & 0x7fffffffu);
  const bool steep = b > a;
  const float least = steep ? a : b, most = steep ? b : a;
  const float large = most > 1.84467441e19f ? 5.42101086e-20f : 1.0f;
  const float scale = most < 5.42101086e-20f ? 1.84467441e19f : large;
  const float part = ark_times(least * scale, ark_reciprocal_flushed(most * scale));
  const float angle = ark_atan_near(least == most ? (most == 0.0f ? 0.0f : 1.0f) : part);
  const float upper = steep ? 1.57079633f - angle : angle;
  const float made = ark_float_bits(x) >> 31 != 0u ? 3.14159265f - upper : upper;
  const bool none = x != x || y != y;
  return none ? x + y : ark_bits_float(ark_float_bits(made) | (ark_float_bits(y) & 0x80000000u));
}

// The square root of a^2 + b^2, computed from the ratio of the smaller to the larger, so that no
// square overflows. Infinite if one of them is infinite, even if the other is NaN.
ARK_DEVICE float ark_hypot(float a, float b) {
  const float x = a < 0.0f ? -a : a, y = b < 0.0f ? -b : b, inf = ark_inf();
  const float most = x > y ? x : y, part = (x > y ? y : x) / most;
  const float made = most == 0.0f ? most : ark_times(most, ark_sqrt(1.0f + part * part));
  return x == inf || y == inf ? inf : a != a || b != b ? a + b : made;
}

// The inverse sine of s, for s up to 1/2; z = s^2 is the argument of its polynomial. For larger |v|
// the callers use pi/2 minus twice the inverse sine of sqrt((1 - |v|) / 2).
ARK_DEVICE float ark_asin_near(float s, float z) {
  float p = 0.0421663374f;
  p = 0.0241794996f + p * z;
  p = 0.0454703793f + p * z;
  p = 0.0749529749f + p * z;
  p = 0.166667521f + p * z;
  return s + s * z * p;
}
ARK_DEVICE float ark_asin(float v) {
  const float a = v < 0.0f ? -v : v;
  const bool far = a > 0.5f;
  const float z = far ? 0.5f * (1.0f - a) : v * v;
  const float made = ark_asin_near(far ? ark_sqrt(z) : a, z);
  const float size = far ? 1.57079633f - 2.0f * made : made;
  return v < 0.0f ? -size : size;
}
ARK_DEVICE float ark_acos(float v) {
  const float a = v < 0.0f ? -v : v;
  const bool far = a > 0.5f;
  const float z = far ? 0.5f * (1.0f - a) : v * v;
  const float made = ark_asin_near(far ? ark_sqrt(z) : v, z);
  return !far ? 1.57079633f - made : v < 0.0f ? 3.14159265f - 2.0f * made : 2.0f * made;
}

#if !defined(ARK_HAS_SINCOS)
ARK_DEVICE void ark_sincos(float v, float& sine, float& cosine) {
  sine = ark_sin(v);
  cosine = ark_cos(v);
}
#endif

#if !defined(ARK_HAS_TAN)
ARK_DEVICE float ark_tan(float v) { return ark_sin(v) / ark_cos(v); }
#endif

// e^v / 2, computed as (e^(v/2) / 2) e^(v/2), so that it overflows only if the result does.
ARK_DEVICE float ark_half_exp(float v) {
  const float root = ark_exp(0.5f * v);
  return ark_times(ark_times(0.5f, root), root);
}
// sinh(v). Near 0 it is computed from a series, because the difference of two exponentials would
// lose digits.
ARK_DEVICE float ark_sinh(float v) {
  const float s = v * v;
  const float near = v * (1.0f + s * (1.0f / 6.0f + s * (1.0f / 120.0f + s / 5040.0f)));
  const float far = ark_half_exp(v) - ark_half_exp(-v);
  return s < 0.25f ? near : far;
}
ARK_DEVICE float ark_cosh(float v) { return ark_half_exp(v) + ark_half_exp(-v); }
ARK_DEVICE float ark_atanh(float v) {
  const float a = v < 0.0f ? -v : v;
  const float size = 0.5f * ark_log1p(2.0f * a / (1.0f - a));
  return v < 0.0f ? -size : size;
}
ARK_DEVICE float ark_asinh(float v) {
  const float a = v < 0.0f ? -v : v;
  const float s = a * a, near = ark_log1p(a + s / (1.0f + ark_sqrt(s + 1.0f)));
  const float size = a < 1e9f ? near : ark_log(a) + 0.693147181f;
  return v < 0.0f ? -size : size;
}
ARK_DEVICE float ark_acosh(float v) {
  const float t = v - 1.0f;  // below 0 the square root, and so the result, is NaN
  const float near = ark_log1p(t + ark_sqrt(t) * ark_sqrt(t + 2.0f));
  return v < 1e9f ? near : ark_log(v) + 0.693147181f;
}

// Operations on integers of 32 or 64 bits. Where the result is undefined (division by 0) it is 0,
// and no operation traps.
template <typename T>
ARK_DEVICE T ark_int_fmod(T a, T b) {
  return b == 0 || b == -1 ? 0 : a - ark_int_quotient(a, b) * b;
}
template <typename T>
ARK_DEVICE T ark_int_mod(T a, T b) {
  const T rest = ark_int_fmod(a, b);
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
template <typename T>
ARK_DEVICE T ark_int_floor_divide(T a, T b) {
  const T quotient = ark_int_div(a, b);
  if (b == 0 || b == -1) return quotient;
  const T rest = a - quotient * b;
  return rest != 0 && (rest < 0) != (b < 0) ? quotient - 1 : quotient;
}
template <typename T>
ARK_DEVICE T ark_int_pow(T a, T b) {
  if (b < 0) return a == 1 ? 1 : a == -1 ? (b & 1 ? -1 : 1) : 0;
  ark_u64 made = 1u, power = static_cast<ark_u64>(a);
  for (; b > 0; b >>= 1) {
    if (b & 1) made *= power;
    power *= power;
  }
  return static_cast<T>(made);
}
template <typename T>
ARK_DEVICE T ark_int_left(T a, T b) {
  return b < 0 || b >= static_cast<T>(8 * sizeof(T)) ? 0
                                                     : static_cast<T>(static_cast<ark_u64>(a) << b);
}
template <typename T>
ARK_DEVICE T ark_int_right(T a, T b) {
  return b < 0 || b >= static_cast<T>(8 * sizeof(T)) ? (a < 0 ? -1 : 0) : a >> b;
}

// Maps a float to an integer such that integers compare as the floats do. +0 and -0 give the same
// integer, and NaN gives the largest.
ARK_DEVICE ark_i32 ark_order(float v) {
  const ark_u32 bits = ark_float_bits(v);
  const ark_u32 ordered = bits >> 31 != 0u ? 0x80000000u - bits : bits;
  return v != v ? 2147483647 : static_cast<ark_i32>(ordered);
}

// Word `at` % 4 of block `at` / 4 of a Philox4x32-10 stream (Salmon et al., SC 2011, "Parallel
// random numbers: as easy as 1, 2, 3", section 4.2).
ARK_DEVICE ark_i64 ark_philox(ark_i64 at, ark_i64 key, ark_i64 stream) {
  const ark_u64 block = static_cast<ark_u64>(at) >> 2;
  ark_u32 c0 = static_cast<ark_u32>(block), c1 = static_cast<ark_u32>(block >> 32);
  ark_u32 c2 = static_cast<ark_u32>(stream);
  ark_u32 c3 = static_cast<ark_u32>(static_cast<ark_u64>(stream) >> 32);
  ark_u32 k0 = static_cast<ark_u32>(key);
  ark_u32 k1 = static_cast<ark_u32>(static_cast<ark_u64>(key) >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const ark_u64 first = static_cast<ark_u64>(0xd2511f53u) * c0;
    const ark_u64 second = static_cast<ark_u64>(0xcd9e8d57u) * c2;
    c0 = static_cast<ark_u32>(second >> 32) ^ c1 ^ k0;
    c1 = static_cast<ark_u32>(second);
    c2 = static_cast<ark_u32>(first >> 32) ^ c3 ^ k1;
    c3 = static_cast<ark_u32>(first);
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  const ark_u32 low = at & 1 ? c1 : c0, high = at & 1 ? c3 : c2;
  return at & 2 ? high : low;
}

// Index arithmetic in a dimension of n indices. ark_floor_div divides and rounds down. ark_edge
// returns the nearest valid index. ark_wrap continues the indices periodically. ark_reflect mirrors
// them at both ends, without repeating the end.
ARK_DEVICE int ark_floor_div(int a, int b) { return a >= 0 ? a / b : -((b - 1 - a) / b); }
ARK_DEVICE int ark_edge(int at, int n) { return at < 0 ? 0 : at < n ? at : n - 1; }
ARK_DEVICE int ark_wrap(int at, int n) {
  const int rest = at % n;
  return rest < 0 ? rest + n : rest;
}
ARK_DEVICE int ark_reflect(int at, int n) {
  if (n == 1) return 0;
  const int rest = ark_wrap(at, 2 * n - 2);
  return rest < n ? rest : 2 * n - 2 - rest;
}
// Checks an index that was loaded from a tensor, for a dimension of n indices. Negative indices
// count from the end if FROM_END. An index out of range ends the launch with an error.
template <bool FROM_END = true, typename T>
ARK_DEVICE int ark_looked_up(ArkCtx& c, T id, int n) {
  const T at = FROM_END && id < 0 ? id + n : id;
  if (at >= 0 && at < n) return static_cast<int>(at);
  ark_fail(c, 5u, 0u, static_cast<ark_u32>(n), static_cast<ark_u32>(id));
  return 0;
}
