// Decodes the words of an instruction to an Inst. There is one Decoder per architecture, which is
// stateless after construction.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine.h"
#include "inst.h"

namespace ark_emu {

// The opcode numbers of one encoding format as text: a number, then the names of the opcodes from
// that number on. A name may be followed by "=" and the name under which its handler is registered;
// "none" removes an opcode. Example: "0 s_add_u32 s_sub_u32 5 new_name=registered_name"
struct OpcodeText {
  Format format;
  const char* text;
};

struct OpcodeEntry {
  std::string name;             // the assembler's name
  const OpInfo* op = nullptr;   // null: no such opcode
};

constexpr unsigned bits(uint32_t word, int high, int low) {
  return (word >> low) & ((1u << (high - low + 1)) - 1);
}
constexpr bool bit(uint32_t word, int which) { return ((word >> which) & 1) != 0; }
constexpr int32_t sign_extend(uint32_t value, int width) {
  return static_cast<int32_t>(value << (32 - width)) >> (32 - width);
}

class Decoder {
 public:
  virtual ~Decoder() = default;
  // Decodes one instruction at words[0]; `pc` is its dword index. Never throws: bits that cannot be
  // decoded give an Inst of one dword whose `run` stops the wave with UnknownOpcode.
  Inst decode(std::span<const uint32_t> words, uint32_t pc) const;

 protected:
  Decoder(Arch arch, std::span<const OpcodeText> tables);
  // Fills in everything except run, pc and next. Returns the length in dwords, or 0 if the
  // instruction is unknown.
  virtual int decode_words(std::span<const uint32_t> words, Inst& inst) const = 0;

  // Looks up (format, opcode), sets inst.op, name, run, format, opcode and operand types. False if
  // there is no such opcode.
  bool lookup(Inst& inst, Format format, unsigned opcode) const;
  // Decodes a source field of 9 bits (in scalar formats 8 bits, with the same numbers below 256) to
  // an operand, whose type is already set. Sets `needs_literal` if the value is a literal dword
  // after the instruction.
  void source(Operand& operand, unsigned enc, bool& needs_literal) const;
  static void set_vgpr(Operand& operand, unsigned reg, bool agpr = false);
  void set_sgpr(Operand& operand, unsigned reg) const;   // source or destination
  static void set_literal(Operand& operand, uint32_t word);
  // Sets the implicit operands of VOP1, VOP2 and VOPC in their 32-bit form (VCC), and the sources
  // that are tied to the destination.
  void implicit(Inst& inst) const;
  static void finish_valu(Inst& inst);                   // sets plain_src and plain_dst
  // The handler that executes the operation on these operands while all lanes are active.
  static Handler whole_of(const Inst& inst);

  // Fills in the literal, which is the dword at index `length`. Returns the length of the
  // instruction.
  static int finish(std::span<const uint32_t> words, Inst& inst, bool literal, int length);
  // Decodes the scalar formats SOP1, SOP2, SOPC, SOPK and SOPP: words whose top two bits are 10.
  int scalar_format(std::span<const uint32_t> words, Inst& inst) const;
  void vector_dst(Inst& inst, unsigned field) const;     // a VGPR, or an SGPR by the operand's type
  // Decodes everything of a VOP3 instruction except its sources. VOP3 can encode the operations of
  // other formats: `vop1` is the first opcode number of VOP1's operations, `own` that of VOP3's own
  // operations.
  bool vop3_head(std::span<const uint32_t> words, Inst& inst, unsigned vop1, unsigned own) const;
  // Decodes the second dword of an instruction with DPP (exchange of data between lanes).
  // modifiers: true if the dword also has neg and abs. Returns the register number of source 0.
  static unsigned dpp16(Inst& inst, uint32_t word, bool modifiers);
  // Decodes the literal at the end of fmamk and fmaak. length: the instruction's length without the
  // literal.
  static int literal_operand(std::span<const uint32_t> words, Inst& inst, int length);
  // Decode the operands in the second word of an instruction: ds_operands for DS, flat_operands for
  // FLAT, GLOBAL and SCRATCH, buffer_operands for MUBUF. flat_operands needs inst.has_saddr;
  // buffer_operands needs inst.offen, idxen and lds. vaddr: true if the instruction has an address
  // in vector registers. acc: true if the data are in accumulation registers.
  static void ds_operands(uint32_t word, Inst& inst, bool acc);
  void flat_operands(uint32_t word, Inst& inst, bool vaddr, bool acc) const;
  int buffer_operands(uint32_t word, Inst& inst, bool acc) const;

  int sopk(std::span<const uint32_t> words, Inst& inst) const;

  Arch arch_;
  unsigned m0_, null_;            // scalar register numbers; null_ = 128 where there is none
  std::vector<OpcodeEntry> table_[static_cast<int>(Format::Count)];
};

const Decoder& decoder_for(Arch arch);
std::unique_ptr<Decoder> make_gfx9_decoder(Arch arch);
std::unique_ptr<Decoder> make_gfx11_decoder(Arch arch);

// Converts an instruction to text that the assembler converts back to the same bytes.
std::string disassemble(const Inst& inst, Arch arch);
// The handler of instructions that cannot be decoded or are known by name only.
void unknown_opcode(Wave& wave, const Inst& inst);

// The high dwords of addresses of LDS and of private memory in the generic address space
// (src_shared_base, src_private_base).
constexpr uint32_t kSharedAperture = 0x00010000;
constexpr uint32_t kPrivateAperture = 0x00020000;

}  // namespace ark_emu
