// Handlers of 16-bit vector arithmetic: f16 and 16-bit integers, one per lane.
#include <algorithm>
#include <cmath>

#include "floats.h"
#include "lanes.h"
#include "ops.h"

namespace ark_emu {

uint16_t round_half(const Wave& w, double value) {
  return double_to_half(value, static_cast<Round>((w.mode >> 2) & 3));
}

uint16_t flush_half(const Wave& w, uint16_t value) {
  const bool denormal = (value & 0x7c00) == 0;
  return denormal && ((w.mode >> 6) & 3) != 3 ? value & 0x8000 : value;
}

namespace {

using U16 = uint16_t;
using I16 = int16_t;
using U32 = uint32_t;

float half_at(uint32_t bits) { return half_to_float(static_cast<U16>(bits)); }

// Products and sums of f16 are exact in double, so the result is rounded once.
U16 fused(Wave& w, U16 a, U16 b, U16 c) {
  if (w.default_mode) {
    return double_to_half_nearest(double(half_to_float(a)) * half_to_float(b) + half_to_float(c));
  }
  const double r = double(half_to_float(flush_half(w, a))) * half_to_float(flush_half(w, b)) +
                   half_to_float(flush_half(w, c));
  return flush_half(w, round_half(w, r));
}

void fma_f16(Wave& w, const Inst& i) {
  alignas(64) Row t0, t1, t2, out;
  const U32 *a = w.src16(i, 0, t0), *b = w.src16(i, 1, t1), *c = w.src16(i, 2, t2);
  for (int l = 0; l < kLanes; l++) out[l] = fused(w, U16(a[l]), U16(b[l]), U16(c[l]));
  w.put16(i, out);
}

// v_mad_f16, v_mac_f16: the product is rounded before the addition.
void mad_f16(Wave& w, const Inst& i) {
  alignas(64) Row t0, t1, t2, product, out;
  const U32 *a = w.src16(i, 0, t0), *b = w.src16(i, 1, t1), *c = w.src16(i, 2, t2);
  half_lanes<decltype([](auto x, auto y, auto) { return x * y; })>(w, a, b, b, product);
  half_lanes<decltype([](auto x, auto y, auto) { return x + y; })>(w, product, c, c, out);
  w.put16(i, out);
}

// Returns source k of v_fma_mix as f32. If its bit of op_sel_hi is set, the source is the f16 in
// the half of the dword that op_sel selects; otherwise it is an f32.
const U32* mixed_source(Wave& w, const Inst& i, int k, U32* tmp) {
  Inst plain = i;
  plain.neg = plain.abs = plain.opsel = 0;
  const bool half = ((i.opsel_hi >> k) & 1) != 0, high = ((i.opsel >> k) & 1) != 0;
  plain.src[k].ty = Ty::B32;
  const U32* raw = w.src32(plain, k, tmp);
  const U32 flip = (i.neg >> k) & 1 ? 0x80000000u : 0, keep = (i.abs >> k) & 1 ? 0x7fffffff : ~0u;
  for (int l = 0; l < kLanes; l++) {
    const U32 value = half ? as_bits(half_at(high ? raw[l] >> 16 : raw[l])) : raw[l];
    tmp[l] = (value & keep) ^ flip;
  }
  return tmp;
}

enum class MixTo { Float, Low, High };

template <MixTo To>
void fma_mix(Wave& w, const Inst& i) {
  alignas(64) Row t0, t1, t2, out;
  const U32 *a = mixed_source(w, i, 0, t0), *b = mixed_source(w, i, 1, t1),
            *c = mixed_source(w, i, 2, t2);
  U32* to = w.row(i.dst[0].reg);
  for (int l = 0; l < kLanes; l++) {
    float r = std::fma(as_float(a[l]), as_float(b[l]), as_float(c[l]));
    if (i.clamp) r = r > 0 ? std::min(r, 1.0f) : 0.0f;
    if (To == MixTo::Float) {
      out[l] = as_bits(r);
    } else {
      const U32 half = w.default_mode ? float_to_half(r) : round_half(w, r);
      out[l] = To == MixTo::Low ? half | (to[l] & 0xffff0000) : half << 16 | (to[l] & 0xffff);
    }
  }
  w.blend(to, out, w.exec());
}

float turns(float value, bool sine) {
  if (!std::isfinite(value)) return std::nanf("");
  const double angle = (double(value) - std::floor(double(value))) * 6.283185307179586476925;
  return static_cast<float>(sine ? std::sin(angle) : std::cos(angle));
}

U32 frexp_exponent(float value) {
  int exponent = 0;
  if (std::isfinite(value) && value != 0) std::frexp(value, &exponent);
  return static_cast<U32>(exponent);
}

float mantissa(float value) {
  int exponent = 0;
  return std::isfinite(value) ? std::frexp(value, &exponent) : value;
}

void register_f16(Ops& ops) {
  constexpr uint32_t kFlags = kFloat | kMode64;
  const auto two = [&](const char* name, Handler run) {
    ops.add(name, "f16=f16,f16", run, kFlags);
  };
  const auto one = [&](const char* name, Handler run) { ops.add(name, "f16=f16", run, kFlags); };
  const auto three = [&](const char* name, Handler run) {
    ops.add(name, "f16=f16,f16,f16", run, kFlags | kKeepHigh);
  };
  two("v_add_f16", half2([](auto a, auto b) { return a + b; }));
  two("v_sub_f16", half2([](auto a, auto b) { return a - b; }));
  two("v_subrev_f16", half2([](auto a, auto b) { return b - a; }));
  two("v_mul_f16", half2([](auto a, auto b) { return a * b; }));
  two("v_min_f16", half2([](auto a, auto b) { return min_number(a, b); }));
  two("v_max_f16", half2([](auto a, auto b) { return max_number(a, b); }));
  three("v_fma_f16", fma_f16);
  ops.add("v_fmac_f16", "f16=f16,f16,tied", fma_f16, kFlags);
  ops.add("v_fma_legacy_f16", "f16=f16,f16,f16", fma_f16, kFlags);
  ops.add("v_mac_f16", "f16=f16,f16,tied", mad_f16, kFlags);
  ops.add("v_madmk_f16", "f16=f16,lit,f16", mad_f16, kFlags);
  ops.add("v_madak_f16", "f16=f16,f16,lit", mad_f16, kFlags);
  three("v_mad_f16", mad_f16);
  ops.add("v_mad_legacy_f16", "f16=f16,f16,f16", mad_f16, kFlags);
  const auto ternary = [](auto f) -> Handler {
    using F = decltype(f);
    return [](Wave& w, const Inst& i) {
      alignas(64) Row t0, t1, t2, out;
      const U32 *a = w.src16(i, 0, t0), *b = w.src16(i, 1, t1), *c = w.src16(i, 2, t2);
      half_lanes<F>(w, a, b, c, out);
      w.put16(i, out);
    };
  };
  three("v_min3_f16", ternary([](auto a, auto b, auto c) {
          return min_number(min_number(a, b), c);
        }));
  three("v_max3_f16", ternary([](auto a, auto b, auto c) {
          return max_number(max_number(a, b), c);
        }));
  three("v_med3_f16", ternary([](auto a, auto b, auto c) { return median(a, b, c); }));
  const Handler fixup = ternary([](auto a, auto b, auto c) {
    return fix_quotient(float(a), float(b), float(c));
  });
  three("v_div_fixup_f16", fixup);
  ops.add("v_div_fixup_legacy_f16", "f16=f16,f16,f16", fixup, kFlags);
  one("v_rcp_f16", half1([](auto a) { return decltype(a)(1) / a; }));
  one("v_sqrt_f16", half1([](auto a) { return std::sqrt(a); }));
  one("v_rsq_f16", half1([](auto a) { return decltype(a)(1.0 / std::sqrt(double(a))); }));
  one("v_log_f16", half1([](auto a) { return std::log2(a); }));
  one("v_exp_f16", half1([](auto a) { return std::exp2(a); }));
  one("v_floor_f16", half1([](auto a) { return std::floor(a); }));
  one("v_ceil_f16", half1([](auto a) { return std::ceil(a); }));
  one("v_trunc_f16", half1([](auto a) { return std::trunc(a); }));
  one("v_rndne_f16", half1([](auto a) { return round_even(a); }));
  one("v_fract_f16", half1([](auto a) {
        return std::min(a - std::floor(a), decltype(a)(0x1.ffcp-1));
      }));
  one("v_sin_f16", half1([](auto a) { return decltype(a)(turns(float(a), true)); }));
  one("v_cos_f16", half1([](auto a) { return decltype(a)(turns(float(a), false)); }));
  one("v_frexp_mant_f16", half1([](auto a) { return decltype(a)(mantissa(float(a))); }));
  ops.add("v_frexp_exp_i16_f16", "i16=f16",
          short1([](U16 a) { return frexp_exponent(half_to_float(a)); }), kFlags);
  ops.add("v_ldexp_f16", "f16=f16,i16", short2([](U16 a, U16 b) {
            const int n = std::clamp<int>(I16(b), -60, 60);
            return U32(float_to_half(std::ldexp(half_to_float(a), n)));
          }), kFlags);
  ops.add("v_pack_b32_f16", "b32=f16,f16", [](Wave& w, const Inst& i) {
    alignas(64) Row t0, t1, out;
    const U32 *a = w.src16(i, 0, t0), *b = w.src16(i, 1, t1);
    for (int l = 0; l < kLanes; l++) out[l] = a[l] | b[l] << 16;
    Inst whole = i;   // op_sel selected the halves; the result is a whole dword
    whole.opsel = 0;
    w.put32(whole, out);
  });
  ops.add("v_fma_mix_f32", "f32=f32,f32,f32", fma_mix<MixTo::Float>, kFloat);
  ops.add("v_fma_mixlo_f16", "b32=f32,f32,f32", fma_mix<MixTo::Low>, kFloat);
  ops.add("v_fma_mixhi_f16", "b32=f32,f32,f32", fma_mix<MixTo::High>, kFloat);
}

template <bool Signed, bool Subtract, bool Reverse>
void add_sub16(Wave& w, const Inst& i) {
  alignas(64) Row t0, t1, out;
  const U32 *a = w.src16(i, Reverse ? 1 : 0, t0), *b = w.src16(i, Reverse ? 0 : 1, t1);
  constexpr int kLow = Signed ? -32768 : 0, kHigh = Signed ? 32767 : 65535;
  for (int l = 0; l < kLanes; l++) {
    const int x = Signed ? I16(a[l]) : U16(a[l]), y = Signed ? I16(b[l]) : U16(b[l]);
    const int r = Subtract ? x - y : x + y;
    out[l] = static_cast<U32>(i.clamp ? std::clamp(r, kLow, kHigh) : r) & 0xffff;
  }
  w.put16(i, out);
}

template <bool Signed>
void mad16(Wave& w, const Inst& i) {
  alignas(64) Row t0, t1, t2, out;
  const U32 *a = w.src16(i, 0, t0), *b = w.src16(i, 1, t1), *c = w.src16(i, 2, t2);
  constexpr int64_t kLow = Signed ? -32768 : 0, kHigh = Signed ? 32767 : 65535;
  for (int l = 0; l < kLanes; l++) {
    const int64_t x = Signed ? I16(a[l]) : U16(a[l]), y = Signed ? I16(b[l]) : U16(b[l]),
                  z = Signed ? I16(c[l]) : U16(c[l]);
    const int64_t r = x * y + z;
    out[l] = static_cast<U32>(i.clamp ? std::clamp(r, kLow, kHigh) : r) & 0xffff;
  }
  w.put16(i, out);
}

template <bool Signed>
void mad_wide(Wave& w, const Inst& i) {
  alignas(64) Row t0, t1, t2, out;
  const U32 *a = w.src16(i, 0, t0), *b = w.src16(i, 1, t1);
  Inst whole = i;   // op_sel applies to the factors only
  whole.opsel = 0;
  const U32* c = w.src32(whole, 2, t2);
  for (int l = 0; l < kLanes; l++) {
    const int64_t x = Signed ? I16(a[l]) : U16(a[l]), y = Signed ? I16(b[l]) : U16(b[l]);
    const int64_t r = x * y + (Signed ? int64_t{static_cast<int32_t>(c[l])} : int64_t{c[l]});
    out[l] = i.clamp ? saturated<Signed>(r) : static_cast<U32>(r);
  }
  w.put32(whole, out);
}

void register_int16(Ops& ops) {
  const auto two = [&](const char* name, Handler run) { ops.add(name, "u16=u16,u16", run); };
  const auto three = [&](const char* name, Handler run) {
    ops.add(name, "u16=u16,u16,u16", run, kKeepHigh);
  };
  two("v_add_u16", add_sub16<false, false, false>);
  two("v_sub_u16", add_sub16<false, true, false>);
  two("v_subrev_u16", add_sub16<false, true, true>);
  two("v_add_i16", add_sub16<true, false, false>);
  two("v_sub_i16", add_sub16<true, true, false>);
  two("v_mul_lo_u16", short2([](U16 a, U16 b) { return U32(a) * b & 0xffff; }));
  two("v_lshlrev_b16", short2([](U16 a, U16 b) { return U32(b) << (a & 15) & 0xffff; }));
  two("v_lshrrev_b16", short2([](U16 a, U16 b) { return U32(b) >> (a & 15); }));
  two("v_ashrrev_i16", short2([](U16 a, U16 b) { return U32(I16(b) >> (a & 15)) & 0xffff; }));
  two("v_max_u16", short2([](U16 a, U16 b) { return U32(std::max(a, b)); }));
  two("v_min_u16", short2([](U16 a, U16 b) { return U32(std::min(a, b)); }));
  two("v_max_i16", short2([](U16 a, U16 b) { return U32(U16(std::max(I16(a), I16(b)))); }));
  two("v_min_i16", short2([](U16 a, U16 b) { return U32(U16(std::min(I16(a), I16(b)))); }));
  three("v_mad_u16", mad16<false>);
  three("v_mad_i16", mad16<true>);
  ops.add("v_mad_legacy_u16", "u16=u16,u16,u16", mad16<false>);
  ops.add("v_mad_legacy_i16", "u16=u16,u16,u16", mad16<true>);
  three("v_min3_i16", short3([](U16 a, U16 b, U16 c) {
          return U32(U16(std::min({I16(a), I16(b), I16(c)})));
        }));
  three("v_max3_i16", short3([](U16 a, U16 b, U16 c) {
          return U32(U16(std::max({I16(a), I16(b), I16(c)})));
        }));
  three("v_min3_u16", short3([](U16 a, U16 b, U16 c) { return U32(std::min({a, b, c})); }));
  three("v_max3_u16", short3([](U16 a, U16 b, U16 c) { return U32(std::max({a, b, c})); }));
  three("v_med3_i16", short3([](U16 a, U16 b, U16 c) {
          const I16 x = I16(a), y = I16(b), z = I16(c);
          return U32(U16(std::max(std::min(x, y), std::min(std::max(x, y), z))));
        }));
  three("v_med3_u16", short3([](U16 a, U16 b, U16 c) {
          return U32(std::max(std::min(a, b), std::min(std::max(a, b), c)));
        }));
  ops.add("v_mad_u32_u16", "u32=u16,u16,u32", mad_wide<false>);
  ops.add("v_mad_i32_i16", "i32=i16,i16,i32", mad_wide<true>);
}

}  // namespace

void register_valu_f16(Ops& ops) {
  register_f16(ops);
  register_int16(ops);
}

}  // namespace ark_emu
