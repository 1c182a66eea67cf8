// Detects a grid that can never progress. If no byte of memory has changed for a while, every live
// wave is run alone. If each wave returns to the same instruction with the same registers and has
// not changed memory, nothing inside the grid can end the wait. The grid is then stopped. If the
// waves poll memory that the host, another device or another process may write, the grid first gets
// additional wall-clock time.
#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <thread>

#include "grid.h"
#include "stale.h"

namespace ark_emu {
namespace {

constexpr uint64_t kWatchSteps = 20000;   // longest cycle that is detected, in instructions
constexpr size_t kPrintedWaves = 24;

constexpr uint64_t kLooks = 100000;       // instructions between two checks for a deadlock
constexpr uint64_t kLongestPause = 64;    // limit of the factor by which checks become rarer
// How long the grid's thread sleeps while it waits for a writer outside of the grid.
constexpr std::chrono::microseconds kShortestNap{200}, kLongestNap{20000};

// Calls f(begin, bytes) for each part of the state, except the pc, that determines a wave's next
// steps.
template <class F>
void each_part(const Wave& w, size_t vgprs, size_t agprs, F f) {
  f(&w.scc, sizeof w.scc);
  f(&w.mode, sizeof w.mode);
  f(w.s, 128 * sizeof w.s[0]);
  f(w.v, vgprs * kLanes * 4);
  f(w.v + 256 * kLanes, agprs * kLanes * 4);
  // Private memory is part of the state: a wave that recurses makes progress although its registers
  // repeat.
  if (w.scratch != nullptr) f(w.scratch, w.scratch_size);
}

}  // namespace

void Grid::keep_state(const Wave& w, std::vector<uint8_t>& state) const {
  state.clear();
  const size_t agprs = vgpr_rows > 256 ? kernel->agprs : 0;
  each_part(w, std::min<size_t>(kernel->vgprs + 1, vgpr_rows), agprs,
            [&state](const void* from, size_t bytes) {
              const auto* begin = static_cast<const uint8_t*>(from);
              state.insert(state.end(), begin, begin + bytes);
            });
}

bool Grid::is_in_state(const Wave& w, const std::vector<uint8_t>& state) const {
  bool same = true;
  size_t at = 0;
  const size_t agprs = vgpr_rows > 256 ? kernel->agprs : 0;
  each_part(w, std::min<size_t>(kernel->vgprs + 1, vgpr_rows), agprs,
            [&](const void* from, size_t bytes) {
              same = same && std::memcmp(from, state.data() + at, bytes) == 0;
              at += bytes;
            });
  return same;
}

bool Grid::externally_written(uint64_t address) const {
  const std::shared_ptr<const RegionEntry> entry = memory.find(address);
  if (entry == nullptr) return false;
  const Region& r = entry->region;
  const uint64_t others = r.access & ~(1ull << device);
  return r.kind == MemKind::Host || r.kind == MemKind::Queue || r.shared || r.device != device ||
         others != 0;
}

std::string Grid::poll_state(const PollLog& log) const {
  std::string text = "polls";
  for (size_t k = 0; k < log.addresses.size() && k < 3; k++) {
    char line[64];
    std::snprintf(line, sizeof line, " 0x%" PRIx64, log.addresses[k]);
    text += line;
    if (const auto entry = memory.find(log.addresses[k]); entry != nullptr) {
      text += " (" + entry->region.name + "+" +
              std::to_string(log.addresses[k] - entry->region.base) + ")";
    }
    text += " = " + std::to_string(log.values[k]);
  }
  if (log.addresses.size() > 3) text += " and more";
  return log.addresses.empty() ? "loops without reading memory" : text;
}

// Runs the wave alone and looks for a cycle (Brent's method on instruction counts).
Grid::Stuck Grid::watch(Wave& w) {
  Stuck stuck;
  PollLog log;
  w.watched = &log;
  uint32_t mark_pc = w.pc;
  uint64_t mark_at = 0, next_mark = 1;
  std::vector<uint8_t> mark;
  keep_state(w, mark);
  for (uint64_t steps = 1; steps <= kWatchSteps && !ended; steps++) {
    run_slice(w, 1);
    if (w.changed || w.status != WaveStatus::Ready || ended) break;
    if (w.pc == mark_pc && is_in_state(w, mark)) {
      stuck.cycles = true;
      break;
    }
    if (steps - mark_at >= next_mark) {
      mark_at = steps;
      next_mark *= 2;
      mark_pc = w.pc;
      keep_state(w, mark);
      log.addresses.clear();
      log.values.clear();
    }
  }
  w.watched = nullptr;
  stuck.state = poll_state(log);
  for (const uint64_t address : log.addresses) stuck.external |= externally_written(address);
  return stuck;
}

bool Grid::look_for_deadlock() {
  if (!quiet()) {
    waiting_external = false;
    pause = 1;
    return false;
  }
  if (clock < next_look) return false;
  next_look = clock + pause * (kLooks + 2000 * live_waves);
  wake_sleepers(true);
  if (stale != nullptr) stale->settle();
  bool external = false;
  std::vector<std::pair<const Wave*, std::string>> states;
  const std::vector<Wave*> looked_at = ready;
  for (Wave* wave : looked_at) {
    const Stuck stuck = watch(*wave);
    if (ended || !stuck.cycles) {   // it computes for long: look less often
      waiting_external = false;
      pause = std::min(2 * pause, kLongestPause);
      return ended;
    }
    external |= stuck.external;
    states.emplace_back(wave, stuck.state);
  }
  const auto now = std::chrono::steady_clock::now();
  if (!waiting_external) {
    waiting_external = true;
    external_since = now;
  }
  const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(now - external_since);
  if (external && waited.count() < static_cast<int64_t>(desc.options.external_wait_ms)) {
    // A writer outside of the grid may still act. This thread sleeps so that the writer can run.
    // The longer the wait has taken, the longer it sleeps.
    const auto nap = std::chrono::duration_cast<std::chrono::microseconds>(now - external_since) / 4;
    std::this_thread::sleep_for(std::clamp(nap, kShortestNap, kLongestNap));
    napped += std::chrono::steady_clock::now() - now;
    next_look = clock + 64 * live_waves;
    return false;
  }
  for (const auto& [wave, state] : states) {
    WaveWhere w = where(*wave, wave->pc);
    w.state = state;
    result.waves.push_back(std::move(w));
  }
  for (const auto& wave : waves) {
    if (wave->status == WaveStatus::Barrier) result.waves.push_back(where(*wave, wave->pc));
  }
  std::string text =
      "none of the " + std::to_string(result.waves.size()) + " live waves can continue";
  if (external)
    text += " and nothing came from outside for " + std::to_string(waited.count()) + " ms";
  for (size_t k = 0; k < result.waves.size() && k < kPrintedWaves; k++) {
    const WaveWhere& w = result.waves[k];
    text += "\n  workgroup (" + std::to_string(w.workgroup[0]) + ", " +
            std::to_string(w.workgroup[1]) + ", " + std::to_string(w.workgroup[2]) + ") wave " +
            std::to_string(w.wave) + " at " + w.function + ": " + w.line + "; " + w.state;
  }
  if (result.waves.size() > kPrintedWaves) text += "\n  ...";
  finish(Fault{ErrorKind::Deadlock, text + "\n"}, nullptr, 0);
  return true;
}

}  // namespace ark_emu
