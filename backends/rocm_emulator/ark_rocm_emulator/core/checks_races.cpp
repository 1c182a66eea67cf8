// Detects races: checks that every access is ordered relative to the accesses of other waves.
// checks_access.cpp has the checks that need only one access.
#include <algorithm>
#include <bit>

#include "checks_agent.h"
#include "checks_shared.h"
#include "grid.h"
#include "memory.h"

namespace ark_emu {
namespace {

constexpr size_t kMaxReaders = 16;   // per cell; more are forgotten, which may miss a race
constexpr size_t kMaxDoubts = 64;    // per wave; likewise

bool cdna3(const Wave& w) {
  const Arch arch = w.grid->program->arch();
  return arch == Arch::gfx942 || arch == Arch::gfx950;
}

std::string describe(const Record& record, const Wave& w) {
  const SlotHistory& other = World::get().slots[record.slot];
  if (other.device == kEngine) return "a DMA engine";
  if (other.grid != w.checks->grid) return "a wave of another grid";
  return "workgroup number " + std::to_string(other.group) + " at " +
         w.grid->where(w, record.pc).function;
}

Fault race(const Access& x, int lane, uint64_t address, const Record& other, bool other_writes) {
  const std::string where = x.lds ? "LDS byte " + std::to_string(address)
                                  : describe_address(x.w.grid->view, address);
  const char* mine = x.kind == AccessKind::Read ? "reads" : "writes";
  return {ErrorKind::Race,
          *x.i.name + " at " + x.w.grid->where(x.w, x.i.pc).function + " " + mine + " " + where +
              ", which " + describe(other, x.w) + (other_writes ? " wrote" : " read") +
              ": no barrier, no atomics with the fences and waits of their scope order the two",
          lane, address};
}

bool ordered(const Access& x, const Record& other, bool other_writes) {
  const WaveChecks& c = *x.w.checks;
  if (other.slot == c.slot) return true;
  if (!x.lds && !other_writes && clock_at(c.past, other.slot) >= other.epoch) return true;
  if (clock_at(x.lds ? c.seen_lds : c.seen, other.slot) >= other.epoch) return true;
  return !x.lds && sharing() && ended_before(other.slot, other.epoch, c.started);
}

bool writes_register(const Inst& inst, unsigned reg) {
  for (const Operand& to : inst.dst) {
    if (to.kind == Kind::Vgpr && to.reg <= reg && reg < to.reg + to.dwords) return true;
  }
  return inst.second != nullptr && writes_register(*inst.second, reg);
}

// Returns the polling load to which the load at `pc` belongs, or kNoPoll. A load polls if a small
// loop without stores or barriers repeats until its value changes; then `pc` is returned. Compilers
// peel the first iteration of such a loop. For the load of the peeled iteration, the load in the
// loop is returned. On LDS this distinguishes polls from plain reads, because no bit marks atomic
// loads there.
constexpr uint32_t kNoPoll = ~0u;
uint32_t poll_at(const Wave& w, uint32_t pc) {
  constexpr int kWindow = 160;   // most instructions of the loop
  auto [known, fresh] = w.grid->checks->polls.try_emplace(pc, kNoPoll);
  if (!fresh) return known->second;
  uint32_t& result = known->second;   // a map's elements do not move
  Program& program = *w.grid->program;
  const Inst load = program.at(pc);
  bool same_address = true;
  uint32_t at = load.next;
  for (int steps = 0; steps < kWindow && result == kNoPoll; steps++) {
    const Inst& inst = program.at(at);
    if (inst.op == nullptr || inst.op->name == "s_barrier" || inst.op->name == "s_endpgm") break;
    if ((inst.op->flags & kStore) != 0 && (inst.op->flags & kLdsOp) != 0) break;
    const uint32_t target = inst.next + static_cast<uint32_t>(inst.imm);
    if ((inst.op->flags & kBranch) != 0 && inst.format == Format::SOPP && target <= pc) {
      if (pc - target <= 2 * kWindow) result = pc;
      break;
    }
    const bool twin = same_address && inst.op == load.op && inst.src[0].reg == load.src[0].reg &&
                      inst.imm == load.imm;
    const uint32_t next = inst.next;
    same_address = same_address && !writes_register(inst, load.src[0].reg);
    if (twin && poll_at(w, at) == at) result = at;
    at = next;
  }
  return result;
}

bool polls(const Wave& w, uint32_t pc) { return poll_at(w, pc) != kNoPoll; }

// True if the poll at `load` reads one address until its value changes, that is, if no instruction
// in the loop writes the address register. Such a poll may wait for a plain LDS store. A loop that
// walks along LDS is not a poll.
bool spins(const Wave& w, uint32_t load) {
  const uint32_t pc = poll_at(w, load);
  if (pc == kNoPoll) return false;
  auto [known, fresh] = w.grid->checks->spins.try_emplace(pc, false);
  if (!fresh) return known->second;
  Program& program = *w.grid->program;
  const unsigned address = program.at(pc).src[0].reg;
  uint32_t at = pc, target = pc + 1;
  while (target > pc) {   // the branch back, which poll_at() has found
    const Inst& inst = program.at(at);
    target = (inst.op->flags & kBranch) != 0 && inst.format == Format::SOPP
                 ? inst.next + static_cast<uint32_t>(inst.imm)
                 : pc + 1;
    at = inst.next;
  }
  bool stays = true;
  for (uint32_t k = target; k < at && stays; k = program.at(k).next) {
    const Inst& inst = program.at(k);
    stays = inst.op != nullptr && !writes_register(inst, address);
  }
  w.grid->checks->spins[pc] = stays;
  return stays;
}

bool spins(const Access& x) {
  if (!x.spins.has_value()) x.spins = spins(x.w, x.i.pc);
  return *x.spins;
}

// True if two unordered accesses are allowed, because both are atomic. An LDS load that polls
// counts as atomic.
bool may_meet(const Access& x, const Record& other, bool other_writes) {
  const bool atomic_other = other.stamp == Stamp::Atomic;
  if (x.lds && x.kind == AccessKind::Read && other.stamp == Stamp::Plain) return spins(x);
  if (x.lds && x.stamp == Stamp::Plain && !other_writes) return spins(x.w, other.pc);
  if (x.stamp == Stamp::Atomic) {
    const bool polled = x.lds && !other_writes && polls(x.w, other.pc);
    return atomic_other || other.stamp == Stamp::MaybeAtomic || polled;
  }
  if (x.stamp == Stamp::MaybeAtomic) return atomic_other;
  return x.lds && atomic_other && x.kind == AccessKind::Read && polls(x.w, x.i.pc);
}

void forget(Records& records, uint8_t bytes) {
  records.remove([bytes](Record& r) {
    r.bytes &= static_cast<uint8_t>(~bytes);
    return r.bytes == 0;
  });
}

void remember_write(CellState& cell, const Record& fresh) {
  forget(cell.writes, fresh.bytes);
  cell.writes.push_back(fresh);
  forget(cell.reads, fresh.bytes);
}

void remember_read(const Access& x, CellState& cell, const Record& fresh) {
  Records& records = cell.reads;
  const auto mine = [&](const Record& r) { return r.slot == fresh.slot && r.stamp == fresh.stamp; };
  if (x.hint >= records.size() || !mine(records[x.hint])) {
    const auto found = std::find_if(records.begin(), records.end(), mine);
    x.hint = static_cast<size_t>(found - records.begin());
  }
  if (x.hint < records.size()) {
    Record& known = records[x.hint];
    const uint8_t bytes = known.bytes | fresh.bytes;
    known = fresh;
    known.bytes = bytes;
    return;
  }
  if (records.size() >= kMaxReaders) {
    const uint32_t endings = World::get().endings;
    if (cell.full == endings) return;
    records.remove([](const Record& r) { return has_ended(r.slot, r.epoch); });
    if (records.size() >= kMaxReaders) {
      cell.full = endings;
      return;
    }
  }
  x.hint = records.size();
  records.push_back(fresh);
}

// Called when a load has read a flag: orders the wave after everything that the waves that wrote
// the flag had released.
void acquire(const Access& x, ShadowPages& shadow, uint64_t index, const CellState& cell) {
  Wave& w = x.w;
  WaveChecks& c = *w.checks;
  const uint32_t sequence = c.next_sequence + 1;   // the number of this load
  const uint32_t scalar = x.i.format == Format::FLAT ? sequence : 0;
  const auto pass = [&](Contributor from) {
    const auto passed = c.passed.find(from.slot);
    if (x.lds || (passed != c.passed.end() && passed->second >= from.epoch)) return;
    for (const Passing& p : c.passing) {
      const bool same = p.from.slot == from.slot && p.from.epoch == from.epoch;
      if (same && p.vm_sequence == sequence) return;
    }
    c.passing.push_back({from, sequence, scalar});
  };
  const auto learn = [&](Contributor from) {
    if (from.slot == c.slot) return;
    pass(from);
    const Scope relation = relation_to(w, c, from.slot);
    const uint32_t* known = nullptr;
    const auto found = c.joined.find(uint64_t{from.slot} << 2 | static_cast<uint64_t>(relation));
    if (found != c.joined.end()) known = &found->second;
    if (known != nullptr && *known >= from.epoch) return;
    if (x.lds || (relation == Scope::Group && !is_rdna(w))) {
      join_release(w, from, relation);
      return;
    }
    for (PendingAcquire& p : c.acquires) {
      if (p.from.slot != from.slot) continue;
      if (p.from.epoch == from.epoch) return;
    }
    c.acquires.push_back({from, relation, sequence, scalar, false});
  };
  const auto sync = shadow.syncs.find(index);
  if (sync != shadow.syncs.end()) {
    for (const Contributor& from : sync->second) learn(from);
    return;
  }
  for (const Record& r : cell.writes) learn({r.slot, r.epoch});
}

void contribute(const Access& x, ShadowPages& shadow, uint64_t index, const CellState& cell) {
  const WaveChecks& c = *x.w.checks;
  const Contributor mine{c.slot, c.epoch};
  if (x.kind == AccessKind::Atomic) {
    auto [sync, fresh] = shadow.syncs.try_emplace(index);
    if (fresh) {
      for (const Record& r : cell.writes) sync->second.push_back({r.slot, r.epoch});
    }
    for (Contributor& from : sync->second) {
      if (from.slot != c.slot) continue;
      from.epoch = c.epoch;
      return;
    }
    sync->second.push_back(mine);
    return;
  }
  if (shadow.syncs.empty()) return;
  const auto sync = shadow.syncs.find(index);
  if (sync != shadow.syncs.end()) sync->second.assign(1, mine);
}

// True if a store writes the value that memory already has. Two waves that store the same value may
// both intend an atomic store to a flag. So such a conflict is reported only if no later access
// shows that the cell is a flag.
bool same_value(const Access& x, int lane, uint64_t element, uint64_t address, uint8_t bytes) {
  const uint32_t* rows = x.w.checks->storing;
  const bool may_be_atomic = x.lds ? x.i.format == Format::DS : x.stamp == Stamp::MaybeAtomic;
  if (rows == nullptr || !may_be_atomic) return false;
  const uint8_t* now = x.lds ? x.w.group->lds.data() + address
                             : reinterpret_cast<const uint8_t*>(address);
  for (int k = 0; k < std::popcount(bytes); k++) {
    const uint64_t at = address - element + static_cast<uint64_t>(k);
    const uint32_t row = rows[at / 4 * kLanes + static_cast<uint64_t>(lane)];
    if (static_cast<uint8_t>(row >> (8 * (at % 4))) != now[k]) return false;
  }
  return true;
}

// Called when an LDS load of wave `slot` conflicts with an atomic operation. Later instructions
// show whether the load is part of an atomic update (a compare-and-swap loop), which is allowed.
// Until then the conflict is recorded as a doubt.
bool doubtful(const Access& x, uint64_t index, uint32_t slot, uint32_t pc, const Fault& found) {
  GridChecks& grid = *x.w.grid->checks;
  if (grid.expects.contains(pc)) return true;
  std::vector<LdsDoubt>& doubts = grid.groups[x.w.group].doubts;
  for (const LdsDoubt& known : doubts) {
    if (known.index == index && known.slot == slot && known.pc == pc) return true;
  }
  if (doubts.size() >= kMaxDoubts) return false;
  doubts.push_back({index, slot, pc, found});
  return true;
}

// Called when the wave executes an atomic operation on a cell that it has loaded. The load was then
// part of an atomic update, so the doubts that were recorded about it are removed.
void settle_doubts(const Access& x, uint64_t index) {
  GridChecks& grid = *x.w.grid->checks;
  for (const LdsDoubt& doubt : grid.groups[x.w.group].doubts) {
    if (doubt.index == index && doubt.slot == x.w.checks->slot) grid.expects[doubt.pc] = true;
  }
}

void check_cell(const Access& x, ShadowPages& shadow, uint64_t index, uint8_t bytes, int lane,
                uint64_t address, uint64_t element) {
  WaveChecks& c = *x.w.checks;
  CellState& cell = shadow.cell(index);
  cell.flag |= !x.lds && x.stamp == Stamp::Atomic;
  for (const Record& r : cell.writes) {
    if ((r.bytes & bytes) == 0) continue;
    if (r.stamp == Stamp::Dma && r.slot == c.slot && r.sequence > c.vm_done) {
      throw Fault{ErrorKind::MissingWait,
                  *x.i.name + " touches LDS byte " + std::to_string(address) +
                      " before an s_waitcnt vmcnt covers the load that writes it",
                  lane, address};
    }
    if (ordered(x, r, true) || may_meet(x, r, true)) continue;
    const bool writes_too = x.kind == AccessKind::Write && r.stamp != Stamp::Dma;
    if (writes_too && same_value(x, lane, element, address, bytes)) continue;
    const Fault found = race(x, lane, address, r, true);
    const bool loads = x.lds && x.kind == AccessKind::Read && r.stamp == Stamp::Atomic;
    if (loads && doubtful(x, index, c.slot, x.i.pc, found)) continue;
    if (x.stamp != Stamp::MaybeAtomic || r.stamp != Stamp::MaybeAtomic) throw found;
    if (!cell.flag && c.doubts.size() < kMaxDoubts) c.doubts.push_back({&shadow, index, found});
  }
  const bool writes = x.kind != AccessKind::Read;
  if (writes) {
    for (const Record& r : cell.reads) {
      if ((r.bytes & bytes) == 0 || ordered(x, r, false) || may_meet(x, r, false)) continue;
      const Fault found = race(x, lane, address, r, false);
      const bool loaded = x.lds && x.kind == AccessKind::Atomic;
      if (!loaded || !doubtful(x, index, r.slot, r.pc, found)) throw found;
    }
  }
  if (x.lds && x.kind == AccessKind::Atomic) settle_doubts(x, index);
  const bool learns = x.kind == AccessKind::Atomic || x.coherent || x.lds;
  if (learns) {
    const bool flag = x.kind == AccessKind::Atomic || x.coherent ||
                      (!shadow.syncs.empty() && shadow.syncs.contains(index)) ||
                      (x.lds && x.kind == AccessKind::Read && spins(x));
    const bool returns = x.kind != AccessKind::Atomic || x.i.glc || x.lds;
    if (flag && returns && x.kind != AccessKind::Write) acquire(x, shadow, index, cell);
  }
  Record fresh{c.slot, c.epoch, x.i.pc, bytes, x.stamp, c.next_sequence + 1};
  if (writes) {
    contribute(x, shadow, index, cell);
    remember_write(cell, fresh);
  } else {
    remember_read(x, cell, fresh);
  }
  if (shadow.shared != nullptr) export_cell(x.w, shadow, index, cell, fresh, x.kind);
}

}  // namespace

Stamp stamp_of(const Wave& w, const Inst& i, AccessKind kind, bool lds, int bytes) {
  if (kind == AccessKind::Atomic) return Stamp::Atomic;
  if (lds) return i.format == Format::DS || i.format == Format::FLAT ? Stamp::Plain : Stamp::Dma;
  if (i.format == Format::SMEM) return Stamp::Plain;
  if (kind == AccessKind::Read) {
    const bool coherent = cdna3(w) ? i.glc || i.scc_bit : i.glc;
    return coherent ? Stamp::Atomic : Stamp::Plain;
  }
  if (cdna3(w)) return i.glc || i.scc_bit ? Stamp::Atomic : Stamp::Plain;
  return bytes <= 8 ? Stamp::MaybeAtomic : Stamp::Plain;   // atomic stores look plain
}

void check_access(Wave& w, const Inst& i, const Addresses& a, AccessKind kind, int bytes) {
  const bool lds = a.space == Space::Lds;
  const Stamp stamp = stamp_of(w, i, kind, lds, bytes);
  const Access x{w,   i,     kind,
                  lds, stamp, !lds && kind == AccessKind::Read && stamp == Stamp::Atomic};
  ShadowPages* const own = lds ? &w.grid->checks->groups[w.group].lds : nullptr;
  for (uint64_t rest = a.active; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    const uint64_t address = a.at[lane];
    ShadowPages* shadow = own;
    uint64_t offset = address;
    if (!lds) {
      const RegionEntry* entry = w.grid->view.find(address, static_cast<uint64_t>(bytes));
      if (entry == nullptr) continue;
      if (entry->shadow == nullptr) {
        check_arguments(x, address, bytes, lane);
        continue;
      }
      shadow = entry->shadow.get();
      offset = address - entry->region.base;
      check_float_atomic(x, entry->region, lane, address);
    }
    if (shadow->shared != nullptr) import_cells(*shadow, offset, static_cast<uint64_t>(bytes));
    check_alignment(x, address, bytes, lane);
    check_initialised(x, *shadow, offset, bytes, lane, address);
    for (uint64_t at = offset; at < offset + static_cast<uint64_t>(bytes);) {
      const uint64_t in_cell = at % 4;
      const uint64_t count =
          std::min<uint64_t>(4 - in_cell, offset + static_cast<uint64_t>(bytes) - at);
      const auto mask = static_cast<uint8_t>(((1u << count) - 1) << in_cell);
      check_cell(x, *shadow, at / 4, mask, lane, address + (at - offset), address);
      if (i.format == Format::SMEM) check_scalar_cache(x, *shadow, at / 4, mask, address);
      at += count;
    }
    if (i.format == Format::SMEM) hold_line(x, *shadow, offset, address);
  }
}

}  // namespace ark_emu
