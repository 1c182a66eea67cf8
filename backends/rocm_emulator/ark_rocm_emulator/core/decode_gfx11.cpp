// Decoding of gfx1100's encodings (AMD RDNA3 instruction set document, chapter "Microcode
// formats").
#include "decode.h"
#include "exec_gfx11.h"
#include "opcodes_gfx11.h"

namespace ark_emu {
namespace {

constexpr unsigned kExec = 126, kDpp8 = 233, kDpp8Inactive = 234, kDpp16 = 250;

std::vector<OpcodeText> all_tables() {
  std::vector<OpcodeText> all;
  for (const auto* part : {&kGfx11Scalar, &kGfx11Memory, &kGfx11Vector, &kGfx11Compare}) {
    all.insert(all.end(), part->begin(), part->end());
  }
  return all;
}

class Gfx11Decoder : public Decoder {
 public:
  Gfx11Decoder() : Decoder(Arch::gfx1100, all_tables()) {}

 protected:
  int decode_words(std::span<const uint32_t> words, Inst& inst) const override {
    const uint32_t word = words[0];
    if (!bit(word, 31)) {
      const unsigned op = bits(word, 30, 25);
      if (op == 0x3f) return vop1(words, inst);
      if (op == 0x3e) return vopc(words, inst);
      return vop2(words, inst);
    }
    if (bits(word, 31, 30) == 2) return scalar_format(words, inst);
    if (words.size() < 2) return 0;
    switch (bits(word, 31, 26)) {
      case 0x32: return vopd(words, inst);
      case 0x33: return bits(word, 31, 24) == 0xcc ? vop3p(words, inst) : 0;
      case 0x35: return vop3(words, inst);
      case 0x36: return ds(words, inst);
      case 0x37: return flat(words, inst);
      case 0x38: return mubuf(words, inst);
      case 0x3d: return smem(words, inst);
      default: return 0;
    }
  }

 private:
  // Sets implied operands and the fast-path flags. If a 16-bit source is tied to the destination,
  // it is the half of the register that the instruction writes.
  void finish_operands(Inst& inst) const {
    implicit(inst);
    for (int k = 0; k < inst.op->src_count; k++) {
      if (inst.op->src[k] == Ty::Tied && is_half(inst.dst[0].ty) && (inst.opsel & 8) != 0) {
        inst.opsel |= static_cast<uint8_t>(1 << k);
      }
    }
    finish_valu(inst);
  }

  int smem(std::span<const uint32_t> words, Inst& inst) const {
    const uint32_t word = words[0];
    if (!lookup(inst, Format::SMEM, bits(word, 25, 18))) return 0;
    inst.glc = bit(word, 14);
    inst.dlc = bit(word, 13);
    if (inst.op->dst_count > 0) set_sgpr(inst.dst[0], bits(word, 12, 6));
    if (inst.op->src_count == 0) return 2;
    inst.src[0].dwords = inst.op->src[0] == Ty::B128 ? 4 : 2;
    set_sgpr(inst.src[0], bits(word, 5, 0) * 2);
    inst.imm = sign_extend(bits(words[1], 20, 0), 21);
    inst.src[1].ty = Ty::B32;
    const unsigned soffset = bits(words[1], 31, 25);
    if (soffset != null_) {
      set_sgpr(inst.src[1], soffset);
      inst.src[1].dwords = 1;
      inst.has_saddr = true;
    }
    return 2;
  }

  // Decodes source k of a 32-bit encoding. There a 16-bit VGPR operand can be only v0 to v127, and
  // the top bit of the number selects the half of the register. In the 64-bit encodings, op_sel
  // selects the half.
  void short_source(Inst& inst, int k, unsigned enc, bool& literal) const {
    if (enc >= 256 && is_half(inst.src[k].ty)) {
      if (bit(enc, 7)) inst.opsel |= static_cast<uint8_t>(1 << k);
      enc &= ~128u;
    }
    source(inst.src[k], enc, literal);
  }

  void short_dst(Inst& inst, unsigned field) const {
    if (inst.op->dst_count == 0) return;
    if (is_half(inst.dst[0].ty)) {
      if (bit(field, 7)) inst.opsel |= 8;
      field &= 127;
    }
    vector_dst(inst, field);
  }

  static bool is_dpp(unsigned enc) {
    return enc == kDpp8 || enc == kDpp8Inactive || enc == kDpp16;
  }

  // Decodes the DPP dword (exchange of data between lanes). modifiers: true if it also has neg and
  // abs. Returns the VGPR number of source 0.
  static unsigned dpp(Inst& inst, unsigned enc, uint32_t word, bool modifiers) {
    if (enc == kDpp16) return dpp16(inst, word, modifiers);
    inst.ext = Ext::Dpp8;
    inst.dpp8 = bits(word, 31, 8);
    inst.fetch_inactive = enc == kDpp8Inactive;
    return bits(word, 7, 0);
  }

  // Decodes source 0 of VOP1, VOP2 and VOPC, with the dwords that follow the first one. Returns the
  // length.
  int source0(std::span<const uint32_t> words, Inst& inst) const {
    const unsigned enc = bits(words[0], 8, 0);
    bool literal = false;
    if (!is_dpp(enc)) {
      short_source(inst, 0, enc, literal);
      return finish(words, inst, literal, 1);
    }
    if (words.size() < 2) return 0;
    short_source(inst, 0, 256 + dpp(inst, enc, words[1], true), literal);
    return 2;
  }

  int vop1(std::span<const uint32_t> words, Inst& inst) const {
    if (!lookup(inst, Format::VOP1, bits(words[0], 16, 9))) return 0;
    short_dst(inst, bits(words[0], 24, 17));
    const bool plain = !is_dpp(bits(words[0], 8, 0));
    const int length = inst.op->src_count > 0 ? source0(words, inst) : plain ? 1 : 0;
    finish_operands(inst);
    return length;
  }

  int vop2(std::span<const uint32_t> words, Inst& inst) const {
    if (!lookup(inst, Format::VOP2, bits(words[0], 30, 25))) return 0;
    short_dst(inst, bits(words[0], 24, 17));
    // In fmamk, the operands are src0, literal, src1; in fmaak, they are src0, src1, literal.
    const int second = inst.op->src[1] == Ty::Literal ? 2 : 1;
    bool literal = false;
    short_source(inst, second, 256 + bits(words[0], 16, 9), literal);
    const int length = literal_operand(words, inst, source0(words, inst));
    finish_operands(inst);
    return length;
  }

  int vopc(std::span<const uint32_t> words, Inst& inst) const {
    if (!lookup(inst, Format::VOPC, bits(words[0], 24, 17))) return 0;
    bool literal = false;
    short_source(inst, 1, 256 + bits(words[0], 16, 9), literal);
    if ((inst.op->flags & kWritesExec) != 0) set_sgpr(inst.dst[0], kExec);
    const int length = source0(words, inst);
    finish_operands(inst);
    return length;
  }

  int vop3(std::span<const uint32_t> words, Inst& inst) const {
    if (!vop3_head(words, inst, 0x180, 0x200)) return 0;
    return sources3(words, inst);
  }

  int sources3(std::span<const uint32_t> words, Inst& inst) const {
    bool literal = false;
    int length = 2;
    unsigned enc[3] = {bits(words[1], 8, 0), bits(words[1], 17, 9), bits(words[1], 26, 18)};
    if (is_dpp(enc[0])) {
      if (words.size() < 3) return 0;
      enc[0] = 256 + dpp(inst, enc[0], words[2], false);
      length = 3;
    }
    for (int k = 0; k < inst.op->src_count && k < 3; k++) {
      if (inst.src[k].ty == Ty::Literal) return 0;  // no 64-bit form
      if (inst.src[k].ty != Ty::Tied) source(inst.src[k], enc[k], literal);
    }
    finish_operands(inst);
    return finish(words, inst, literal, length);
  }

  int vop3p(std::span<const uint32_t> words, Inst& inst) const {
    if (!lookup(inst, Format::VOP3P, bits(words[0], 22, 16))) return 0;
    vector_dst(inst, bits(words[0], 7, 0));
    inst.abs = static_cast<uint8_t>(bits(words[0], 10, 8));  // neg_hi
    inst.opsel = static_cast<uint8_t>(bits(words[0], 13, 11));
    inst.opsel_hi = static_cast<uint8_t>(bits(words[1], 28, 27) | bits(words[0], 14, 14) << 2);
    inst.clamp = bit(words[0], 15);
    inst.neg = static_cast<uint8_t>(bits(words[1], 31, 29));
    return sources3(words, inst);
  }

  // Decodes one half of a dual-issue instruction (VOPD). The first half, X, is stored in `inst`
  // itself, the second, Y, in a separate Inst.
  bool vopd_half(Inst& inst, unsigned op, unsigned src0, unsigned src1, unsigned dst,
                 bool& literal) const {
    if (!lookup(inst, Format::VOPD, op)) return false;
    set_vgpr(inst.dst[0], dst);
    source(inst.src[0], src0, literal);
    const int second = inst.op->src[1] == Ty::Literal ? 2 : 1;
    if (inst.op->src_count > 1) set_vgpr(inst.src[second], src1);
    for (int k = 1; k < 3; k++) {
      if (inst.op->src[k] != Ty::Literal) continue;
      inst.src[k].ty = inst.op->src[0];
      inst.src[k].dwords = 1;
      inst.src[k].enc = 255;
      literal = true;
    }
    return true;
  }

  int vopd(std::span<const uint32_t> words, Inst& inst) const {
    bool literal = false;
    Inst other;
    const unsigned dst_x = bits(words[1], 31, 24);
    const unsigned dst_y = bits(words[1], 23, 17) << 1 | (~dst_x & 1);
    if (!vopd_half(inst, bits(words[0], 25, 22), bits(words[0], 8, 0), bits(words[0], 16, 9),
                   dst_x, literal) ||
        !vopd_half(other, bits(words[0], 21, 17), bits(words[1], 8, 0), bits(words[1], 16, 9),
                   dst_y, literal)) {
      return 0;
    }
    other.pc = inst.pc;
    const int length = finish(words, inst, literal, 2);
    if (length == 0) return 0;
    finish(words, other, literal, 2);
    for (Inst* half : {&inst, &other}) {
      finish_operands(*half);
    }
    inst.first = inst.run;
    inst.first_whole = whole_of(inst);
    other.whole = whole_of(other);
    inst.run = nullptr;
    if (inst.first != nullptr && other.run != nullptr) set_vopd_handlers(inst, other);
    inst.second = std::make_shared<const Inst>(other);
    return length;
  }

  int ds(std::span<const uint32_t> words, Inst& inst) const {
    if (!lookup(inst, Format::DS, bits(words[0], 25, 18))) return 0;
    inst.imm = static_cast<int32_t>(words[0] & 0xffff);
    inst.gds = bit(words[0], 17);
    ds_operands(words[1], inst, false);
    return 2;
  }

  int flat(std::span<const uint32_t> words, Inst& inst) const {
    const uint32_t word = words[0];
    const unsigned seg = bits(word, 17, 16);
    constexpr Format kSegments[4] = {Format::FLAT, Format::SCRATCH, Format::GLOBAL, Format::None};
    if (seg == 3 || !lookup(inst, kSegments[seg], bits(word, 24, 18))) return 0;
    inst.imm = seg == 0 ? static_cast<int32_t>(bits(word, 11, 0))
                        : sign_extend(bits(word, 12, 0), 13);
    inst.glc = bit(word, 14);
    inst.dlc = bit(word, 13);
    inst.slc = bit(word, 15);
    const unsigned saddr = bits(words[1], 22, 16);
    inst.has_saddr = seg != 0 && saddr != null_;
    flat_operands(words[1], inst, seg != 1 || bit(words[1], 23), false);
    return 2;
  }

  int mubuf(std::span<const uint32_t> words, Inst& inst) const {
    const uint32_t word = words[0];
    if (!lookup(inst, Format::MUBUF, bits(word, 25, 18))) return 0;
    inst.glc = bit(word, 14);
    inst.dlc = bit(word, 13);
    inst.slc = bit(word, 12);
    if (inst.op->src_count == 0) return 2;  // cache control
    inst.imm = static_cast<int32_t>(bits(word, 11, 0));
    inst.offen = bit(words[1], 22);
    inst.idxen = bit(words[1], 23);
    return buffer_operands(words[1], inst, false);
  }
};

}  // namespace

std::unique_ptr<Decoder> make_gfx11_decoder(Arch) { return std::make_unique<Gfx11Decoder>(); }

}  // namespace ark_emu
