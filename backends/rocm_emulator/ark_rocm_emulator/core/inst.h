// A decoded instruction. The decoders fill it in; the handlers and the disassembler read it.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>

namespace ark_emu {

struct Wave;
struct Inst;
using Handler = void (*)(Wave&, const Inst&);

// The handlers of one operation. whole[m] executes instructions without modifiers while all lanes
// are active; bit k of m is set if source k is the same in all lanes. If whole[m] is null, `run` is
// used.
struct Handlers {
  Handler run = nullptr;
  std::array<Handler, 8> whole = {};

  Handlers() = default;
  template <class F>
    requires std::is_convertible_v<F, Handler>
  Handlers(F handler) : run(handler) {}
};

// Operand types. A type determines the width, the conversion of inline constants, and the meaning
// of the modifiers neg and abs.
enum class Ty : uint8_t {
  None,
  B16, I16, U16, F16, BF16,   // one dword, low half (op_sel: high half)
  B32, I32, U32, F32,
  B64, I64, U64, F64,
  Pk16,                       // two 16-bit integers or bf16
  PkF16,                      // two f16
  PkF32,                      // two f32 in a register pair
  Mask,                       // one bit per lane in SGPRs, 64 or 32 bits by wave size
  Scalar,                     // 32-bit SGPR destination of a vector operation
  Tied,                       // source that is the destination's old value
  Literal,                    // the trailing literal of fmamk / fmaak
  Ptr,                        // address of a memory operation
  B96, B128, B160, B192, B256, B512, B1024,
};
constexpr bool is_half(Ty ty) {
  return ty == Ty::B16 || ty == Ty::I16 || ty == Ty::U16 || ty == Ty::F16 || ty == Ty::BF16;
}
int ty_dwords(Ty ty);                         // Mask counts 2, Ptr counts 2

enum class Kind : uint8_t { None, Vgpr, Sgpr, Const, Scc, Vccz, Execz };

struct Operand {
  Kind kind = Kind::None;
  Ty ty = Ty::None;
  uint8_t dwords = 0;
  bool literal = false;                       // Const that came from a literal dword
  uint16_t reg = 0;                           // Vgpr: 0..255, AGPRs 256..511; Sgpr: 0..127
  uint16_t enc = 0;                           // source encoding as in the instruction word
  uint32_t lo = 0, hi = 0;                    // Const: value, widened
};

enum class Format : uint8_t {
  None, SOP1, SOP2, SOPC, SOPK, SOPP, SMEM, VOP1, VOP2, VOPC, VOP3, VOP3P, DS, FLAT, GLOBAL,
  SCRATCH, MUBUF, VOPD,
  Count,
};

// Flags of an operation (OpInfo::flags).
enum : uint32_t {
  kMode64 = 1 << 0,        // obeys the f64/f16 half of MODE instead of the f32 half
  kFloat = 1 << 1,         // a VALU float operation: it uses MODE; clamp limits to [0, 1]
  kNoModifiers = 1 << 2,   // handler reads raw registers itself (MFMA, permutes)
  kKeepHigh = 1 << 3,      // 16-bit result keeps the other half of the destination
  kWritesExec = 1 << 4,    // v_cmpx
  kBranch = 1 << 5,
  kMemory = 1 << 6,        // touches memory or LDS
  kSync = 1 << 7,          // atomics, fences, barriers, sleeps: workgroups may depend on each other
  kLdsOp = 1 << 8,
  kStore = 1 << 9,
  kSignedClamp = 1 << 10,  // integer clamp is signed
  kOwnRounding = 1 << 11,  // to nearest, denormals kept, whatever MODE says
};

struct OpInfo {
  std::string name;
  Handlers handlers;       // run is null: known by name only
  Ty dst[2] = {Ty::None, Ty::None};
  Ty src[4] = {Ty::None, Ty::None, Ty::None, Ty::None};
  uint8_t dst_count = 0, src_count = 0;
  uint32_t flags = 0;
};

enum class Ext : uint8_t { None, Dpp, Dpp8, Sdwa };

struct Inst {
  Handler run = nullptr;
  Handler whole = nullptr;            // does the same while all lanes are on (Wave::handler)
  const OpInfo* op = nullptr;
  const std::string* name = nullptr;  // the assembler's name on this architecture
  uint32_t pc = 0;                    // dword index in the program
  uint32_t next = 0;                  // dword index of the following instruction
  uint32_t words[4] = {0, 0, 0, 0};
  Format format = Format::None;
  uint16_t opcode = 0;
  bool vop3_form = false;             // VOP1/2/C in the 64-bit encoding
  Operand dst[2], src[4];

  // Modifiers of vector ALU instructions. plain_src, plain_dst: true if no modifier applies to the
  // sources or to the destination, so that the fast path can be used.
  bool plain_src = true, plain_dst = true;
  uint8_t neg = 0, abs = 0;           // bit per source; VOP3P: abs is neg_hi
  uint8_t opsel = 0, opsel_hi = 0;    // bit per source; opsel bit 3: destination's high half
  uint8_t omod = 0;
  bool clamp = false;
  Ext ext = Ext::None;
  uint16_t dpp_ctrl = 0;
  uint32_t dpp8 = 0;                  // 8 x 3 bits
  uint8_t row_mask = 0xf, bank_mask = 0xf;
  bool bound_ctrl = false, fetch_inactive = false;
  uint8_t sel[2] = {6, 6}, dst_sel = 6, dst_unused = 0;   // SDWA; 6 = whole dword
  bool sext[2] = {false, false};
  uint8_t cbsz = 0, abid = 0, blgp = 0;                   // MFMA

  // Memory and scalar formats
  int32_t imm = 0;                    // simm16, memory offset; DS: offset0 | offset1 << 8
  bool glc = false, slc = false, dlc = false, scc_bit = false;  // gfx940: sc0 = glc, nt = slc, sc1
  bool lds = false, offen = false, idxen = false, gds = false, has_saddr = false;

  Handler first = nullptr;            // VOPD: the handler of this half alone,
  Handler first_whole = nullptr;      // its handler while all lanes are on,
  std::shared_ptr<const Inst> second; // and the other half, executed with the same inputs
};

}  // namespace ark_emu
