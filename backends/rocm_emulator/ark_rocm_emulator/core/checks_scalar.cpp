// Checks of the scalar data cache. Stores do not update it, and only s_dcache_inv clears it. It is
// an error if a write is ordered before a scalar load, but the load may return a cached line that
// was read before the write. See README.md, "Checks".
#include <algorithm>
#include <cstring>

#include "checks_state.h"
#include "grid.h"
#include "memory.h"

namespace ark_emu {
namespace {

// The last epoch whose stores and scalar loads are all complete. If the scalar cache is cleared
// now, the effect covers these accesses.
uint32_t complete_scalar(const WaveChecks& c) {
  uint32_t epoch = complete_global(c);
  for (const Outstanding& op : c.lgkm) {
    if (op.smem) return std::min(epoch, op.epoch - 1);
  }
  return epoch;
}

// True if this wave has cleared its scalar cache since `load` loaded the line into the cache.
bool gone(const WaveChecks& c, const ScalarHold& hold, const ScalarHold::Load& load) {
  return clock_at(c.cleared, hold.slot) >= load.epoch;
}

// True if the cached line contains the data of `write`, because it was loaded after they had been
// written.
bool fresh(const ScalarHold& hold, const ScalarHold::Load& load, const Record& write) {
  if (hold.slot == write.slot) return load.complete >= write.epoch;
  return clock_at(load.seen, write.slot) >= write.epoch;
}

[[noreturn]] void report_stale(const Access& x, uint64_t address, const ScalarHold& hold,
                               const char* written) {
  const bool own = hold.slot == x.w.checks->slot;
  throw Fault{ErrorKind::Stale,
              *x.i.name + " reads " + describe_address(x.w.grid->view, address) +
                  " through the scalar cache, which may hold the line since " +
                  (own ? "this wave's" : "another wave's") + " scalar load before " + written +
                  ": no s_dcache_inv, with its s_waitcnt lgkmcnt(0), lies between the write and "
                  "this load",
              0, address};
}

}  // namespace

void check_scalar_cache(const Access& x, ShadowPages& shadow, uint64_t index, uint8_t bytes,
                        uint64_t address) {
  if (x.i.glc) return;   // globally coherent: bypasses the cache
  const WaveChecks& c = *x.w.checks;
  const auto line = shadow.held.find(address / ScalarHold::kLine);
  for (const Record& write : shadow.cell(index).writes) {
    if ((write.bytes & bytes) == 0) continue;
    if (write.slot == c.slot && write.epoch > complete_global(c)) {
      throw Fault{ErrorKind::MissingWait,
                  *x.i.name + " reads " + describe_address(x.w.grid->view, address) +
                      " before an s_waitcnt covers this wave's store to it; scalar loads and " +
                      "vector stores are not ordered",
                  0, address};
    }
    if (line == shadow.held.end() || clock_at(c.cleared, write.slot) >= write.epoch) continue;
    for (const ScalarHold& hold : line->second) {
      if (hold.device != x.w.grid->device) continue;
      for (const ScalarHold::Load* load : {&hold.first, &hold.last}) {
        if (!gone(c, hold, *load) && !fresh(hold, *load, write)) {
          report_stale(x, address, hold, "the write");
        }
      }
    }
  }
  if (line == shadow.held.end()) return;
  // The checks have no record of writes by the host, a peer or a copy engine. Such a write is
  // detected only if it has changed the value.
  const uint64_t cleared_at = x.w.grid->checks->groups[x.w.group].cleared_at;
  for (const ScalarHold& hold : line->second) {
    if (hold.device != x.w.grid->device || hold.time <= cleared_at) continue;
    const void* then = hold.bytes.data() + address % ScalarHold::kLine;
    if (std::memcmp(then, reinterpret_cast<const void*>(address), 4) != 0) {
      report_stale(x, address, hold, "the host or a peer wrote it");
    }
  }
}

void hold_line(const Access& x, ShadowPages& shadow, uint64_t offset, uint64_t address) {
  if (x.i.glc) return;
  const WaveChecks& c = *x.w.checks;
  const ScalarHold::Load load{c.epoch, complete_global(c), c.seen};
  std::vector<ScalarHold>& line = shadow.held[address / ScalarHold::kLine];
  const auto mine = std::find_if(line.begin(), line.end(),
                                 [&c](const ScalarHold& hold) { return hold.slot == c.slot; });
  if (mine != line.end() && !gone(c, *mine, mine->first)) {
    mine->last = load;
    return;
  }
  if (mine != line.end()) line.erase(mine);
  if (line.size() >= ScalarHold::kMost) {
    std::erase_if(line, [](const ScalarHold& hold) { return has_ended(hold.slot, hold.last.epoch); });
    if (line.size() >= ScalarHold::kMost) return;
  }
  ScalarHold hold{c.slot, x.w.grid->device, load, load, ++World::get().time, {}};
  const uint64_t before = std::min(address % ScalarHold::kLine, offset);
  const uint64_t behind = shadow.size - offset;
  const uint64_t in_line = address % ScalarHold::kLine;
  std::memcpy(hold.bytes.data() + in_line - before,
              reinterpret_cast<const void*>(address - before),
              before + std::min(ScalarHold::kLine - in_line, behind));
  line.push_back(std::move(hold));
}

void check_scalar_invalidate(Wave& w) {
  World& world = World::get();
  const std::lock_guard lock(world.mutex);
  WaveChecks& c = *w.checks;
  GroupChecks& group = w.grid->checks->groups[w.group];
  group.cleared_at = ++world.time;
  group.clears = true;
  c.clearing = std::make_shared<Clock>(*c.seen);
  raise_clock(c.clearing, c.slot, complete_scalar(c));
}

void scalar_cleared(WaveChecks& c) {
  if (c.clearing == nullptr) return;
  join_clock(c.cleared, *c.clearing);
  c.clearing = nullptr;
}

}  // namespace ark_emu
