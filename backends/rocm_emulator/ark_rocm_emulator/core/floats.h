// Floating-point rules shared by the f16, f32 and f64 handlers, as templates over the type.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace ark_emu {

template <class T>
using BitsOf = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

// With MODE.IEEE, which HIP's kernels set, v_min and v_max return a signalling NaN operand as a
// quiet NaN, in preference to any other operand. If both operands are signalling NaN, the result is
// source 0's.
template <class T>
T unless_signalling(T a, T b, T result) {
  using B = BitsOf<T>;
  constexpr B kInfinity = std::bit_cast<B>(std::numeric_limits<T>::infinity());
  constexpr B kQuiet = std::bit_cast<B>(std::numeric_limits<T>::quiet_NaN());
  constexpr B kSign = B(1) << (8 * sizeof(T) - 1);
  const B x = std::bit_cast<B>(a), y = std::bit_cast<B>(b);
  const bool first = (x & ~kSign) > kInfinity && (x & ~kSign) < kQuiet;
  const bool second = (y & ~kSign) > kInfinity && (y & ~kSign) < kQuiet;
  const B r = second ? y | kQuiet : std::bit_cast<B>(result);
  return std::bit_cast<T>(first ? B(x | kQuiet) : r);
}

// v_min and v_max: if one operand is a quiet NaN, the result is the other one. -0 counts as less
// than +0.
template <class T>
T min_number(T a, T b) {
  using B = BitsOf<T>;
  const T equal = std::bit_cast<T>(static_cast<B>(std::bit_cast<B>(a) | std::bit_cast<B>(b)));
  const T less = a < b ? a : b < a ? b : equal;
  return unless_signalling(a, b, a != a ? b : b != b ? a : less);
}

template <class T>
T max_number(T a, T b) {
  using B = BitsOf<T>;
  const T equal = std::bit_cast<T>(static_cast<B>(std::bit_cast<B>(a) & std::bit_cast<B>(b)));
  const T more = a > b ? a : b > a ? b : equal;
  return unless_signalling(a, b, a != a ? b : b != b ? a : more);
}

// v_minimum3 and v_maximum3: the result is NaN if an operand is NaN.
template <class T>
T minimum(T a, T b) {
  return a != a ? a : b != b ? b : min_number(a, b);
}

template <class T>
T maximum(T a, T b) {
  return a != a ? a : b != b ? b : max_number(a, b);
}

template <class T>
T median(T a, T b, T c) {
  if (a != a || b != b || c != c) return min_number(min_number(a, b), c);
  const T most = max_number(max_number(a, b), c);
  if (most == a) return max_number(b, c);
  return most == b ? max_number(a, c) : max_number(a, b);
}

// The nearest integer, with ties to even, whatever the rounding mode is.
template <class T>
T round_even(T value) {
  const T floor = std::floor(value);
  const T rest = value - floor;
  const T half = floor * T(0.5);
  const bool odd = half != std::floor(half);
  const T r = rest > T(0.5) || (rest == T(0.5) && odd) ? floor + T(1) : floor;
  return std::copysign(r, value);
}

template <class T>
struct Parts;
template <>
struct Parts<float> {
  static constexpr int mantissa = 23, mask = 0xff, near_max = 96, tiny = 23, scale = 64, gap = 150;
};
template <>
struct Parts<double> {
  static constexpr int mantissa = 52, mask = 0x7ff, near_max = 768, tiny = 53, scale = 128,
                       gap = 1075;
};

template <class T>
int biased_exponent(T value) {
  return static_cast<int>(std::bit_cast<BitsOf<T>>(value) >> Parts<T>::mantissa) & Parts<T>::mask;
}

// v_div_scale: scales the denominator or the numerator of a division, so that the Newton iterations
// neither overflow nor lose bits. `value` is the one that is scaled. Sets `flag` if v_div_fmas must
// reverse the scaling.
template <class T>
T scale_for_division(T value, T denominator, T numerator, bool& flag) {
  constexpr int kScale = Parts<T>::scale;
  flag = false;
  if (numerator == 0 || denominator == 0) return std::numeric_limits<T>::quiet_NaN();
  const int e_num = biased_exponent(numerator), e_den = biased_exponent(denominator);
  if (e_num - e_den >= Parts<T>::near_max) {
    flag = true;
    return value == denominator ? std::ldexp(value, kScale) : value;
  }
  if (e_den == 0) return std::ldexp(value, kScale);
  constexpr int kBias = Parts<T>::mask / 2;
  const bool tiny_inverse = std::fabs(denominator) > std::ldexp(T(1), kBias - 1);
  const bool tiny_quotient = e_num - e_den <= 1 - kBias;
  if (tiny_inverse && tiny_quotient) {
    flag = true;
    return value == denominator ? std::ldexp(value, -kScale) : value;
  }
  if (tiny_inverse) return std::ldexp(value, -kScale);
  if (tiny_quotient) {
    flag = true;
    return value == numerator ? std::ldexp(value, kScale) : value;
  }
  if (e_num <= Parts<T>::tiny) return std::ldexp(value, kScale);
  return value;
}

// Computes (a * b + c) * 2^scale, rounded once. For float, the sum is computed in double. If it is
// inexact, it is rounded to odd, so that the rounding to float is correct. For a double result that
// becomes denormal, rounding to odd does not suffice, because only one bit may be lost. If the last
// rounding would then see a tie, the sum is first moved in the direction of the lost bit.
template <class T>
T scaled_fma(T a, T b, T c, int scale) {
  const double x = a, y = b, z = c;
  if constexpr (sizeof(T) == 8) {   // only a denormal result rounds to fewer bits than fma's
    const double near = std::ldexp(std::fma(x, y, z), scale);
    if (!(std::fabs(near) <= std::numeric_limits<double>::min())) return near;
  }
  const double product = x * y, low = std::fma(x, y, -product);
  double sum = product + z;
  const double part = sum - product;
  const double error = (product - (sum - part)) + (z - part) + low;
  if constexpr (sizeof(T) == 8) {
    const double rest = std::fabs(sum - std::ldexp(std::ldexp(sum, scale), -scale));
    const bool tie = rest == std::ldexp(0.5, -1074 - scale);
    const double limit = std::numeric_limits<double>::infinity();
    if (tie && error != 0) sum = std::nextafter(sum, error > 0 ? limit : -limit);
    return std::ldexp(sum, scale);
  }
  if (error != 0 && std::isfinite(sum) && sum != 0) {
    uint64_t bits = std::bit_cast<uint64_t>(sum);
    if ((error < 0) != (sum < 0)) bits -= 1;
    sum = std::bit_cast<double>(bits | 1);
  }
  return static_cast<T>(std::ldexp(sum, scale));
}

// v_div_fixup: returns the quotient, corrected for zeros, infinities and NaN.
template <class T>
T fix_quotient(T quotient, T denominator, T numerator) {
  const bool negative = std::signbit(denominator) != std::signbit(numerator);
  const auto with_sign = [negative](T value) { return negative ? -value : value; };
  if (std::isnan(numerator)) return numerator;
  if (std::isnan(denominator)) return denominator;
  const bool both_zero = numerator == 0 && denominator == 0;
  if (both_zero || (std::isinf(numerator) && std::isinf(denominator))) {
    return -std::numeric_limits<T>::quiet_NaN();   // the sign that AMD's pseudocode gives
  }
  if (denominator == 0 || std::isinf(numerator)) {
    return with_sign(std::numeric_limits<T>::infinity());
  }
  if (numerator == 0 || std::isinf(denominator)) return with_sign(T(0));
  if (biased_exponent(numerator) - biased_exponent(denominator) < -Parts<T>::gap) {
    return with_sign(T(0));
  }
  // The quotient exceeds the largest number. The Newton steps then compute infinity minus infinity,
  // which is NaN. The correct result is infinity.
  if (std::isnan(quotient)) return with_sign(std::numeric_limits<T>::infinity());
  return with_sign(std::fabs(quotient));
}

}  // namespace ark_emu
