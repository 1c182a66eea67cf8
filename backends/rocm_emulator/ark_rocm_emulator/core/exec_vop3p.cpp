// Handlers of packed arithmetic (two 16-bit or two f32 values per lane) and of the dot-product
// instructions.
#include <algorithm>
#include <cmath>

#include "floats.h"
#include "lanes.h"
#include "mfma.h"
#include "ops.h"

namespace ark_emu {
namespace {

using U32 = uint32_t;
using U16 = uint16_t;
using I16 = int16_t;
using I32 = int32_t;

// Selects one half of source k, by op_sel for the low result and by op_sel_hi for the high result.
// neg is applied if the operand is f16.
void pick_half(const Inst& i, int k, bool high_result, const U32* raw, U32* out) {
  const unsigned select = high_result ? i.opsel_hi : i.opsel, negate = high_result ? i.abs : i.neg;
  const int shift = ((select >> k) & 1) != 0 ? 16 : 0;
  const Ty ty = i.src[k].ty;
  const U32 flip = ty == Ty::PkF16 && ((negate >> k) & 1) != 0 ? 0x8000 : 0;
  for (int l = 0; l < kLanes; l++) out[l] = ((raw[l] >> shift) & 0xffff) ^ flip;
}

template <class F>
void packed(Wave& w, const Inst& i, int sources, F each) {
  alignas(64) Row tmp[3], half[3], result[2], out;
  const U32* raw[3];
  for (int k = 0; k < sources; k++) raw[k] = w.raw32(i.src[k], tmp[k]);
  for (int h = 0; h < 2; h++) {
    for (int k = 0; k < sources; k++) pick_half(i, k, h == 1, raw[k], half[k]);
    each(half[0], half[sources > 1 ? 1 : 0], half[sources > 2 ? 2 : 0], result[h]);
  }
  for (int l = 0; l < kLanes; l++) out[l] = (result[0][l] & 0xffff) | result[1][l] << 16;
  w.blend(w.row(i.dst[0].reg), out, w.exec());
}

template <int Sources, class F>
Handler packed_int(F) {   // F on zero-extended halves
  return [](Wave& w, const Inst& i) {
    packed(w, i, Sources, [](const U32* a, const U32* b, const U32* c, U32* r) {
      for (int l = 0; l < kLanes; l++) r[l] = F{}(U16(a[l]), U16(b[l]), U16(c[l]));
    });
  };
}

void clamp_halves(const Inst& i, U32* r) {
  if (!i.clamp) return;
  for (int l = 0; l < kLanes; l++) {
    const float v = half_to_float(static_cast<U16>(r[l]));
    r[l] = float_to_half(v > 0 ? std::min(v, 1.0f) : 0.0f);
  }
}

template <int Sources, class F>
Handler packed_half(F) {
  return [](Wave& w, const Inst& i) {
    packed(w, i, Sources, [&](const U32* a, const U32* b, const U32* c, U32* r) {
      half_lanes<F>(w, a, b, c, r);
      clamp_halves(i, r);
    });
  };
}

void fused_halves(Wave& w, const U32* a, const U32* b, const U32* c, U32* r) {
  for (int l = 0; l < kLanes; l++) {
    const double sum = double(half_to_float(U16(a[l]))) * half_to_float(U16(b[l])) +
                       half_to_float(U16(c[l]));
    r[l] = w.default_mode ? double_to_half_nearest(sum) : flush_half(w, round_half(w, sum));
  }
}

void pk_fma_f16(Wave& w, const Inst& i) {
  packed(w, i, 3, [&](const U32* a, const U32* b, const U32* c, U32* r) {
    fused_halves(w, a, b, c, r);
    clamp_halves(i, r);
  });
}

void pk_fmac_f16(Wave& w, const Inst& i) {   // VOP2: no op_sel
  Inst wide = i;
  wide.opsel_hi = 7;
  wide.src[2] = i.dst[0];
  wide.src[2].ty = Ty::PkF16;
  pk_fma_f16(w, wide);
}

template <bool Subtract, bool Signed>
void pk_add_sub(Wave& w, const Inst& i) {
  packed(w, i, 2, [&](const U32* a, const U32* b, const U32*, U32* r) {
    constexpr int kLow = Signed ? -32768 : 0, kHigh = Signed ? 32767 : 65535;
    for (int l = 0; l < kLanes; l++) {
      const int x = Signed ? I16(a[l]) : U16(a[l]), y = Signed ? I16(b[l]) : U16(b[l]);
      const int sum = Subtract ? x - y : x + y;
      r[l] = static_cast<U32>(i.clamp ? std::clamp(sum, kLow, kHigh) : sum);
    }
  });
}

// v_pk_mul_lo and v_pk_mad: the product of two sources, plus source 2 if there are three sources.
template <int Sources, bool Signed>
void pk_mad(Wave& w, const Inst& i) {
  packed(w, i, Sources, [&](const U32* a, const U32* b, const U32* c, U32* r) {
    constexpr int64_t kLow = Signed ? -32768 : 0, kHigh = Signed ? 32767 : 65535;
    for (int l = 0; l < kLanes; l++) {
      const int64_t x = Signed ? I16(a[l]) : U16(a[l]), y = Signed ? I16(b[l]) : U16(b[l]),
                    z = Sources < 3 ? 0 : Signed ? I16(c[l]) : U16(c[l]);
      r[l] = static_cast<U32>(i.clamp ? std::clamp(x * y + z, kLow, kHigh) : x * y + z);
    }
  });
}

// Operations on two f32 per lane, in a register pair (v_pk_fma_f32 and others); op_sel selects the
// dword for each result.
template <int Sources, class F>
void packed_float(Wave& w, const Inst& i) {
  alignas(64) Row2 tmp[3], out;
  const U32* raw[3];
  for (int k = 0; k < Sources; k++) raw[k] = w.raw64(i.src[k], tmp[k]);
  for (int h = 0; h < 2; h++) {
    const unsigned select = h == 1 ? i.opsel_hi : i.opsel, negate = h == 1 ? i.abs : i.neg;
    const U32* part[3];
    U32 flip[3];
    for (int k = 0; k < 3; k++) {
      const int from = k < Sources ? k : 0;
      part[k] = raw[from] + ((select >> from) & 1) * kLanes;
      flip[k] = (negate >> from) & 1 ? 0x80000000u : 0;
    }
    U32* r = out + h * kLanes;
    each_lane(w, [&](int l) {
      r[l] = as_bits(F{}(as_float(part[0][l] ^ flip[0]), as_float(part[1][l] ^ flip[1]),
                         as_float(part[2][l] ^ flip[2])));
    });
    if (!i.clamp) continue;
    for (int l = 0; l < kLanes; l++) {
      const float v = as_float(r[l]);
      r[l] = as_bits(v > 0 ? std::min(v, 1.0f) : 0.0f);
    }
  }
  w.blend(w.row(i.dst[0].reg), out, w.exec());
  w.blend(w.row(i.dst[0].reg + 1), out + kLanes, w.exec());
}

// Like packed_float, without neg and with op_sel 0; at most one source is the same in all lanes.
template <class F, unsigned kUniform, int... k>
void packed_float_whole(Wave& w, const Inst& i) {
  U32* to = w.row(i.dst[0].reg);
  const auto second = [&i](int source) {   // the operand for the high result
    Operand operand = i.src[source];
    if ((i.opsel_hi >> source & 1) == 0) return operand;
    operand.lo = operand.hi;
    operand.reg++;
    return operand;
  };
  const auto apply = [&w, to](const auto&... source) {
    whole_lanes(w, [=](int l) {
      const U32 low = as_bits(F{}(as_float(source.first[l])...));
      const U32 high = as_bits(F{}(as_float(source.second[l])...));
      to[l] = low;
      to[kLanes + l] = high;
    });
  };
  apply(std::pair<Source<(kUniform >> k & 1) != 0>, Source<(kUniform >> k & 1) != 0>>(
      Source<(kUniform >> k & 1) != 0>(w, i.src[k]),
      Source<(kUniform >> k & 1) != 0>(w, second(k)))...);
}

template <class F>
Handlers packed_float2(F) {
  Handlers all = packed_float<2, decltype([](float a, float b, float) { return F{}(a, b); })>;
  all.whole = {packed_float_whole<F, 0, 0, 1>, packed_float_whole<F, 1, 0, 1>,
               packed_float_whole<F, 2, 0, 1>};
  return all;
}

template <class F>
Handlers packed_float3(F) {
  Handlers all = packed_float<3, F>;
  all.whole = {packed_float_whole<F, 0, 0, 1, 2>, packed_float_whole<F, 1, 0, 1, 2>,
               packed_float_whole<F, 2, 0, 1, 2>, nullptr, packed_float_whole<F, 4, 0, 1, 2>};
  return all;
}

void pk_mov_b32(Wave& w, const Inst& i) {
  alignas(64) Row2 t0, t1, out;
  const U32* a = w.raw64(i.src[0], t0) + (i.opsel & 1) * kLanes;
  const U32* b = w.raw64(i.src[1], t1) + ((i.opsel >> 1) & 1) * kLanes;
  std::memcpy(out, a, sizeof(Row));
  std::memcpy(out + kLanes, b, sizeof(Row));
  w.blend(w.row(i.dst[0].reg), out, w.exec());
  w.blend(w.row(i.dst[0].reg + 1), out + kLanes, w.exec());
}

// The handler of a dot product: F(a, b, c) takes whole dwords; neg applies to f32 addends only.
template <class F>
Handler dot(F) {
  return [](Wave& w, const Inst& i) {
    alignas(64) Row tmp[3], out;
    const U32* raw[3];
    for (int k = 0; k < 3; k++) raw[k] = w.raw32(i.src[k], tmp[k]);
    const U32 flip = (i.neg & 4) != 0 ? 0x80000000u : 0;
    for (int l = 0; l < kLanes; l++) out[l] = F{}(raw[0][l], raw[1][l], raw[2][l] ^ flip);
    if (i.clamp) {
      for (int l = 0; l < kLanes; l++) {
        const float v = as_float(out[l]);
        out[l] = as_bits(v > 0 ? std::min(v, 1.0f) : 0.0f);
      }
    }
    w.blend(w.row(i.dst[0].reg), out, w.exec());
  };
}

// Replaces denormals by 0 in a pair of f16.
U32 halves_without_denormals(U32 pair) {
  const U32 low = (pair & 0x7c00) != 0 ? 0x7fff : 0, high = (pair & 0x7c000000) != 0 ? 0x7fff : 0;
  return pair & (0x80008000 | low | high << 16);
}

U32 dot2_f16(U32 a, U32 b, U32 c) {
  const float low = std::fma(half_to_float(U16(a)), half_to_float(U16(b)), as_float(c));
  return as_bits(std::fma(half_to_float(U16(a >> 16)), half_to_float(U16(b >> 16)), low));
}

U32 dot2_bf16(U32 a, U32 b, U32 c) {
  const float low = as_float(a << 16) * as_float(b << 16);
  return as_bits(std::fma(as_float(a & 0xffff0000), as_float(b & 0xffff0000), low) + as_float(c));
}

// The handler of an integer dot product of fields of `Width` bits. With the clamp modifier the sum
// saturates.
template <int Width, bool Signed>
void dot_int(Wave& w, const Inst& i) {
  alignas(64) Row tmp[3], out;
  const U32* raw[3];
  for (int k = 0; k < 3; k++) raw[k] = w.raw32(i.src[k], tmp[k]);
  for (int l = 0; l < kLanes; l++) {
    int64_t sum = Signed ? int64_t{I32(raw[2][l])} : int64_t{raw[2][l]};
    for (int at = 0; at < 32; at += Width) {
      const U32 x = raw[0][l] << (32 - Width - at), y = raw[1][l] << (32 - Width - at);
      if (Signed) {
        sum += int64_t{I32(x) >> (32 - Width)} * (I32(y) >> (32 - Width));
      } else {
        sum += int64_t{x >> (32 - Width)} * (y >> (32 - Width));
      }
    }
    out[l] = i.clamp ? saturated<Signed>(sum) : static_cast<U32>(sum);
  }
  w.blend(w.row(i.dst[0].reg), out, w.exec());
}

}  // namespace

void register_vop3p(Ops& ops) {
  const auto int2op = [&](const char* name, Handler run) { ops.add(name, "pk16=pk16,pk16", run); };
  int2op("v_pk_mul_lo_u16", pk_mad<2, false>);
  int2op("v_pk_add_i16", pk_add_sub<false, true>);
  int2op("v_pk_sub_i16", pk_add_sub<true, true>);
  int2op("v_pk_add_u16", pk_add_sub<false, false>);
  int2op("v_pk_sub_u16", pk_add_sub<true, false>);
  int2op("v_pk_lshlrev_b16", packed_int<2>([](U16 a, U16 b, U16) { return U32(b) << (a & 15); }));
  int2op("v_pk_lshrrev_b16", packed_int<2>([](U16 a, U16 b, U16) { return U32(b) >> (a & 15); }));
  int2op("v_pk_ashrrev_i16",
         packed_int<2>([](U16 a, U16 b, U16) { return U32(I16(b) >> (a & 15)); }));
  int2op("v_pk_max_i16",
         packed_int<2>([](U16 a, U16 b, U16) { return U32(std::max(I16(a), I16(b))); }));
  int2op("v_pk_min_i16",
         packed_int<2>([](U16 a, U16 b, U16) { return U32(std::min(I16(a), I16(b))); }));
  int2op("v_pk_max_u16", packed_int<2>([](U16 a, U16 b, U16) { return U32(std::max(a, b)); }));
  int2op("v_pk_min_u16", packed_int<2>([](U16 a, U16 b, U16) { return U32(std::min(a, b)); }));
  ops.add("v_pk_mad_i16", "pk16=pk16,pk16,pk16", pk_mad<3, true>);
  ops.add("v_pk_mad_u16", "pk16=pk16,pk16,pk16", pk_mad<3, false>);
  constexpr uint32_t kFlags = kFloat | kMode64;
  const auto half2op = [&](const char* name, Handler run) {
    ops.add(name, "pkf16=pkf16,pkf16", run, kFlags);
  };
  half2op("v_pk_add_f16", packed_half<2>([](auto a, auto b, auto) { return a + b; }));
  half2op("v_pk_mul_f16", packed_half<2>([](auto a, auto b, auto) { return a * b; }));
  half2op("v_pk_min_f16", packed_half<2>([](auto a, auto b, auto) { return min_number(a, b); }));
  half2op("v_pk_max_f16", packed_half<2>([](auto a, auto b, auto) { return max_number(a, b); }));
  ops.add("v_pk_minimum3_f16", "pkf16=pkf16,pkf16,pkf16",
          packed_half<3>([](auto a, auto b, auto c) { return minimum(minimum(a, b), c); }), kFlags);
  ops.add("v_pk_maximum3_f16", "pkf16=pkf16,pkf16,pkf16",
          packed_half<3>([](auto a, auto b, auto c) { return maximum(maximum(a, b), c); }), kFlags);
  ops.add("v_pk_fma_f16", "pkf16=pkf16,pkf16,pkf16", pk_fma_f16, kFlags);
  ops.add("v_pk_fmac_f16", "pkf16=pkf16,pkf16,tied", pk_fmac_f16, kFlags);
  ops.add("v_pk_fma_f32", "pkf32=pkf32,pkf32,pkf32",
          packed_float3([](float a, float b, float c) { return std::fma(a, b, c); }), kFloat);
  ops.add("v_pk_mul_f32", "pkf32=pkf32,pkf32",
          packed_float2([](float a, float b) { return a * b; }), kFloat);
  ops.add("v_pk_add_f32", "pkf32=pkf32,pkf32",
          packed_float2([](float a, float b) { return a + b; }), kFloat);
  ops.add("v_pk_mov_b32", "pkf32=pkf32,pkf32", pk_mov_b32);
}

void register_dot(Ops& ops) {
  const auto add = [&](const char* name, const char* accumulating, const char* type, Handler run) {
    const std::string t = type;
    if (name != nullptr) ops.add(name, t + "=pk16,pk16," + t, run);
    if (accumulating != nullptr) ops.add(accumulating, t + "=pk16,pk16,tied", run);
  };
  add("v_dot2_f32_f16", "v_dot2c_f32_f16", "f32",
      [](Wave& w, const Inst& i) {
        static const Handler plain = dot([](U32 a, U32 b, U32 c) { return dot2_f16(a, b, c); });
        static const Handler flushing = dot([](U32 a, U32 b, U32 c) {
          const U32 x = halves_without_denormals(a), y = halves_without_denormals(b);
          return without_denormal(dot2_f16(x, y, without_denormal(c)));
        });
        (flushes_denormals(w) ? flushing : plain)(w, i);
      });
  add("v_dot2_f32_bf16", "v_dot2c_f32_bf16", "f32",
      dot([](U32 a, U32 b, U32 c) { return dot2_bf16(a, b, c); }));
  add("v_dot2_i32_i16", "v_dot2c_i32_i16", "i32", dot_int<16, true>);
  add("v_dot2_u32_u16", nullptr, "u32", dot_int<16, false>);
  add("v_dot4_i32_i8", "v_dot4c_i32_i8", "i32", dot_int<8, true>);
  add("v_dot4_u32_u8", nullptr, "u32", dot_int<8, false>);
  add("v_dot8_i32_i4", "v_dot8c_i32_i4", "i32", dot_int<4, true>);
  add("v_dot8_u32_u4", nullptr, "u32", dot_int<4, false>);
}

}  // namespace ark_emu
