// Handlers of gfx950's conversions: v_cvt_scalef32_* between f32, f16, bf16 and the formats of 8, 6
// and 4 bits (CDNA4 instruction set document, section "BF8 / FP8 and smaller formats and
// conversions"), and stochastic rounding to f16 and bf16. The scale is the exponent of an f32: a
// power of two, or NaN. Conversions to the small format divide by it, and conversions from the
// small format multiply by it.
#include <array>
#include <cmath>
#include <string>

#include "lanes.h"
#include "ops.h"

namespace ark_emu {
namespace {

using U32 = uint32_t;

enum class Large : uint8_t { F32, F16, BF16 };

double scale_of(U32 bits) {
  const int exponent = static_cast<int>((bits >> 23) & 0xff);
  return exponent == 0xff ? std::nan("") : std::ldexp(1.0, exponent - 127);
}

// The random number for the next element of a stochastic rounding: v_prng_b32 of the preceding
// number.
U32 next_random(U32 bits) { return bits << 1 ^ (static_cast<int32_t>(bits) < 0 ? 197u : 0u); }

// Returns the register rows of an instruction's source k. Modifiers (neg, abs) are not applied.
const U32* raw_rows(Wave& w, const Inst& i, int k, U32* tmp) {
  const Operand& operand = i.src[k];
  if (operand.kind == Kind::Vgpr) return w.row(operand.reg);
  if (operand.dwords > 1) {
    throw Fault{ErrorKind::UnknownOpcode,
                *i.name + " takes its source " + std::to_string(k) + " from vector registers only"};
  }
  const U32 value = w.scalar32(operand);
  for (int l = 0; l < kLanes; l++) tmp[l] = value;
  return tmp;
}

// Returns element e of a lane as a double. A row (register) holds one or two elements of each lane.
template <Large kFrom>
double wide_element(const U32* rows, int e, int lane) {
  if (kFrom == Large::F32) return as_float(rows[e * kLanes + lane]);
  const auto half = static_cast<uint16_t>(rows[e / 2 * kLanes + lane] >> (16 * (e % 2)));
  return kFrom == Large::F16 ? half_to_float(half) : bf16_to_float(half);
}

template <Large kTo>
U32 to_large(const Wave& w, double value) {
  if (kTo == Large::F32) return as_bits(static_cast<float>(value));
  if (kTo == Large::BF16) return float_to_bf16(static_cast<float>(value));
  const U32 half = double_to_half_nearest(value);
  const bool overflow = (half & 0x7fff) == 0x7c00 && std::isfinite(value);
  return overflow && saturates(w) ? half - 1 : half;
}

// Writes `width` bits of each lane to the destination's row, from bit `shift` on, which op_sel has
// selected. Other bits of the destination are unchanged.
void put_field(Wave& w, const Inst& i, const U32* fields, int width, int shift) {
  alignas(64) Row out;
  U32* to = w.row(i.dst[0].reg);
  const U32 mask = ((1u << width) - 1) << shift;
  for (int l = 0; l < kLanes; l++) out[l] = (to[l] & ~mask) | fields[l] << shift;
  w.blend(to, out, w.exec());
}

// The handler of conversions of kCount elements to a small format. The result has 8 bits for one
// element, 8 or 16 bits for two, and six registers for 32. Two f32 come from sources 0 and 1. With
// kPairs, 32 elements come from sources 0 and 1, 16 from each. Otherwise source 0 holds all
// elements. kRandom: true for stochastic rounding.
template <Large kFrom, Small kTo, int kCount, bool kRandom, bool kPairs = false>
void to_small_format(Wave& w, const Inst& i) {
  constexpr int kBits = small_bits(kTo);
  constexpr bool kTwo = kPairs || (kFrom == Large::F32 && kCount == 2 && !kRandom);
  alignas(64) Row tmp[4];
  const U32* from[2] = {raw_rows(w, i, 0, tmp[0]), raw_rows(w, i, 1, tmp[1])};
  const U32* random = from[1];
  const U32* scales = raw_rows(w, i, kTwo || kRandom ? 2 : 1, tmp[2]);
  alignas(64) U32 out[6 * kLanes] = {};
  const bool half = kCount == 1 && kFrom != Large::F32 && (i.opsel & 1) != 0;
  for (int l = 0; l < kLanes; l++) {
    const double scale = scale_of(scales[l]);
    U32 seed = random[l];
    for (int e = 0; e < kCount; e++) {
      const int k = kTwo ? e % 2 : 0;
      double value = wide_element<kFrom>(from[k], kTwo ? e / 2 : e + (half ? 1 : 0), l);
      if ((i.abs >> k) & 1) value = std::fabs(value);
      if ((i.neg >> k) & 1) value = -value;
      const U32 code = to_small(value / scale, kTo, saturates(w), kRandom ? &seed : nullptr);
      if (kRandom) seed = next_random(seed);
      const int at = e * kBits;
      out[at / 32 * kLanes + l] |= code << (at % 32);
      if (at % 32 + kBits > 32) out[(at / 32 + 1) * kLanes + l] |= code >> (32 - at % 32);
    }
  }
  if (kCount == 32) {
    for (unsigned d = 0; d < 6; d++) {
      w.blend(w.row(i.dst[0].reg + d), out + d * kLanes, w.exec());
    }
  } else {
    constexpr int kWidth = kBits * kCount;
    put_field(w, i, out, kWidth, kWidth == 16 ? 16 * (i.opsel >> 3) : 8 * (i.opsel >> 2));
  }
}

// The handler of conversions from a small format. The source is a byte or half of source 0, which
// op_sel selects, or six registers.
template <Small kFrom, Large kTo, int kCount>
void from_small_format(Wave& w, const Inst& i) {
  constexpr int kBits = small_bits(kFrom), kRows = kTo == Large::F32 ? kCount : (kCount + 1) / 2;
  alignas(64) Row tmp[2];
  const U32 *rows = raw_rows(w, i, 0, tmp[0]), *scales = raw_rows(w, i, 1, tmp[1]);
  const float* table = small_table(kFrom);
  constexpr int kWidth = kBits * kCount;
  const int shift = kCount == 32 ? 0 : kWidth == 16 ? 16 * (i.opsel & 1) : 8 * (i.opsel & 3);
  alignas(64) U32 out[kRows * kLanes] = {};
  for (int l = 0; l < kLanes; l++) {
    const double scale = scale_of(scales[l]);
    for (int e = 0; e < kCount; e++) {
      const int at = shift + e * kBits;
      U32 code = rows[at / 32 * kLanes + l] >> (at % 32);
      if (at % 32 + kBits > 32) code |= rows[(at / 32 + 1) * kLanes + l] << (32 - at % 32);
      const U32 bits = to_large<kTo>(w, table[code & ((1u << kBits) - 1)] * scale);
      if (kTo == Large::F32) {
        out[e * kLanes + l] = bits;
      } else {
        out[e / 2 * kLanes + l] |= bits << (16 * (e % 2));
      }
    }
  }
  if (kCount == 1 && kTo != Large::F32) {
    put_field(w, i, out, 16, 16 * (i.opsel >> 3));
    return;
  }
  for (unsigned d = 0; d < kRows; d++) {
    w.blend(w.row(i.dst[0].reg + d), out + d * kLanes, w.exec());
  }
}

template <Large kFrom, Small kTo>
void add_eight(Ops& ops, const std::string& large, const std::string& small) {
  const std::string name = "v_cvt_scalef32_";
  constexpr bool kFull = kFrom == Large::F32;
  const char* const half = kFrom == Large::F16 ? "f16" : "bf16";
  ops.add(name + "pk_" + small + "_" + large, kFull ? "b32=f32,f32,f32" : "b32=pkf16,f32",
          to_small_format<kFrom, kTo, 2, false>, kFloat);
  ops.add(name + "sr_" + small + "_" + large,
          kFull ? "b32=f32,b32,f32" : std::string("b32=") + half + ",b32,f32",
          to_small_format<kFrom, kTo, 1, true>, kFloat);
  ops.add(name + "pk_" + large + "_" + small, kFull ? "b64=b32,f32" : "b32=b32,f32",
          from_small_format<kTo, kFrom, 2>, kFloat);
  if (kFrom == Large::BF16) return;
  ops.add(name + large + "_" + small, "b32=b32,f32", from_small_format<kTo, kFrom, 1>, kFloat);
}

template <Large kFrom>
void add_four(Ops& ops, const std::string& large) {
  const std::string name = "v_cvt_scalef32_";
  constexpr bool kFull = kFrom == Large::F32;
  ops.add(name + "pk_fp4_" + large, kFull ? "b32=f32,f32,f32" : "b32=pkf16,f32",
          to_small_format<kFrom, Small::E2M1, 2, false>, kFloat);
  ops.add(name + "sr_pk_fp4_" + large, kFull ? "b32=b64,b32,f32" : "b32=pkf16,b32,f32",
          to_small_format<kFrom, Small::E2M1, 2, true>, kFloat);
  ops.add(name + "pk_" + large + "_fp4", kFull ? "b64=b32,f32" : "b32=b32,f32",
          from_small_format<Small::E2M1, kFrom, 2>, kFloat);
}

template <Large kFrom, Small kTo>
void add_six(Ops& ops, const std::string& large, const std::string& small) {
  const std::string name = "v_cvt_scalef32_";
  constexpr bool kFull = kFrom == Large::F32;
  const std::string wide = kFull ? "b1024" : "b512";
  if (kFull) {
    ops.add(name + "2xpk16_" + small + "_f32", "b192=b512,b512,f32",
            to_small_format<kFrom, kTo, 32, false, true>, kFloat);
  } else {
    ops.add(name + "pk32_" + small + "_" + large, "b192=" + wide + ",f32",
            to_small_format<kFrom, kTo, 32, false>, kFloat);
  }
  ops.add(name + "sr_pk32_" + small + "_" + large, "b192=" + wide + ",b32,f32",
          to_small_format<kFrom, kTo, 32, true>, kFloat);
  ops.add(name + "pk32_" + large + "_" + small, wide + "=b192,f32",
          from_small_format<kTo, kFrom, 32>, kFloat);
}

// Stochastic rounding to f16: adds the random number below the bits that are kept, and truncates.
// So the magnitude is rounded up with a probability equal to the truncated fraction.
U32 half_at_random(const Wave& w, float value, U32 random) {
  const U32 low = double_to_half(value, Round::Zero);
  if (!std::isfinite(value)) return low;
  const auto magnitude = [](U32 half) {
    return half_to_float(static_cast<uint16_t>(half & 0x7fff));
  };
  const double here = magnitude(low);
  const double step = (low & 0x7fff) == 0x7bff ? 32.0 : magnitude(low + 1) - here;
  const double rest = (std::fabs(static_cast<double>(value)) - here) / step;
  const bool up = rest + static_cast<double>(random) * 0x1p-32 >= 1.0;
  const bool overflow = up && (low & 0x7fff) == 0x7bff;
  return up && !(overflow && saturates(w)) ? low + 1 : low;
}

U32 bf16_at_random(const Wave& w, float value, U32 random) {
  if (!std::isfinite(value)) return float_to_bf16(value);
  const U32 bits = as_bits(value);
  const U32 sum = (bits & 0xffff) + (random >> 16);
  const U32 result = (bits >> 16) + (sum >> 16);
  return (result & 0x7fff) == 0x7f80 && saturates(w) ? result - 1 : result;
}

template <U32 (*kRound)(const Wave&, float, U32)>
void cvt_sr_16(Wave& w, const Inst& i) {
  alignas(64) Row t0, t1, out;
  Inst whole = i;
  whole.opsel = 0;
  const U32 *a = w.src32(whole, 0, t0), *random = w.src32(whole, 1, t1);
  for (int l = 0; l < kLanes; l++) out[l] = kRound(w, as_float(a[l]), random[l]);
  put_field(w, i, out, 16, 16 * (i.opsel >> 3));
}

}  // namespace

void register_cvt_scale(Ops& ops) {
  add_eight<Large::F32, Small::E4M3>(ops, "f32", "fp8");
  add_eight<Large::F32, Small::E5M2>(ops, "f32", "bf8");
  add_eight<Large::F16, Small::E4M3>(ops, "f16", "fp8");
  add_eight<Large::F16, Small::E5M2>(ops, "f16", "bf8");
  add_eight<Large::BF16, Small::E4M3>(ops, "bf16", "fp8");
  add_eight<Large::BF16, Small::E5M2>(ops, "bf16", "bf8");
  add_four<Large::F32>(ops, "f32");
  add_four<Large::F16>(ops, "f16");
  add_four<Large::BF16>(ops, "bf16");
  add_six<Large::F32, Small::E2M3>(ops, "f32", "fp6");
  add_six<Large::F32, Small::E3M2>(ops, "f32", "bf6");
  add_six<Large::F16, Small::E2M3>(ops, "f16", "fp6");
  add_six<Large::F16, Small::E3M2>(ops, "f16", "bf6");
  add_six<Large::BF16, Small::E2M3>(ops, "bf16", "fp6");
  add_six<Large::BF16, Small::E3M2>(ops, "bf16", "bf6");
  ops.add("v_cvt_sr_f16_f32", "b32=f32,b32", cvt_sr_16<half_at_random>, kFloat);
  ops.add("v_cvt_sr_bf16_f32", "b32=f32,b32", cvt_sr_16<bf16_at_random>, kFloat);
}

}  // namespace ark_emu
