#include "half.h"

#include <algorithm>

namespace ark_emu {
namespace {

constexpr int kFormats = 7;

struct Layout {
  int exponent_bits, mantissa_bits, bias;
  bool fnuz, has_infinity;
  uint8_t largest;   // largest finite magnitude
};

constexpr Layout kLayouts[kFormats] = {
    {4, 3, 8, true, false, 0x7f},
    {5, 2, 16, true, false, 0x7f},
    {4, 3, 7, false, false, 0x7e},
    {5, 2, 15, false, true, 0x7b},
    {2, 3, 1, false, false, 0x1f},
    {3, 2, 3, false, false, 0x1f},
    {2, 1, 1, false, false, 0x07},
};

float value_of(int code, Small format) {
  const Layout& layout = kLayouts[static_cast<int>(format)];
  const int sign_bit = 1 << (small_bits(format) - 1);
  const bool negative = (code & sign_bit) != 0;
  const int magnitude = code & (sign_bit - 1);
  const float nan = std::bit_cast<float>(0x7fc00000u);
  if (layout.fnuz && code == 0x80) return nan;
  if (magnitude > layout.largest) {
    const bool infinite = layout.has_infinity && magnitude == 0x7c;
    const float special = infinite ? std::bit_cast<float>(0x7f800000u) : nan;
    return negative ? -special : special;
  }
  const int exponent = magnitude >> layout.mantissa_bits;
  const int mantissa = magnitude & ((1 << layout.mantissa_bits) - 1);
  const int hidden = exponent == 0 ? 0 : 1 << layout.mantissa_bits;
  const int scale = (exponent == 0 ? 1 : exponent) - layout.bias - layout.mantissa_bits;
  const float result = std::ldexp(static_cast<float>(mantissa | hidden), scale);
  return negative ? -result : result;
}

}  // namespace

const float* small_table(Small format) {
  struct Tables {
    float values[kFormats][256];
    Tables() {
      for (int f = 0; f < kFormats; f++) {
        const auto each = static_cast<Small>(f);
        for (int v = 0; v < 1 << small_bits(each); v++) values[f][v] = value_of(v, each);
      }
    }
  };
  static const Tables tables;
  return tables.values[static_cast<int>(format)];
}

uint8_t to_small(double value, Small format, bool saturate, const uint32_t* random) {
  const Layout& layout = kLayouts[static_cast<int>(format)];
  const bool small = small_bits(format) < 8;
  const auto sign =
      static_cast<uint8_t>(std::signbit(value) ? 1 << (small_bits(format) - 1) : 0);
  const uint8_t nan = layout.fnuz ? 0x80 : static_cast<uint8_t>(sign | 0x7f);
  const uint8_t limit = static_cast<uint8_t>(sign | layout.largest);
  const uint8_t overflow = saturate || small     ? limit
                           : layout.has_infinity ? static_cast<uint8_t>(sign | 0x7c)
                                                 : nan;
  if (std::isnan(value)) return small ? limit : nan;
  if (std::isinf(value)) return overflow;
  const double magnitude = std::fabs(value);
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  const int lowest = 1 - layout.bias;   // exponent of the smallest normal
  const int ulp = std::max(magnitude == 0 ? lowest : exponent - 1, lowest) - layout.mantissa_bits;
  const double units = std::ldexp(magnitude, -ulp);
  double whole = std::floor(units);
  const double rest = units - whole;
  if (random != nullptr) {
    whole += rest + static_cast<double>(*random) * 0x1p-32 >= 1.0 ? 1 : 0;
  } else if (rest > 0.5 || (rest == 0.5 && std::fmod(whole, 2) != 0)) {
    whole += 1;
  }
  // The encoding of a denormal is its magnitude in units of the smallest denormal.
  const double steps = static_cast<double>(ulp - (lowest - layout.mantissa_bits));
  const double code = whole + steps * (1 << layout.mantissa_bits);
  if (code > layout.largest) return overflow;
  if (layout.fnuz && code == 0) return 0;
  return static_cast<uint8_t>(sign | static_cast<uint8_t>(code));
}

}  // namespace ark_emu
