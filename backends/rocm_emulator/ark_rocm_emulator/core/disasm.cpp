// Converts Inst to assembler text: operands, scalar and memory formats. The text uses LLVM's syntax
// and assembles to the same words again; the tests check this for every opcode.
#include "disasm.h"

#include <cstdio>
#include <cstring>

#include "ops.h"

namespace ark_emu {

std::string hex(uint32_t value) {
  char text[16];
  std::snprintf(text, sizeof text, "0x%x", value);
  return text;
}

std::string listed(std::initializer_list<std::string> parts) {
  std::string all;
  for (const std::string& part : parts) {
    if (part.empty()) continue;
    if (!all.empty()) all += ", ";
    all += part;
  }
  return all;
}

std::string Printer::registers(const char* file, unsigned reg, unsigned count) const {
  const std::string first = std::to_string(reg);
  if (count <= 1) return file + first;
  return std::string(file) + "[" + first + ":" + std::to_string(reg + count - 1) + "]";
}

std::string Printer::sgpr(unsigned reg, unsigned count) const {
  const auto half = [&](const char* name, unsigned base) {
    if (count >= 2) return std::string(name);
    return std::string(name) + (reg == base ? "_lo" : "_hi");
  };
  const unsigned m0 = rdna() ? 125 : 124;
  if (reg == m0) return "m0";
  if (rdna() && reg == 124) return "null";
  if (!rdna() && (reg == 102 || reg == 103)) return half("flat_scratch", 102);
  if (!rdna() && (reg == 104 || reg == 105)) return half("xnack_mask", 104);
  if (reg == 106 || reg == 107) return half("vcc", 106);
  if (reg == 126 || reg == 127) return half("exec", 126);
  if (reg >= 108 && reg < 124) return registers("ttmp", reg - 108, count);
  return registers("s", reg, count);
}

std::string Printer::vgpr(const Operand& operand) const {
  const unsigned count = operand.dwords > 0 ? operand.dwords : 1;
  if (operand.reg >= 256) return registers("a", operand.reg - 256, count);
  return registers("v", operand.reg, count);
}

std::string Printer::source(const Operand& operand) const {
  static const char* const kFloats[] = {"0.5",  "-0.5", "1.0",  "-1.0",
                                        "2.0",  "-2.0", "4.0",  "-4.0"};
  const unsigned enc = operand.enc;
  if (operand.kind == Kind::Vgpr) return vgpr(operand);
  const bool negative = operand.lo >= 0xffff8000 && operand.lo < 0xfffffff0;
  if (operand.literal && is_half(operand.ty) && negative) {
    return std::to_string(static_cast<int32_t>(operand.lo));   // its hexadecimal form has 32 bits
  }
  if (operand.literal) return hex(operand.ty == Ty::F64 ? operand.hi : operand.lo);
  if (enc < 128) {
    return sgpr(enc, operand.dwords == 0 ? 1 : operand.dwords);
  }
  if (enc <= 192) return std::to_string(static_cast<int>(enc) - 128);
  if (enc <= 208) return std::to_string(192 - static_cast<int>(enc));
  if (enc >= 240 && enc < 248) return kFloats[enc - 240];
  switch (enc) {
    case 235: return "src_shared_base";
    case 236: return "src_shared_limit";
    case 237: return "src_private_base";
    case 238: return "src_private_limit";
    case 248: return operand.dwords == 2 ? "0.15915494309189532" : "0.15915494";
    case 251: return "src_vccz";
    case 252: return "src_execz";
    case 253: return "src_scc";
    default: return "?" + std::to_string(enc);
  }
}

std::string Printer::cache_bits() const {
  std::string text;
  if (gfx940()) {
    if (inst.glc) text += " sc0";
    if (inst.slc) text += " nt";
    if (inst.scc_bit) text += " sc1";
    return text;
  }
  if (inst.glc) text += " glc";
  if (inst.slc) text += " slc";
  if (inst.dlc) text += " dlc";
  if (inst.scc_bit) text += " scc";
  return text;
}

std::string Printer::offset() const {
  return inst.imm == 0 ? "" : " offset:" + std::to_string(inst.imm);
}

namespace {

std::string hwreg(int32_t imm) {
  const unsigned bits = static_cast<unsigned>(imm) & 0xffff;
  return "hwreg(" + std::to_string(bits & 63) + ", " + std::to_string((bits >> 6) & 31) + ", " +
         std::to_string((bits >> 11) + 1) + ")";
}

}  // namespace

std::string Printer::scalar() const {
  const std::string& name = *inst.name;
  const auto dst = [&] {
    const Operand& d = inst.dst[0];
    return inst.op->dst_count == 0 ? "" : sgpr(d.enc, d.dwords);
  };
  if (inst.format == Format::SOPK) {
    const std::string imm = hex(static_cast<uint32_t>(inst.imm) & 0xffff);
    if (name == "s_getreg_b32") return listed({dst(), hwreg(inst.imm)});
    if (name == "s_setreg_b32") return listed({hwreg(inst.imm), source(inst.src[0])});
    if (name == "s_setreg_imm32_b32") return listed({hwreg(inst.imm), hex(inst.src[0].lo)});
    if (name.starts_with("s_waitcnt_")) {
      return listed({sgpr((inst.words[0] >> 16) & 127, 1), imm});
    }
    if (name == "s_call_b64") return listed({dst(), std::to_string(inst.imm)});
    return listed({inst.op->dst_count > 0 ? dst() : source(inst.src[0]), imm});
  }
  if (name.starts_with("s_sendmsg_rtn")) {
    return listed({dst(), "sendmsg(" + std::to_string(inst.words[0] & 0xff) + ", 0, 0)"});
  }
  if (name == "s_set_gpr_idx_on") {
    return listed({source(inst.src[0]), hex((inst.words[0] >> 8) & 0xff)});
  }
  std::string text = dst();
  for (int k = 0; k < inst.op->src_count; k++) {
    text = listed({text, source(inst.src[k])});
  }
  return text;
}

std::string Printer::program() const {
  const std::string& name = *inst.name;
  const unsigned imm = static_cast<unsigned>(inst.imm) & 0xffff;
  static const char* const kBare[] = {"s_endpgm",     "s_barrier",   "s_icache_inv",
                                      "s_wakeup",     "s_code_end",  "s_ttracedata",
                                      "s_wait_idle",  "s_set_gpr_idx_off"};
  for (const char* bare : kBare) {
    if (name == bare) return "";
  }
  if (name == "s_waitcnt") {
    const unsigned vm = rdna() ? imm >> 10 : (imm & 15) | (imm >> 14) << 4;
    const unsigned exp = rdna() ? imm & 7 : (imm >> 4) & 7;
    const unsigned lgkm = rdna() ? (imm >> 4) & 63 : (imm >> 8) & 15;
    const unsigned encoded = rdna() ? vm << 10 | lgkm << 4 | exp
                                    : (vm & 15) | (vm >> 4) << 14 | exp << 4 | lgkm << 8;
    if (encoded != imm) return hex(imm);
    std::string text;
    if (vm < 63) text += "vmcnt(" + std::to_string(vm) + ") ";
    if (exp < 7) text += "expcnt(" + std::to_string(exp) + ") ";
    if (lgkm < (rdna() ? 63u : 15u)) text += "lgkmcnt(" + std::to_string(lgkm) + ") ";
    if (text.empty()) return hex(imm);
    text.pop_back();
    return text;
  }
  if (name.starts_with("s_branch") || name.starts_with("s_cbranch")) {
    return std::to_string(inst.imm & 0xffff);
  }
  if (name == "s_nop" || name == "s_sleep" || name == "s_setprio" || name == "s_trap") {
    return std::to_string(imm);
  }
  return hex(imm);
}

std::string Printer::smem() const {
  if (inst.op->src_count == 0) {
    return inst.op->dst_count == 0 ? "" : sgpr(inst.dst[0].enc, inst.dst[0].dwords);
  }
  const std::string dst =
      inst.op->dst_count > 0 ? sgpr(inst.dst[0].enc, inst.dst[0].dwords) : "";
  std::string text = listed({dst, sgpr(inst.src[0].enc, inst.src[0].dwords)});
  const bool reg = inst.src[1].kind == Kind::Sgpr;
  if (!reg) {
    text += ", " + (inst.imm < 0 ? "-" + hex(static_cast<uint32_t>(-inst.imm))
                                 : hex(static_cast<uint32_t>(inst.imm)));
  } else {
    text += ", " + sgpr(inst.src[1].enc, 1);
    if (inst.has_saddr) {
      text += " offset:" + (inst.imm < 0 ? "-" + hex(static_cast<uint32_t>(-inst.imm))
                                         : hex(static_cast<uint32_t>(inst.imm)));
    }
  }
  return text + (inst.glc ? " glc" : "") + (inst.dlc ? " dlc" : "");
}

std::string Printer::ds() const {
  const std::string& name = *inst.name;
  std::string text = inst.op->dst_count > 0 ? vgpr(inst.dst[0]) : "";
  for (int k = 0; k < inst.op->src_count && k < 3; k++) {
    if (inst.src[k].kind == Kind::Vgpr) text = listed({text, vgpr(inst.src[k])});
  }
  const unsigned imm = static_cast<unsigned>(inst.imm) & 0xffff;
  const auto named = [&name](const char* part) { return name.find(part) != std::string::npos; };
  const bool pair = named("2_") || named("2st64") || named("2addr");
  if (pair) {
    if ((imm & 255) != 0) text += " offset0:" + std::to_string(imm & 255);
    if ((imm >> 8) != 0) text += " offset1:" + std::to_string(imm >> 8);
  } else if (imm != 0) {
    text += " offset:" + std::to_string(imm);
  }
  return inst.gds ? text + " gds" : text;
}

std::string Printer::flat() const {
  const std::string& name = *inst.name;
  const bool atomic = name.find("_atomic_") != std::string::npos;
  const bool to_lds = inst.lds || name.find("_lds_") != std::string::npos;
  const bool returns = inst.op->dst_count > 0 && (!atomic || inst.glc);
  const Operand& address = inst.src[0];
  const bool vector = address.kind == Kind::Vgpr;
  std::string where = vector ? registers("v", address.reg, address.dwords) : "off";
  std::string base;
  if (inst.format != Format::FLAT) {
    base = inst.has_saddr ? sgpr(inst.src[2].enc, inst.src[2].dwords) : "off";
  }
  const std::string data = inst.op->src_count > 1 && !to_lds ? vgpr(inst.src[1]) : "";
  return listed({returns && !to_lds ? vgpr(inst.dst[0]) : "", where, data, base}) + offset() +
         cache_bits() + (inst.lds ? " lds" : "");
}

std::string Printer::mubuf() const {
  if (inst.op->src_count == 0) {
    const std::string bits = cache_bits();
    return bits.empty() ? "" : bits.substr(1);
  }
  const bool vector = inst.offen || inst.idxen;
  const Operand& value = inst.op->src_count > 1 ? inst.src[1] : inst.dst[0];
  const std::string where =
      vector ? registers("v", inst.src[0].reg, inst.src[0].dwords) : std::string("off");
  std::string text = listed({inst.lds ? "" : vgpr(value), where,
                             sgpr(inst.src[2].enc, inst.src[2].dwords), source(inst.src[3])});
  if (inst.idxen) text += " idxen";
  if (inst.offen) text += " offen";
  text += offset() + cache_bits();
  return inst.lds ? text + " lds" : text;
}

std::string disassemble(const Inst& inst, Arch arch) {
  if (inst.op == nullptr) return ".long " + hex(inst.words[0]);
  const Printer p{inst, arch};
  std::string name = *inst.name, rest;
  switch (inst.format) {
    case Format::SOP1: case Format::SOP2: case Format::SOPC: case Format::SOPK:
      rest = p.scalar();
      break;
    case Format::SOPP: rest = p.program(); break;
    case Format::SMEM: rest = p.smem(); break;
    case Format::DS: rest = p.ds(); break;
    case Format::FLAT: case Format::GLOBAL: case Format::SCRATCH: rest = p.flat(); break;
    case Format::MUBUF: rest = p.mubuf(); break;
    case Format::VOPD: return p.vopd();
    case Format::VOP3P: rest = p.vop3p(); break;
    default:
      name += p.suffix();
      rest = p.valu();
  }
  return rest.empty() ? name : name + " " + rest;
}

}  // namespace ark_emu
