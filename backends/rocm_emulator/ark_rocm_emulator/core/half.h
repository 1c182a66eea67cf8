// Conversions between f32 and the small float formats: f16, bf16, and formats of 8, 6 and 4 bits.
// They round to nearest even unless a comment says otherwise. The code uses plain integers, so
// compilers vectorise it and results do not depend on the host.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace ark_emu {

inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(half & 0x7fff) << 13;
  // For a denormal f16, the mantissa is put below an exponent of 2^-14, and 2^-14 is subtracted.
  const float denormal = std::bit_cast<float>(magnitude + (113u << 23)) - 0x1p-14f;
  uint32_t bits = magnitude + (112u << 23);
  bits = magnitude >= (0x7c00u << 13) ? bits + (112u << 23) : bits;
  bits = magnitude < (0x0400u << 13) ? std::bit_cast<uint32_t>(denormal) : bits;
  return std::bit_cast<float>(bits | sign);
}

// Converts f32 to f16: rounds to nearest even; overflow gives infinity, NaN stays NaN (quiet).
inline uint16_t float_to_half(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
  // Normal results: the exponent's bias is changed and bit 13 is rounded. Denormal results: the
  // addition of a float shifts the mantissa.
  const uint32_t normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  const float denormal = std::bit_cast<float>(magnitude) + 0.5f;
  const uint32_t small = std::bit_cast<uint32_t>(denormal) - 0x3f000000u;
  uint32_t half = magnitude < (113u << 23) ? small : normal;
  half = magnitude >= 0x477ff000u ? 0x7c00u : half;
  half = magnitude > 0x7f800000u ? 0x7e00u | ((magnitude >> 13) & 0x1ff) : half;
  return static_cast<uint16_t>(half | sign);
}

// Converts double to f16 with rounding to nearest even. The double is first rounded to f32 "to
// odd", which keeps ties and inexactness, so that the second rounding is correct.
inline uint16_t double_to_half_nearest(double value) {
  const float near = static_cast<float>(value);
  const double error = std::fabs(value) - std::fabs(static_cast<double>(near));
  uint32_t bits = std::bit_cast<uint32_t>(near);
  bits -= error < 0 ? 1u : 0u;            // back towards zero
  bits |= error != 0 && error == error ? 1u : 0u;
  return float_to_half(std::bit_cast<float>(bits));
}

enum class Round : uint8_t { Nearest = 0, Up = 1, Down = 2, Zero = 3 };   // as MODE encodes it

// Rounds a double to f16 in any rounding mode. A double holds the exact results of f32 and f16
// arithmetic.
inline uint16_t double_to_half(double value, Round round) {
  const uint64_t bits = std::bit_cast<uint64_t>(value);
  const uint32_t sign = static_cast<uint32_t>(bits >> 48) & 0x8000;
  if (std::isnan(value)) return static_cast<uint16_t>(sign | 0x7e00);
  const double magnitude = std::fabs(value);
  if (std::isinf(value)) return static_cast<uint16_t>(sign | 0x7c00);
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  // The unit in the last place of the result: 2^-24 for denormals.
  const int ulp = magnitude == 0 || exponent - 11 < -24 ? -24 : exponent - 11;
  const double units = std::ldexp(magnitude, -ulp);
  double whole = std::floor(units);
  const double rest = units - whole;
  const bool up = round == Round::Nearest ? rest > 0.5 || (rest == 0.5 && std::fmod(whole, 2) != 0)
                  : round == Round::Zero  ? false
                                          : rest > 0 && (round == Round::Up) == (sign == 0);
  if (up) whole += 1;
  const double rounded = std::ldexp(whole, ulp);
  if (rounded >= 65536.0) {
    const bool to_infinity = round == Round::Nearest ||
                             (round != Round::Zero && (round == Round::Up) == (sign == 0));
    return static_cast<uint16_t>(sign | (to_infinity ? 0x7c00 : 0x7bff));
  }
  if (rounded < 0x1p-14)
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(rounded * 0x1p24));
  std::frexp(rounded, &exponent);
  const uint32_t mantissa = static_cast<uint32_t>(std::ldexp(rounded, 11 - exponent)) & 0x3ff;
  return static_cast<uint16_t>(sign | static_cast<uint32_t>(exponent + 14) << 10 | mantissa);
}

inline float bf16_to_float(uint16_t value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value) << 16);
}

inline uint16_t float_to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const bool nan = (bits & 0x7fffffff) > 0x7f800000u;
  return static_cast<uint16_t>(nan ? (bits >> 16) | 0x40 : rounded);
}

// The float formats of 8 bits and fewer. FNUZ formats (8 bits, gfx942) have a bias that is higher
// by one, no infinity, no negative zero, and 0x80 is NaN. The other formats are those of OCP (8-bit
// floating point; microscaling formats). Of these, E4M3 has no infinity, and its NaN is S.1111.111;
// E5M2 is IEEE-like; the formats of six and four bits have neither infinity nor NaN.
enum class Small : uint8_t { E4M3Fnuz, E5M2Fnuz, E4M3, E5M2, E2M3, E3M2, E2M1 };

constexpr int small_bits(Small format) {
  return format < Small::E2M3 ? 8 : format < Small::E2M1 ? 6 : 4;
}
const float* small_table(Small format);   // the value of every encoding
// Converts a number to a small format. Rounds to nearest even or, if `random` is given (a fraction
// of 32 bits, added below the kept bits), stochastically. saturate: a number that is too large
// becomes the largest finite value instead of NaN or infinity. Formats of six and four bits always
// saturate, and NaN becomes their largest value too.
uint8_t to_small(double value, Small format, bool saturate, const uint32_t* random = nullptr);

}  // namespace ark_emu
