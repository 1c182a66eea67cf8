// Handlers of integer vector operations of 32 bits.
#include <algorithm>
#include <bit>

#include "lanes.h"
#include "ops.h"

namespace ark_emu {
namespace {

using U32 = uint32_t;
using I32 = int32_t;
using U64 = uint64_t;
using I64 = int64_t;

I32 low24(U32 value) { return static_cast<I32>(value << 8) >> 8; }

U32 reverse_bits(U32 a) {
  a = (a >> 1 & 0x55555555) | (a & 0x55555555) << 1;
  a = (a >> 2 & 0x33333333) | (a & 0x33333333) << 2;
  a = (a >> 4 & 0x0f0f0f0f) | (a & 0x0f0f0f0f) << 4;
  return __builtin_bswap32(a);
}

// Additions and subtractions of 32-bit integers. With the clamp modifier the result saturates,
// signed or unsigned.
template <bool Signed, bool Subtract, bool Reverse>
void add_sub(Wave& w, const Inst& i) {
  alignas(64) Row t0, t1, out;
  const U32 *a = w.src32(i, Reverse ? 1 : 0, t0), *b = w.src32(i, Reverse ? 0 : 1, t1);
  U32* to = w.target(i, out);
  if (!i.clamp) {
    each_lane(w, [&](int l) { to[l] = Subtract ? a[l] - b[l] : a[l] + b[l]; });
  } else {
    each_lane(w, [&](int l) {
      const I64 x = Signed ? I64(I32(a[l])) : I64(a[l]), y = Signed ? I64(I32(b[l])) : I64(b[l]);
      to[l] = saturated<Signed>(Subtract ? x - y : x + y);
    });
  }
  if (to == out) w.put32(i, out);
}

// Additions and subtractions with a carry. The carry-in is a lane mask or 0; the carry-out is a
// lane mask.
template <bool Subtract, bool Reverse, bool CarryIn>
void add_carry(Wave& w, const Inst& i) {
  alignas(64) Row t0, t1, out, in, over;
  const U32 *a = w.src32(i, Reverse ? 1 : 0, t0), *b = w.src32(i, Reverse ? 0 : 1, t1);
  if (CarryIn) bits_row(in, w.src_mask(i.src[2]), w.lanes);
  const U32 limit = i.clamp ? ~0u : 0;   // the result on overflow
  U32* to = w.target(i, out);
  each_lane(w, [&](int l) {
    const U32 c = CarryIn ? in[l] & 1 : 0;
    const U32 first = Subtract ? a[l] - b[l] : a[l] + b[l];
    const U32 r = Subtract ? first - c : first + c;
    const bool carried = Subtract ? a[l] < b[l] || first < c : first < a[l] || r < first;
    const U32 all = carried ? ~0u : 0;
    over[l] = all;
    to[l] = Subtract ? r & ~(all & limit) : r | (all & limit);
  });
  if (to == out) w.put32(i, out);
  w.put_mask(i, 1, row_bits(over, w.lanes));
}

void cndmask(Wave& w, const Inst& i) {
  alignas(64) Row t0, t1, out;
  const U32 *a = w.src32(i, 0, t0), *b = w.src32(i, 1, t1);
  std::memcpy(out, a, sizeof out);
  blend_row(out, b, w.src_mask(i.src[2]), w.lanes);
  w.put32(i, out);
}

// v_cndmask: for each lane selects source 0 or 1 by source 2, which is a lane mask.
template <bool kUniform0, bool kUniform1>
void cndmask_whole(Wave& w, const Inst& i) {
  const Source<kUniform0> a(w, i.src[0]);
  const Source<kUniform1> b(w, i.src[1]);
  const U64 mask = w.src_mask(i.src[2]);
  U32* to = w.row(i.dst[0].reg);
  const int lanes = w.lanes;
  for (int from = 0; from < lanes; from += 32) {
    const auto bits = static_cast<U32>(mask >> from);
    ARK_LANES
    for (int l = 0; l < 32; l++) {
      const U32 chosen = 0u - (bits >> l & 1);
      to[from + l] = (b[from + l] & chosen) | (a[from + l] & ~chosen);
    }
  }
}

void mov_b32(Wave& w, const Inst& i);

// Between s_set_gpr_idx_on and _off, M0 bits 7:0 are added to the register numbers that bits 15:12
// choose (source 0, 1, 2, destination). Compilers put nothing but v_mov_b32 there.
void indexed_mov_b32(Wave& w, const Inst& i) {
  Inst moved = i;
  const unsigned index = w.m0() & 0xff, enabled = w.m0() >> 12;
  for (auto [operand, bit] : {std::pair{&moved.src[0], 1u}, std::pair{&moved.dst[0], 8u}}) {
    if ((enabled & bit) == 0 || operand->kind != Kind::Vgpr) continue;
    if (operand->reg + index > 255) {
      throw Fault{ErrorKind::OutOfBounds,
                  "the register index " + std::to_string(index) + " leads beyond v255"};
    }
    operand->reg = static_cast<uint16_t>(operand->reg + index);
  }
  w.gpr_index = false;
  mov_b32(w, moved);
  w.gpr_index = true;
}

void mov_b32(Wave& w, const Inst& i) {
  if (w.gpr_index) {
    indexed_mov_b32(w, i);
    return;
  }
  alignas(64) Row t0, out;
  const U32* a = w.src32(i, 0, t0);
  if (i.plain_dst) {
    w.blend(w.row(i.dst[0].reg), a, w.exec());
    return;
  }
  std::memcpy(out, a, sizeof out);
  w.put32(i, out);
}

void swap_b32(Wave& w, const Inst& i) {
  U32 *a = w.row(i.dst[0].reg), *b = w.row(i.src[0].reg);
  alignas(64) Row old_a, old_b;
  std::memcpy(old_a, a, sizeof old_a);
  std::memcpy(old_b, b, sizeof old_b);
  w.blend(a, old_b, w.exec());
  w.blend(b, old_a, w.exec());
}

U32 bit_field_signed(U32 a, U32 offset, U32 width) {
  width &= 31;
  if (width == 0) return 0;
  const U32 value = static_cast<U32>(static_cast<I32>(a) >> (offset & 31));
  return static_cast<U32>(static_cast<I32>(value << (32 - width)) >> (32 - width));
}

U32 pick_byte(U64 data, U32 selector) {
  if (selector >= 13) return 0xff;
  if (selector == 12) return 0;
  if (selector >= 8) {   // sign of bytes 1, 3, 5, 7
    return (data >> (16 * (selector - 8) + 15)) & 1 ? 0xff : 0;
  }
  return static_cast<U32>(data >> (8 * selector)) & 0xff;
}

U32 permute_bytes(U32 a, U32 b, U32 selectors) {
  const U64 data = U64(a) << 32 | b;
  U32 r = 0;
  for (int k = 0; k < 4; k++) r |= pick_byte(data, (selectors >> (8 * k)) & 0xff) << (8 * k);
  return r;
}

U32 absolute_difference(U32 a, U32 b) { return a > b ? a - b : b - a; }

I64 sad_u8(U32 a, U32 b, I64 c, bool masked) {
  for (int k = 0; k < 32; k += 8) {
    const U32 y = (b >> k) & 0xff;
    if (!masked || y != 0) c += absolute_difference((a >> k) & 0xff, y);
  }
  return c;
}

U32 truth_table(U32 table, U32 a, U32 b, U32 c) {
  U32 r = 0;
  for (U32 row = 0; row < 8; row++) {
    if (((table >> row) & 1) == 0) continue;
    r |= (row & 4 ? a : ~a) & (row & 2 ? b : ~b) & (row & 1 ? c : ~c);
  }
  return r;
}

void bitop3(Wave& w, const Inst& i) {   // the bits of omod, abs and neg are the truth table
  const U32 table = static_cast<U32>(i.omod) << 6 | static_cast<U32>(i.abs) << 3 | i.neg;
  alignas(64) Row t[3], out;
  const U32* src[3];
  for (int k = 0; k < 3; k++) src[k] = w.raw32(i.src[k], t[k]);
  each_lane(w, [&](int l) { out[l] = truth_table(table, src[0][l], src[1][l], src[2][l]); });
  w.blend(w.row(i.dst[0].reg), out, w.exec());
}

void bitop3_b16(Wave& w, const Inst& i) {
  const U32 table = static_cast<U32>(i.omod) << 6 | static_cast<U32>(i.abs) << 3 | i.neg;
  alignas(64) Row t[3], out;
  Inst plain = i;
  plain.omod = plain.abs = plain.neg = 0;
  const U32* src[3];
  for (int k = 0; k < 3; k++) src[k] = w.src16(plain, k, t[k]);
  for (int l = 0; l < kLanes; l++) out[l] = truth_table(table, src[0][l], src[1][l], src[2][l]);
  w.put16(plain, out);
}

template <bool High>
void mbcnt(Wave& w, const Inst& i) {
  alignas(64) Row t0, t1, out;
  const U32 *a = w.src32(i, 0, t0), *b = w.src32(i, 1, t1);
  each_lane(w, [&](int l) {
    const U64 below = (1ull << l) - 1;
    const U32 mask = static_cast<U32>(High ? below >> 32 : below);
    out[l] = b[l] + static_cast<U32>(std::popcount(a[l] & mask));
  });
  w.put32(i, out);
}

void register_arithmetic(Ops& ops) {
  const auto two = [&ops](const char* name, const Handlers& run) {
    ops.add(name, "u32=u32,u32", run);
  };
  two("v_add_u32",
      with_whole2(add_sub<false, false, false>, [](U32 a, U32 b) { return a + b; }));
  two("v_sub_u32",
      with_whole2(add_sub<false, true, false>, [](U32 a, U32 b) { return a - b; }));
  two("v_subrev_u32",
      with_whole2(add_sub<false, true, true>, [](U32 a, U32 b) { return b - a; }));
  ops.add("v_add_i32", "i32=i32,i32", add_sub<true, false, false>);
  ops.add("v_sub_i32", "i32=i32,i32", add_sub<true, true, false>);
  ops.add("v_add_co_u32", "u32,m=u32,u32", add_carry<false, false, false>);
  ops.add("v_sub_co_u32", "u32,m=u32,u32", add_carry<true, false, false>);
  ops.add("v_subrev_co_u32", "u32,m=u32,u32", add_carry<true, true, false>);
  ops.add("v_addc_co_u32", "u32,m=u32,u32,m", add_carry<false, false, true>);
  ops.add("v_subb_co_u32", "u32,m=u32,u32,m", add_carry<true, false, true>);
  ops.add("v_subbrev_co_u32", "u32,m=u32,u32,m", add_carry<true, true, true>);
  const auto three = [&ops](const char* name, const Handlers& run) {
    ops.add(name, "u32=u32,u32,u32", run);
  };
  two("v_mul_lo_u32", int2([](U32 a, U32 b) { return a * b; }));
  two("v_mul_hi_u32", int2([](U32 a, U32 b) { return static_cast<U32>(U64(a) * b >> 32); }));
  two("v_mul_hi_i32", int2([](U32 a, U32 b) {
        return static_cast<U32>(I64(I32(a)) * I32(b) >> 32);
      }));
  two("v_mul_i32_i24",
      exact2<true>([](U32 a, U32 b) { return I64(low24(a)) * low24(b); }));
  two("v_mul_u32_u24", exact2<false>([](U32 a, U32 b) {
        return I64(a & 0xffffff) * (b & 0xffffff);
      }));
  two("v_mul_hi_i32_i24", int2([](U32 a, U32 b) {
        return static_cast<U32>(I64(low24(a)) * low24(b) >> 32);
      }));
  two("v_mul_hi_u32_u24", int2([](U32 a, U32 b) {
        return static_cast<U32>(U64(a & 0xffffff) * (b & 0xffffff) >> 32);
      }));
  three("v_mad_i32_i24", exact3<true>([](U32 a, U32 b, U32 c) {
          return I64(low24(a)) * low24(b) + I32(c);
        }));
  three("v_mad_u32_u24", exact3<false>([](U32 a, U32 b, U32 c) {
          return I64(a & 0xffffff) * (b & 0xffffff) + c;
        }));
  two("v_min_i32", int2([](U32 a, U32 b) { return I32(a) < I32(b) ? a : b; }));
  two("v_max_i32", int2([](U32 a, U32 b) { return I32(a) > I32(b) ? a : b; }));
  two("v_min_u32", int2([](U32 a, U32 b) { return a < b ? a : b; }));
  two("v_max_u32", int2([](U32 a, U32 b) { return a > b ? a : b; }));
  three("v_min3_i32", int3([](U32 a, U32 b, U32 c) {
          return U32(std::min({I32(a), I32(b), I32(c)}));
        }));
  three("v_max3_i32", int3([](U32 a, U32 b, U32 c) {
          return U32(std::max({I32(a), I32(b), I32(c)}));
        }));
  three("v_min3_u32", int3([](U32 a, U32 b, U32 c) { return std::min({a, b, c}); }));
  three("v_max3_u32", int3([](U32 a, U32 b, U32 c) { return std::max({a, b, c}); }));
  three("v_med3_i32", int3([](U32 a, U32 b, U32 c) {
          const I32 x = I32(a), y = I32(b), z = I32(c);
          return U32(std::max(std::min(x, y), std::min(std::max(x, y), z)));
        }));
  three("v_med3_u32", int3([](U32 a, U32 b, U32 c) {
          return std::max(std::min(a, b), std::min(std::max(a, b), c));
        }));
  three("v_add3_u32", int3([](U32 a, U32 b, U32 c) { return a + b + c; }));
  three("v_xad_u32", int3([](U32 a, U32 b, U32 c) { return (a ^ b) + c; }));
  three("v_lshl_add_u32", int3([](U32 a, U32 b, U32 c) { return (a << (b & 31)) + c; }));
  three("v_add_lshl_u32", int3([](U32 a, U32 b, U32 c) { return (a + b) << (c & 31); }));
  three("v_sad_u8", exact3<false>([](U32 a, U32 b, U32 c) { return sad_u8(a, b, c, false); }));
  three("v_msad_u8", exact3<false>([](U32 a, U32 b, U32 c) { return sad_u8(a, b, c, true); }));
  three("v_sad_hi_u8", exact3<false>([](U32 a, U32 b, U32 c) {
          return (sad_u8(a, b, 0, false) << 16) + c;
        }));
  three("v_sad_u16", exact3<false>([](U32 a, U32 b, U32 c) {
          return I64(c) + absolute_difference(a & 0xffff, b & 0xffff) +
                 absolute_difference(a >> 16, b >> 16);
        }));
  three("v_sad_u32", exact3<false>([](U32 a, U32 b, U32 c) {
          return I64(absolute_difference(a, b)) + c;
        }));
  three("v_lerp_u8", int3([](U32 a, U32 b, U32 c) {
          U32 r = 0;
          for (int k = 0; k < 32; k += 8) {
            r |= (((a >> k) & 0xff) + ((b >> k) & 0xff) + ((c >> k) & 1)) >> 1 << k;
          }
          return r;
        }));
}

void register_bits(Ops& ops) {
  const auto two = [&ops](const char* name, const Handlers& run) { ops.add(name, "b32=b32,b32", run); };
  const auto three = [&ops](const char* name, const Handlers& run) {
    ops.add(name, "b32=b32,b32,b32", run);
  };
  two("v_lshrrev_b32", int2([](U32 a, U32 b) { return b >> (a & 31); }));
  two("v_ashrrev_i32", int2([](U32 a, U32 b) { return static_cast<U32>(I32(b) >> (a & 31)); }));
  two("v_lshlrev_b32", int2([](U32 a, U32 b) { return b << (a & 31); }));
  two("v_and_b32", int2([](U32 a, U32 b) { return a & b; }));
  two("v_or_b32", int2([](U32 a, U32 b) { return a | b; }));
  two("v_xor_b32", int2([](U32 a, U32 b) { return a ^ b; }));
  two("v_xnor_b32", int2([](U32 a, U32 b) { return ~(a ^ b); }));
  two("v_bfm_b32", int2([](U32 a, U32 b) { return ((1u << (a & 31)) - 1) << (b & 31); }));
  two("v_bcnt_u32_b32", int2([](U32 a, U32 b) { return static_cast<U32>(std::popcount(a)) + b; }));
  two("v_mbcnt_lo_u32_b32", mbcnt<false>);
  two("v_mbcnt_hi_u32_b32", mbcnt<true>);
  three("v_bfe_u32", int3([](U32 a, U32 b, U32 c) {
          return (a >> (b & 31)) & ((1u << (c & 31)) - 1);
        }));
  three("v_bfe_i32", int3([](U32 a, U32 b, U32 c) { return bit_field_signed(a, b, c); }));
  three("v_bfi_b32", int3([](U32 a, U32 b, U32 c) { return (a & b) | (~a & c); }));
  three("v_alignbit_b32", int3([](U32 a, U32 b, U32 c) {
          return static_cast<U32>((U64(a) << 32 | b) >> (c & 31));
        }));
  three("v_alignbyte_b32", int3([](U32 a, U32 b, U32 c) {
          return static_cast<U32>((U64(a) << 32 | b) >> (8 * (c & 3)));
        }));
  three("v_perm_b32", int3([](U32 a, U32 b, U32 c) { return permute_bytes(a, b, c); }));
  three("v_lshl_or_b32", int3([](U32 a, U32 b, U32 c) { return (a << (b & 31)) | c; }));
  three("v_and_or_b32", int3([](U32 a, U32 b, U32 c) { return (a & b) | c; }));
  three("v_or3_b32", int3([](U32 a, U32 b, U32 c) { return a | b | c; }));
  three("v_bitop3_b32", bitop3);
  ops.add("v_bitop3_b16", "b16=b16,b16,b16", bitop3_b16, kKeepHigh);
  const auto one = [&ops](const char* name, const Handlers& run) { ops.add(name, "b32=b32", run); };
  using Same = decltype([](U32 a) { return a; });
  Handlers move = mov_b32;
  move.whole = {run_whole<Same, 0, 0>, run_whole<Same, 1, 0>};
  one("v_mov_b32", move);
  one("v_accvgpr_read_b32", move);
  one("v_accvgpr_write_b32", move);
  one("v_accvgpr_mov_b32", move);
  ops.add("v_swap_b32", "b32=b32", swap_b32);
  // v_cndmask selects whole dwords, but its modifiers neg and abs treat the sources as floats.
  Handlers select = cndmask;
  select.whole = {nullptr, nullptr, nullptr, nullptr, cndmask_whole<false, false>,
                  cndmask_whole<true, false>, cndmask_whole<false, true>, cndmask_whole<true, true>};
  ops.add("v_cndmask_b32", "f32=f32,f32,m", select);
  one("v_not_b32", int1([](U32 a) { return ~a; }));
  one("v_bfrev_b32", int1([](U32 a) { return reverse_bits(a); }));
  one("v_ffbh_u32", int1([](U32 a) { return a == 0 ? ~0u : U32(std::countl_zero(a)); }));
  one("v_ffbl_b32", int1([](U32 a) { return a == 0 ? ~0u : U32(std::countr_zero(a)); }));
  one("v_ffbh_i32", int1([](U32 a) {
        const U32 flipped = I32(a) < 0 ? ~a : a;
        return flipped == 0 ? ~0u : U32(std::countl_zero(flipped));
      }));
  one("v_prng_b32", int1([](U32 a) { return a << 1 ^ (I32(a) < 0 ? 197u : 0u); }));
  one("v_sat_pk_u8_i16", int1([](U32 a) {
        const auto saturate = [](U32 half) { return U32(std::clamp<int>(int16_t(half), 0, 255)); };
        return saturate(a & 0xffff) | saturate(a >> 16) << 8;
      }));
}

}  // namespace

void register_valu_int(Ops& ops) {
  register_arithmetic(ops);
  register_bits(ops);
}

}  // namespace ark_emu
