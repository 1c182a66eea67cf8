// A running grid: its workgroups and waves, the seeded scheduler, and how it ends. A Grid belongs
// to one thread.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <queue>
#include <string>
#include <vector>

#include "checks.h"
#include "engine.h"
#include "lazy_pages.h"
#include "memory.h"
#include "program.h"
#include "random.h"
#include "wave.h"

namespace ark_emu {

class LoadedCodeImpl;
struct KernelDescriptor;
class StaleGrid;
class Timing;
struct WidenedOperands;

struct Workgroup {
  uint32_t id[3] = {0, 0, 0};
  uint32_t index = 0;
  std::vector<uint8_t> lds;
  uint32_t live = 0, at_barrier = 0;     // waves
  std::vector<Wave*> waves;
};

// A sleeping wave. It sleeps until the grid's clock reaches `wake`, or until no other wave can run.
struct Sleeper {
  uint64_t wake;
  Wave* wave;
  bool operator<(const Sleeper& other) const {   // the earliest is on top
    return wake != other.wake ? wake > other.wake : wave->id > other.wave->id;
  }
};

// The addresses of a wave's loads while it was watched for a deadlock.
struct PollLog {
  std::vector<uint64_t> addresses;
  std::vector<uint32_t> values;
};

struct Grid {
  Grid(Memory& memory, const LaunchDesc& launch);
  ~Grid();

  // Checks the launch, and allocates kernel arguments, registers and scratch memory for `resident`
  // workgroups, which exist at the same time. Throws Fault (BadLaunch) if the launch is invalid or
  // memory is too small.
  void prepare(uint32_t resident);
  // Creates every workgroup; afterwards step() runs slices of waves until the grid has ended.
  void populate();
  bool step();                           // false when the grid has ended
  // Runs one workgroup by itself, from its first instruction to its end. Only for grids whose
  // workgroups are independent.
  void run_group(uint32_t index, const std::atomic<bool>& cancel);
  // Runs the grid until it ends, a fault or a deadlock occurs, or `cancel` is set.
  void run(const std::atomic<bool>& cancel, const std::function<bool()>& hook);

  // True if no workgroup can see effects of another workgroup before the grid ends, so that they
  // may run one after another.
  bool independent() const;
  // True when no byte has changed for so long that a deadlock is likely.
  bool quiet() const { return clock - last_change >= 100000 + 2000 * live_waves; }
  void note_change() { last_change = clock; }
  bool look_for_deadlock();              // true if the grid was ended
  void finish(const Fault& fault, const Wave* wave, uint32_t pc);
  WaveWhere where(const Wave& wave, uint32_t pc) const;
  uint64_t waves_expected() const { return uint64_t{waves_per_group} * desc.grid.count(); }
  // True if an access is in the region of the kernel arguments, but in neither the argument segment
  // nor the dispatch packet.
  bool beyond_arguments(uint64_t address, int bytes) const;
  uint64_t pc_address(uint32_t pc) const { return code_base + uint64_t(pc) * 4; }

  LaunchDesc desc;
  int device;
  Memory& memory;
  MemoryView view;
  const KernelInfo* kernel = nullptr;
  Program* program = nullptr;
  uint64_t code_base = 0;                // address of image offset 0
  int lanes = 64;
  std::vector<std::unique_ptr<Workgroup>> groups;
  std::vector<std::unique_ptr<Wave>> waves;
  std::vector<Wave*> ready;              // waves that can run, in no particular order
  std::priority_queue<Sleeper> sleepers; // waves in s_sleep
  uint64_t kernarg = 0, packet = 0;      // addresses in the arguments region
  GridChecksPtr checks;
  std::shared_ptr<StaleGrid> stale;      // null unless values may be stale
  std::unique_ptr<Timing> timing;        // null without a timing model
  std::unique_ptr<WidenedOperands> widened;   // from the first matrix instruction on
  Random random{0};
  uint64_t clock = 0;                    // wave-instructions executed by finished slices
  bool ended = false;
  LaunchResult result;

 private:
  friend void reach_barrier(Wave& wave);
  friend void end_wave(Wave& wave);
  void check_launch(const KernelDescriptor& descriptor);
  friend uint64_t realtime(const Grid& grid);
  void make_kernarg();
  Workgroup& make_group(uint32_t index, uint32_t slot);
  void init_wave(Workgroup& group, Wave& wave, uint32_t slot, const KernelDescriptor& descriptor);
  void init_sgprs(const Workgroup& group, Wave& wave, const KernelDescriptor& descriptor);
  void run_slice(Wave& wave, int32_t instructions);
  template <class Around>
  void execute(Wave& wave, const Inst*& current, const Around& around);
  void execute_rows(Wave& wave, const Inst*& current);
  void step_timed();
  void release_barrier(Workgroup& group);
  void forget(Wave& wave);               // removes the wave from `ready`
  void put_to_sleep(Wave& wave, uint64_t executed);
  void wake_sleepers(bool all);
  // What a wave does that was run alone. cycles: it returns to an earlier state. external: it reads
  // memory that may be written from outside of the grid.
  struct Stuck {
    bool cycles = false, external = false;
    std::string state;
  };
  Stuck watch(Wave& wave);
  std::string poll_state(const PollLog& log) const;
  bool externally_written(uint64_t address) const;
  void keep_state(const Wave& wave, std::vector<uint8_t>& state) const;
  bool is_in_state(const Wave& wave, const std::vector<uint8_t>& state) const;

  LazyPages arguments, registers, scratch;
  uint32_t waves_per_group = 1;
  uint64_t scratch_per_wave = 0;
  uint32_t vgpr_rows = 0;                // of a wave: all VGPRs that exist, then all AGPRs
  uint64_t live_waves = 0;
  uint64_t last_change = 0;              // clock when memory last changed
  uint64_t next_look = 0, pause = 1;     // the next check for a deadlock; factor of its interval
  std::chrono::steady_clock::time_point external_since;
  const std::chrono::steady_clock::time_point began = std::chrono::steady_clock::now();
  std::chrono::steady_clock::duration napped{};   // slept while waiting for an outside writer
  bool waiting_external = false;
};

// The clock of s_memrealtime, 100 MHz. It advances by kStepTicks for each executed instruction of
// the grid. So a kernel's time limits allow the same number of instructions when checks or a busy
// host slow the emulator down. The clock never runs faster than the host's clock, because a kernel
// may wait for events outside of the grid.
constexpr uint64_t kStepTicks = 5;
uint64_t realtime(const Grid& grid);

// Called by the handlers of s_barrier and s_endpgm.
void reach_barrier(Wave& wave);
void end_wave(Wave& wave);

}  // namespace ark_emu
