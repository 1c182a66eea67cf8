// f64 vector arithmetic.
#include <algorithm>
#include <cmath>

#include "floats.h"
#include "lanes.h"
#include "ops.h"

namespace ark_emu {
namespace {

void fmac(Wave& w, const Inst& i) {
  alignas(64) Row2 t0, t1, out;
  const uint32_t *a = w.src64(i, 0, t0), *b = w.src64(i, 1, t1);
  const uint32_t* c = w.row(i.dst[0].reg);
  for (int l = 0; l < kLanes; l++) {
    const double r = std::fma(as_double(a[l], a[kLanes + l]), as_double(b[l], b[kLanes + l]),
                              as_double(c[l], c[kLanes + l]));
    split(std::bit_cast<uint64_t>(r), out, l);
  }
  w.put64(i, out);
}

void div_scale(Wave& w, const Inst& i) {
  alignas(64) Row2 t0, t1, t2, out;
  const uint32_t *a = w.src64(i, 0, t0), *b = w.src64(i, 1, t1), *c = w.src64(i, 2, t2);
  uint64_t scaled = 0;
  for (int l = 0; l < kLanes; l++) {
    bool flag = false;
    const double r = scale_for_division(as_double(a[l], a[kLanes + l]),
                                        as_double(b[l], b[kLanes + l]),
                                        as_double(c[l], c[kLanes + l]), flag);
    split(std::bit_cast<uint64_t>(r), out, l);
    scaled |= static_cast<uint64_t>(flag) << l;
  }
  w.put64(i, out);
  w.put_mask(i, 1, scaled);
}

void div_fmas(Wave& w, const Inst& i) {
  alignas(64) Row2 t0, t1, t2, out;
  const uint32_t *a = w.src64(i, 0, t0), *b = w.src64(i, 1, t1), *c = w.src64(i, 2, t2);
  const uint64_t scaled = w.vcc();
  for (int l = 0; l < kLanes; l++) {
    const double x = as_double(a[l], a[kLanes + l]), y = as_double(b[l], b[kLanes + l]),
                 z = as_double(c[l], c[kLanes + l]);
    const bool large = ((c[kLanes + l] >> 20) & 0x7ff) > 1023;
    const bool undo = ((scaled >> l) & 1) != 0;
    const double r = undo ? scaled_fma(x, y, z, large ? 128 : -128) : std::fma(x, y, z);
    split(std::bit_cast<uint64_t>(r), out, l);
  }
  w.put64(i, out);
}

double fract(double value) { return std::min(value - std::floor(value), 0x1.fffffffffffffp-1); }

double mantissa(double value) {
  int exponent = 0;
  return std::isfinite(value) ? std::frexp(value, &exponent) : value;
}

uint64_t exponent_of(uint64_t bits) {
  const double value = std::bit_cast<double>(bits);
  int exponent = 0;
  if (std::isfinite(value) && value != 0) std::frexp(value, &exponent);
  return static_cast<uint32_t>(exponent);
}

// The bits of 2 / pi after the binary point, most significant word first, for v_trig_preop_f64.
constexpr uint64_t kTwoOverPi[] = {
    0xa2f9836e4e441529, 0xfc2757d1f534ddc0, 0xdb6295993c439041, 0xfe5163abdebbc561,
    0xb7246e3a424dd2e0, 0x06492eea09d1921c, 0xfe1deb1cb129a73e, 0xe88235f52ebb4484,
    0xe99c7026b45f7e41, 0x3991d639835339f4, 0x9c845f8bbdf9283b, 0x1ff897ffde05980f,
    0xef2f118b5a0a6d1f, 0x6d367ecf27cb09b7, 0x4f463f669e5fea2d, 0x7527bac7ebe5f17b,
    0x3d0739f78a5292ea, 0x6bfb5fb11f8d5d08, 0x56033046fc7b6bab};

double trig_preop(double value, uint32_t segment) {
  int shift = static_cast<int>(segment & 31) * 53;
  const int exponent = biased_exponent(value);
  if (exponent > 1077) shift += exponent - 1077;
  uint64_t bits = 0;   // 53 bits from position `shift` below the point
  for (int b = 0; b < 53; b++) {
    const int at = shift + b;
    const bool set = at < 1201 && ((kTwoOverPi[at / 64] >> (63 - at % 64)) & 1) != 0;
    bits = bits << 1 | (set ? 1 : 0);
  }
  int scale = -53 - shift;
  if (exponent >= 1968) scale += 128;
  return std::ldexp(static_cast<double>(bits), scale);
}

}  // namespace

void register_valu_f64(Ops& ops) {
  constexpr uint32_t kFlags = kFloat | kMode64;
  const auto binary = [&](const char* name, Handler run) {
    ops.add(name, "f64=f64,f64", run, kFlags);
  };
  const auto unary = [&](const char* name, Handler run) { ops.add(name, "f64=f64", run, kFlags); };
  binary("v_add_f64", double2([](double a, double b) { return a + b; }));
  binary("v_mul_f64", double2([](double a, double b) { return a * b; }));
  binary("v_min_f64", double2([](double a, double b) { return min_number(a, b); }));
  binary("v_max_f64", double2([](double a, double b) { return max_number(a, b); }));
  ops.add("v_fma_f64", "f64=f64,f64,f64",
          double3([](double a, double b, double c) { return std::fma(a, b, c); }), kFlags);
  ops.add("v_fmac_f64", "f64=f64,f64,tied", fmac, kFlags);
  unary("v_trunc_f64", double1([](double a) { return std::trunc(a); }));
  unary("v_ceil_f64", double1([](double a) { return std::ceil(a); }));
  unary("v_floor_f64", double1([](double a) { return std::floor(a); }));
  unary("v_rndne_f64", double1([](double a) { return round_even(a); }));
  unary("v_fract_f64", double1([](double a) { return fract(a); }));
  unary("v_rcp_f64", double1([](double a) { return 1.0 / a; }));
  unary("v_rsq_f64", double1([](double a) { return 1.0 / std::sqrt(a); }));
  unary("v_sqrt_f64", double1([](double a) { return std::sqrt(a); }));
  unary("v_frexp_mant_f64", double1([](double a) { return mantissa(a); }));
  ops.add("v_frexp_exp_i32_f64", "i32=f64", wide1([](uint64_t a) { return exponent_of(a); }),
          kFlags);
  ops.add("v_ldexp_f64", "f64=f64,i32", wide2([](uint64_t a, uint64_t b) {
            const int n = std::clamp(static_cast<int32_t>(b), -3000, 3000);
            return std::bit_cast<uint64_t>(std::ldexp(std::bit_cast<double>(a), n));
          }), kFlags);
  ops.add("v_trig_preop_f64", "f64=f64,u32", wide2([](uint64_t a, uint64_t b) {
            return std::bit_cast<uint64_t>(
                trig_preop(std::bit_cast<double>(a), static_cast<uint32_t>(b)));
          }), kFlags);
  ops.add("v_div_scale_f64", "f64,m=f64,f64,f64", div_scale, kFlags);
  ops.add("v_div_fmas_f64", "f64=f64,f64,f64", div_fmas, kFlags);
  ops.add("v_div_fixup_f64", "f64=f64,f64,f64", double3([](double a, double b, double c) {
            return fix_quotient(a, b, c);
          }), kFlags);
}

}  // namespace ark_emu
