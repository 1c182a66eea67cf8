// Handlers of vector operations that compilers emit only for intrinsics: sums of absolute
// differences at four byte offsets, cube map coordinates, RDNA3's multiplications in which zero
// wins over infinity and NaN, and normalised f16.
#include <algorithm>
#include <cmath>

#include "floats.h"
#include "lanes.h"
#include "ops.h"

namespace ark_emu {
namespace {

using U32 = uint32_t;
using U16 = uint16_t;

// The sum of |a - b| over the four bytes of a word. masked: bytes for which b is zero do not count.
U32 differences(U32 a, U32 b, bool masked) {
  U32 sum = 0;
  for (int k = 0; k < 32; k += 8) {
    const int x = static_cast<int>((a >> k) & 0xff), y = static_cast<int>((b >> k) & 0xff);
    if (!masked || y != 0) sum += static_cast<U32>(std::abs(x - y));
  }
  return sum;
}

// Sums of absolute differences at four offsets (v_qsad, v_mqsad). For each offset 0 to 3, four
// bytes of source 0 from this offset on are compared with the four bytes of source 1. The sum is
// added to part number `offset` of source 2, which has four 16-bit parts or four dwords.
template <bool kMasked, bool kWide>
void four_differences(Wave& w, const Inst& i) {
  alignas(64) Row2 t0;
  alignas(64) Row t1;
  alignas(64) U32 addends[4 * kLanes] = {}, out[4 * kLanes] = {};
  const U32 *a = w.src64(i, 0, t0), *b = w.src32(i, 1, t1);
  constexpr int kRows = kWide ? 4 : 2;
  if (i.src[2].kind == Kind::Vgpr) {
    std::copy_n(w.row(i.src[2].reg), kRows * kLanes, addends);
  } else {
    const uint64_t value = w.scalar64(i.src[2]);
    for (int l = 0; l < kLanes; l++) split(value, addends, l);
  }
  for (int l = 0; l < kLanes; l++) {
    const uint64_t bytes = join(a[l], a[kLanes + l]);
    for (int k = 0; k < 4; k++) {
      const U32 sum = differences(static_cast<U32>(bytes >> (8 * k)), b[l], kMasked);
      if (kWide) {
        out[k * kLanes + l] = addends[k * kLanes + l] + sum;
      } else {
        const U32 addend = addends[k / 2 * kLanes + l] >> (16 * (k % 2));
        out[k / 2 * kLanes + l] |= ((addend + sum) & 0xffff) << (16 * (k % 2));
      }
    }
  }
  for (unsigned d = 0; d < kRows; d++) {
    w.blend(w.row(i.dst[0].reg + d), out + d * kLanes, w.exec());
  }
}

// The axis that a direction is nearest to: 2 = z, 1 = y, 0 = x.
int major_axis(float x, float y, float z) {
  if (std::fabs(z) >= std::fabs(x) && std::fabs(z) >= std::fabs(y)) return 2;
  return std::fabs(y) >= std::fabs(x) ? 1 : 0;
}

float cube_face(float x, float y, float z) {
  const int axis = major_axis(x, y, z);
  const float along = axis == 2 ? z : axis == 1 ? y : x;
  return static_cast<float>(2 * axis + (along < 0 ? 1 : 0));
}

float cube_s(float x, float y, float z) {
  switch (major_axis(x, y, z)) {
    case 2: return z < 0 ? -x : x;
    case 1: return x;
    default: return x < 0 ? z : -z;
  }
}

float cube_t(float x, float y, float z) {
  if (major_axis(x, y, z) != 1) return -y;
  return y < 0 ? -z : z;
}

float cube_major(float x, float y, float z) {
  const int axis = major_axis(x, y, z);
  return 2.0f * (axis == 2 ? z : axis == 1 ? y : x);
}

float fma_zero_wins(float a, float b, float c) { return a == 0 || b == 0 ? c : std::fma(a, b, c); }

// The product of v_mullit, a lighting computation: the lowest finite number if the second source
// is not above it or the third is not positive, and 0 if a factor is 0.
float light(float a, float b, float c) {
  constexpr float kMost = std::numeric_limits<float>::max();
  const bool none = !(b > -kMost) || !(c > 0.0f);
  return none ? -kMost : a == 0 || b == 0 ? 0.0f : a * b;
}

U16 normalised(U16 half, bool is_signed) {
  const float value = half_to_float(half);
  if (value != value) return 0;
  const float clamped = std::clamp(value, is_signed ? -1.0f : 0.0f, 1.0f);
  const float scaled = clamped * (is_signed ? 32767.0f : 65535.0f);
  return static_cast<U16>(static_cast<int>(round_even(scaled)));
}

template <bool kSigned>
void pack_normalised(Wave& w, const Inst& i) {
  alignas(64) Row t0, t1, out;
  const U32 *a = w.src16(i, 0, t0), *b = w.src16(i, 1, t1);
  for (int l = 0; l < kLanes; l++) {
    const U32 high = normalised(static_cast<U16>(b[l]), kSigned);
    out[l] = normalised(static_cast<U16>(a[l]), kSigned) | high << 16;
  }
  w.blend(w.row(i.dst[0].reg), out, w.exec());
}

// v_cvt_pk_accum: writes one byte of the destination, rounded to the nearest; the other bytes keep
// their values.
void accumulate_byte(Wave& w, const Inst& i) {
  alignas(64) Row t0, t1, out;
  const U32 *a = w.src32(i, 0, t0), *b = w.src32(i, 1, t1);
  U32* to = w.row(i.dst[0].reg);
  for (int l = 0; l < kLanes; l++) {
    const float value = as_float(a[l]);
    const float clamped = value != value ? 0.0f : std::clamp(round_even(value), 0.0f, 255.0f);
    const int shift = 8 * static_cast<int>(b[l] & 3);
    out[l] = (to[l] & ~(0xffu << shift)) | static_cast<U32>(clamped) << shift;
  }
  w.blend(to, out, w.exec());
}

}  // namespace

void register_valu_rare(Ops& ops) {
  ops.add("v_qsad_pk_u16_u8", "b64=b64,b32,b64", four_differences<false, false>);
  ops.add("v_mqsad_pk_u16_u8", "b64=b64,b32,b64", four_differences<true, false>);
  ops.add("v_mqsad_u32_u8", "b128=b64,b32,b128", four_differences<true, true>);
  const auto three = [&ops](const char* name, const Handlers& run) {
    ops.add(name, "f32=f32,f32,f32", run, kFloat);
  };
  three("v_cubeid_f32", float3([](float x, float y, float z) { return cube_face(x, y, z); }));
  three("v_cubesc_f32", float3([](float x, float y, float z) { return cube_s(x, y, z); }));
  three("v_cubetc_f32", float3([](float x, float y, float z) { return cube_t(x, y, z); }));
  three("v_cubema_f32", float3([](float x, float y, float z) { return cube_major(x, y, z); }));
  const Handlers fma = float3([](float a, float b, float c) { return fma_zero_wins(a, b, c); });
  three("v_fma_dx9_zero_f32", fma);
  ops.add("v_fmac_dx9_zero_f32", "f32=f32,f32,tied", [](Wave& w, const Inst& i) {
    static const Handler run = Ops::all().find("v_fma_dx9_zero_f32")->handlers.run;
    Inst plain = i;
    plain.src[2].ty = Ty::F32;   // so that neg and abs apply to it
    run(w, plain);
  }, kFloat);
  three("v_mullit_f32", float3([](float a, float b, float c) { return light(a, b, c); }));
  ops.add("v_cvt_pknorm_i16_f16", "b32=f16,f16", pack_normalised<true>, kFloat | kMode64);
  ops.add("v_cvt_pknorm_u16_f16", "b32=f16,f16", pack_normalised<false>, kFloat | kMode64);
  ops.add("v_cvt_pkaccum_u8_f32", "b32=f32,b32", accumulate_byte, kFloat);
}

}  // namespace ark_emu
