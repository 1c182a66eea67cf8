// The state of the checks for races: its creation and removal, and the vector clocks of waves,
// which releases, acquires and barriers update.
#include "checks.h"

#include <algorithm>

#include "checks_agent.h"
#include "checks_shared.h"
#include "grid.h"
#include "memory.h"

namespace ark_emu {

World& World::get() {
  static World& world = *new World;   // never destroyed: grids may still run when the process ends
  return world;
}

CheckedAccess::CheckedAccess(const Wave& w) {
  if (w.checks == nullptr) return;
  lock_ = std::unique_lock(World::get().mutex);
  if (sharing()) shared_ = std::make_unique<SharedLock>();
}

CheckedAccess::~CheckedAccess() = default;

void GridChecksDeleter::operator()(GridChecks* checks) const {
  World& world = World::get();
  const std::lock_guard lock(world.mutex);
  for (size_t k = 0; k < checks->slots.size(); k++) {
    const uint32_t slot = checks->slots[k];
    if (k < checks->waves.size()) world.slots[slot].epoch = checks->waves[k]->epoch + 1;
    world.slots[slot].live = false;
    world.endings++;
    ledger_end(slot);
    world.free_slots.push_back(slot);
  }
  delete checks;
}

GridChecksPtr begin_checks(Grid& grid) {
  World& world = World::get();
  const std::lock_guard lock(world.mutex);
  GridChecksPtr checks(new GridChecks);
  checks->number = world.next_grid++;
  const uint64_t count = grid.waves_expected();
  for (uint64_t k = 0; k < count; k++) {
    uint32_t slot;
    if (world.free_slots.empty()) {
      slot = static_cast<uint32_t>(world.slots.size());
      world.slots.emplace_back();
    } else {
      slot = world.free_slots.back();
      world.free_slots.pop_back();
    }
    checks->slots.push_back(slot);
  }
  return checks;
}

// Creates the checks' state of a new wave. The wave is ordered after every grid that has ended.
void add_wave_checks(Grid& grid, Wave& w) {
  World& world = World::get();
  const std::lock_guard lock(world.mutex);
  GridChecks& checks = *grid.checks;
  auto c = std::make_unique<WaveChecks>();
  c->slot = checks.slots[checks.waves.size()];
  c->grid = checks.number;
  c->seen = std::make_shared<Clock>(world.slots.size(), 0);
  c->seen_lds = std::make_shared<Clock>();
  for (const uint32_t slot : world.free_slots) (*c->seen)[slot] = world.slots[slot].epoch;
  for (const uint32_t slot : checks.slots) (*c->seen)[slot] = world.slots[slot].epoch;
  for (size_t slot = 0; slot < world.slots.size(); slot++) {   // what engines have done so far, too
    const SlotHistory& other = world.slots[slot];
    if (other.live && other.device == kEngine) (*c->seen)[slot] = other.epoch;
  }
  c->past = c->seen;
  SlotHistory& history = world.slots[c->slot];
  c->epoch = history.epoch + 2;
  c->released_agent = c->released_system = {c->epoch - 1, c->seen};
  c->cleared = c->seen;   // a grid's start clears the caches
  history.group = w.group->index;
  history.grid = checks.number;
  history.device = grid.device;
  history.live = true;
  history.records.clear();
  history.start = c->epoch;
  c->started = world_time();
  ledger_begin(c->slot, c->epoch);
  const Published start = c->released_agent;
  history.records.push_back(
      {c->epoch, start, start, start, {c->epoch - 1, c->seen_lds}, c->cleared, start});
  GroupChecks& group = checks.groups[w.group];
  group.lds.size = w.group->lds.size();
  group.lds.track_init = true;
  if (group.cleared_at == 0) group.cleared_at = ++world.time;
  w.checks = c.get();
  checks.waves.push_back(std::move(c));
}

bool has_ended(uint32_t slot, uint32_t epoch) {
  const SlotHistory& history = World::get().slots[slot];
  return !history.live || epoch < history.start;
}

bool is_rdna(const Wave& w) { return w.grid->program->arch() == Arch::gfx1100; }

uint32_t clock_at(const SharedClock& clock, uint32_t slot) {
  return slot < clock->size() ? (*clock)[slot] : 0;
}

namespace {

Clock& writable(SharedClock& clock, size_t size) {
  if (clock.use_count() > 1) clock = std::make_shared<Clock>(*clock);
  if (clock->size() < size) clock->resize(size, 0);
  return *clock;
}

}  // namespace

void join_clock(SharedClock& into, const Clock& from, uint32_t except) {
  bool higher = false;
  for (uint32_t k = 0; k < from.size() && !higher; k++) {
    higher = k != except && from[k] > clock_at(into, k);
  }
  if (!higher) return;
  Clock& to = writable(into, from.size());
  for (uint32_t k = 0; k < from.size(); k++) {
    if (k != except) to[k] = std::max(to[k], from[k]);
  }
}

void raise_clock(SharedClock& into, uint32_t slot, uint32_t epoch) {
  if (clock_at(into, slot) >= epoch) return;
  writable(into, slot + 1)[slot] = epoch;
}

uint32_t complete_global(const WaveChecks& c) {
  uint32_t epoch = c.epoch;
  if (!c.vm.empty()) epoch = std::min(epoch, c.vm.front().epoch - 1);
  if (!c.vs.empty()) epoch = std::min(epoch, c.vs.front().epoch - 1);
  return epoch;
}

uint32_t complete_lds(const WaveChecks& c) {
  uint32_t epoch = c.epoch;
  for (const auto* queue : {&c.vm, &c.lgkm}) {
    for (const Outstanding& op : *queue) {
      if (!op.lds) continue;
      epoch = std::min(epoch, op.epoch - 1);
      break;
    }
  }
  return epoch;
}

uint32_t complete_loads(const WaveChecks& c) {
  uint32_t epoch = c.epoch;
  if (!c.vm.empty()) epoch = std::min(epoch, c.vm.front().epoch - 1);
  for (const Outstanding& op : c.lgkm) {
    if (op.smem) return std::min(epoch, op.epoch - 1);
  }
  return epoch;
}

void note_release(Wave& w) {
  WaveChecks& c = *w.checks;
  const Arch arch = w.grid->program->arch();
  const uint32_t complete = complete_global(c);
  // A wave sees its own completed stores. Other waves see these stores too, unless a write-back
  // cache between the waves delays them.
  const auto publish = [&](Published& to, bool through) {
    if (through) to.seen = c.seen;
    if (through || c.last_store <= to.own) to.own = std::max(to.own, complete);
  };
  publish(c.released_agent, arch == Arch::gfx90a || is_rdna(w));
  publish(c.released_system, is_rdna(w));
  // The accesses that a release publishes to the workgroup. On CDNA these are all issued accesses,
  // because one L1 cache serves the workgroup in order. On RDNA they are only the completed
  // accesses.
  const Published group{is_rdna(w) ? complete : ~0u, c.seen};
  const Published lds{complete_lds(c), c.seen_lds};
  const Published past{complete_loads(c), c.past};
  c.epoch++;
  auto& records = World::get().slots[c.slot].records;
  records.push_back({c.epoch, group, c.released_agent, c.released_system, lds, c.cleared, past});
  if (records.size() > kMaxRecords) records.pop_front();
}

Scope relation_to(const Wave& w, const WaveChecks& c, uint32_t slot) {
  const SlotHistory& other = World::get().slots[slot];
  if (other.grid == c.grid) return other.group == w.group->index ? Scope::Group : Scope::Agent;
  return other.device == w.grid->device ? Scope::Agent : Scope::System;
}

const ReleaseRecord* record_of(Contributor from) {
  const SlotHistory& history = World::get().slots[from.slot];
  if (from.epoch < history.start) return nullptr;
  const auto& records = history.records;
  const auto next = std::upper_bound(records.begin(), records.end(), from.epoch,
                                     [](uint32_t e, const ReleaseRecord& r) { return e < r.time; });
  // If the epoch is older than the oldest record that is kept, the oldest record is used. This
  // record orders more accesses than the wave had released, so a race may be missed.
  return next == records.begin() ? &records.front() : &*(next - 1);
}

namespace {

void join_past(WaveChecks& c, Contributor from) {
  uint32_t& passed = c.passed[from.slot];
  if (passed >= from.epoch) return;
  passed = from.epoch;
  const ReleaseRecord* record = record_of(from);
  if (record == nullptr) return;
  join_clock(c.past, *record->past.seen, from.slot);
  raise_clock(c.past, from.slot, std::min(record->past.own, from.epoch));
}

}  // namespace

void pass_flags(WaveChecks& c) {
  std::erase_if(c.passing, [&](const Passing& p) {
    if (p.vm_sequence > c.vm_done || p.lgkm_sequence > c.lgkm_done) return false;
    join_past(c, p.from);
    return true;
  });
}

void join_release(Wave& w, Contributor from, Scope relation) {
  WaveChecks& c = *w.checks;
  if (from.slot == c.slot) return;
  uint32_t& joined = c.joined[uint64_t{from.slot} << 2 | static_cast<uint64_t>(relation)];
  if (joined >= from.epoch) return;
  joined = from.epoch;
  join_past(c, from);
  const ReleaseRecord* found = record_of(from);
  if (found == nullptr) return;
  const ReleaseRecord& record = *found;
  const auto join = [&](SharedClock& into, const Published& what) {
    // A barrier adds the other wave's own accesses to `seen`, although some of them may not be
    // visible outside of the workgroup yet. `own` is the last epoch whose accesses are visible
    // there.
    join_clock(into, *what.seen, from.slot);
    raise_clock(into, from.slot, std::min(what.own, from.epoch));
  };
  join(c.seen, relation == Scope::Group   ? record.group
               : relation == Scope::Agent ? record.agent
                                          : record.system);
  join(c.released_agent.seen, relation == Scope::System ? record.system : record.agent);
  join(c.released_system.seen, record.system);
  if (relation == Scope::Group) {
    join_clock(c.seen_lds, *record.lds.seen, from.slot);
    raise_clock(c.seen_lds, from.slot, record.lds.own);
    if (record.cleared != c.cleared) join_clock(c.cleared, *record.cleared);
  }
}

void check_barrier_reached(Wave& w) {
  const std::lock_guard lock(World::get().mutex);
  note_release(w);
}

// Called when a barrier completes: orders every wave of the group after the accesses that the other
// waves made before the barrier. On CDNA all earlier global accesses are ordered, because one L1
// cache serves the group in order; on RDNA only completed ones are. LDS accesses are ordered if the
// wave has waited for them. The waves share one scalar cache: if one wave has cleared it, it is
// cleared for all.
void check_barrier_passed(Workgroup& group) {
  const std::lock_guard lock(World::get().mutex);
  SharedClock all, all_lds, past, cleared;
  const bool clears = group.waves.front()->grid->checks->groups[&group].clears;
  for (Wave* wave : group.waves) {
    WaveChecks& c = *wave->checks;
    if (wave->status != WaveStatus::Barrier) continue;
    if (all == nullptr) {
      all = std::make_shared<Clock>(*c.seen);
      all_lds = std::make_shared<Clock>(*c.seen_lds);
      past = c.past;
      cleared = c.cleared;
    }
    if (clears) join_clock(cleared, *c.cleared);
    join_clock(all, *c.seen);
    join_clock(all_lds, *c.seen_lds);
    join_clock(past, *c.past);
    raise_clock(past, c.slot, complete_loads(c));
    raise_clock(all, c.slot, is_rdna(*wave) ? complete_global(c) : c.epoch);
    raise_clock(all_lds, c.slot, complete_lds(c));
  }
  for (Wave* wave : group.waves) {
    if (wave->status != WaveStatus::Barrier) continue;
    wave->checks->seen = all;
    wave->checks->seen_lds = all_lds;
    wave->checks->past = past;
    if (clears) wave->checks->cleared = cleared;
    note_release(*wave);
  }
}

void check_wave_ended(Wave& w) {
  const std::lock_guard lock(World::get().mutex);
  WaveChecks& c = *w.checks;
  for (const Doubt& doubt : c.doubts) {
    if (!doubt.shadow->cell(doubt.index).flag) throw doubt.race;
  }
  if (w.group->live == 1) {
    for (const LdsDoubt& doubt : w.grid->checks->groups[w.group].doubts) {
      if (!w.grid->checks->expects.contains(doubt.pc)) throw doubt.race;
    }
  }
  c.vm.clear();
  c.vs.clear();
  c.lgkm.clear();
  c.released_agent = c.released_system = {c.epoch, c.seen};
  note_release(w);
}

std::shared_ptr<ShadowPages> make_shadow(const Region& region) {
  if (region.kind == MemKind::Code) return nullptr;
  auto shadow = std::make_shared<ShadowPages>();
  shadow->size = region.size;
  shadow->shared = static_cast<SharedCell*>(region.records);
  shadow->track_init = !region.initialised && region.kind != MemKind::Host;
  return shadow;
}

void shadow_share(ShadowPages& shadow, void* records) {
  const std::lock_guard lock(World::get().mutex);
  shadow.shared = static_cast<SharedCell*>(records);
}

// Marks memory that was written from outside of a kernel: it is initialised, and no earlier access
// conflicts with the write.
void shadow_mark_written(ShadowPages& shadow, uint64_t offset, uint64_t size) {
  const std::lock_guard lock(World::get().mutex);
  if (shadow.track_init) {
    shadow.initialised.prepare(shadow.size);
    shadow.initialised.add(offset, size);
  }
  const uint64_t first = offset / 4, last = (offset + size + 3) / 4;
  for (auto& [number, page] : shadow.pages) {
    const uint64_t base = number * ShadowPages::kCells;
    const uint64_t begin = std::max(first, base), end = std::min(last, base + ShadowPages::kCells);
    for (uint64_t k = begin; k < end; k++) (*page)[k - base].reset();
  }
  std::erase_if(shadow.syncs, [&](const auto& s) { return s.first >= first && s.first < last; });
  if (shadow.shared != nullptr) clear_cells(shadow, first, last);
}

}  // namespace ark_emu
