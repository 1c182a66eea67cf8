// Converts Inst to assembler text: the vector formats with their modifiers, DPP, SDWA and dual
// issue.
#include <algorithm>
#include <cstdlib>

#include "disasm.h"

namespace ark_emu {
namespace {

bool is_float(Ty ty) {
  return ty == Ty::F16 || ty == Ty::BF16 || ty == Ty::F32 || ty == Ty::F64 || ty == Ty::PkF16 ||
         ty == Ty::PkF32;
}

std::string bit_list(const char* name, unsigned bits, int count) {
  std::string text = std::string(" ") + name + ":[";
  for (int k = 0; k < count; k++) {
    if (k > 0) text += ",";
    text += (bits >> k) & 1 ? "1" : "0";
  }
  return text + "]";
}

// The number of source operands that the assembler text lists; it omits implied ones.
int written_sources(const OpInfo& op) {
  int count = 0;
  for (int k = 0; k < op.src_count; k++) count += op.src[k] != Ty::Tied ? 1 : 0;
  return count;
}

}  // namespace

std::string Printer::vector_source(int k) const {
  const Operand& operand = inst.src[k];
  std::string text = source(operand);
  const bool high = ((inst.opsel >> k) & 1) != 0;
  // RDNA3 has 16-bit registers, and op_sel is then written as the name of the half.
  if (rdna() && operand.kind == Kind::Vgpr && is_half(inst.op->src[k])) text += high ? ".h" : ".l";
  if (inst.ext == Ext::Sdwa && k < 2 && inst.sext[k]) return "sext(" + text + ")";
  return with_sign(k, text);
}

std::string Printer::with_sign(int k, std::string text) const {
  const Kind kind = inst.src[k].kind;
  const bool plain = kind == Kind::Vgpr || kind == Kind::Sgpr;
  if ((inst.abs >> k) & 1) text = "|" + text + "|";
  if ((inst.neg >> k) & 1) text = plain || text[0] == '|' ? "-" + text : "neg(" + text + ")";
  return text;
}

std::string Printer::vector_dst(int k) const {
  const Operand& operand = inst.dst[k];
  if (operand.ty == Ty::Mask) return sgpr(operand.enc, operand.dwords);
  if (operand.ty == Ty::Scalar) return sgpr(operand.enc, 1);
  std::string text = vgpr(operand);
  if (rdna() && is_half(operand.ty)) text += (inst.opsel & 8) != 0 ? ".h" : ".l";
  return text;
}

std::string Printer::suffix() const {
  const std::string dpp = inst.ext == Ext::Dpp || inst.ext == Ext::Dpp8 ? "_dpp" : "";
  if (inst.ext == Ext::Sdwa) return "_sdwa";
  if (inst.format == Format::VOP3) return dpp.empty() ? "" : "_e64" + dpp;
  if (inst.vop3_form) return "_e64" + dpp;
  if (!dpp.empty()) return dpp;
  // Instructions that exist only in the 32-bit encoding. The names of other instructions have a
  // suffix for the encoding (_e32, _e64).
  static const char* const kNoSuffix[] = {
      "v_fmamk_f32", "v_fmaak_f32", "v_fmamk_f16", "v_fmaak_f16", "v_madmk_f16", "v_madak_f16",
      "v_madmk_f32", "v_madak_f32",
      "v_swap_b32", "v_swap_b16", "v_nop", "v_readfirstlane_b32", "v_accvgpr_mov_b32",
      "v_permlane64_b32", "v_swaprel_b32", "v_clrexcp"};
  const bool bare = std::any_of(std::begin(kNoSuffix), std::end(kNoSuffix),
                                [this](const char* name) { return *inst.name == name; });
  return bare ? "" : "_e32";
}

std::string Printer::extension() const {
  std::string text;
  if (inst.ext == Ext::Dpp8) {
    text = " dpp8:[";
    for (int k = 0; k < 8; k++) {
      text += (k > 0 ? "," : "") + std::to_string((inst.dpp8 >> (3 * k)) & 7);
    }
    return text + (inst.fetch_inactive ? "] fi:1" : "]");
  }
  if (inst.ext == Ext::Dpp) {
    const unsigned ctrl = inst.dpp_ctrl;
    const std::string n = std::to_string(ctrl & 15);
    if (ctrl < 0x100) {
      text = " quad_perm:[";
      for (int k = 0; k < 4; k++) {
        text += (k > 0 ? "," : "") + std::to_string((ctrl >> (2 * k)) & 3);
      }
      text += "]";
    } else {
      switch (ctrl >> 4) {
        case 0x10: text = " row_shl:" + n; break;
        case 0x11: text = " row_shr:" + n; break;
        case 0x12: text = " row_ror:" + n; break;
        case 0x15: text = (rdna() ? " row_share:" : " row_newbcast:") + n; break;
        case 0x16: text = " row_xmask:" + n; break;
        default: break;
      }
      switch (ctrl) {
        case 0x130: text = " wave_shl:1"; break;
        case 0x134: text = " wave_rol:1"; break;
        case 0x138: text = " wave_shr:1"; break;
        case 0x13c: text = " wave_ror:1"; break;
        case 0x140: text = " row_mirror"; break;
        case 0x141: text = " row_half_mirror"; break;
        case 0x142: text = " row_bcast:15"; break;
        case 0x143: text = " row_bcast:31"; break;
        default: break;
      }
    }
    text += " row_mask:" + hex(inst.row_mask) + " bank_mask:" + hex(inst.bank_mask);
    if (inst.bound_ctrl) text += " bound_ctrl:1";
    if (inst.fetch_inactive) text += " fi:1";
    return text;
  }
  if (inst.ext != Ext::Sdwa) return text;
  static const char* const kSelect[] = {"BYTE_0", "BYTE_1", "BYTE_2", "BYTE_3",
                                        "WORD_0", "WORD_1", "DWORD"};
  static const char* const kUnused[] = {"UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE"};
  const std::string& name = inst.op->name;
  const bool whole = name.find("f32_fp8") != name.npos || name.find("f32_bf8") != name.npos;
  if (inst.format != Format::VOPC && !whole) {
    text += std::string(" dst_sel:") + kSelect[std::min<int>(inst.dst_sel, 6)];
    text += std::string(" dst_unused:") + kUnused[std::min<int>(inst.dst_unused, 2)];
  }
  text += std::string(" src0_sel:") + kSelect[std::min<int>(inst.sel[0], 6)];
  if (inst.format != Format::VOP1) {
    text += std::string(" src1_sel:") + kSelect[std::min<int>(inst.sel[1], 6)];
  }
  return text;
}

std::string Printer::output_modifiers() const {
  static const char* const kScale[] = {"", " mul:2", " mul:4", " div:2"};
  return std::string(inst.clamp ? " clamp" : "") + kScale[inst.omod];
}

std::string Printer::valu() const {
  const OpInfo& op = *inst.op;
  // On RDNA3, v_cmpx writes only EXEC, so the text has no destination.
  const bool no_dst = rdna() && inst.format == Format::VOPC && (op.flags & kWritesExec) != 0;
  std::string text;
  for (int k = 0; k < op.dst_count && !no_dst; k++) text = listed({text, vector_dst(k)});
  bool halves = false, high_scalar = false;
  for (int k = 0; k < op.src_count; k++) {
    if (op.src[k] == Ty::Tied) continue;
    text = listed({text, vector_source(k)});
    halves = halves || is_half(op.src[k]);
    high_scalar |= is_half(op.src[k]) && ((inst.opsel >> k) & 1) != 0 &&
                   inst.src[k].kind != Kind::Vgpr;
  }
  halves = halves || is_half(op.dst[0]);
  // On CDNA, the modifier op_sel is printed as a list of bits. On RDNA3, which has 16-bit
  // registers, the operands' names contain the selected halves instead; op_sel is printed only for
  // halves of scalar registers and for operations on whole registers. If two bits of op_sel select
  // the destination's byte, all bits are printed.
  const bool all_bits = inst.name->starts_with("v_cvt_scalef32_pk_fp4_");
  const int count = all_bits ? 3 : written_sources(op);
  const bool whole_dst = rdna() && halves && !is_half(op.dst[0]);
  const unsigned high_dst = whole_dst ? 0 : (inst.opsel >> 3) & 1u;
  const unsigned selected = (inst.opsel & ((1u << count) - 1)) | high_dst << count;
  if (inst.vop3_form && selected != 0 && (!rdna() || !halves || high_scalar)) {
    text += bit_list("op_sel", selected, count + 1);
  }
  return text + output_modifiers() + extension();
}

std::string Printer::vop3p() const {
  const OpInfo& op = *inst.op;
  std::string text = listed({vector_dst(0)});
  const int count = written_sources(op);
  const bool mfma = op.name.starts_with("v_mfma") || op.name.starts_with("v_smfmac");
  const bool mixed = inst.name->starts_with("v_fma_mix");
  for (int k = 0; k < op.src_count; k++) {
    if (op.src[k] == Ty::Tied) continue;
    const std::string one = source(inst.src[k]);
    text = listed({text, mixed ? with_sign(k, one) : one});
  }
  if (op.name.starts_with("v_accvgpr")) return text;
  if (inst.second != nullptr) {   // the scales of A and B
    const Inst& scales = *inst.second;
    text = listed({text, source(scales.src[0]), source(scales.src[1])});
    text += bit_list("op_sel", scales.opsel & 3, 3) + bit_list("op_sel_hi", scales.opsel_hi & 3, 3);
  }
  if (mfma) {
    if (inst.cbsz != 0) text += " cbsz:" + std::to_string(inst.cbsz);
    const int abid = inst.abid & (inst.second != nullptr ? ~1 : ~0);   // bit 0: has scales
    if (abid != 0) text += " abid:" + std::to_string(abid);
    if (inst.blgp != 0) {
      text += is_float(op.src[0]) && op.src[0] == Ty::F64 ? bit_list("neg", inst.blgp, 3)
                                                           : " blgp:" + std::to_string(inst.blgp);
    }
    return text;
  }
  const unsigned all = (1u << count) - 1;
  const unsigned usual = mixed ? 0 : all;
  if ((inst.opsel & all) != 0) text += bit_list("op_sel", inst.opsel, count);
  if ((inst.opsel_hi & all) != usual) text += bit_list("op_sel_hi", inst.opsel_hi, count);
  if (!mixed && (inst.neg & all) != 0) text += bit_list("neg_lo", inst.neg, count);
  if (!mixed && (inst.abs & all) != 0) text += bit_list("neg_hi", inst.abs, count);
  return text + (inst.clamp ? " clamp" : "") + extension();
}

std::string Printer::vopd() const {
  const auto half = [this](const Inst& part) {
    const Printer p{part, arch};
    std::string text = p.vgpr(part.dst[0]);
    for (int k = 0; k < part.op->src_count; k++) {
      const Ty ty = part.op->src[k];
      if (ty != Ty::Tied && ty != Ty::Mask) text = listed({text, p.source(part.src[k])});
    }
    return *part.name + " " + text;
  };
  return half(inst) + " :: " + half(*inst.second);
}

}  // namespace ark_emu
