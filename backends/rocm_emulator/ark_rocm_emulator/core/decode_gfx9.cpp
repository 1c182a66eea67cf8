// Decoding of the encodings of gfx90a, gfx942 and gfx950 (AMD CDNA2, CDNA3, CDNA4 instruction set
// documents, chapter "Microcode formats").
#include "decode.h"
#include "opcodes_gfx9.h"
#include "ops.h"

namespace ark_emu {
namespace {

// A matrix product with scales (gfx950) is encoded as two instructions of format VOP3P. kLoadScale
// is the opcode of the first one. The second one has the opcode of the product without scales. In
// the opcode tables below, the number of the product with scales is the opcode of the product
// without scales plus kScaled.
constexpr unsigned kLoadScale = 44, kScaled = 128;

std::vector<OpcodeText> tables_for(Arch arch) {
  std::vector<OpcodeText> all;
  for (const auto* part : {&kGfx9Scalar, &kGfx9Memory, &kGfx9Vector, &kGfx9Compare}) {
    all.insert(all.end(), part->begin(), part->end());
  }
  if (arch == Arch::gfx90a) all.insert(all.end(), kGfx90aChanges.begin(), kGfx90aChanges.end());
  if (arch == Arch::gfx950) all.insert(all.end(), kGfx950Changes.begin(), kGfx950Changes.end());
  return all;
}

class Gfx9Decoder : public Decoder {
 public:
  explicit Gfx9Decoder(Arch arch) : Decoder(arch, tables_for(arch)) {}

 protected:
  int decode_words(std::span<const uint32_t> words, Inst& inst) const override {
    const uint32_t word = words[0];
    inst.opsel_hi = 0;
    if (bits(word, 31, 31) == 0) {
      const unsigned op = bits(word, 30, 25);
      if (op == 0x3f) return vop1(words, inst);
      if (op == 0x3e) return vopc(words, inst);
      return vop2(words, inst);
    }
    if (bits(word, 31, 30) == 2) return scalar_format(words, inst);
    if (words.size() < 2) return 0;
    switch (bits(word, 31, 26)) {
      case 0x30: return smem(words, inst);
      case 0x34: return bits(word, 31, 23) == 0x1a7 ? vop3p(words, inst) : vop3(words, inst);
      case 0x36: return ds(words, inst);
      case 0x37: return flat(words, inst);
      case 0x38: return mubuf(words, inst);
      default: return 0;
    }
  }

 private:
  int smem(std::span<const uint32_t> words, Inst& inst) const {
    const uint32_t word = words[0];
    if (!lookup(inst, Format::SMEM, bits(word, 25, 18))) return 0;
    inst.glc = bits(word, 16, 16) != 0;
    if (inst.op->dst_count > 0) set_sgpr(inst.dst[0], bits(word, 12, 6));
    if (inst.op->src_count == 0) return 2;
    inst.src[0].dwords = inst.op->src[0] == Ty::B128 ? 4 : 2;
    set_sgpr(inst.src[0], bits(word, 5, 0) * 2);
    const bool imm = bits(word, 17, 17) != 0, offset_en = bits(word, 14, 14) != 0;
    if (imm) inst.imm = sign_extend(bits(words[1], 20, 0), 21);
    inst.src[1].ty = Ty::B32;
    if (offset_en || !imm) {
      set_sgpr(inst.src[1], offset_en ? bits(words[1], 31, 25) : bits(words[1], 6, 0));
      inst.src[1].dwords = 1;
    }
    inst.has_saddr = imm;   // both an immediate and a register: printed differently
    return 2;
  }

  // Decodes source 0 of VOP1, VOP2 and VOPC with its DPP and SDWA words. compare: true for VOPC.
  // Returns the length, or 0 on error.
  int source0(std::span<const uint32_t> words, Inst& inst, bool compare) const {
    const unsigned enc = bits(words[0], 8, 0);
    if (enc != 249 && enc != 250) {
      bool literal = false;
      source(inst.src[0], enc, literal);
      return finish(words, inst, literal, 1);
    }
    if (words.size() < 2) return 0;
    const uint32_t word = words[1];
    if (enc == 250) {
      set_vgpr(inst.src[0], dpp16(inst, word, true));
      inst.fetch_inactive = false;   // a bit of RDNA only
      return 2;
    }
    inst.ext = Ext::Sdwa;
    bool literal = false;
    source(inst.src[0], bits(word, 7, 0) + (bits(word, 23, 23) != 0 ? 0 : 256), literal);
    if (inst.op->src_count > 1 && inst.src[1].kind == Kind::Vgpr && bits(word, 31, 31) != 0) {
      const unsigned enc1 = bits(words[0], 16, 9);
      source(inst.src[1], enc1, literal);
    }
    if (literal) return 0;
    inst.sel[0] = static_cast<uint8_t>(bits(word, 18, 16));
    inst.sel[1] = static_cast<uint8_t>(bits(word, 26, 24));
    inst.sext[0] = bits(word, 19, 19) != 0;
    inst.sext[1] = bits(word, 27, 27) != 0;
    inst.neg = static_cast<uint8_t>(bits(word, 20, 20) | bits(word, 28, 28) << 1);
    inst.abs = static_cast<uint8_t>(bits(word, 21, 21) | bits(word, 29, 29) << 1);
    if (compare) {
      if (bits(word, 15, 15) != 0) set_sgpr(inst.dst[0], bits(word, 14, 8));
    } else {
      inst.dst_sel = static_cast<uint8_t>(bits(word, 10, 8));
      inst.dst_unused = static_cast<uint8_t>(bits(word, 12, 11));
      inst.clamp = bits(word, 13, 13) != 0;
      inst.omod = static_cast<uint8_t>(bits(word, 15, 14));
    }
    return 2;
  }

  int vop1(std::span<const uint32_t> words, Inst& inst) const {
    if (!lookup(inst, Format::VOP1, bits(words[0], 16, 9))) return 0;
    vector_dst(inst, bits(words[0], 24, 17));
    const bool plain = bits(words[0], 8, 0) != 249 && bits(words[0], 8, 0) != 250;
    const int length = inst.op->src_count > 0 ? source0(words, inst, false) : plain ? 1 : 0;
    if (inst.op->name == "v_accvgpr_mov_b32") {
      inst.dst[0].reg += 256;
      if (inst.src[0].kind == Kind::Vgpr) inst.src[0].reg += 256;
    }
    implicit(inst);
    finish_valu(inst);
    return length;
  }

  int vop2(std::span<const uint32_t> words, Inst& inst) const {
    if (!lookup(inst, Format::VOP2, bits(words[0], 30, 25))) return 0;
    vector_dst(inst, bits(words[0], 24, 17));
    // In fmamk, the operands are src0, literal, src1; in fmaak, they are src0, src1, literal.
    const int second = inst.op->src[1] == Ty::Literal ? 2 : 1;
    set_vgpr(inst.src[second], bits(words[0], 16, 9));
    const int length = literal_operand(words, inst, source0(words, inst, false));
    implicit(inst);
    finish_valu(inst);
    return length;
  }

  int vopc(std::span<const uint32_t> words, Inst& inst) const {
    if (!lookup(inst, Format::VOPC, bits(words[0], 24, 17))) return 0;
    set_vgpr(inst.src[1], bits(words[0], 16, 9));
    const int length = source0(words, inst, true);
    implicit(inst);
    finish_valu(inst);
    return length;
  }

  int vop3(std::span<const uint32_t> words, Inst& inst) const {
    if (!vop3_head(words, inst, 0x140, 0x1c0)) return 0;
    return sources3(words, inst);
  }

  int sources3(std::span<const uint32_t> words, Inst& inst) const {
    bool literal = false;
    const unsigned enc[3] = {bits(words[1], 8, 0), bits(words[1], 17, 9), bits(words[1], 26, 18)};
    for (int k = 0; k < inst.op->src_count && k < 3; k++) {
      if (inst.src[k].ty != Ty::Tied) source(inst.src[k], enc[k], literal);
    }
    if (literal) return 0;
    implicit(inst);
    finish_valu(inst);
    return 2;
  }

  int vop3p(std::span<const uint32_t> words, Inst& inst) const {
    const unsigned op = bits(words[0], 22, 16);
    if (op == kLoadScale && words.size() >= 4) {
      const int length = scaled_mfma(words, inst);
      if (length != 0) return length;
    }
    if (!lookup(inst, Format::VOP3P, op)) return 0;
    return vop3p_fields(words, inst);
  }

  // Decodes a matrix product with scales (gfx950): two words that name the scales, then the
  // product. The product's abid bit is set if it uses the scales.
  int scaled_mfma(std::span<const uint32_t> words, Inst& inst) const {
    const auto product = words.subspan(2);
    const bool uses = bits(product[0], 31, 23) == 0x1a7 && bits(product[0], 11, 11) != 0;
    if (!uses || !lookup(inst, Format::VOP3P, kScaled + bits(product[0], 22, 16))) return 0;
    const auto scales = std::make_shared<Inst>();
    if (!lookup(*scales, Format::VOP3P, kLoadScale)) return 0;
    if (vop3p_fields(words, *scales) == 0 || vop3p_fields(product, inst) == 0) return 0;
    inst.second = scales;
    return 4;
  }

  int vop3p_fields(std::span<const uint32_t> words, Inst& inst) const {
    vector_dst(inst, bits(words[0], 7, 0));
    const std::string& name = inst.op->name;
    const bool sparse = name.starts_with("v_smfmac");
    const bool mai = (name.starts_with("v_mfma") && name != "v_mfma_ld_scale_b32") || sparse ||
                     name.starts_with("v_accvgpr");
    if (!mai) {
      inst.abs = static_cast<uint8_t>(bits(words[0], 10, 8));   // neg_hi
      inst.opsel = static_cast<uint8_t>(bits(words[0], 13, 11));
      inst.opsel_hi =
          static_cast<uint8_t>(bits(words[1], 28, 27) | bits(words[0], 14, 14) << 2);
      inst.clamp = bits(words[0], 15, 15) != 0;
      inst.neg = static_cast<uint8_t>(bits(words[1], 31, 29));
      return sources3(words, inst);
    }
    const int length = sources3(words, inst);
    inst.cbsz = static_cast<uint8_t>(bits(words[0], 10, 8));
    inst.abid = static_cast<uint8_t>(bits(words[0], 14, 11));
    inst.blgp = static_cast<uint8_t>(bits(words[1], 31, 29));
    if (name.ends_with("_f8f6f4")) {   // cbsz and blgp are formats: 8, 8, 6, 6 or 4 bits
      constexpr uint8_t kWords[5] = {8, 8, 6, 6, 4};
      if (inst.cbsz > 4 || inst.blgp > 4) return 0;
      inst.src[0].dwords = kWords[inst.cbsz];
      inst.src[1].dwords = kWords[inst.blgp];
    }
    const bool accvgpr_write = name == "v_accvgpr_write_b32";
    const bool acc_cd = bits(words[0], 15, 15) != 0 || accvgpr_write;
    if (acc_cd) inst.dst[0].reg += 256;
    if (acc_cd && !sparse && inst.src[2].kind == Kind::Vgpr) inst.src[2].reg += 256;
    // These bits select accumulation registers (acc). For v_accvgpr_write they are ignored: the
    // assembler sets them, although the instruction's source is an ordinary VGPR.
    for (int k = 0; k < 2 && !accvgpr_write; k++) {
      if (inst.src[k].kind == Kind::Vgpr && bits(words[1], 27 + k, 27 + k) != 0) {
        inst.src[k].reg += 256;
      }
    }
    return length;
  }

  int ds(std::span<const uint32_t> words, Inst& inst) const {
    if (!lookup(inst, Format::DS, bits(words[0], 24, 17))) return 0;
    inst.imm = static_cast<int32_t>(words[0] & 0xffff);
    inst.gds = bits(words[0], 16, 16) != 0;
    const bool acc = bits(words[0], 25, 25) != 0;
    ds_operands(words[1], inst, acc);
    return 2;
  }

  // True for loads that write LDS directly. gfx90a marks them by a bit; later architectures have
  // separate opcodes.
  static bool to_lds(Inst& inst) {
    const std::string prefix = "global_load_";
    if (!inst.op->name.starts_with(prefix)) return false;
    const OpInfo* op = Ops::all().find("global_load_lds_" + inst.op->name.substr(prefix.size()));
    if (op == nullptr) return false;
    inst.op = op;
    inst.run = op->handlers.run;
    inst.lds = true;
    inst.dst[0] = Operand();
    return true;
  }

  int flat(std::span<const uint32_t> words, Inst& inst) const {
    const uint32_t word = words[0];
    const unsigned seg = bits(word, 15, 14);
    constexpr Format kSegments[4] = {Format::FLAT, Format::SCRATCH, Format::GLOBAL, Format::None};
    if (seg == 3 || !lookup(inst, kSegments[seg], bits(word, 24, 18))) return 0;
    if (arch_ == Arch::gfx90a && seg == 2 && bits(word, 13, 13) != 0 && !to_lds(inst)) return 0;
    inst.imm = seg == 0 ? static_cast<int32_t>(bits(word, 11, 0))
                        : sign_extend(bits(word, 12, 0), 13);
    inst.glc = bits(word, 16, 16) != 0;
    inst.slc = bits(word, 17, 17) != 0;
    inst.scc_bit = bits(word, 25, 25) != 0;
    const bool acc = bits(words[1], 23, 23) != 0;
    const unsigned saddr = bits(words[1], 22, 16);
    inst.has_saddr = seg != 0 && saddr != 0x7f;
    bool vaddr = true;
    if (seg == 1) vaddr = arch_ == Arch::gfx90a ? !inst.has_saddr : bits(word, 13, 13) != 0;
    if (seg == 1 && arch_ != Arch::gfx90a) {
      inst.imm = sign_extend(bits(word, 12, 0), 13);
    }
    flat_operands(words[1], inst, vaddr, acc);
    return 2;
  }

  int mubuf(std::span<const uint32_t> words, Inst& inst) const {
    const uint32_t word = words[0];
    if (!lookup(inst, Format::MUBUF, bits(word, 24, 18))) return 0;
    inst.glc = bits(word, 14, 14) != 0;
    inst.scc_bit = bits(word, 15, 15) != 0;
    inst.slc = bits(word, 17, 17) != 0;
    if (inst.op->src_count == 0) return 2;   // cache control
    inst.imm = static_cast<int32_t>(bits(word, 11, 0));
    inst.offen = bits(word, 12, 12) != 0;
    inst.idxen = bits(word, 13, 13) != 0;
    inst.lds = bits(word, 16, 16) != 0;
    const bool acc = bits(words[1], 23, 23) != 0;
    return buffer_operands(words[1], inst, acc);
  }
};

}  // namespace

std::unique_ptr<Decoder> make_gfx9_decoder(Arch arch) {
  return std::make_unique<Gfx9Decoder>(arch);
}

}  // namespace ark_emu
