#include "wave.h"

#include <bit>
#include <cmath>
#include <cstring>

#include "half.h"

namespace ark_emu {
namespace {

// Returns the lane from which `lane` reads under a DPP control (data exchange between lanes), or -1
// if there is none.
int dpp_source(unsigned ctrl, int lane, int lanes) {
  const int row = lane & ~15, in_row = lane & 15, n = static_cast<int>(ctrl & 15);
  if (ctrl < 0x100) return (lane & ~3) + static_cast<int>((ctrl >> (2 * (lane & 3))) & 3);
  switch (ctrl >> 4) {
    case 0x10: return in_row + n < 16 ? lane + n : -1;              // row_shl
    case 0x11: return in_row >= n ? lane - n : -1;                  // row_shr
    case 0x12: return row + ((in_row + 16 - n) & 15);               // row_ror
    case 0x15: return row + n;                                      // row_newbcast, row_share
    case 0x16: return row + (in_row ^ n);                           // row_xmask
    default: break;
  }
  switch (ctrl) {
    case 0x130: return lane + 1 < lanes ? lane + 1 : -1;            // wave_shl
    case 0x134: return (lane + 1) % lanes;                          // wave_rol
    case 0x138: return lane - 1;                                    // wave_shr
    case 0x13c: return (lane + lanes - 1) % lanes;                  // wave_ror
    case 0x140: return row + 15 - in_row;                           // row_mirror
    case 0x141: return (lane & ~7) + 7 - (lane & 7);                // row_half_mirror
    case 0x142: return row > 0 ? row - 1 : -1;                      // row_bcast15
    case 0x143: return lane >= 32 ? 31 : -1;                        // row_bcast31
    default: return -1;
  }
}

bool is_dpp(const Inst& inst) { return inst.ext == Ext::Dpp || inst.ext == Ext::Dpp8; }

// The source lanes of a DPP control. from: the lane that each lane reads. valid: one bit per lane,
// set if its source lane exists.
struct LaneMap {
  alignas(64) int32_t from[kLanes] = {};
  uint64_t valid = 0;

  void set(int lane, int source) {
    if (source < 0) return;
    from[lane] = source;
    valid |= 1ull << lane;
  }
  void move(uint32_t* to, const uint32_t* row, int lanes) const {
    for (int start = 0; start < lanes; start += 32) {
      for (int l = start; l < start + 32; l++) to[l] = row[from[l]];
    }
  }
  static LaneMap of_dpp8(uint32_t selectors) {
    LaneMap map;
    for (int l = 0; l < kLanes; l++) {
      map.set(l, (l & ~7) + static_cast<int>((selectors >> (3 * (l & 7))) & 7));
    }
    return map;
  }
  static const LaneMap& of_dpp(unsigned ctrl, int lanes) {
    constexpr unsigned kControls = 512;
    struct All {
      LaneMap of[2][kControls];
      All() {
        for (int wide = 0; wide < 2; wide++) {
          for (unsigned ctrl = 0; ctrl < kControls; ctrl++) {
            const int count = wide == 1 ? 64 : 32;
            for (int l = 0; l < count; l++) of[wide][ctrl].set(l, dpp_source(ctrl, l, count));
          }
        }
      }
    };
    static const All& all = *new All;   // never destroyed: grids may still run
    return all.of[lanes == 64 ? 1 : 0][ctrl % kControls];
  }
};

// The lanes that the row and bank masks of a DPP instruction leave active.
uint64_t selected_lanes(const Inst& inst) {
  uint64_t banks = 0, rows = 0;
  for (int k = 0; k < 4; k++) {
    if ((inst.bank_mask >> k) & 1) banks |= 0x000f000f000f000full << (4 * k);
    if ((inst.row_mask >> k) & 1) rows |= 0xffffull << (16 * k);
  }
  return banks & rows;
}

float scale_by_omod(float value, unsigned omod) {
  return omod == 1 ? value * 2.0f : omod == 2 ? value * 4.0f : value * 0.5f;
}

template <class T>
T clamp01(T value) {
  if (!(value > T(0))) return T(0);   // NaN too
  return value > T(1) ? T(1) : value;
}

}  // namespace

uint32_t Wave::condition(const Operand& operand) const {
  switch (operand.kind) {
    case Kind::Scc: return scc ? 1 : 0;
    case Kind::Vccz: return vcc() == 0 ? 1 : 0;
    case Kind::Execz: return exec() == 0 ? 1 : 0;
    default: return 0;
  }
}

uint64_t Wave::src_mask(const Operand& operand) const {
  return lanes == 64 ? scalar64(operand) : scalar32(operand);
}

// Returns source 0 with its lanes moved by the DPP control (data exchange between lanes). Records
// which lanes may be written.
const uint32_t* Wave::dpp_row(const Inst& inst, const uint32_t* from, uint32_t* tmp) {
  const bool dpp8 = inst.ext == Ext::Dpp8;
  LaneMap made;
  if (dpp8) made = LaneMap::of_dpp8(inst.dpp8);
  const LaneMap& map = dpp8 ? made : LaneMap::of_dpp(inst.dpp_ctrl, lanes);
  uint64_t valid = map.valid & full;
  const uint64_t active = exec();
  if (!inst.fetch_inactive && active != full) {
    alignas(64) uint32_t on[kLanes], moved[kLanes];
    bits_row(on, active, lanes);
    map.move(moved, on, lanes);
    valid &= row_bits(moved, lanes);
  }
  alignas(64) uint32_t moved[kLanes];
  map.move(moved, from, lanes);
  fill_row(tmp, 0, kLanes);
  blend_row(tmp, moved, valid, lanes);
  const bool zero_fill = inst.bound_ctrl || dpp8;
  dpp_lanes = selected_lanes(inst) & (zero_fill ? full : valid);
  return tmp;
}

// Applies the modifiers abs and neg of source k to the values in tmp, according to the operand's
// type.
void Wave::modify(const Inst& inst, int k, uint32_t* tmp) {
  const Ty ty = inst.src[k].ty;
  const uint32_t sign = ty == Ty::F32 ? 0x80000000u
                        : ty == Ty::F16 || ty == Ty::BF16 ? 0x8000u
                                                          : 0;
  if (sign == 0) return;
  const uint32_t keep = (inst.abs >> k) & 1 ? ~sign : ~0u, flip = (inst.neg >> k) & 1 ? sign : 0;
  for (int l = 0; l < kLanes; l++) tmp[l] = (tmp[l] & keep) ^ flip;
}

const uint32_t* Wave::src32_slow(const Inst& inst, int k, uint32_t* tmp) {
  const Operand& operand = inst.src[k];
  if (k == 0 && operand.kind == Kind::Vgpr && is_dpp(inst)) {
    dpp_row(inst, row(operand.reg), tmp);
  } else if (const uint32_t* raw = raw32(operand, tmp); raw != tmp) {
    std::memcpy(tmp, raw, static_cast<size_t>(lanes) * 4);
  }
  if (inst.plain_src) return tmp;
  if (inst.ext == Ext::Sdwa && k < 2 && inst.sel[k] < 6) {
    const int width = inst.sel[k] < 4 ? 8 : 16;
    const int shift = inst.sel[k] < 4 ? inst.sel[k] * 8 : (inst.sel[k] - 4) * 16;
    for (int l = 0; l < kLanes; l++) {
      const uint32_t value = tmp[l] >> shift << (32 - width);
      tmp[l] = inst.sext[k] ? static_cast<uint32_t>(static_cast<int32_t>(value) >> (32 - width))
                            : value >> (32 - width);
    }
  }
  modify(inst, k, tmp);
  return tmp;
}

const uint32_t* Wave::src16(const Inst& inst, int k, uint32_t* tmp) {
  src32_slow(inst, k, tmp);
  const bool high = ((inst.opsel >> k) & 1) != 0;
  // The modifiers abs and neg were applied to bit 15, the sign of the low half. If op_sel selects
  // the high half, they must apply to the high half instead.
  if (high && inst.ext != Ext::Sdwa) {
    const uint32_t keep = (inst.abs >> k) & 1 ? 0x7fffu : 0xffffu;
    const uint32_t flip = (inst.neg >> k) & 1 ? 0x8000u : 0;
    const Ty ty = inst.src[k].ty;
    const bool is_float = ty == Ty::F16 || ty == Ty::BF16;
    for (int l = 0; l < kLanes; l++) {
      const uint32_t value = tmp[l] >> 16;
      tmp[l] = is_float ? (value & keep) ^ flip : value;
    }
  } else {
    for (int l = 0; l < kLanes; l++) tmp[l] &= 0xffff;
  }
  return tmp;
}

const uint32_t* Wave::src64_slow(const Inst& inst, int k, uint32_t* tmp) {
  const Operand& operand = inst.src[k];
  if (k == 0 && operand.kind == Kind::Vgpr && is_dpp(inst)) {
    dpp_row(inst, row(operand.reg), tmp);
    dpp_row(inst, row(operand.reg + 1), tmp + kLanes);
  } else if (const uint32_t* raw = raw64(operand, tmp); raw != tmp) {
    std::memcpy(tmp, raw, kLanes * 8);
  }
  if (!inst.plain_src && operand.ty == Ty::F64) {
    const uint32_t keep = (inst.abs >> k) & 1 ? 0x7fffffffu : ~0u;
    const uint32_t flip = (inst.neg >> k) & 1 ? 0x80000000u : 0;
    for (int l = kLanes; l < 2 * kLanes; l++) tmp[l] = (tmp[l] & keep) ^ flip;
  }
  return tmp;
}

const uint32_t* Wave::same32(const Operand& operand, uint32_t* tmp) {
  fill_row(tmp, scalar32(operand), lanes);
  return tmp;
}

const uint32_t* Wave::same64(const Operand& operand, uint32_t* tmp) {
  const uint64_t value = scalar64(operand);
  fill_row(tmp, static_cast<uint32_t>(value), lanes);
  fill_row(tmp + kLanes, static_cast<uint32_t>(value >> 32), lanes);
  return tmp;
}

void Wave::blend(uint32_t* to, const uint32_t* from, uint64_t bits) {
  if (bits != full) {
    blend_row(to, from, bits, lanes);
  } else if (to != from) {
    std::memcpy(to, from, static_cast<size_t>(lanes) * 4);
  }
}

void Wave::put32(const Inst& inst, uint32_t* out) {
  if (inst.plain_dst) {
    blend(row(inst.dst[0].reg), out, exec());
  } else {
    put32_slow(inst, out);
  }
}

void Wave::put32_slow(const Inst& inst, uint32_t* out) {
  const Operand& dst = inst.dst[0];
  if (dst.kind != Kind::Vgpr) return;
  if (is_half(dst.ty)) {
    put16(inst, out);
    return;
  }
  if (dst.ty == Ty::F32 && (inst.omod != 0 || inst.clamp)) {
    for (int l = 0; l < kLanes; l++) {
      float value = std::bit_cast<float>(out[l]);
      if (inst.omod != 0) value = scale_by_omod(value, inst.omod);
      if (inst.clamp) value = clamp01(value);
      out[l] = std::bit_cast<uint32_t>(value);
    }
  }
  uint32_t* to = row(dst.reg);
  if (inst.ext == Ext::Sdwa && inst.dst_sel < 6) {
    const int width = inst.dst_sel < 4 ? 8 : 16;
    const int shift = inst.dst_sel < 4 ? inst.dst_sel * 8 : (inst.dst_sel - 4) * 16;
    const uint32_t field = (width == 8 ? 0xffu : 0xffffu) << shift;
    for (int l = 0; l < kLanes; l++) {
      uint32_t value = (out[l] << shift) & field;
      if (inst.dst_unused == 2) {
        value |= to[l] & ~field;
      } else if (inst.dst_unused == 1) {   // sign extends above, zero below
        value = static_cast<uint32_t>(static_cast<int32_t>(out[l] << (32 - width)) >>
                                      (32 - width))
                << shift;
      }
      out[l] = value;
    }
  }
  blend(to, out, is_dpp(inst) ? exec() & dpp_lanes : exec());
}

void Wave::put16(const Inst& inst, uint32_t* out) {
  const Operand& dst = inst.dst[0];
  if (dst.kind != Kind::Vgpr) return;
  uint32_t* to = row(dst.reg);
  if (dst.ty == Ty::F16 && (inst.omod != 0 || inst.clamp)) {
    for (int l = 0; l < kLanes; l++) {
      float value = half_to_float(static_cast<uint16_t>(out[l]));
      if (inst.omod != 0) value = scale_by_omod(value, inst.omod);
      if (inst.clamp) value = clamp01(value);
      out[l] = float_to_half(value);
    }
  }
  if (inst.ext == Ext::Sdwa) {
    Inst whole = inst;
    whole.dst[0].ty = Ty::B32;
    for (int l = 0; l < kLanes; l++) out[l] &= 0xffff;
    put32_slow(whole, out);
    return;
  }
  const bool keep = keep_high16 || (inst.op->flags & kKeepHigh) != 0;
  if ((inst.opsel & 8) != 0) {
    for (int l = 0; l < kLanes; l++) out[l] = out[l] << 16 | (to[l] & 0xffff);
  } else {
    for (int l = 0; l < kLanes; l++) out[l] = (out[l] & 0xffff) | (keep ? to[l] & 0xffff0000 : 0);
  }
  blend(to, out, is_dpp(inst) ? exec() & dpp_lanes : exec());
}

void Wave::put64(const Inst& inst, uint32_t* out) {
  const Operand& dst = inst.dst[0];
  if (dst.kind != Kind::Vgpr) return;
  if (dst.ty == Ty::F64 && (inst.omod != 0 || inst.clamp)) {
    for (int l = 0; l < kLanes; l++) {
      double value = std::bit_cast<double>(out[l] | static_cast<uint64_t>(out[kLanes + l]) << 32);
      if (inst.omod != 0) value *= inst.omod == 1 ? 2.0 : inst.omod == 2 ? 4.0 : 0.5;
      if (inst.clamp) value = clamp01(value);
      const uint64_t bits = std::bit_cast<uint64_t>(value);
      out[l] = static_cast<uint32_t>(bits);
      out[kLanes + l] = static_cast<uint32_t>(bits >> 32);
    }
  }
  const uint64_t bits = is_dpp(inst) ? exec() & dpp_lanes : exec();
  blend(row(dst.reg), out, bits);
  blend(row(dst.reg + 1), out + kLanes, bits);
}

void Wave::put_mask(const Inst& inst, int which, uint64_t bits) {
  bits &= exec();
  if (is_dpp(inst)) bits &= dpp_lanes;   // also for lanes that DPP disables
  if (lanes == 64) {
    put_scalar64(inst.dst[which], bits);
  } else {
    put_scalar32(inst.dst[which], static_cast<uint32_t>(bits));
  }
}

}  // namespace ark_emu
