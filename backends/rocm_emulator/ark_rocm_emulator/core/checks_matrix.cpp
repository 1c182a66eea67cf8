// Checks of wait states around matrix instructions. The hardware does not delay an instruction that
// uses registers which a matrix instruction is still writing or reading. The program must place
// enough independent instructions or s_nop between the two instructions. Sources: AMD's CDNA2,
// CDNA3 and CDNA4 instruction set documents, "Dependency resolution: required independent
// instructions". For cases that these documents omit, the rules are those of LLVM's AMDGPU back end
// (which for gfx950 mostly requires one wait state more than for gfx942). An instruction is one
// wait state; s_nop is as many as its operand states.
#include <algorithm>
#include <string_view>

#include "checks_state.h"
#include "grid.h"

namespace ark_emu {
namespace {

// How an instruction uses a register. A matrix instruction reads it as C, or as A or B. Another
// instruction reads or writes it.
enum class Touch : uint8_t { ReadC, ReadAB, Read, Write };

bool has(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

// The number of passes (of four cycles each) that a matrix instruction takes until its result is
// written.
uint8_t passes_of(std::string_view name, const Inst& i, Arch arch) {
  const bool large = has(name, "_32x32x"), small = has(name, "_4x4x");
  if (name.ends_with("f64")) {
    if (small) return 4;
    return arch == Arch::gfx950 ? 16 : 8;
  }
  if (small) return 2;
  if (arch == Arch::gfx90a) return large ? 16 : 8;
  if (has(name, "f8f6f4")) {   // formats 0 and 1 have 8 bits, the others run twice as fast
    const bool wide = i.cbsz < 2 || i.blgp < 2;
    return static_cast<uint8_t>((large ? 8 : 4) * (wide ? 2 : 1));
  }
  const bool single = name.ends_with("_f32") && !has(name, "xf32");
  const bool blocks = has(name, "_2b_") || has(name, "_4b_");
  const int passes = (large ? 8 : 4) * (single || blocks ? 2 : 1);
  return static_cast<uint8_t>(passes);
}

MatrixRole role_of(const Inst& i, Arch arch) {
  MatrixRole role;
  role.known = true;
  if (i.op == nullptr) return role;
  const std::string_view name = i.op->name;
  if (name == "s_nop") role.states = static_cast<uint8_t>((i.imm & 15) + 1);
  switch (i.format) {
    case Format::FLAT: case Format::GLOBAL: case Format::SCRATCH: case Format::MUBUF:
    case Format::DS:
      role.memory = true;
      return role;
    case Format::VOP1: case Format::VOP2: case Format::VOPC: case Format::VOP3: case Format::VOP3P:
      break;
    default: return role;
  }
  role.sparse = has(name, "smfmac");
  role.matrix = has(name, "mfma") || role.sparse;
  role.vector = !role.matrix;
  role.dot = name.starts_with("v_dot");
  role.fma64 = name == "v_fma_f64" || name == "v_fmac_f64";
  if (!role.matrix) return role;
  role.passes = passes_of(name, i, arch);
  role.f64 = name.ends_with("f64");
  const bool single = name.ends_with("_f32") && !has(name, "xf32");
  role.xdl = !role.f64 && (arch == Arch::gfx90a || !single);
  return role;
}

// Wait states that gfx950 requires in addition to those of gfx942.
int more(const MatrixRole& from, Arch arch) { return arch == Arch::gfx950 && from.passes != 2; }

// Wait states between a matrix instruction that writes a register and one that reads it as the
// operand C (the sums). same: true if C is exactly the registers that were written. same_name: true
// if both instructions have the same name.
int before_c(const MatrixRole& from, const MatrixRole& to, Arch arch, bool same, bool same_name) {
  if (arch == Arch::gfx90a && from.f64 && !to.f64) return 0;
  if (same) {   // the unit forwards its results internally
    if (from.f64) return from.passes == 4 && same_name ? 4 : 0;
    return arch != Arch::gfx90a && from.passes == 2 ? 2 : 0;
  }
  if (from.f64) {
    if (to.xdl) return 0;
    return from.passes == 4 ? 4 : from.passes + 1;
  }
  if (arch == Arch::gfx90a) return to.f64 ? from.passes + 1 : from.passes;
  if (!from.xdl) return to.xdl ? 0 : from.passes;
  return from.passes + 1 + (to.xdl ? arch == Arch::gfx950 : more(from, arch));
}

// Wait states between a matrix instruction that writes a register and an instruction that uses the
// register otherwise than as C.
int after_write(const MatrixRole& from, const MatrixRole& to, Arch arch, Touch touch) {
  if (from.f64) {
    if (to.memory && touch != Touch::Write) return from.passes == 4 ? 9 : 18;
    if (from.passes == 4) return 6;
    return arch == Arch::gfx950 && touch == Touch::ReadAB ? 19 : 11;
  }
  if (arch != Arch::gfx90a && !from.xdl) return from.passes + 2;
  return from.passes + 3 + more(from, arch);
}

class Checker {
 public:
  Checker(Wave& w, const Inst& i, const MatrixRole& role)
      : w_(w), i_(i), role_(role), arch_(w.grid->program->arch()), c_(w.checks->matrix) {}

  void all() {
    for (const Operand& operand : i_.src) {
      const Touch touch = role_.matrix ? Touch::ReadAB : Touch::Read;
      const bool as_c = role_.matrix && &operand == &c_operand();
      each(operand, [&](unsigned reg) { read(reg, operand, as_c ? Touch::ReadC : touch); });
    }
    if (role_.sparse) {
      each(i_.dst[0], [&](unsigned reg) { read(reg, i_.dst[0], Touch::ReadC); });
    }
    // Two matrix instructions that write the same register keep their order without wait states.
    if (!role_.matrix) each(i_.dst[0], [&](unsigned reg) { write(reg); });
    if (role_.matrix) need(4, c_.exec, "EXEC", "written by");
    if (role_.fma64) need(2, c_.f64, "the f64 units", "used by");
  }

  void note() {
    const HazardTouch now{c_.states, &i_};
    each(i_.dst[0], [&](unsigned reg) {
      if (role_.matrix) c_.by_matrix[reg] = now;
      if (role_.dot) c_.by_dot[reg] = now;
      if (role_.vector && !role_.dot) c_.by_vector[reg] = now;
    });
    if (role_.matrix && role_.f64) c_.f64 = now;
    if (role_.vector && (i_.op->flags & kWritesExec) != 0) c_.exec = now;
    const bool reads_late = role_.matrix && !role_.f64 && (arch_ == Arch::gfx90a || role_.xdl);
    if (reads_late) each(c_operand(), [&](unsigned reg) { c_.as_c[reg] = now; });
  }

 private:
  const Operand& c_operand() const { return role_.sparse ? i_.dst[0] : i_.src[2]; }

  template <class F>
  void each(const Operand& operand, F visit) const {
    if (operand.kind != Kind::Vgpr) return;
    const unsigned count = std::max<unsigned>(operand.dwords, 1);
    for (unsigned k = 0; k < count && operand.reg + k < 512u; k++) visit(operand.reg + k);
  }

  const MatrixRole& role(const HazardTouch& touch) const {
    return w_.grid->checks->matrix_roles[touch.by->pc];
  }

  void read(unsigned reg, const Operand& operand, Touch touch) const {
    const HazardTouch& from = c_.by_matrix[reg];
    if (from.by != nullptr) {
      const Operand& to = from.by->dst[0];
      const bool same = to.reg == operand.reg && to.dwords == operand.dwords;
      const int states = touch == Touch::ReadC ? before_c(role(from), role_, arch_, same,
                                                          from.by->op == i_.op)
                                               : after_write(role(from), role_, arch_, touch);
      need(states, from, reg, "written by");
    }
    const HazardTouch& dot = c_.by_dot[reg];
    if (role_.matrix) {
      need(2, c_.by_vector[reg], reg, "written by");
    } else if (dot.by != nullptr) {
      // The hardware forwards sums between products of the same operation, so these need no wait
      // states.
      const bool sum = &operand == &i_.src[2] || operand.ty == Ty::Tied;
      if (dot.by->op != i_.op || !sum) need(3, dot, reg, "written by");
    }
  }

  void write(unsigned reg) const {
    const HazardTouch& from = c_.by_matrix[reg];
    if (from.by != nullptr) {
      need(after_write(role(from), role_, arch_, Touch::Write), from, reg, "written by");
    }
    const HazardTouch& reader = c_.as_c[reg];
    if (reader.by != nullptr) {
      need(role(reader).passes - 1, reader, reg, "read as C by");
    }
    const HazardTouch& dot = c_.by_dot[reg];
    if (dot.by != nullptr && dot.by->op != i_.op) need(3, dot, reg, "written by");
  }

  static std::string name(unsigned reg) {
    return (reg < 256 ? "v" : "a") + std::to_string(reg % 256);
  }
  static std::string name(const char* what) { return what; }

  // Reports an error if fewer than `states` wait states have passed since `from`. what: the number
  // of a register, or a text.
  template <class What>
  void need(int states, const HazardTouch& from, What what, const char* how) const {
    if (from.by == nullptr) return;
    const uint64_t between = c_.states - from.state - 1;
    if (between < static_cast<uint64_t>(std::max(states, 0))) {
      report(states, between, from, name(what), how);
    }
  }

  [[noreturn, gnu::noinline]] void report(int states, uint64_t between, const HazardTouch& from,
                                          const std::string& what, const char* how) const {
    throw Fault{ErrorKind::MissingWait,
                *i_.name + " comes " + std::to_string(between) + " wait states after " +
                    *from.by->name + " at " + w_.grid->where(w_, from.by->pc).function + "; " +
                    what + ", " + how + " that, needs " + std::to_string(states) +
                    " (independent instructions or s_nop)"};
  }

  Wave& w_;
  const Inst& i_;
  const MatrixRole& role_;
  Arch arch_;
  MatrixHistory& c_;
};

}  // namespace

void check_matrix_hazards(Wave& w, const Inst& i) {
  const Arch arch = w.grid->program->arch();
  if (arch == Arch::gfx1100) return;   // gfx1100's hardware delays the instruction itself
  std::vector<MatrixRole>& roles = w.grid->checks->matrix_roles;
  if (i.pc >= roles.size()) roles.resize(i.pc + 1024);
  MatrixRole& role = roles[i.pc];
  if (!role.known) role = role_of(i, arch);
  MatrixHistory& history = w.checks->matrix;
  if (role.matrix || role.vector || role.memory) {
    Checker checker(w, i, role);
    history.used |= role.matrix || role.dot;
    if (history.used) checker.all();
    checker.note();
  }
  history.states += role.states;
}

}  // namespace ark_emu
