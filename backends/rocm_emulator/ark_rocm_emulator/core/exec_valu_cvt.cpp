// Conversions between vector types.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "floats.h"
#include "grid.h"
#include "lanes.h"
#include "ops.h"

namespace ark_emu {
namespace {

using U32 = uint32_t;
using U16 = uint16_t;

// Converts a float to an integer: truncates and saturates; NaN gives 0.
template <class To, class From>
U32 saturate(From value) {
  if (value != value) return 0;
  const double low = double(std::numeric_limits<To>::min());
  const double high = double(std::numeric_limits<To>::max());
  const double clamped = std::clamp(double(value), low, high);
  return static_cast<U32>(static_cast<To>(clamped));
}

template <bool kE5M2>
Small fp8_of(const Wave& w) {
  const bool fnuz = w.grid->program->arch() == Arch::gfx942;
  if (kE5M2) return fnuz ? Small::E5M2Fnuz : Small::E5M2;
  return fnuz ? Small::E4M3Fnuz : Small::E4M3;
}

// Returns source 0 as raw dwords. `byte` is set to the number of the byte that is converted. SDWA
// selects this byte or, in the 64-bit encoding, op_sel.
const U32* fp8_source(Wave& w, const Inst& i, U32* tmp, unsigned* byte) {
  Inst raw = i;
  raw.opsel = 0;
  *byte = 0;
  if (i.vop3_form) *byte = ((i.opsel & 1) << 1) | ((i.opsel >> 1) & 1);
  return w.src32(raw, 0, tmp);
}

template <bool E5M2>
void cvt_f32_fp8(Wave& w, const Inst& i) {
  alignas(64) Row t0, out;
  unsigned byte = 0;
  const U32* a = fp8_source(w, i, t0, &byte);
  const float* table = small_table(fp8_of<E5M2>(w));
  for (int l = 0; l < kLanes; l++) out[l] = as_bits(table[(a[l] >> (8 * byte)) & 0xff]);
  Inst whole = i;
  whole.opsel = 0;
  w.put32(whole, out);
}

template <bool E5M2>
void cvt_pk_f32_fp8(Wave& w, const Inst& i) {
  alignas(64) Row t0;
  alignas(64) Row2 out;
  Inst raw = i;
  raw.opsel = 0;
  const U32* a = w.src32(raw, 0, t0);
  const int shift = i.vop3_form && (i.opsel & 1) != 0 ? 16 : 0;
  const float* table = small_table(fp8_of<E5M2>(w));
  for (int l = 0; l < kLanes; l++) {
    out[l] = as_bits(table[(a[l] >> shift) & 0xff]);
    out[kLanes + l] = as_bits(table[(a[l] >> (shift + 8)) & 0xff]);
  }
  w.put64(raw, out);
}

// v_cvt_pk_fp8_f32, v_cvt_pk_bf8_f32: convert two f32 to two 8-bit floats in one half of the
// destination; the other half keeps its value.
template <bool E5M2>
void cvt_pk_fp8_f32(Wave& w, const Inst& i) {
  alignas(64) Row t0, t1, out;
  Inst raw = i;
  raw.opsel = 0;
  const U32 *a = w.src32(raw, 0, t0), *b = w.src32(raw, 1, t1);
  U32* to = w.row(i.dst[0].reg);
  const bool high = (i.opsel & 8) != 0;
  const Small format = fp8_of<E5M2>(w);
  for (int l = 0; l < kLanes; l++) {
    const U32 pair = to_small(as_float(a[l]), format, saturates(w)) |
                     static_cast<U32>(to_small(as_float(b[l]), format, saturates(w))) << 8;
    out[l] = high ? pair << 16 | (to[l] & 0xffff) : pair | (to[l] & 0xffff0000);
  }
  w.blend(to, out, w.exec());
}

template <bool E5M2>
void cvt_sr_fp8_f32(Wave& w, const Inst& i) {
  alignas(64) Row t0, t1, out;
  Inst raw = i;
  raw.opsel = 0;
  const U32 *a = w.src32(raw, 0, t0), *b = w.src32(raw, 1, t1);
  U32* to = w.row(i.dst[0].reg);
  const int shift = 8 * ((i.opsel >> 2) & 3);
  const Small format = fp8_of<E5M2>(w);
  for (int l = 0; l < kLanes; l++) {
    const U32 byte = to_small(as_float(a[l]), format, saturates(w), &b[l]);
    out[l] = (to[l] & ~(0xffu << shift)) | byte << shift;
  }
  w.blend(to, out, w.exec());
}

U16 float_to_half_mode(const Wave& w, float value) {
  return w.default_mode ? float_to_half(value) : flush_half(w, round_half(w, value));
}

void cvt_f16_f32(Wave& w, const Inst& i) {
  alignas(64) Row t0, out;
  const U32* a = w.src32(i, 0, t0);
  if (w.default_mode) {
    for (int l = 0; l < kLanes; l++) out[l] = float_to_half(as_float(a[l]));
  } else {
    for (int l = 0; l < kLanes; l++) out[l] = float_to_half_mode(w, as_float(a[l]));
  }
  w.put16(i, out);
}

void cvt_f32_f16(Wave& w, const Inst& i) {
  alignas(64) Row t0, out;
  const U32* a = w.src16(i, 0, t0);
  if (w.default_mode) {
    for (int l = 0; l < kLanes; l++) out[l] = as_bits(half_to_float(static_cast<U16>(a[l])));
  } else {
    for (int l = 0; l < kLanes; l++) {
      out[l] = as_bits(half_to_float(flush_half(w, static_cast<U16>(a[l]))));
    }
  }
  Inst whole = i;
  whole.opsel &= 8;
  w.put32(whole, out);
}

// Packs two results of F (16 bits each) into a dword.
template <class F>
Handlers pack2(F) {
  return int2([](U32 a, U32 b) { return (F{}(a) & 0xffff) | F{}(b) << 16; });
}

U32 normalised(float value, bool is_signed) {
  if (value != value) return 0;
  const float clamped = std::clamp(value, is_signed ? -1.0f : 0.0f, 1.0f);
  const float scaled = clamped * (is_signed ? 32767.0f : 65535.0f);
  return static_cast<U32>(static_cast<int32_t>(round_even(scaled)));
}

template <class F>
Handler double_to_32(F) {   // f64 source, 32-bit result
  return [](Wave& w, const Inst& i) {
    alignas(64) Row2 t0;
    alignas(64) Row out;
    const U32* a = w.src64(i, 0, t0);
    for (int l = 0; l < kLanes; l++) out[l] = F{}(as_double(a[l], a[kLanes + l]));
    w.put32(i, out);
  };
}

template <class F>
Handler to_double(F) {      // 32-bit source, f64 result
  return [](Wave& w, const Inst& i) {
    alignas(64) Row t0;
    alignas(64) Row2 out;
    const U32* a = w.src32(i, 0, t0);
    for (int l = 0; l < kLanes; l++) split(std::bit_cast<uint64_t>(F{}(a[l])), out, l);
    w.put64(i, out);
  };
}

void register_f32(Ops& ops) {
  const auto from_f32 = [&ops](const char* name, const Handlers& run) {
    ops.add(name, "b32=f32", run, kFloat);
  };
  const auto to_f32 = [&ops](const char* name, const Handlers& run) {
    ops.add(name, "f32=b32", run, kFloat);
  };
  to_f32("v_cvt_f32_i32", int1([](U32 a) { return as_bits(float(int32_t(a))); }));
  to_f32("v_cvt_f32_u32", int1([](U32 a) { return as_bits(float(a)); }));
  to_f32("v_cvt_f32_ubyte0", int1([](U32 a) { return as_bits(float(a & 0xff)); }));
  to_f32("v_cvt_f32_ubyte1", int1([](U32 a) { return as_bits(float((a >> 8) & 0xff)); }));
  to_f32("v_cvt_f32_ubyte2", int1([](U32 a) { return as_bits(float((a >> 16) & 0xff)); }));
  to_f32("v_cvt_f32_ubyte3", int1([](U32 a) { return as_bits(float(a >> 24)); }));
  to_f32("v_cvt_off_f32_i4", int1([](U32 a) {   // a signed 4-bit integer divided by 16
           return as_bits(float(int32_t(a << 28) >> 28) * 0.0625f);
         }));
  from_f32("v_cvt_u32_f32", int1([](U32 a) { return saturate<uint32_t>(as_float(a)); }));
  from_f32("v_cvt_i32_f32", int1([](U32 a) { return saturate<int32_t>(as_float(a)); }));
  from_f32("v_cvt_rpi_i32_f32", int1([](U32 a) {
             return saturate<int32_t>(std::floor(as_float(a) + 0.5f));
           }));
  from_f32("v_cvt_flr_i32_f32", int1([](U32 a) {
             return saturate<int32_t>(std::floor(as_float(a)));
           }));
  ops.add("v_cvt_pk_u8_f32", "b32=f32,b32,b32", int3([](U32 a, U32 b, U32 c) {
            const int shift = 8 * static_cast<int>(b & 3);
            const U32 byte = std::min(saturate<uint32_t>(round_even(as_float(a))), 255u);
            return (c & ~(0xffu << shift)) | byte << shift;
          }), kFloat);
  ops.add("v_cvt_f16_f32", "f16=f32", cvt_f16_f32, kFloat | kMode64);
  ops.add("v_cvt_f32_f16", "f32=f16", cvt_f32_f16, kFloat);
  ops.add("v_cvt_f32_bf16", "f32=bf16", [](Wave& w, const Inst& i) {
    alignas(64) Row t0, out;
    const U32* a = w.src16(i, 0, t0);
    for (int l = 0; l < kLanes; l++) out[l] = a[l] << 16;
    Inst whole = i;
    whole.opsel &= 8;
    w.put32(whole, out);
  }, kFloat);
  const auto pack = [&ops](const char* name, const char* signature, const Handlers& run) {
    ops.add(name, signature, run, kFloat);
  };
  pack("v_cvt_pkrtz_f16_f32", "b32=f32,f32",
       pack2([](U32 a) { return U32(double_to_half(as_float(a), Round::Zero)); }));
  pack("v_cvt_pk_f16_f32", "b32=f32,f32",
       pack2([](U32 a) { return U32(float_to_half(as_float(a))); }));
  pack("v_cvt_pk_bf16_f32", "b32=f32,f32",
       pack2([](U32 a) { return U32(float_to_bf16(as_float(a))); }));
  pack("v_cvt_pknorm_i16_f32", "b32=f32,f32",
       pack2([](U32 a) { return normalised(as_float(a), true); }));
  pack("v_cvt_pknorm_u16_f32", "b32=f32,f32",
       pack2([](U32 a) { return normalised(as_float(a), false); }));
  pack("v_cvt_pk_u16_u32", "b32=u32,u32", pack2([](U32 a) { return std::min(a, 65535u); }));
  pack("v_cvt_pk_i16_i32", "b32=i32,i32",
       pack2([](U32 a) { return U32(std::clamp(int32_t(a), -32768, 32767)); }));
  pack("v_ashr_pk_i8_i32", "b16=i32,i32,u32", int3([](U32 a, U32 b, U32 c) {
         const auto clip = [c](U32 v) {
           return std::clamp(int32_t(v) >> (c & 31), -128, 127) & 0xff;
         };
         return U32(clip(a) | clip(b) << 8);
       }));
  pack("v_ashr_pk_u8_i32", "b16=i32,i32,u32", int3([](U32 a, U32 b, U32 c) {
         const auto clip = [c](U32 v) { return std::clamp(int32_t(v) >> (c & 31), 0, 255); };
         return U32(clip(a) | clip(b) << 8);
       }));
}

void register_f64(Ops& ops) {
  constexpr uint32_t kFlags = kFloat | kMode64;
  ops.add("v_cvt_i32_f64", "i32=f64", double_to_32([](double a) { return saturate<int32_t>(a); }),
          kFlags);
  ops.add("v_cvt_u32_f64", "u32=f64", double_to_32([](double a) { return saturate<uint32_t>(a); }),
          kFlags);
  ops.add("v_cvt_f32_f64", "f32=f64",
          double_to_32([](double a) { return as_bits(static_cast<float>(a)); }), kFlags);
  ops.add("v_cvt_f64_i32", "f64=i32", to_double([](U32 a) { return double(int32_t(a)); }), kFlags);
  ops.add("v_cvt_f64_u32", "f64=u32", to_double([](U32 a) { return double(a); }), kFlags);
  ops.add("v_cvt_f64_f32", "f64=f32", to_double([](U32 a) { return double(as_float(a)); }), kFlags);
}

void register_small(Ops& ops) {
  constexpr uint32_t kFlags = kFloat | kMode64;
  const auto to_half = [](auto f) -> Handler {
    using F = decltype(f);
    return [](Wave& w, const Inst& i) {
      alignas(64) Row t0, out;
      const U32* a = w.src16(i, 0, t0);
      for (int l = 0; l < kLanes; l++) out[l] = float_to_half_mode(w, F{}(static_cast<U16>(a[l])));
      w.put16(i, out);
    };
  };
  ops.add("v_cvt_f16_u16", "f16=u16", to_half([](U16 a) { return float(a); }), kFlags);
  ops.add("v_cvt_f16_i16", "f16=i16", to_half([](U16 a) { return float(int16_t(a)); }), kFlags);
  ops.add("v_cvt_u16_f16", "u16=f16",
          short1([](U16 a) { return saturate<uint16_t>(half_to_float(a)); }), kFlags);
  ops.add("v_cvt_i16_f16", "i16=f16",
          short1([](U16 a) { return saturate<int16_t>(half_to_float(a)) & 0xffff; }), kFlags);
  ops.add("v_cvt_norm_i16_f16", "i16=f16",
          short1([](U16 a) { return normalised(half_to_float(a), true) & 0xffff; }), kFlags);
  ops.add("v_cvt_norm_u16_f16", "u16=f16",
          short1([](U16 a) { return normalised(half_to_float(a), false) & 0xffff; }), kFlags);
  ops.add("v_cvt_f32_fp8", "f32=b32", cvt_f32_fp8<false>, kFloat);
  ops.add("v_cvt_f32_bf8", "f32=b32", cvt_f32_fp8<true>, kFloat);
  ops.add("v_cvt_pk_f32_fp8", "b64=b32", cvt_pk_f32_fp8<false>, kFloat);
  ops.add("v_cvt_pk_f32_bf8", "b64=b32", cvt_pk_f32_fp8<true>, kFloat);
  ops.add("v_cvt_pk_fp8_f32", "b32=f32,f32", cvt_pk_fp8_f32<false>, kFloat);
  ops.add("v_cvt_pk_bf8_f32", "b32=f32,f32", cvt_pk_fp8_f32<true>, kFloat);
  ops.add("v_cvt_sr_fp8_f32", "b32=f32,b32", cvt_sr_fp8_f32<false>, kFloat);
  ops.add("v_cvt_sr_bf8_f32", "b32=f32,b32", cvt_sr_fp8_f32<true>, kFloat);
}

}  // namespace

void register_valu_cvt(Ops& ops) {
  register_f32(ops);
  register_f64(ops);
  register_small(ops);
}

}  // namespace ark_emu
