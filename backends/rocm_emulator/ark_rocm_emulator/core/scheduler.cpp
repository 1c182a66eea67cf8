// The scheduling of waves: slices of random length, random choice of the next wave (both seeded),
// barriers, and the end of waves and grids.
#include <algorithm>
#include <thread>
#include <utility>

#include "fp_mode.h"
#include "grid.h"
#include "ops.h"
#include "stale.h"
#include "timing.h"

namespace ark_emu {

const char* error_kind_name(ErrorKind kind) {
  static const char* const kNames[] = {"none",          "bad launch",  "unknown opcode",
                                       "out of bounds", "uninitialised read", "LDS out of range",
                                       "misaligned",    "missing wait", "race",
                                       "deadlock",      "budget",      "trap",
                                       "cancelled",     "stale scalar read", "link"};
  return kNames[static_cast<int>(kind)];
}

void Grid::populate() {
  if (desc.options.checks) checks = begin_checks(*this);
  const TimingModel* model = timing_model(desc.options.timing);
  if (model != nullptr && model->arch == program->arch()) {
    timing = std::make_unique<Timing>(*model, *this);
  } else if (desc.options.stale && checks == nullptr) {
    stale = std::make_shared<StaleGrid>(*this, memory.caches(device, program->arch()));
  }
  for (uint32_t k = 0; k < desc.grid.count(); k++) make_group(k, k);
}

// Puts a polling wave to sleep. If a wave polls and sleeps repeatedly, it sleeps longer each time,
// so that most of the time goes to waves that work.
void Grid::put_to_sleep(Wave& w, uint64_t executed) {
  constexpr uint64_t kShort = 256;    // a wave that executed fewer instructions only polls
  constexpr uint32_t kLongest = 8;    // the sleep is doubled at most this often
  w.naps = executed < kShort && !w.changed ? std::min(w.naps + 1, kLongest) : 0;
  const uint64_t nap = 32ull << w.naps;
  forget(w);
  sleepers.push({clock + nap + random.below(nap), &w});
}

void Grid::wake_sleepers(bool all) {
  while (!sleepers.empty() && (all || ready.empty() || sleepers.top().wake <= clock)) {
    ready.push_back(sleepers.top().wave);
    sleepers.pop();
  }
}

void Grid::step_timed() {
  Wave* wave = timing->next();
  if (wave == nullptr || wave->status != WaveStatus::Ready) return;
  run_slice(*wave, static_cast<int32_t>(desc.options.max_slice));
  if (!ended && wave->status == WaveStatus::Ready) timing->queue(*wave);
}

bool Grid::step() {
  if (ended) return false;
  if (timing != nullptr) {
    step_timed();
    return !ended;
  }
  wake_sleepers(false);
  const uint64_t pick = random.next();
  Wave& wave = *ready[((pick >> 32) * ready.size()) >> 32];
  // The length of a slice: the number of instructions that a wave executes before another wave
  // runs. Most slices are long, and some have only a few instructions: both kinds find ordering
  // bugs.
  const uint64_t limit = (pick & 7) == 0 ? 8 : desc.options.max_slice;
  const uint64_t length = 1 + ((pick & 0xffffffff) / 8 * limit) / (1ull << 29);
  run_slice(wave, static_cast<int32_t>(std::min(length, limit)));
  return !ended;
}

namespace {

// Grid::execute takes one of the structs below as a template parameter. They have the code that
// runs before and after each instruction of a grid that is executed with checks (Checked), with
// delayed memory operations (Stale), with a timing model (Timed), or with none of these (Plainly).
// instead(): returns true if it has executed the instruction in place of its handler. after():
// returns false if the wave's slice of instructions ends here.
struct Plainly {
  void before(Wave&, const Inst&) const {}
  bool instead(Wave&, const Inst&) const { return false; }
  bool after(Wave&, const Inst&) const { return true; }
};

struct Checked : Plainly {
  void before(Wave& w, const Inst& inst) const { check_before(w, inst); }
  bool after(Wave& w, const Inst& inst) const {
    check_after(w, inst);
    return true;
  }
};

// For grids with stale values: memory operations do not take effect when they are issued, but at a
// random later time.
struct Stale : Plainly {
  StaleGrid& stale;
  explicit Stale(StaleGrid& grid) : stale(grid) {}
  bool instead(Wave& w, const Inst& inst) const { return stale.issue(w, inst); }
};

struct Timed : Plainly {
  Timing& timing;
  explicit Timed(Timing& model) : timing(model) {}
  void before(Wave& w, const Inst& inst) const { timing.before(w, inst); }
  bool after(Wave& w, const Inst& inst) const {
    timing.after(w, inst);
    return !timing.ahead(w);
  }
};

}  // namespace

template <class Around>
void Grid::execute(Wave& w, const Inst*& current, const Around& around) {
  Program& code = *program;
  const Inst* next = &code.at(w.pc);
  while (true) {
    const Inst& inst = *next;
    current = &inst;
    around.before(w, inst);
    w.pc = inst.next;
    w.slice--;
    w.executed++;
    if (w.default_mode) [[likely]] {
      if (!around.instead(w, inst)) w.handler(inst)(w, inst);
    } else {
      const uint32_t flags = inst.op != nullptr ? inst.op->flags : 0;
      const FpMode scope((flags & kOwnRounding) != 0 ? 0xf0 : w.mode, (flags & kMode64) != 0);
      if (!around.instead(w, inst)) w.handler(inst)(w, inst);
    }
    if (!around.after(w, inst) || w.slice <= 0) return;
    // If an instruction does not branch, its successor is inst.next, which the host's processor
    // knows without waiting for the store to w.pc. The empty asm hides from the compiler that
    // `behind` equals w.pc here, because it would use w.pc instead.
    uint32_t behind = inst.next;
    if (w.pc == behind) [[likely]] {
      asm("" : "+r"(behind));
      next = &code.at(behind);
    } else {
      next = &code.at(w.pc);
    }
  }
}

// Like `execute`, for grids without checks, delayed memory operations and timing model. Executes a
// row of consecutive instructions at a time, without a look at the wave's state in between.
void Grid::execute_rows(Wave& w, const Inst*& current) {
  while (w.slice > 0) {
    if (!w.default_mode) [[unlikely]] {
      execute(w, current, Plainly());
      return;
    }
    const Step* step = &program->step_at(w.pc);
    // The minimum of step->left and w.slice, written as a branch. With a minimum instruction the
    // host's processor would wait for both numbers.
    int32_t count = step->left;
    if (count > w.slice) [[unlikely]] {
      count = w.slice;
      asm("" : "+r"(count));
    }
    const Step* const last = step + count - 1;
    w.slice -= count;
    w.executed += static_cast<uint32_t>(count);
    const Handler Step::*const handler = w.whole() ? &Step::whole : &Step::run;
    try {
      for (; step != last; step++) (step->*handler)(w, *step->inst);
      w.pc = last->inst->next;
      (last->*handler)(w, *last->inst);
    } catch (const Fault&) {
      current = step->inst;
      w.executed -= static_cast<uint32_t>(last - step);
      throw;
    }
  }
}

void Grid::run_slice(Wave& w, int32_t instructions) {
  if (stale != nullptr) stale->progress();
  const Inst* current = nullptr;
  const uint64_t before = w.executed;
  w.slice = instructions;
  w.changed = false;
  try {
    if (w.timing != nullptr && w.watched == nullptr) {
      execute(w, current, Timed(*timing));
    } else if (w.checks != nullptr) {
      execute(w, current, Checked());
    } else if (w.stale != nullptr) {
      execute(w, current, Stale(*stale));
    } else {
      execute_rows(w, current);
    }
  } catch (const Fault& fault) {
    clock += w.executed - before;
    finish(fault, &w, current == nullptr ? w.pc : current->pc);
    return;
  }
  clock += w.executed - before;
  if (std::exchange(w.sleeps, false) && w.watched == nullptr && timing == nullptr) put_to_sleep(w, w.executed - before);
  if (w.changed || w.status != WaveStatus::Ready) last_change = clock;
  const uint64_t budget = desc.options.step_budget;
  if (budget != 0 && clock > budget && !ended) {
    finish(Fault{ErrorKind::Budget, "the grid ran " + std::to_string(clock) +
                                        " wave-instructions, its budget is " +
                                        std::to_string(budget)},
           &w, w.pc);
  }
}

void Grid::forget(Wave& wave) {
  const auto found = std::find(ready.begin(), ready.end(), &wave);
  *found = ready.back();
  ready.pop_back();
}

void Grid::release_barrier(Workgroup& group) {
  if (group.at_barrier == 0 || group.at_barrier < group.live) return;
  if (checks != nullptr) check_barrier_passed(group);
  if (timing != nullptr) timing->released(group);
  for (Wave* wave : group.waves) {
    if (wave->status != WaveStatus::Barrier) continue;
    wave->status = WaveStatus::Ready;
    ready.push_back(wave);
  }
  group.at_barrier = 0;
}

void reach_barrier(Wave& w) {
  if (w.checks != nullptr) check_barrier_reached(w);
  w.status = WaveStatus::Barrier;
  w.slice = 0;
  w.changed = true;
  w.group->at_barrier++;
  w.grid->forget(w);
  w.grid->release_barrier(*w.group);
}

void end_wave(Wave& w) {
  if (w.checks != nullptr) check_wave_ended(w);
  w.status = WaveStatus::Done;
  w.slice = 0;
  w.changed = true;
  Grid& grid = *w.grid;
  grid.forget(w);
  w.group->live--;
  grid.live_waves--;
  grid.release_barrier(*w.group);
  if (grid.live_waves == 0) grid.ended = true;
}

void Grid::finish(const Fault& fault, const Wave* wave, uint32_t pc) {
  ended = true;
  result.kind = fault.kind;
  result.lane = fault.lane;
  result.address = fault.address;
  std::string text = std::string(error_kind_name(fault.kind)) + ": " + fault.message;
  if (wave != nullptr) {
    result.where = where(*wave, pc);
    const WaveWhere& w = result.where;
    text += " [kernel " + desc.kernel + ", workgroup (" + std::to_string(w.workgroup[0]) + ", " +
            std::to_string(w.workgroup[1]) + ", " + std::to_string(w.workgroup[2]) + "), wave " +
            std::to_string(w.wave);
    if (fault.lane >= 0) text += ", lane " + std::to_string(fault.lane);
    text += ", at " + w.function + ": " + w.line + "]";
  }
  result.message = text + " [seed " + std::to_string(desc.options.seed) + "]";
}

void Grid::run(const std::atomic<bool>& cancel, const std::function<bool()>& hook) {
  uint64_t slices = 0;
  while (!ended) {
    step();
    if ((++slices & 63) != 0) continue;
    if (cancel.load(std::memory_order_relaxed) && !ended) {
      finish(Fault{ErrorKind::Cancelled, "the launch was cancelled"}, nullptr, 0);
      break;
    }
    view.refresh();
    if (hook && hook()) note_change();
    if (!ended) look_for_deadlock();
  }
}

void Grid::run_group(uint32_t index, const std::atomic<bool>& cancel) {
  groups.clear();
  waves.clear();
  ready.clear();
  sleepers = {};
  live_waves = 0;
  ended = false;
  last_change = clock;
  next_look = 0;
  pause = 1;
  random.state = desc.options.seed * 0x2545f4914f6cdd1dull + index;
  // Registers are overwritten with a fixed pattern, so that a workgroup does not see values that an
  // earlier one left in them.
  for (uint32_t k = 0; k < waves_per_group; k++) {
    auto* rows = reinterpret_cast<uint32_t*>(registers.data()) + size_t{k} * vgpr_rows * kLanes;
    std::fill_n(rows, size_t{std::min(kernel->vgprs, 256u)} * kLanes, 0u);
    if (vgpr_rows > 256) std::fill_n(rows + 256 * kLanes, size_t{kernel->agprs} * kLanes, 0u);
  }
  make_group(index, 0);
  run(cancel, nullptr);
}

bool Grid::independent() const {
  bool calls = false;
  const auto quiet_code = [&](uint64_t begin, uint64_t end) {
    for (uint64_t pc = begin / 4; pc < end / 4;) {
      const Inst& inst = program->at(static_cast<uint32_t>(pc));
      pc = inst.next > pc ? inst.next : pc + 1;
      if (inst.op == nullptr) continue;
      calls |= inst.op->name == "s_swappc_b64" || inst.op->name == "s_setpc_b64";
      const bool coherent = (inst.op->flags & kMemory) != 0 && (inst.glc || inst.scc_bit);
      // Barriers and invalidations of the workgroup's own cache (which RDNA3 has at barriers)
      // synchronise only the waves of one workgroup.
      const bool within = inst.op->name == "s_barrier" || inst.op->name == "buffer_gl0_inv";
      const bool sync = (inst.op->flags & kSync) != 0 && !within;
      if (coherent || sync) return false;
    }
    return true;
  };
  uint64_t end = program->code_end();
  for (const SymbolInfo& symbol : desc.code->code().symbols()) {
    if (symbol.function && symbol.offset == kernel->entry && symbol.size > 0) {
      end = symbol.offset + symbol.size;
    }
  }
  if (!quiet_code(kernel->entry, end)) return false;
  // The functions that a kernel calls are not examined separately. If there are calls, all of the
  // code must be free of instructions by which workgroups see each other's effects.
  return !calls || quiet_code(program->code_begin(), program->code_end());
}

}  // namespace ark_emu
