#include "half.h"

#include <algorithm>

namespace ark_emu {
namespace {

struct Layout {
  int exponent_bits, mantissa_bits, bias;
  bool fnuz, has_infinity;
  uint8_t largest;   // largest finite magnitude
};

constexpr Layout kLayouts[4] = {
    {4, 3, 8, true, false, 0x7f},
    {5, 2, 16, true, false, 0x7f},
    {4, 3, 7, false, false, 0x7e},
    {5, 2, 15, false, true, 0x7b},
};

}  // namespace

float fp8_to_float(uint8_t value, Fp8 format) {
  const Layout& layout = kLayouts[static_cast<int>(format)];
  const bool negative = (value & 0x80) != 0;
  const int magnitude = value & 0x7f;
  const float nan = std::bit_cast<float>(0x7fc00000u);
  if (layout.fnuz && value == 0x80) return nan;
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

const float* fp8_table(Fp8 format) {
  struct Tables {
    float values[4][256];
    Tables() {
      for (int f = 0; f < 4; f++) {
        for (int v = 0; v < 256; v++) {
          values[f][v] = fp8_to_float(static_cast<uint8_t>(v), static_cast<Fp8>(f));
        }
      }
    }
  };
  static const Tables tables;
  return tables.values[static_cast<int>(format)];
}

uint8_t float_to_fp8(float value, Fp8 format, bool saturate, const uint32_t* random) {
  const Layout& layout = kLayouts[static_cast<int>(format)];
  const uint8_t sign = std::signbit(value) ? 0x80 : 0;
  const uint8_t nan = layout.fnuz ? 0x80 : static_cast<uint8_t>(sign | 0x7f);
  if (std::isnan(value)) return nan;
  const uint8_t limit = static_cast<uint8_t>(sign | layout.largest);
  const uint8_t overflow = layout.has_infinity ? static_cast<uint8_t>(sign | 0x7c) : nan;
  if (std::isinf(value)) return saturate ? limit : overflow;
  double magnitude = std::fabs(static_cast<double>(value));
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  const int lowest = 1 - layout.bias;   // exponent of the smallest normal
  const int ulp = std::max(exponent - 1, lowest) - layout.mantissa_bits;
  const double units = std::ldexp(magnitude, -ulp);
  double whole = std::floor(units);
  const double rest = units - whole;
  if (random != nullptr) {   // 20 random bits below the kept mantissa
    whole += rest + static_cast<double>(*random >> 12) * 0x1p-20 >= 1.0 ? 1 : 0;
  } else if (rest > 0.5 || (rest == 0.5 && std::fmod(whole, 2) != 0)) {
    whole += 1;
  }
  // Counting units from the smallest denormal gives the encoding itself.
  int code;
  const int hidden = 1 << layout.mantissa_bits;
  if (ulp == lowest - layout.mantissa_bits) {
    code = static_cast<int>(whole);
  } else {
    code = static_cast<int>(whole) + (ulp - (lowest - layout.mantissa_bits)) * hidden;
  }
  if (code > layout.largest) return saturate ? limit : overflow;
  if (layout.fnuz && code == 0) return 0;
  return static_cast<uint8_t>(sign | code);
}

}  // namespace ark_emu
