// A running grid: its workgroups and waves, the seeded scheduler, and how it ends.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine.h"
#include "memory.h"
#include "program.h"
#include "wave.h"

namespace ark_emu {

class LoadedCodeImpl;
struct GridChecks;

// splitmix64: small, good enough to order waves, the same everywhere.
struct Random {
  uint64_t state;
  uint64_t next() {
    uint64_t z = (state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  uint64_t below(uint64_t limit) {   // limit < 2^32
    return ((next() >> 32) * limit) >> 32;
  }
};

struct Workgroup {
  uint32_t id[3] = {0, 0, 0};
  uint32_t index = 0;
  std::vector<uint8_t> lds;
  uint32_t live = 0, at_barrier = 0;     // waves
  std::vector<Wave*> waves;
};

struct Grid {
  Grid(Memory& memory, LaunchDesc launch, int device_index);
  ~Grid();

  // Builds workgroups, waves, kernel arguments. Throws Fault (BadLaunch) when they do not fit.
  void prepare();
  // Picks a ready wave and runs one slice of it. False when the grid has ended.
  bool step();
  bool finished() const { return ended; }
  void run(const std::atomic<bool>& cancel, const std::function<bool()>& hook);
  void run_parallel(const std::atomic<bool>& cancel);
  void finish(const Fault& fault, Wave* wave);
  WaveWhere where(const Wave& wave, uint32_t pc) const;
  uint64_t pc_address(uint32_t pc) const { return code_base + uint64_t(pc) * 4; }

  LaunchDesc desc;
  int device = 0;
  Memory& memory;
  MemoryView view;
  const KernelInfo* kernel = nullptr;
  Program* program = nullptr;
  uint64_t code_base = 0;                // address of image offset 0
  int lanes = 64;
  std::vector<std::unique_ptr<Workgroup>> groups;
  std::vector<std::unique_ptr<Wave>> waves;
  std::vector<Wave*> ready;              // waves that can run, in no particular order
  std::unique_ptr<GridChecks> checks;
  Random random{0};
  uint64_t clock = 0;                    // wave-instructions executed by finished slices
  uint64_t progress = 0;
  bool ended = false;
  LaunchResult result;

 private:
  void make_kernarg();
  void make_group(uint32_t index);
  void init_wave(Workgroup& group, Wave& wave);
  void run_slice(Wave& wave);
  void after_slice(Wave& wave);
  void release_barrier(Workgroup& group);
  bool independent() const;
  void look_for_deadlock();
  void report_deadlock(const std::vector<std::string>& states);
  std::string poll_state(Wave& wave, bool* cycles, bool* external);

  uint64_t kernarg = 0, packet = 0;      // addresses in `private_area`
  std::vector<uint8_t> private_area;     // kernel arguments, dispatch packet
  uint8_t* registers = nullptr;          // VGPRs of all waves, mapped lazily
  size_t registers_size = 0;
  uint8_t* scratch = nullptr;
  size_t scratch_size = 0;
  uint64_t seen_progress = 0, quiet_since = 0;
  std::chrono::steady_clock::time_point external_since;
  bool waiting_external = false;
};

// Called by s_barrier and s_endpgm handlers.
void reach_barrier(Wave& wave);
void end_wave(Wave& wave);

}  // namespace ark_emu
