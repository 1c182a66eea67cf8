// Handlers of f32 vector arithmetic. Transcendental operations are computed to the host's accuracy
// (better than the documented 1 ulp) and flush denormals as the hardware units do.
#include <algorithm>
#include <cmath>

#include "floats.h"
#include "lanes.h"
#include "ops.h"

namespace ark_emu {
namespace {

float flush(float value) {
  return std::fabs(value) < 0x1p-126f ? std::copysign(0.0f, value) : value;
}

// The handlers of a transcendental operation F: denormal arguments and results are flushed to zero.
template <class F>
Handlers transcendental(F) {
  return float1([](float a) { return flush(F{}(flush(a))); });
}

// v_sin_f32 and v_cos_f32: their argument is in turns (multiples of 2 pi).
template <bool Sine>
float turns(float value) {
  if (!std::isfinite(value)) return std::nanf("");
  const double angle = (double(value) - std::floor(double(value))) * 6.283185307179586476925;
  return static_cast<float>(Sine ? std::sin(angle) : std::cos(angle));
}

uint32_t frexp_exponent(float value) {
  if (!std::isfinite(value) || value == 0) return 0;
  int exponent = 0;
  std::frexp(value, &exponent);
  return static_cast<uint32_t>(exponent);
}

float frexp_mantissa(float value) {
  if (!std::isfinite(value)) return value;
  int exponent = 0;
  return std::frexp(value, &exponent);
}

float mul_legacy(float a, float b) { return a == 0 || b == 0 ? 0.0f : a * b; }

// v_fmac_f32: the destination is also the addend (source 2 is tied to it).
void fmac(Wave& w, const Inst& i) {
  alignas(64) Row t0, t1, out;
  const uint32_t *a = w.src32(i, 0, t0), *b = w.src32(i, 1, t1);
  const uint32_t* c = w.row(i.dst[0].reg);
  const uint32_t flip = (i.neg & 4) != 0 ? 0x80000000u : 0,
                 keep = (i.abs & 4) != 0 ? 0x7fffffff : ~0u;
  uint32_t* to = w.target(i, out);
  each_lane(w, [&](int l) {
    to[l] = as_bits(std::fma(as_float(a[l]), as_float(b[l]), as_float((c[l] & keep) ^ flip)));
  });
  if (to == out) w.put32(i, out);
}

void div_scale(Wave& w, const Inst& i) {
  alignas(64) Row t0, t1, t2, out;
  const uint32_t *a = w.src32(i, 0, t0), *b = w.src32(i, 1, t1), *c = w.src32(i, 2, t2);
  uint64_t scaled = 0;
  for (int l = 0; l < w.lanes; l++) {
    bool flag = false;
    out[l] = as_bits(scale_for_division(as_float(a[l]), as_float(b[l]), as_float(c[l]), flag));
    scaled |= static_cast<uint64_t>(flag) << l;
  }
  w.put32(i, out);
  w.put_mask(i, 1, scaled);
}

void div_fmas(Wave& w, const Inst& i) {
  alignas(64) Row t0, t1, t2, out;
  const uint32_t *a = w.src32(i, 0, t0), *b = w.src32(i, 1, t1), *c = w.src32(i, 2, t2);
  const uint64_t scaled = w.vcc();
  for (int l = 0; l < w.lanes; l++) {
    const float x = as_float(a[l]), y = as_float(b[l]), z = as_float(c[l]);
    const bool large = ((c[l] >> 23) & 0xff) > 127;   // true if v_div_scale scaled down
    const bool undo = ((scaled >> l) & 1) != 0;
    out[l] = as_bits(undo ? scaled_fma(x, y, z, large ? 64 : -64) : std::fma(x, y, z));
  }
  w.put32(i, out);
}

}  // namespace

void register_valu_f32(Ops& ops) {
  const auto binary = [&ops](const char* name, const Handlers& run) {
    ops.add(name, "f32=f32,f32", run, kFloat);
  };
  const auto ternary = [&ops](const char* name, const Handlers& run) {
    ops.add(name, "f32=f32,f32,f32", run, kFloat);
  };
  const auto unary = [&ops](const char* name, const Handlers& run) {
    ops.add(name, "f32=f32", run, kFloat);
  };
  binary("v_add_f32", float2([](float a, float b) { return a + b; }));
  binary("v_sub_f32", float2([](float a, float b) { return a - b; }));
  binary("v_subrev_f32", float2([](float a, float b) { return b - a; }));
  binary("v_mul_f32", float2([](float a, float b) { return a * b; }));
  binary("v_mul_legacy_f32", float2([](float a, float b) { return mul_legacy(a, b); }));
  binary("v_min_f32", float2([](float a, float b) { return min_number(a, b); }));
  binary("v_max_f32", float2([](float a, float b) { return max_number(a, b); }));
  const Handlers fma = float3([](float a, float b, float c) { return std::fma(a, b, c); });
  ternary("v_fma_f32", fma);
  ops.add("v_fmac_f32", "f32=f32,f32,tied",
          with_whole3(fmac, [](uint32_t a, uint32_t b, uint32_t c) {
            return as_bits(std::fma(as_float(a), as_float(b), as_float(c)));
          }), kFloat);
  ops.add("v_fmamk_f32", "f32=f32,lit,f32", fma, kFloat);
  ops.add("v_fmaak_f32", "f32=f32,f32,lit", fma, kFloat);
  // v_mad_f32: multiplies, rounds, adds. Denormals count as zero whatever MODE says.
  const Handlers mad = float3([](float a, float b, float c) {
    return flush(flush(flush(a) * flush(b)) + flush(c));
  });
  ternary("v_mad_f32", mad);
  ops.add("v_mac_f32", "f32=f32,f32,tied", mad, kFloat);
  ops.add("v_madmk_f32", "f32=f32,lit,f32", mad, kFloat);
  ops.add("v_madak_f32", "f32=f32,f32,lit", mad, kFloat);
  ternary("v_min3_f32", float3([](float a, float b, float c) {
            return min_number(min_number(a, b), c);
          }));
  ternary("v_max3_f32", float3([](float a, float b, float c) {
            return max_number(max_number(a, b), c);
          }));
  ternary("v_med3_f32", float3([](float a, float b, float c) { return median(a, b, c); }));
  ternary("v_minimum3_f32", float3([](float a, float b, float c) {
            return minimum(minimum(a, b), c);
          }));
  ternary("v_maximum3_f32", float3([](float a, float b, float c) {
            return maximum(maximum(a, b), c);
          }));
  unary("v_fract_f32", float1([](float a) { return std::min(a - std::floor(a), 0x1.fffffep-1f); }));
  unary("v_trunc_f32", float1([](float a) { return std::trunc(a); }));
  unary("v_ceil_f32", float1([](float a) { return std::ceil(a); }));
  unary("v_floor_f32", float1([](float a) { return std::floor(a); }));
  unary("v_rndne_f32", float1([](float a) { return round_even(a); }));
  unary("v_exp_f32", transcendental([](float a) { return std::exp2(a); }));
  unary("v_log_f32", transcendental([](float a) { return std::log2(a); }));
  unary("v_exp_legacy_f32", transcendental([](float a) { return std::exp2(a); }));
  unary("v_log_legacy_f32", transcendental([](float a) { return std::log2(a); }));
  unary("v_rcp_f32", transcendental([](float a) { return 1.0f / a; }));
  unary("v_rcp_iflag_f32", transcendental([](float a) { return 1.0f / a; }));
  unary("v_rsq_f32", transcendental([](float a) {
          return static_cast<float>(1.0 / std::sqrt(double(a)));
        }));
  unary("v_sqrt_f32", transcendental([](float a) { return std::sqrt(a); }));
  unary("v_sin_f32", float1([](float a) { return turns<true>(a); }));
  unary("v_cos_f32", float1([](float a) { return turns<false>(a); }));
  unary("v_frexp_mant_f32", float1([](float a) { return frexp_mantissa(a); }));
  ops.add("v_frexp_exp_i32_f32", "i32=f32",
          int1([](uint32_t a) { return frexp_exponent(as_float(a)); }), kFloat);
  ops.add("v_ldexp_f32", "f32=f32,i32", int2([](uint32_t a, uint32_t b) {
            const int n = std::clamp(static_cast<int32_t>(b), -400, 400);
            return as_bits(std::ldexp(as_float(a), n));
          }), kFloat);
  ops.add("v_div_scale_f32", "f32,m=f32,f32,f32", div_scale, kFloat);
  ternary("v_div_fmas_f32", div_fmas);
  ternary("v_div_fixup_f32", float3([](float a, float b, float c) {
            return fix_quotient(a, b, c);
          }));
}

}  // namespace ark_emu
