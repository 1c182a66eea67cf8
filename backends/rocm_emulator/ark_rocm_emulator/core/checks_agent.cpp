// Race checks of engines that access memory independently of the processors (agent.h). With checks
// off, these functions report nothing, because regions have no records of accesses (shadow pages).
#include <algorithm>

#include "agent.h"
#include "checks_agent.h"
#include "checks_state.h"
#include "memory.h"

namespace ark_emu {
namespace {

class CheckedAgent final : public Agent {
 public:
  explicit CheckedAgent(std::shared_ptr<Memory> memory) : memory_(std::move(memory)) {
    World& world = World::get();
    const std::lock_guard lock(world.mutex);
    if (world.free_slots.empty()) {
      slot_ = static_cast<uint32_t>(world.slots.size());
      world.slots.emplace_back();
    } else {
      slot_ = world.free_slots.back();
      world.free_slots.pop_back();
    }
    SlotHistory& history = world.slots[slot_];
    seen_ = std::make_shared<Clock>(world.slots.size(), 0);
    for (const uint32_t slot : world.free_slots) (*seen_)[slot] = world.slots[slot].epoch;
    past_ = seen_;
    history.epoch += 2;
    history.start = history.epoch;
    history.grid = world.next_grid++;
    history.device = kEngine;
    history.live = true;
    history.records.clear();
    note(true);
  }

  ~CheckedAgent() override {
    World& world = World::get();
    const std::lock_guard lock(world.mutex);
    world.slots[slot_].epoch++;
    world.slots[slot_].live = false;
    world.endings++;
    world.free_slots.push_back(slot_);
  }

  void acquire(uint64_t address, uint64_t size) override {
    cells(address, size, [&](ShadowPages& shadow, uint64_t index, CellState& cell, uint8_t) {
      const auto sync = shadow.syncs.find(index);
      if (sync != shadow.syncs.end()) {
        for (const Contributor& from : sync->second) join(from);
      } else {
        for (const Record& r : cell.writes) join({r.slot, r.epoch});
      }
      return std::string();
    });
  }

  std::string read(uint64_t address, uint64_t size) override {
    return cells(address, size, [&](ShadowPages& shadow, uint64_t index, CellState& cell, uint8_t b) {
      if (uninitialised(shadow, index, b)) return std::string("reads bytes that were not written");
      for (const Record& r : cell.writes) {
        if ((r.bytes & b) != 0 && !after_write(r)) return race("reads", r, "wrote");
      }
      cell.reads.remove([&](const Record& r) { return r.slot == slot_ && r.bytes == b; });
      if (cell.reads.size() < kMostReaders) cell.reads.push_back(record(b, Stamp::Plain));
      return std::string();
    });
  }

  std::string write(uint64_t address, uint64_t size) override {
    return cells(address, size, [&](ShadowPages& shadow, uint64_t index, CellState& cell, uint8_t b) {
      const std::string wrong = judge(cell, b, false);
      if (wrong.empty()) leave(shadow, index, cell, b, Stamp::Plain, false);
      return wrong;
    });
  }

  std::string publish(uint64_t address, uint64_t size, bool done, bool adds) override {
    {
      const std::lock_guard lock(World::get().mutex);
      note(done);
    }
    return cells(address, size, [&](ShadowPages& shadow, uint64_t index, CellState& cell, uint8_t b) {
      const std::string wrong = judge(cell, b, true);
      if (wrong.empty()) leave(shadow, index, cell, b, Stamp::Atomic, adds);
      return wrong;
    });
  }

 private:
  static constexpr size_t kMostReaders = 16;

  SlotHistory& history() { return World::get().slots[slot_]; }
  Record record(uint8_t bytes, Stamp stamp) {
    return {slot_, history().epoch, 0, bytes, stamp, 0};
  }

  // Begins a new epoch of the engine. The preceding epochs, with everything before them, are
  // published to waves that read the engine's signal. done: see Agent::publish.
  void note(bool done) {
    SlotHistory& mine = history();
    const Published all{mine.epoch, seen_};
    const Published none{0, std::make_shared<Clock>()};
    const Published& what = done ? all : none;
    mine.epoch++;
    mine.records.push_back({mine.epoch, what, what, what, none, none.seen, {all.own, past_}});
    if (mine.records.size() > kMaxRecords) mine.records.pop_front();
  }

  void join(Contributor from) {
    if (from.slot == slot_) return;
    const ReleaseRecord* found = record_of(from);
    if (found == nullptr) {   // the wave that wrote the flag has ended
      raise_clock(seen_, from.slot, from.epoch);
      return;
    }
    join_clock(seen_, *found->system.seen, from.slot);
    raise_clock(seen_, from.slot, std::min(found->system.own, from.epoch));
    join_clock(past_, *found->past.seen, from.slot);
    raise_clock(past_, from.slot, std::min(found->past.own, from.epoch));
  }

  bool after_write(const Record& r) const {
    return r.slot == slot_ || clock_at(seen_, r.slot) >= r.epoch;
  }

  std::string race(const char* does, const Record& r, const char* did) const {
    const SlotHistory& other = World::get().slots[r.slot];
    const std::string who = other.device == kEngine
                                ? std::string("another engine")
                                : "workgroup number " + std::to_string(other.group) +
                                      " of device " + std::to_string(other.device);
    return std::string(does) + " what " + who + " " + did +
           ": nothing that was released to the whole system orders the two";
  }

  // Returns the error if a write of the engine to these bytes of the cell is a race. flag: true if
  // the write is atomic.
  std::string judge(const CellState& cell, uint8_t bytes, bool flag) const {
    for (const Record& r : cell.writes) {
      const bool meets = flag && r.stamp != Stamp::Plain;
      if ((r.bytes & bytes) != 0 && !meets && !after_write(r)) return race("writes", r, "wrote");
    }
    for (const Record& r : cell.reads) {
      const bool over = after_write(r) || clock_at(past_, r.slot) >= r.epoch;
      const bool meets = flag && r.stamp != Stamp::Plain;
      if ((r.bytes & bytes) != 0 && !meets && !over) return race("writes", r, "read");
    }
    return {};
  }

  void leave(ShadowPages& shadow, uint64_t index, CellState& cell, uint8_t bytes, Stamp stamp,
             bool adds) {
    const Contributor mine{slot_, history().epoch};
    const auto sync = shadow.syncs.find(index);
    if (adds) {
      auto& all = shadow.syncs[index];
      if (sync == shadow.syncs.end()) {
        for (const Record& r : cell.writes) all.push_back({r.slot, r.epoch});
      }
      std::erase_if(all, [&](const Contributor& c) { return c.slot == slot_; });
      all.push_back(mine);
    } else if (sync != shadow.syncs.end()) {
      sync->second.assign(1, mine);
    }
    const auto drop = [bytes](Records& records) {
      records.remove([bytes](Record& r) {
        return (r.bytes = static_cast<uint8_t>(r.bytes & ~bytes)) == 0;
      });
    };
    drop(cell.writes);
    drop(cell.reads);
    cell.writes.push_back(record(bytes, stamp));
    cell.flag |= stamp == Stamp::Atomic;
    initialise(shadow, index, bytes);
  }

  static void initialise(ShadowPages& shadow, uint64_t index, uint8_t bytes) {
    if (!shadow.track_init) return;
    shadow.initialised.prepare(shadow.size);
    for (uint64_t k = 0; k < 4 && index * 4 + k < shadow.size; k++) {
      if ((bytes >> k & 1) != 0) shadow.initialised.add(index * 4 + k, 1);
    }
  }

  static bool uninitialised(const ShadowPages& shadow, uint64_t index, uint8_t bytes) {
    if (!shadow.track_init) return false;
    for (uint64_t k = 0; k < 4 && index * 4 + k < shadow.size; k++) {
      if ((bytes >> k & 1) != 0 && !shadow.initialised.contains(index * 4 + k)) return true;
    }
    return false;
  }

  // Calls `visit` for each of the checks' cells (four bytes) of a memory range, until a call
  // returns an error. Accesses by engines are not recorded for memory that several processes have
  // mapped.
  template <class F>
  std::string cells(uint64_t address, uint64_t size, F visit) {
    const auto entry = memory_->find(address);
    if (entry == nullptr || entry->shadow == nullptr || entry->shadow->shared != nullptr) return {};
    const std::lock_guard lock(World::get().mutex);
    const uint64_t begin = address - entry->region.base;
    const uint64_t end = std::min(begin + size, entry->region.size);
    for (uint64_t at = begin; at < end;) {
      const uint64_t count = std::min<uint64_t>(4 - at % 4, end - at);
      const auto mask = static_cast<uint8_t>(((1u << count) - 1) << at % 4);
      ShadowPages& shadow = *entry->shadow;
      const std::string wrong = visit(shadow, at / 4, shadow.cell(at / 4), mask);
      if (!wrong.empty()) return wrong + " (byte " + std::to_string(at) + " of " +
                                 entry->region.name + ")";
      at += count;
    }
    return {};
  }

  std::shared_ptr<Memory> memory_;
  uint32_t slot_ = 0;
  SharedClock seen_, past_;
};

}  // namespace

std::unique_ptr<Agent> checked_agent(std::shared_ptr<Memory> memory) {
  return std::make_unique<CheckedAgent>(std::move(memory));
}

}  // namespace ark_emu
