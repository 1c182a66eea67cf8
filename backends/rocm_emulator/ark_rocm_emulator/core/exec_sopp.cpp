// Handlers of program control: branches, barriers, waits, sleeps, hardware registers, program
// counter.
#include <algorithm>
#include <chrono>
#include <thread>

#include "checks.h"
#include "grid.h"
#include "ops.h"
#include "timing.h"
#include "waits.h"
#include "wave.h"

namespace ark_emu {
namespace {

void branch(Wave& w, const Inst& i) { w.pc = i.next + static_cast<uint32_t>(i.imm); }

template <class F>
Handler branch_if(F) {
  return [](Wave& w, const Inst& i) {
    if (F{}(w)) branch(w, i);
  };
}

uint64_t ticks(std::chrono::steady_clock::duration time) {
  return static_cast<uint64_t>(std::chrono::nanoseconds(time).count()) / 10;
}

// s_getreg: returns one of the hardware registers that compiled code reads. MODE is exact; the
// other registers describe a device with one workgroup per compute unit.
uint32_t hardware_register(const Wave& w, unsigned id) {
  switch (id) {
    case 1: return w.mode;
    case 2: return (w.scc ? 1u : 0u) | (w.exec() == 0 ? 1u << 9 : 0u);
    case 4: return w.id_in_group & 15;                                   // HW_ID: wave slot
    case 15: return kPrivateAperture | kSharedAperture << 16;            // SH_MEM_BASES
    case 20: return w.grid->desc.grid.count() > 1 ? w.group->index % 8 : 0;   // XCC_ID
    case 29: return static_cast<uint32_t>(w.grid->clock + w.executed);   // SHADER_CYCLES
    default: return 0;
  }
}

void write_mode(Wave& w, uint32_t value) {
  w.mode = value;
  w.default_mode = (value & 0xff) == 0xf0;
}

struct RegisterField {
  unsigned id, offset, width;
};

RegisterField register_field(int32_t imm) {
  const unsigned bits = static_cast<unsigned>(imm) & 0xffff;
  return {bits & 63, (bits >> 6) & 31, (bits >> 11) + 1};
}

void setreg(Wave& w, const Inst& i, uint32_t value) {
  const RegisterField field = register_field(i.imm);
  if (field.id != 1) return;   // only MODE is writable by compiled code
  const uint32_t mask = (field.width == 32 ? ~0u : (1u << field.width) - 1) << field.offset;
  write_mode(w, (w.mode & ~mask) | ((value << field.offset) & mask));
}

void wait(Wave& w, const Inst& i) {
  std::atomic_thread_fence(std::memory_order_acq_rel);
  if (w.checks != nullptr) check_wait(w, i);
}

void register_branches(Ops& ops) {
  ops.add("s_branch", "=", branch, kBranch);
  ops.add("s_cbranch_scc0", "=", branch_if([](const Wave& w) { return !w.scc; }), kBranch);
  ops.add("s_cbranch_scc1", "=", branch_if([](const Wave& w) { return w.scc; }), kBranch);
  ops.add("s_cbranch_vccz", "=", branch_if([](const Wave& w) { return w.vcc() == 0; }), kBranch);
  ops.add("s_cbranch_vccnz", "=", branch_if([](const Wave& w) { return w.vcc() != 0; }), kBranch);
  ops.add("s_cbranch_execz", "=", branch_if([](const Wave& w) { return w.exec() == 0; }), kBranch);
  ops.add("s_cbranch_execnz", "=", branch_if([](const Wave& w) { return w.exec() != 0; }), kBranch);
  ops.add("s_getpc_b64", "b64=", [](Wave& w, const Inst& i) {
    w.put_scalar64(i.dst[0], w.grid->pc_address(i.next));
  });
  const auto jump = [](Wave& w, uint64_t address) {
    w.pc = static_cast<uint32_t>((address - w.grid->code_base) / 4);
  };
  ops.add("s_setpc_b64", "=b64",
          [](Wave& w, const Inst& i) { decltype(jump){}(w, w.scalar64(i.src[0])); }, kBranch);
  ops.add("s_swappc_b64", "b64=b64", [](Wave& w, const Inst& i) {
    const uint64_t target = w.scalar64(i.src[0]);
    w.put_scalar64(i.dst[0], w.grid->pc_address(i.next));
    decltype(jump){}(w, target);
  }, kBranch);
  ops.add("s_call_b64", "b64=", [](Wave& w, const Inst& i) {
    w.put_scalar64(i.dst[0], w.grid->pc_address(i.next));
    branch(w, i);
  }, kBranch);
}

// s_movrel*: the register number of an operand plus an index in M0. The index applies to the source
// (movrels) or to the destination (movreld).
unsigned relative_sgpr(const Wave& w, const Operand& operand, uint32_t by) {
  const uint64_t reg = uint64_t(operand.reg) + by;
  if (operand.kind != Kind::Sgpr || reg + operand.dwords > 108) {
    throw Fault{ErrorKind::OutOfBounds,
                "M0 = " + std::to_string(w.m0()) + " leads beyond the scalar registers"};
  }
  return static_cast<unsigned>(reg);
}

void register_movrel(Ops& ops) {
  ops.add("s_movrels_b32", "b32=b32", [](Wave& w, const Inst& i) {
    w.put_scalar32(i.dst[0], w.s[relative_sgpr(w, i.src[0], w.m0())]);
  });
  ops.add("s_movrels_b64", "b64=b64", [](Wave& w, const Inst& i) {
    w.put_scalar64(i.dst[0], w.s64(relative_sgpr(w, i.src[0], w.m0())));
  });
  ops.add("s_movreld_b32", "b32=b32", [](Wave& w, const Inst& i) {
    w.s[relative_sgpr(w, i.dst[0], w.m0())] = w.scalar32(i.src[0]);
  });
  ops.add("s_movreld_b64", "b64=b64", [](Wave& w, const Inst& i) {
    w.set_s64(relative_sgpr(w, i.dst[0], w.m0()), w.scalar64(i.src[0]));
  });
  // M0 has separate indices: bits 9:0 for the source, bits 25:16 for the destination.
  ops.add("s_movrelsd_2_b32", "b32=b32", [](Wave& w, const Inst& i) {
    const uint32_t value = w.s[relative_sgpr(w, i.src[0], w.m0() & 0x3ff)];
    w.s[relative_sgpr(w, i.dst[0], (w.m0() >> 16) & 0x3ff)] = value;
  });
}

// s_set_gpr_idx_on: stores an index in bits 7:0 of M0. Bits 15:12 select the operands of later
// instructions to whose register numbers the index is added.
void register_gpr_index(Ops& ops) {
  ops.add("s_set_gpr_idx_on", "=b32", [](Wave& w, const Inst& i) {
    const uint32_t enabled = (i.words[0] >> 8) & 15;
    w.s[w.m0_reg] = (w.m0() & ~0xf0ffu) | (w.scalar32(i.src[0]) & 0xff) | enabled << 12;
    w.gpr_index = true;
  });
  ops.add("s_set_gpr_idx_off", "=", [](Wave& w, const Inst&) { w.gpr_index = false; });
  ops.add("s_set_gpr_idx_mode", "=", [](Wave& w, const Inst& i) {
    w.s[w.m0_reg] = (w.m0() & ~0xf000u) | (static_cast<uint32_t>(i.imm) & 15) << 12;
  });
  ops.add("s_set_gpr_idx_idx", "=b32", [](Wave& w, const Inst& i) {
    w.s[w.m0_reg] = (w.m0() & ~0xffu) | (w.scalar32(i.src[0]) & 0xff);
  });
}

}  // namespace

uint64_t realtime(const Grid& grid) {
  const uint64_t passed = ticks(std::chrono::steady_clock::now() - grid.began);
  const uint64_t own = grid.clock * kStepTicks + ticks(grid.napped);
  return ticks(grid.began.time_since_epoch()) + std::min(passed, own);
}

WaitCounts wait_counts(const Inst& i, Arch arch) {
  WaitCounts counts;
  const unsigned imm = static_cast<unsigned>(i.imm) & 0xffff;
  if (i.format == Format::SOPK) {   // gfx11: waits for one counter
    const std::string& name = i.op->name;
    if (name == "s_waitcnt_vscnt") counts.vs = imm & 63;
    if (name == "s_waitcnt_vmcnt") counts.vm = imm & 63;
    if (name == "s_waitcnt_lgkmcnt") counts.lgkm = imm & 63;
    return counts;
  }
  const bool rdna = arch == Arch::gfx1100;
  const unsigned vm = rdna ? imm >> 10 : (imm & 15) | (imm >> 14) << 4;
  const unsigned lgkm = rdna ? (imm >> 4) & 63 : (imm >> 8) & 15;
  if (vm < 63) counts.vm = vm;
  if (lgkm < (rdna ? 63u : 15u)) counts.lgkm = lgkm;
  return counts;
}

void register_sopp(Ops& ops) {
  register_branches(ops);
  register_gpr_index(ops);
  register_movrel(ops);
  const Handler nothing = [](Wave&, const Inst&) {};
  for (const char* name : {"s_nop", "s_setprio", "s_icache_inv", "s_sethalt", "s_setkill",
                           "s_wakeup", "s_dcache_wb", "s_dcache_inv_vol",
                           "s_dcache_wb_vol", "s_sendmsg", "s_sendmsghalt", "v_nop", "v_clrexcp",
                           "ds_nop", "s_incperflevel", "s_decperflevel", "s_ttracedata"}) {
    ops.add(name, "=", nothing);
  }
  ops.add("s_endpgm", "=", [](Wave& w, const Inst&) { end_wave(w); });
  ops.add("s_barrier", "=", [](Wave& w, const Inst&) { reach_barrier(w); }, kSync);
  ops.add("s_waitcnt", "=", wait);
  // A wave that sleeps ends its slice, so that other waves run.
  ops.add("s_sleep", "=", [](Wave& w, const Inst&) {
    w.slice = 0;
    w.sleeps = true;
  }, kSync);
  ops.add("s_trap", "=", [](Wave&, const Inst& i) {
    throw Fault{ErrorKind::Trap, "s_trap " + std::to_string(i.imm & 0xff) +
                                     " (a failed assertion, abort() or __builtin_trap())"};
  });
  ops.add("s_memtime", "b64=", [](Wave& w, const Inst& i) {
    w.put_scalar64(i.dst[0], w.grid->clock + w.executed);
  });
  ops.add("s_memrealtime", "b64=", [](Wave& w, const Inst& i) {
    const bool timed = w.timing != nullptr;
    w.put_scalar64(i.dst[0], timed ? w.grid->timing->ticks(w) : realtime(*w.grid));
  });
  ops.add("s_getreg_b32", "b32=", [](Wave& w, const Inst& i) {
    const RegisterField field = register_field(i.imm);
    const uint32_t mask = field.width == 32 ? ~0u : (1u << field.width) - 1;
    w.put_scalar32(i.dst[0], (hardware_register(w, field.id) >> field.offset) & mask);
  });
  ops.add("s_setreg_b32", "=b32",
          [](Wave& w, const Inst& i) { setreg(w, i, w.scalar32(i.src[0])); });
  ops.add("s_setreg_imm32_b32", "=lit", [](Wave& w, const Inst& i) { setreg(w, i, i.src[0].lo); });
}

}  // namespace ark_emu
