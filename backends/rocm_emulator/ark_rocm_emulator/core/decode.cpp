#include "decode.h"

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <sstream>

#include "ops.h"
#include "wave.h"

namespace ark_emu {
namespace {

constexpr unsigned kVcc = 106;

struct FloatConstant {
  uint16_t f16, bf16;
  uint32_t f32;
  uint64_t f64;
};

// The constants that source encodings 240 to 248 stand for: +-0.5, +-1, +-2, +-4, 1/(2 pi); each as
// f16, f32 and f64.
constexpr FloatConstant kFloats[9] = {
    {0x3800, 0x3f00, 0x3f000000, 0x3fe0000000000000},
    {0xb800, 0xbf00, 0xbf000000, 0xbfe0000000000000},
    {0x3c00, 0x3f80, 0x3f800000, 0x3ff0000000000000},
    {0xbc00, 0xbf80, 0xbf800000, 0xbff0000000000000},
    {0x4000, 0x4000, 0x40000000, 0x4000000000000000},
    {0xc000, 0xc000, 0xc0000000, 0xc000000000000000},
    {0x4400, 0x4080, 0x40800000, 0x4010000000000000},
    {0xc400, 0xc080, 0xc0800000, 0xc010000000000000},
    {0x3118, 0x3e23, 0x3e22f983, 0x3fc45f306dc9c882},
};

void set_const(Operand& operand, uint64_t value) {
  operand.kind = Kind::Const;
  operand.lo = static_cast<uint32_t>(value);
  operand.hi = static_cast<uint32_t>(value >> 32);
}

void set_int_const(Operand& operand, int64_t value) {
  switch (operand.ty) {
    case Ty::B16: case Ty::I16: case Ty::U16: case Ty::F16: case Ty::BF16:
      set_const(operand, static_cast<uint16_t>(value));
      break;
    case Ty::B64: case Ty::I64: case Ty::U64: case Ty::F64: case Ty::Mask:
      set_const(operand, static_cast<uint64_t>(value));
      break;
    default:
      set_const(operand, static_cast<uint32_t>(value));
  }
}

void set_float_const(Operand& operand, const FloatConstant& value) {
  switch (operand.ty) {
    case Ty::B16: case Ty::I16: case Ty::U16: case Ty::F16: case Ty::PkF16:
      set_const(operand, value.f16);
      break;
    case Ty::BF16:
      set_const(operand, value.bf16);
      break;
    case Ty::B64: case Ty::I64: case Ty::U64: case Ty::F64: case Ty::Mask:
      set_const(operand, value.f64);
      break;
    default:
      set_const(operand, value.f32);
  }
}

}  // namespace

Decoder::Decoder(Arch arch, std::span<const OpcodeText> tables) : arch_(arch) {
  const bool rdna = arch == Arch::gfx1100;
  m0_ = rdna ? 125 : 124;
  null_ = rdna ? 124 : 128;
  for (const OpcodeText& part : tables) {
    std::vector<OpcodeEntry>& table = table_[static_cast<int>(part.format)];
    std::istringstream words(part.text);
    std::string word;
    size_t number = 0;
    while (words >> word) {
      if (word[0] >= '0' && word[0] <= '9') {
        number = std::strtoul(word.c_str(), nullptr, 10);
        continue;
      }
      if (table.size() <= number) table.resize(number + 1);
      const size_t equals = word.find('=');
      OpcodeEntry entry;
      if (word != "none") {
        entry.name = word.substr(0, equals);
        const std::string wanted = equals == std::string::npos ? word : word.substr(equals + 1);
        entry.op = Ops::all().find(wanted);
        if (entry.op == nullptr) entry.op = Ops::all().named_only(wanted);
      }
      table[number++] = entry;
    }
  }
}

bool Decoder::lookup(Inst& inst, Format format, unsigned opcode) const {
  const std::vector<OpcodeEntry>& table = table_[static_cast<int>(format)];
  if (opcode >= table.size() || table[opcode].op == nullptr) return false;
  const OpcodeEntry& entry = table[opcode];
  inst.op = entry.op;
  inst.name = &entry.name;
  inst.run = entry.op->handlers.run;
  inst.format = format;
  inst.opcode = static_cast<uint16_t>(opcode);
  const auto typed = [this](Operand& operand, Ty ty) {
    operand.ty = ty;
    // A lane mask (one bit per lane) has one register in a wave of 32 lanes, otherwise two.
    const bool narrow = ty == Ty::Mask && arch_ == Arch::gfx1100;
    operand.dwords = static_cast<uint8_t>(narrow ? 1 : ty_dwords(ty));
  };
  for (int k = 0; k < 2; k++) typed(inst.dst[k], entry.op->dst[k]);
  for (int k = 0; k < 4; k++) typed(inst.src[k], entry.op->src[k]);
  return true;
}

void Decoder::set_vgpr(Operand& operand, unsigned reg, bool agpr) {
  operand.kind = Kind::Vgpr;
  operand.reg = static_cast<uint16_t>(reg + (agpr ? 256 : 0));
  operand.enc = static_cast<uint16_t>(256 + reg);
}

void Decoder::set_sgpr(Operand& operand, unsigned reg) const {
  operand.enc = static_cast<uint16_t>(reg);
  if (reg == null_) {
    operand.kind = Kind::None;
    return;
  }
  operand.kind = Kind::Sgpr;
  operand.reg = static_cast<uint16_t>(reg & 127);
}

void Decoder::set_literal(Operand& operand, uint32_t word) {
  operand.literal = true;
  operand.kind = Kind::Const;
  switch (operand.ty) {
    case Ty::F64:
      operand.lo = 0;
      operand.hi = word;
      break;
    case Ty::I64:
      set_const(operand, static_cast<uint64_t>(static_cast<int64_t>(static_cast<int32_t>(word))));
      break;
    default:
      set_const(operand, word);
  }
}

void Decoder::source(Operand& operand, unsigned enc, bool& needs_literal) const {
  operand.enc = static_cast<uint16_t>(enc);
  if (enc >= 256) {
    set_vgpr(operand, enc - 256);
  } else if (enc < 128) {
    if (enc == null_) {
      set_const(operand, 0);
    } else {
      set_sgpr(operand, enc);
    }
  } else if (enc <= 192) {
    set_int_const(operand, static_cast<int64_t>(enc) - 128);
  } else if (enc <= 208) {
    set_int_const(operand, 192 - static_cast<int64_t>(enc));
  } else if (enc >= 240 && enc <= 248) {
    set_float_const(operand, kFloats[enc - 240]);
  } else if (enc == 235 || enc == 237) {
    operand.kind = Kind::Const;
    operand.hi = enc == 235 ? kSharedAperture : kPrivateAperture;
  } else if (enc == 236 || enc == 238) {
    operand.kind = Kind::Const;
    operand.lo = 0xffffffff;
    operand.hi = enc == 236 ? kSharedAperture : kPrivateAperture;
  } else if (enc == 251) {
    operand.kind = Kind::Vccz;
  } else if (enc == 252) {
    operand.kind = Kind::Execz;
  } else if (enc == 253) {
    operand.kind = Kind::Scc;
  } else if (enc == 255) {
    needs_literal = true;
  }
}

void Decoder::implicit(Inst& inst) const {
  for (int k = 0; k < inst.op->src_count; k++) {
    Operand& src = inst.src[k];
    if (src.ty == Ty::Tied) {
      src = inst.dst[0];
    } else if (src.kind == Kind::None && src.ty == Ty::Mask) {
      set_sgpr(src, kVcc);
    }
  }
  for (int k = 0; k < inst.op->dst_count; k++) {
    Operand& dst = inst.dst[k];
    if (dst.kind == Kind::None && dst.ty == Ty::Mask && dst.enc == 0) set_sgpr(dst, kVcc);
  }
}

void Decoder::finish_valu(Inst& inst) {
  inst.plain_src = inst.neg == 0 && inst.abs == 0 && inst.opsel == 0 && inst.ext == Ext::None;
  inst.plain_dst = inst.omod == 0 && !inst.clamp && (inst.opsel & 8) == 0 &&
                   inst.ext == Ext::None && inst.dst[0].kind == Kind::Vgpr;
}

Handler Decoder::whole_of(const Inst& inst) {
  const OpInfo& op = *inst.op;
  const bool writes_lanes = inst.dst[0].kind == Kind::Vgpr;
  if (!inst.plain_src || (writes_lanes ? !inst.plain_dst : inst.dst[0].ty != Ty::Mask) ||
      op.src_count > 3) {
    return op.handlers.run;
  }
  unsigned uniform = 0;
  for (unsigned k = 0; k < op.src_count; k++) {
    const Kind kind = inst.src[k].kind;
    if (kind == Kind::Sgpr || kind == Kind::Const) {
      uniform |= 1u << k;
    } else if (kind != Kind::Vgpr) {
      return op.handlers.run;
    }
  }
  const Handler whole = op.handlers.whole[uniform];
  return whole != nullptr ? whole : op.handlers.run;
}

Inst Decoder::decode(std::span<const uint32_t> words, uint32_t pc) const {
  Inst inst;
  inst.pc = pc;
  for (size_t k = 0; k < 4 && k < words.size(); k++) inst.words[k] = words[k];
  int length = words.empty() ? 0 : decode_words(words, inst);
  if (static_cast<size_t>(length) > words.size()) length = 0;
  // A register range that exceeds the register file is treated like an unknown opcode.
  const auto outside = [](const Operand& operand) {
    if (operand.kind == Kind::Vgpr) {
      return (operand.reg & 255) + (operand.dwords > 0 ? operand.dwords : 1) > 256;
    }
    return operand.kind == Kind::Sgpr && (operand.reg + operand.dwords > 128 || operand.enc > 127);
  };
  for (const Operand& operand : inst.dst) {
    if (outside(operand)) length = 0;
  }
  for (const Operand& operand : inst.src) {
    if (outside(operand)) length = 0;
  }
  if (length == 0) {
    Inst bad;
    bad.pc = pc;
    bad.words[0] = inst.words[0];
    bad.words[1] = inst.words[1];
    bad.next = pc + 1;
    bad.run = bad.whole = unknown_opcode;
    return bad;
  }
  inst.next = pc + static_cast<uint32_t>(length);
  if (inst.run == nullptr) inst.run = unknown_opcode;
  if (inst.whole == nullptr) {
    inst.whole = inst.run == inst.op->handlers.run ? whole_of(inst) : inst.run;
  }
  return inst;
}

const Decoder& decoder_for(Arch arch) {
  static std::once_flag once[kArchCount];
  static const Decoder* decoders[kArchCount];   // never destroyed: grids may still run
  const int index = static_cast<int>(arch);
  std::call_once(once[index], [&] {
    auto made = arch == Arch::gfx1100 ? make_gfx11_decoder(arch) : make_gfx9_decoder(arch);
    decoders[index] = made.release();
  });
  return *decoders[index];
}

void unknown_opcode(Wave&, const Inst& inst) {
  char words[48];
  std::snprintf(words, sizeof words, "0x%08x 0x%08x", inst.words[0], inst.words[1]);
  if (inst.op != nullptr) {
    throw Fault{ErrorKind::UnknownOpcode, "the emulator does not execute " + *inst.name +
                                              " (words " + words + ")"};
  }
  throw Fault{ErrorKind::UnknownOpcode,
              std::string("no instruction of this architecture has the words ") + words};
}

}  // namespace ark_emu
