// Decoding of the encodings that all architectures share: scalar formats, and the operand fields of
// LDS, flat and buffer instructions.
#include "decode.h"

namespace ark_emu {

int Decoder::finish(std::span<const uint32_t> words, Inst& inst, bool literal, int length) {
  if (!literal) return length;
  if (words.size() <= static_cast<size_t>(length)) return 0;
  for (Operand& src : inst.src) {
    if (src.enc == 255 && src.kind == Kind::None) set_literal(src, words[length]);
  }
  return length + 1;
}

int Decoder::scalar_format(std::span<const uint32_t> words, Inst& inst) const {
  const uint32_t word = words[0];
  const unsigned sdst = bits(word, 22, 16);
  bool literal = false;
  switch (bits(word, 31, 23)) {
    case 0x17d:
      if (!lookup(inst, Format::SOP1, bits(word, 15, 8))) return 0;
      if (inst.op->dst_count > 0) set_sgpr(inst.dst[0], sdst);
      if (inst.op->src_count > 0) source(inst.src[0], bits(word, 7, 0), literal);
      return finish(words, inst, literal, 1);
    case 0x17e:
      if (!lookup(inst, Format::SOPC, bits(word, 22, 16))) return 0;
      source(inst.src[0], bits(word, 7, 0), literal);
      if (inst.op->src_count > 1) source(inst.src[1], bits(word, 15, 8), literal);
      return finish(words, inst, literal, 1);
    case 0x17f:
      if (!lookup(inst, Format::SOPP, bits(word, 22, 16))) return 0;
      inst.imm = static_cast<int16_t>(word & 0xffff);
      return 1;
    default: break;
  }
  if (bits(word, 31, 28) == 0xb) return sopk(words, inst);
  if (!lookup(inst, Format::SOP2, bits(word, 29, 23))) return 0;
  set_sgpr(inst.dst[0], sdst);
  source(inst.src[0], bits(word, 7, 0), literal);
  source(inst.src[1], bits(word, 15, 8), literal);
  return finish(words, inst, literal, 1);
}

int Decoder::sopk(std::span<const uint32_t> words, Inst& inst) const {
  const unsigned sdst = bits(words[0], 22, 16);
  if (!lookup(inst, Format::SOPK, bits(words[0], 27, 23))) return 0;
  inst.imm = static_cast<int16_t>(words[0] & 0xffff);
  if (inst.op->dst_count > 0) set_sgpr(inst.dst[0], sdst);
  if (inst.op->src_count == 0) return 1;
  if (inst.op->src[0] == Ty::Literal) {   // s_setreg_imm32_b32
    if (words.size() < 2) return 0;
    set_literal(inst.src[0], words[1]);
    return 2;
  }
  set_sgpr(inst.src[0], sdst);
  return 1;
}

void Decoder::vector_dst(Inst& inst, unsigned field) const {
  if (inst.op->dst_count == 0) return;
  if (inst.dst[0].ty == Ty::Scalar || inst.dst[0].ty == Ty::Mask) {
    set_sgpr(inst.dst[0], field);
  } else {
    set_vgpr(inst.dst[0], field);
  }
}

bool Decoder::vop3_head(std::span<const uint32_t> words, Inst& inst, unsigned vop1,
                        unsigned own) const {
  constexpr unsigned kVop2 = 0x100;   // below it are comparisons
  const unsigned op = bits(words[0], 25, 16);
  const bool found = op < kVop2  ? lookup(inst, Format::VOPC, op)
                     : op < vop1 ? lookup(inst, Format::VOP2, op - kVop2)
                     : op < own  ? lookup(inst, Format::VOP1, op - vop1)
                                 : lookup(inst, Format::VOP3, op);
  if (!found) return false;
  inst.vop3_form = true;
  inst.clamp = bit(words[0], 15);
  inst.omod = static_cast<uint8_t>(bits(words[1], 28, 27));
  inst.neg = static_cast<uint8_t>(bits(words[1], 31, 29));
  vector_dst(inst, bits(words[0], 7, 0));
  if (inst.dst[1].ty == Ty::Mask) {
    set_sgpr(inst.dst[1], bits(words[0], 14, 8));
  } else {
    inst.abs = static_cast<uint8_t>(bits(words[0], 10, 8));
    inst.opsel = static_cast<uint8_t>(bits(words[0], 14, 11));
  }
  return true;
}

unsigned Decoder::dpp16(Inst& inst, uint32_t word, bool modifiers) {
  inst.ext = Ext::Dpp;
  inst.dpp_ctrl = static_cast<uint16_t>(bits(word, 16, 8));
  inst.fetch_inactive = bit(word, 18);
  inst.bound_ctrl = bit(word, 19);
  inst.bank_mask = static_cast<uint8_t>(bits(word, 27, 24));
  inst.row_mask = static_cast<uint8_t>(bits(word, 31, 28));
  if (modifiers) {
    inst.neg = static_cast<uint8_t>(bits(word, 20, 20) | bits(word, 22, 22) << 1);
    inst.abs = static_cast<uint8_t>(bits(word, 21, 21) | bits(word, 23, 23) << 1);
  }
  return bits(word, 7, 0);
}

int Decoder::literal_operand(std::span<const uint32_t> words, Inst& inst, int length) {
  for (int k = 1; k < 3; k++) {
    if (length == 0 || inst.op->src[k] != Ty::Literal) continue;
    if (words.size() < 2) return 0;
    inst.src[k].ty = inst.op->src[0];
    inst.src[k].dwords = 1;
    inst.src[k].enc = 255;
    set_literal(inst.src[k], words[1]);
    length = 2;
  }
  return length;
}

void Decoder::ds_operands(uint32_t word, Inst& inst, bool acc) {
  const unsigned fields[3] = {bits(word, 7, 0), bits(word, 15, 8), bits(word, 23, 16)};
  for (int k = 0; k < inst.op->src_count && k < 3; k++) {
    if (inst.src[k].ty == Ty::None) continue;
    set_vgpr(inst.src[k], fields[k], k > 0 && acc);
    if (inst.src[k].ty == Ty::Ptr) inst.src[k].dwords = 1;
  }
  if (inst.op->dst_count > 0) set_vgpr(inst.dst[0], bits(word, 31, 24), acc);
}

void Decoder::flat_operands(uint32_t word, Inst& inst, bool vaddr, bool acc) const {
  const bool scratch = inst.format == Format::SCRATCH;
  if (vaddr) set_vgpr(inst.src[0], bits(word, 7, 0));
  inst.src[0].dwords = inst.has_saddr || scratch ? 1 : 2;
  if (inst.op->src_count > 1) set_vgpr(inst.src[1], bits(word, 15, 8), acc);
  if (inst.has_saddr) {
    set_sgpr(inst.src[2], bits(word, 22, 16));
    inst.src[2].dwords = scratch ? 1 : 2;
    inst.src[2].ty = scratch ? Ty::B32 : Ty::B64;
  }
  if (inst.op->dst_count > 0) set_vgpr(inst.dst[0], bits(word, 31, 24), acc);
}

int Decoder::buffer_operands(uint32_t word, Inst& inst, bool acc) const {
  if (inst.offen || inst.idxen) {
    set_vgpr(inst.src[0], bits(word, 7, 0));
    inst.src[0].dwords = inst.offen && inst.idxen ? 2 : 1;
  }
  if (inst.op->src_count > 1) set_vgpr(inst.src[1], bits(word, 15, 8), acc);
  if (inst.op->dst_count > 0 && !inst.lds) set_vgpr(inst.dst[0], bits(word, 15, 8), acc);
  inst.src[2].ty = Ty::B128;
  inst.src[2].dwords = 4;
  set_sgpr(inst.src[2], bits(word, 20, 16) * 4);
  bool literal = false;
  inst.src[3].ty = Ty::B32;
  inst.src[3].dwords = 1;
  source(inst.src[3], bits(word, 31, 24), literal);
  return literal ? 0 : 2;
}

}  // namespace ark_emu
