// Parts of the disassembler that its source files share.
#pragma once

#include <string>

#include "decode.h"

namespace ark_emu {

// Prints one instruction, whose properties determine the text of its operands.
struct Printer {
  const Inst& inst;
  Arch arch;
  bool rdna() const { return arch == Arch::gfx1100; }
  bool gfx940() const { return arch == Arch::gfx942 || arch == Arch::gfx950; }

  std::string registers(const char* file, unsigned reg, unsigned count) const;
  std::string sgpr(unsigned reg, unsigned count) const;
  std::string vgpr(const Operand& operand) const;    // a name such as v3 or a3
  std::string source(const Operand& operand) const;  // no modifiers
  std::string cache_bits() const;
  std::string offset() const;

  std::string scalar() const;   // SOP1, SOP2, SOPC, SOPK
  std::string program() const;  // SOPP
  std::string smem() const;
  std::string ds() const;
  std::string flat() const;
  std::string mubuf() const;
  std::string valu() const;     // VOP1, VOP2, VOPC, VOP3
  std::string vop3p() const;
  std::string vopd() const;

  // Parts of the vector formats.
  std::string vector_source(int k) const;
  std::string with_sign(int k, std::string text) const;   // abs and neg of source k
  std::string vector_dst(int k) const;
  std::string suffix() const;
  std::string extension() const;
  std::string output_modifiers() const;
};

std::string hex(uint32_t value);
// Joins the parts that are not empty: "a, b, c".
std::string listed(std::initializer_list<std::string> parts);

}  // namespace ark_emu
