// Checks of the counters of memory operations in flight (vmcnt, lgkmcnt, ...): registers that are
// used too early, waits, and cache control.
#include <algorithm>

#include "checks_state.h"
#include "grid.h"
#include "ops.h"
#include "waits.h"

namespace ark_emu {
namespace {

bool waiting(const WaveChecks& c, const RegisterPending& p) {
  return p.vm > c.vm_done || p.lgkm > c.lgkm_done;
}

void check_operand(Wave& w, const Inst& i, const Operand& operand) {
  if (operand.kind != Kind::Vgpr && operand.kind != Kind::Sgpr) return;
  WaveChecks& c = *w.checks;
  const bool vector = operand.kind == Kind::Vgpr;
  unsigned count = std::max<unsigned>(operand.dwords, 1);
  if (operand.ty == Ty::Mask) count = w.lanes == 64 ? 2 : 1;
  for (unsigned k = 0; k < count; k++) {
    const unsigned reg = operand.reg + k;
    if (reg >= (vector ? c.vgprs.size() : c.sgprs.size())) return;
    const RegisterPending& p = vector ? c.vgprs[reg] : c.sgprs[reg];
    if (!waiting(c, p)) continue;
    const char* file = !vector ? "s" : reg < 256 ? "v" : "a";
    const Inst& from = w.grid->program->at(p.pc);
    throw Fault{ErrorKind::MissingWait,
                *i.name + " uses " + file + std::to_string(vector ? reg % 256 : reg) +
                    " before an s_waitcnt covers the load into it (" + *from.name + " at " +
                    w.grid->where(w, p.pc).function + ")"};
  }
}

// True if a load may overwrite a register that an earlier load has not written yet. Loads of the
// same kind return in order, so the register ends up with the later load's value.
bool returns_in_order(const Wave& w, const Inst& i) {
  if (i.dst[0].kind != Kind::Vgpr || i.dst[0].reg >= w.checks->vgprs.size()) return false;
  const RegisterPending& p = w.checks->vgprs[i.dst[0].reg];
  if (i.format == Format::DS) return p.vm <= w.checks->vm_done;
  const bool vector = i.format == Format::GLOBAL || i.format == Format::MUBUF ||
                      i.format == Format::SCRATCH;
  return vector && p.lgkm <= w.checks->lgkm_done;
}

void check_operands(Wave& w, const Inst& i) {
  if (!returns_in_order(w, i)) {
    for (const Operand& operand : i.dst) check_operand(w, i, operand);
  }
  for (const Operand& operand : i.src) check_operand(w, i, operand);
  if (i.second != nullptr) check_operands(w, *i.second);
}

void mark(Wave& w, const Operand& operand, uint32_t vm, uint32_t lgkm, uint32_t pc) {
  WaveChecks& c = *w.checks;
  for (unsigned k = 0; k < operand.dwords; k++) {
    const unsigned reg = operand.reg + k;
    if (operand.kind == Kind::Vgpr && reg < c.vgprs.size()) c.vgprs[reg] = {vm, lgkm, pc};
    if (operand.kind == Kind::Sgpr && reg < c.sgprs.size()) c.sgprs[reg] = {vm, lgkm, pc};
  }
}

struct Counts {
  bool vm = false, vs = false, lgkm = false;
};

// The counters that an instruction increments (ISA documents, "Data dependency resolution").
Counts counts_of(const Wave& w, const Inst& i) {
  Counts counts;
  const uint32_t flags = i.op->flags;
  const bool atomic = (flags & kSync) != 0 && (flags & kStore) != 0;
  const bool store = (flags & kStore) != 0 && !(atomic && i.glc);
  switch (i.format) {
    case Format::SMEM: counts.lgkm = i.op->dst_count > 0; break;
    case Format::DS: counts.lgkm = true; break;
    case Format::FLAT: case Format::GLOBAL: case Format::SCRATCH: case Format::MUBUF:
      if (i.format == Format::MUBUF && i.op->src_count == 0) break;   // cache control
      counts.lgkm = i.format == Format::FLAT;
      counts.vs = is_rdna(w) && store;
      counts.vm = !counts.vs;
      break;
    default: break;
  }
  return counts;
}

void pop_until(std::deque<Outstanding>& queue, size_t left, uint32_t* done) {
  while (queue.size() > left) {
    if (done != nullptr) *done = std::max(*done, queue.front().sequence);
    queue.pop_front();
  }
}

void written_back(WaveChecks& c, const Published& what, Scope scope) {
  const auto publish = [&what](Published& to) {
    to.own = std::max(to.own, what.own);
    join_clock(to.seen, *what.seen);
  };
  if (scope >= Scope::Agent) publish(c.released_agent);
  if (scope == Scope::System) publish(c.released_system);
}

void publish(Published& state, const Published& more) {
  state.own = std::max(state.own, more.own);
  join_clock(state.seen, *more.seen);
}

void wait_vm(Wave& w, size_t left) {
  WaveChecks& c = *w.checks;
  pop_until(c.vm, left, &c.vm_done);
  if (left > 0) return;
  c.vm_done = c.next_sequence;
  for (const auto& back : c.write_backs) written_back(c, back.what, back.scope);
  c.write_backs.clear();
}

// Scalar loads return in any order, so only a wait for zero outstanding loads covers them.
void wait_lgkm(Wave& w, size_t left) {
  WaveChecks& c = *w.checks;
  const bool scalar =
      std::any_of(c.lgkm.begin(), c.lgkm.end(), [](const auto& o) { return o.smem; });
  if (left > 0 && scalar) return;
  pop_until(c.lgkm, left, &c.lgkm_done);
  if (left > 0) return;
  c.lgkm_done = c.next_sequence;
  scalar_cleared(c);
}

Scope scope_of(const Inst& i) {
  if (i.scc_bit) return i.glc ? Scope::System : Scope::Agent;
  return Scope::Group;
}

// Records a cache invalidation. A pending acquire (a flag that was read) takes effect if its load
// has completed and the invalidation covers all caches between this wave and the writer of the
// flag.
void invalidate(Wave& w, Scope reach) {
  WaveChecks& c = *w.checks;
  std::erase_if(c.acquires, [&](const PendingAcquire& p) {
    const bool loaded = p.vm_sequence <= c.vm_done && p.lgkm_sequence <= c.lgkm_done;
    if (!loaded || (p.needed > reach && !p.l2_done)) return false;
    join_release(w, p.from, p.needed);
    return true;
  });
}

void outer_invalidated(WaveChecks& c) {
  for (PendingAcquire& p : c.acquires) {
    if (p.vm_sequence <= c.vm_done && p.lgkm_sequence <= c.lgkm_done) p.l2_done = true;
  }
}

}  // namespace

void check_before(Wave& w, const Inst& i) {
  check_matrix_hazards(w, i);
  if (i.op == nullptr || (i.format == Format::SOPP && (i.op->flags & kBranch) == 0)) return;
  // Without an operation in flight, no register waits for its value.
  if (w.checks->vm.empty() && w.checks->lgkm.empty()) return;
  check_operands(w, i);
}

void check_after(Wave& w, const Inst& i) {
  if (i.op == nullptr || w.status == WaveStatus::Done) return;
  const Counts counts = counts_of(w, i);
  if (!counts.vm && !counts.vs && !counts.lgkm) return;
  WaveChecks& c = *w.checks;
  const std::lock_guard lock(World::get().mutex);
  const uint32_t sequence = ++c.next_sequence;
  const bool to_lds = (i.op->flags & kLdsOp) != 0 || i.lds;
  const Outstanding op{sequence, c.epoch, i.format == Format::SMEM, to_lds};
  const bool cached = (i.op->flags & kStore) != 0 && (i.op->flags & kSync) == 0 && !i.scc_bit;
  if (cached && i.format != Format::DS) c.last_store = c.epoch;
  if (counts.vm) c.vm.push_back(op);
  if (counts.vs) c.vs.push_back(op);
  if (counts.lgkm) c.lgkm.push_back({sequence, c.epoch, op.smem, to_lds});
  c.epoch++;
  const bool atomic = (i.op->flags & kSync) != 0;
  if (atomic && !i.glc && i.format != Format::DS) return;   // returns no value
  const uint32_t vm = counts.vm ? sequence : 0, lgkm = counts.lgkm ? sequence : 0;
  const Operand& to = i.format == Format::MUBUF && atomic ? i.src[1] : i.dst[0];
  mark(w, to, vm, lgkm, i.pc);
}

void check_wait(Wave& w, const Inst& i) {
  const std::lock_guard lock(World::get().mutex);
  WaveChecks& c = *w.checks;
  const WaitCounts counts = wait_counts(i, w.grid->program->arch());
  if (counts.vs != kNoWait) pop_until(c.vs, counts.vs, nullptr);
  if (counts.vm != kNoWait) wait_vm(w, counts.vm);
  if (counts.lgkm != kNoWait) wait_lgkm(w, counts.lgkm);
  pass_flags(c);
  note_release(w);
}

void check_cache_control(Wave& w, const Inst& i) {
  const std::lock_guard lock(World::get().mutex);
  WaveChecks& c = *w.checks;
  const std::string& name = i.op->name;
  const bool scoped = w.grid->program->arch() != Arch::gfx90a;   // bits give the scope
  if (name == "buffer_wbl2") {
    const Published what{c.epoch, c.seen};
    const Scope scope = scoped ? scope_of(i) : Scope::System;
    c.epoch++;
    // If no access is in flight, the cache write-back counts as complete at once. clang omits the
    // wait for the write-back in this case.
    if (c.vm.empty()) {
      written_back(c, what, scope);
    } else {
      c.write_backs.push_back({what, scope});
    }
  } else if (name == "buffer_inv") {
    invalidate(w, scope_of(i));
  } else if (name == "buffer_invl2" || name == "buffer_gl1_inv") {
    outer_invalidated(c);
  } else if (name == "buffer_gl0_inv") {
    invalidate(w, Scope::Group);
  } else {
    invalidate(w, Scope::Agent);   // buffer_wbinvl1, buffer_wbinvl1_vol
  }
  note_release(w);
}

}  // namespace ark_emu
