// Handlers of instructions that RDNA3 has and CDNA lacks: dual issue, 16-bit moves and logic, lane
// permutes within rows, fused 16-bit multiply-adds, mixed-sign dot products, and scalar
// instructions that are only hints. Semantics from AMD's RDNA3 instruction set document, chapter
// "Instructions".
#include "exec_gfx11.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <string>

#include "floats.h"
#include "lanes.h"

namespace ark_emu {
namespace {

using U32 = uint32_t;
using I32 = int32_t;

// The handler of an operation on three f16 sources. F takes its arguments, and returns its result,
// in one floating-point type.
template <class F>
Handler half_of_three(F) {
  return [](Wave& w, const Inst& i) {
    alignas(64) Row t0, t1, t2, out;
    const U32 *a = w.src16(i, 0, t0), *b = w.src16(i, 1, t1), *c = w.src16(i, 2, t2);
    half_lanes<F>(w, a, b, c, out);
    w.put16(i, out);
  };
}

// Truncates to an integer between low and high; NaN gives 0.
I32 saturate(float value, float low, float high) {
  if (std::isnan(value)) return 0;
  return static_cast<I32>(std::trunc(std::min(std::max(value, low), high)));
}

void nothing(Wave&, const Inst&) {}

void set_mode(Wave& w, U32 mode) {
  w.mode = mode;
  w.default_mode = (mode & 0xff) == 0xf0;
}

// s_sendmsg_rtn: compiled code uses only one of its messages, the one that returns the time.
void sendmsg_rtn(Wave& w, const Inst& i) {
  constexpr unsigned kGetRealtime = 0x83;
  static const Handler real_time = Ops::all().find("s_memrealtime")->handlers.run;
  if (i.src[0].enc != kGetRealtime) {
    throw Fault{ErrorKind::UnknownOpcode,
                "s_sendmsg_rtn with message " + std::to_string(i.src[0].enc) + " is not emulated"};
  }
  real_time(w, i);
}

// v_permlane16_b32 and v_permlanex16_b32: 16 selectors of four bits; op_sel[0] fetches from
// inactive lanes, op_sel[1] writes 0 where the source lane is inactive. kOtherRow: true for
// v_permlanex16, which reads the other row of 16 lanes.
template <bool kOtherRow>
void permlane16(Wave& w, const Inst& i) {
  const U32* from = w.row(i.src[0].reg);
  const uint64_t select = w.scalar32(i.src[1]) | static_cast<uint64_t>(w.scalar32(i.src[2])) << 32;
  const bool fetch_inactive = (i.opsel & 1) != 0, zero_fill = (i.opsel & 2) != 0;
  const uint64_t exec = w.exec();
  uint64_t writable = 0;
  Row out = {};
  for (int l = 0; l < w.lanes; l++) {
    const int row = (l & ~15) ^ (kOtherRow ? 16 : 0);
    const int source = row + static_cast<int>((select >> (4 * (l & 15))) & 15);
    const bool valid = fetch_inactive || ((exec >> source) & 1) != 0;
    if (valid) out[l] = from[source];
    if (valid || zero_fill) writable |= 1ull << l;
  }
  w.blend(w.row(i.dst[0].reg), out, exec & writable);
}

// v_permlane64_b32: exchanges the halves of a wave of 64 lanes. A wave of 32 has no other half.
void permlane64(Wave& w, const Inst& i) {
  if (w.lanes == 32) return;
  const U32* from = w.row(i.src[0].reg);
  Row out;
  for (int l = 0; l < kLanes; l++) out[l] = from[l ^ 32];
  w.blend(w.row(i.dst[0].reg), out, w.exec());
}

// Dot products of bytes or nibbles (v_dot4, v_dot8 with mixed signs). Bit k of neg is set if source
// k is signed.
template <int kBits>
void dot_mixed(Wave& w, const Inst& i) {
  Row tmp_a, tmp_b, tmp_c, out;
  const U32* a = w.src32(i, 0, tmp_a);
  const U32* b = w.src32(i, 1, tmp_b);
  const U32* c = w.src32(i, 2, tmp_c);
  const auto field = [](U32 word, int k, bool is_signed) -> int64_t {
    const U32 top = word << (32 - kBits * (k + 1));
    return is_signed ? static_cast<I32>(top) >> (32 - kBits)
                     : static_cast<int64_t>(top >> (32 - kBits));
  };
  for (int l = 0; l < kLanes; l++) {
    int64_t sum = static_cast<I32>(c[l]);
    for (int k = 0; k < 32 / kBits; k++) {
      sum += field(a[l], k, (i.neg & 1) != 0) * field(b[l], k, (i.neg & 2) != 0);
    }
    if (i.clamp) sum = std::clamp<int64_t>(sum, INT32_MIN, INT32_MAX);
    out[l] = static_cast<U32>(sum);
  }
  w.blend(w.row(i.dst[0].reg), out, w.exec());
}

void cndmask_b16(Wave& w, const Inst& i) {
  Row tmp_a, tmp_b, out;
  const U32* a = w.src16(i, 0, tmp_a);
  const U32* b = w.src16(i, 1, tmp_b);
  const uint64_t mask = w.src_mask(i.src[2]);
  for (int l = 0; l < kLanes; l++) out[l] = (mask >> l) & 1 ? b[l] : a[l];
  w.put16(i, out);
}

// v_dot2_f16_f16 and v_dot2_bf16_bf16: the sum of two products and an addend, rounded once.
template <bool kBf16>
void dot2_16(Wave& w, const Inst& i) {
  Row tmp_a, tmp_b, tmp_c, out;
  const U32* a = w.src32(i, 0, tmp_a);
  const U32* b = w.src32(i, 1, tmp_b);
  const U32* c = w.src16(i, 2, tmp_c);
  const auto wide = [](U32 bits) -> double {
    const auto half = static_cast<uint16_t>(bits);
    return kBf16 ? bf16_to_float(half) : half_to_float(half);
  };
  for (int l = 0; l < kLanes; l++) {
    const double sum =
        wide(a[l]) * wide(b[l]) + wide(a[l] >> 16) * wide(b[l] >> 16) + wide(c[l]);
    out[l] = kBf16 ? float_to_bf16(static_cast<float>(sum))
                   : double_to_half(sum, Round::Nearest);
  }
  w.put16(i, out);
}

void swap_b16(Wave& w, const Inst& i) {
  Row tmp_a, tmp_b;
  const U32* a = w.src16(i, 0, tmp_a);
  Inst back = i;   // the destination as a source and the source as the destination
  back.src[0] = i.dst[0];
  back.dst[0] = i.src[0];
  back.opsel = static_cast<uint8_t>((i.opsel & 8) >> 3 | (i.opsel & 1) << 3);
  const U32* b = w.src16(back, 0, tmp_b);
  Row to_dst, to_src;
  std::copy(a, a + kLanes, to_dst);
  std::copy(b, b + kLanes, to_src);
  w.put16(i, to_dst);
  w.put16(back, to_src);
}

template <bool kSigned>
void cvt_pk_16_f32(Wave& w, const Inst& i) {
  Row tmp_a, tmp_b, out;
  const U32* a = w.src32(i, 0, tmp_a);
  const U32* b = w.src32(i, 1, tmp_b);
  const auto narrow = [](U32 bits) {
    const float value = std::bit_cast<float>(bits);
    const I32 whole = kSigned ? saturate(value, -32768, 32767) : saturate(value, 0, 65535);
    return static_cast<U32>(whole) & 0xffff;
  };
  for (int l = 0; l < kLanes; l++) out[l] = narrow(a[l]) | narrow(b[l]) << 16;
  w.put32(i, out);
}

template <bool kSigned>
void cvt_32_16(Wave& w, const Inst& i) {
  Row tmp, out;
  const U32* a = w.src16(i, 0, tmp);
  for (int l = 0; l < kLanes; l++) {
    out[l] = kSigned ? static_cast<U32>(static_cast<int16_t>(a[l])) : a[l];
  }
  w.put32(i, out);
}

// v_sat_pk_u8_i16: converts two 16-bit integers, with saturation, to two bytes in one 16-bit
// register.
void sat_pk_u8_i16(Wave& w, const Inst& i) {
  Row tmp, out;
  const U32* a = w.src32(i, 0, tmp);
  const auto byte = [](U32 half) {
    return static_cast<U32>(std::clamp<I32>(static_cast<int16_t>(half), 0, 255));
  };
  for (int l = 0; l < kLanes; l++) out[l] = byte(a[l]) | byte(a[l] >> 16) << 8;
  w.put16(i, out);
}

// v_movrel*: the register number of an operand plus an index in M0. The index applies to the
// destination (movreld), to the source (movrels) or to both.
unsigned relative(const Wave& w, const Operand& operand, U32 by) {
  const uint64_t reg = uint64_t(operand.reg) + by;
  if (operand.kind != Kind::Vgpr || reg > 255) {
    throw Fault{ErrorKind::OutOfBounds, "M0 = " + std::to_string(w.m0()) +
                                            " leads a relative move beyond v255"};
  }
  return static_cast<unsigned>(reg);
}

// v_movrelsd_2 and v_swaprel (kSwap): M0 has separate indices, bits 9:0 for the source and bits
// 25:16 for the destination.
template <bool kSwap>
void movrel_2(Wave& w, const Inst& i) {
  U32* from = w.row(relative(w, i.src[0], w.m0() & 0x3ff));
  U32* to = w.row(relative(w, i.dst[0], (w.m0() >> 16) & 0x3ff));
  Row old;
  std::copy(to, to + kLanes, old);
  w.blend(to, from, w.exec());
  if (kSwap) w.blend(from, old, w.exec());
}

template <bool kSource, bool kDestination>
void movrel(Wave& w, const Inst& i) {
  Inst moved = i;
  if (kSource) moved.src[0].reg = static_cast<uint16_t>(relative(w, i.src[0], w.m0()));
  if (kDestination) moved.dst[0].reg = static_cast<uint16_t>(relative(w, i.dst[0], w.m0()));
  Row tmp, out;
  const U32* a = w.src32(moved, 0, tmp);
  std::copy(a, a + kLanes, out);
  w.put32(moved, out);
}

// The other 16-bit multiply-adds are v_fma_f16 with the operands in a different order.
void register_fused16(Ops& ops) {
  const OpInfo* fma = ops.find("v_fma_f16");
  if (fma == nullptr) return;
  ops.add("v_fmamk_f16", "f16=f16,lit,f16", fma->handlers.run, fma->flags);
  ops.add("v_fmaak_f16", "f16=f16,f16,lit", fma->handlers.run, fma->flags);
}

void register_minmax(Ops& ops) {
  ops.add("v_maxmin_f32", "f32=f32,f32,f32", float3([](float a, float b, float c) {
            return min_number(max_number(a, b), c);
          }),
          kFloat);
  ops.add("v_minmax_f32", "f32=f32,f32,f32", float3([](float a, float b, float c) {
            return max_number(min_number(a, b), c);
          }),
          kFloat);
  ops.add("v_maxmin_f16", "f16=f16,f16,f16", half_of_three([](auto a, auto b, auto c) {
            return min_number(max_number(a, b), c);
          }),
          kFloat | kMode64);
  ops.add("v_minmax_f16", "f16=f16,f16,f16", half_of_three([](auto a, auto b, auto c) {
            return max_number(min_number(a, b), c);
          }),
          kFloat | kMode64);
  ops.add("v_maxmin_u32", "u32=u32,u32,u32",
          int3([](U32 a, U32 b, U32 c) { return std::min(std::max(a, b), c); }));
  ops.add("v_minmax_u32", "u32=u32,u32,u32",
          int3([](U32 a, U32 b, U32 c) { return std::max(std::min(a, b), c); }));
  ops.add("v_maxmin_i32", "i32=i32,i32,i32", int3([](U32 a, U32 b, U32 c) {
            return U32(std::min(std::max(I32(a), I32(b)), I32(c)));
          }));
  ops.add("v_minmax_i32", "i32=i32,i32,i32", int3([](U32 a, U32 b, U32 c) {
            return U32(std::max(std::min(I32(a), I32(b)), I32(c)));
          }));
}

void register_scalar(Ops& ops) {
  for (const char* hint :
       {"s_clause", "s_delay_alu", "s_waitcnt_depctr", "s_wait_idle", "s_wait_event",
        "s_set_inst_prefetch_distance", "s_ttracedata_imm", "s_gl1_inv"}) {
    ops.add(hint, "=", nothing);
  }
  // Instructions that wait for one counter each (such as s_waitcnt_vscnt). As with s_waitcnt, the
  // instruction contains the value to wait for.
  if (const OpInfo* wait = ops.find("s_waitcnt")) {
    for (const char* name :
         {"s_waitcnt_vscnt", "s_waitcnt_vmcnt", "s_waitcnt_expcnt", "s_waitcnt_lgkmcnt"}) {
      ops.add(name, "=", wait->handlers.run);
    }
  }
  ops.add("s_sendmsg_rtn_b64", "b64=b32", sendmsg_rtn);
  ops.add("s_round_mode", "=",
          [](Wave& w, const Inst& i) { set_mode(w, (w.mode & ~0xfu) | (i.imm & 0xf)); });
  ops.add("s_denorm_mode", "=",
          [](Wave& w, const Inst& i) { set_mode(w, (w.mode & ~0xf0u) | (i.imm & 0xf) << 4); });
  ops.add("s_pack_hl_b32_b16", "b32=b32,b32", [](Wave& w, const Inst& i) {
    w.put_scalar32(i.dst[0], w.scalar32(i.src[0]) >> 16 | w.scalar32(i.src[1]) << 16);
  });
}

// Execute one half of a dual-issue instruction (VOPD): half_x the X half, half_y the Y half.
// kWhole: true for use while all lanes are active.
template <bool kWhole>
void half_x(Wave& w, const Inst& i) {
  (kWhole ? i.first_whole : i.first)(w, i);
}

template <bool kWhole>
void half_y(Wave& w, const Inst& i) {
  (kWhole ? i.second->whole : i.second->run)(w, *i.second);
}

template <bool kWhole>
Handler halves(const Inst& inst, const Inst& other) {
  const auto reads = [](const Inst& half, const Operand& dst) {
    return std::any_of(std::begin(half.src), std::end(half.src), [&dst](const Operand& src) {
      return src.kind == Kind::Vgpr && src.reg == dst.reg;
    });
  };
  if (!reads(other, inst.dst[0])) {
    return [](Wave& w, const Inst& i) {
      half_x<kWhole>(w, i);
      half_y<kWhole>(w, i);
    };
  }
  if (!reads(inst, other.dst[0])) {
    return [](Wave& w, const Inst& i) {
      half_y<kWhole>(w, i);
      half_x<kWhole>(w, i);
    };
  }
  // Each half reads a register that the other half writes. So X's result is saved, and X's
  // destination is restored, before Y runs on the old values.
  return [](Wave& w, const Inst& i) {
    uint32_t before[kLanes], after[kLanes];
    uint32_t* row = w.row(i.dst[0].reg);
    std::copy(row, row + kLanes, before);
    half_x<kWhole>(w, i);
    std::copy(row, row + kLanes, after);
    std::copy(before, before + kLanes, row);
    half_y<kWhole>(w, i);
    std::copy(after, after + kLanes, row);
  };
}

}  // namespace

void set_vopd_handlers(Inst& inst, const Inst& other) {
  inst.run = halves<false>(inst, other);
  inst.whole = halves<true>(inst, other);
}

void register_gfx11(Ops& ops) {
  register_scalar(ops);
  register_fused16(ops);
  register_minmax(ops);
  register_wmma(ops);
  ops.add("v_mov_b16", "b16=b16", short1([](uint16_t a) { return a; }));
  ops.add("v_not_b16", "b16=b16", short1([](uint16_t a) { return ~a; }));
  ops.add("v_and_b16", "b16=b16,b16", short2([](uint16_t a, uint16_t b) { return a & b; }));
  ops.add("v_or_b16", "b16=b16,b16", short2([](uint16_t a, uint16_t b) { return a | b; }));
  ops.add("v_xor_b16", "b16=b16,b16", short2([](uint16_t a, uint16_t b) { return a ^ b; }));
  ops.add("v_xor3_b32", "b32=b32,b32,b32",
          int3([](U32 a, U32 b, U32 c) { return a ^ b ^ c; }));
  ops.add("v_cndmask_b16", "f16=f16,f16,m", cndmask_b16);
  ops.add("v_sat_pk_u8_i16_half", "b16=b32", sat_pk_u8_i16);
  ops.add("v_cvt_i32_i16", "i32=i16", cvt_32_16<true>);
  ops.add("v_cvt_u32_u16", "u32=u16", cvt_32_16<false>);
  ops.add("v_cvt_pk_i16_f32", "b32=f32,f32", cvt_pk_16_f32<true>, kFloat);
  ops.add("v_cvt_pk_u16_f32", "b32=f32,f32", cvt_pk_16_f32<false>, kFloat);
  ops.add("v_movreld_b32", "b32=b32", movrel<false, true>);
  ops.add("v_movrels_b32", "b32=b32", movrel<true, false>);
  ops.add("v_movrelsd_b32", "b32=b32", movrel<true, true>);
  ops.add("v_movrelsd_2_b32", "b32=b32", movrel_2<false>);
  ops.add("v_swaprel_b32", "b32=b32", movrel_2<true>);
  ops.add("v_pipeflush", "=", nothing);
  ops.add("v_permlane16_b32", "b32=b32,b32,b32", permlane16<false>, kNoModifiers);
  ops.add("v_permlanex16_b32", "b32=b32,b32,b32", permlane16<true>, kNoModifiers);
  ops.add("v_permlane64_b32", "b32=b32", permlane64, kNoModifiers);
  ops.add("v_swap_b16", "b16=b16", swap_b16);
  ops.add("v_dot2_f16_f16", "f16=b32,b32,f16", dot2_16<false>);
  ops.add("v_dot2_bf16_bf16", "bf16=b32,b32,bf16", dot2_16<true>);
  ops.add("v_dot4_i32_iu8", "i32=b32,b32,i32", dot_mixed<8>);
  ops.add("v_dot8_i32_iu4", "i32=b32,b32,i32", dot_mixed<4>);
}

}  // namespace ark_emu
