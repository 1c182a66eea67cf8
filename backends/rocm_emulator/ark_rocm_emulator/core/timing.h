// Predicts times: when each instruction would issue and each access would return on a product such
// as an MI300X. With a timing model, the emulator always runs the wave whose clock is furthest
// behind. So polls, signals between processors and queueing happen in the order of the predicted
// times. The result is a prediction, not a measurement. timing_models.cpp and docs/rocm-timing.md
// describe the model and the sources of its numbers.
#pragma once

#include <cstdint>
#include <memory>
#include <queue>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "engine.h"
#include "inst.h"
#include "timing_places.h"

namespace ark_emu {

struct Grid;
struct Wave;
struct Workgroup;

// The figures of a product, such as an MI300X. Times are in cycles of its clock, widths in bytes
// per cycle.
struct TimingModel {
  const char* name;
  Arch arch;
  double ghz;
  int units, dies;                    // compute units; dies with an L2 each
  double matrix_flops;                // per cycle, of a SIMD's matrix unit with 16-bit types
  double lds_width, l1_width;         // of a compute unit
  double l2_width, fabric_width;      // of a die: its L2, its link to the memory side
  double mall_width, memory_width;    // of the device: memory-side cache, memory (as achieved)
  double lds_latency, scalar_latency, l1_latency, l2_latency, mall_latency, memory_latency;
  double coherent_latency;            // a coherent access, to the memory side and back
  double cross_die;                   // added if another die wrote the line last
  double atomic_step, poll_step;      // per atomic and per coherent load of one line in sequence
  double flush, invalidate;           // an L2's write-back without dirty lines; an invalidation
  double barrier;                     // s_barrier, from the last arrival
  double taken_branch;
  uint32_t l1_lines, l2_lines, mall_lines;   // of 128 bytes
};
// Returns the figures of the product with the given number, from 1 on; null if there is none.
const TimingModel* timing_model(uint32_t number);

// A cache, by the lines that it holds. A line's tag contains the epoch (the number of
// invalidations) in which it was filled. Sets have 16 ways, replaced first in, first out.
class LineCache {
 public:
  explicit LineCache(uint32_t lines) : sets_(lines / kWays), tags_(lines), next_(lines / kWays) {}
  bool find(uint64_t line) const {
    const uint64_t* set = &tags_[place(line)];
    for (uint32_t w = 0; w < kWays; w++) {
      if (set[w] == key(line)) return true;
    }
    return false;
  }
  void fill(uint64_t line) {
    const size_t at = place(line);
    uint8_t& next = next_[at / kWays];
    tags_[at + next] = key(line);
    next = (next + 1) % kWays;
  }
  void clear() { epoch_++; }

 private:
  static constexpr uint32_t kWays = 16;
  size_t place(uint64_t line) const {
    // The highest bits of this product choose the set of a line. So neighbouring lines are in
    // distant sets, and all sets get equally many lines. With the middle bits of the product, some
    // sets would overflow: 40% of the lines of a 128 MB buffer would not fit in a 256 MB cache.
    const uint64_t high = (line * 0x9e3779b97f4a7c15ull) >> 32;
    return static_cast<size_t>((high * sets_) >> 32) * kWays;
  }
  uint64_t key(uint64_t line) const { return line << 24 | (epoch_ & 0xffffff); }
  uint32_t sets_;
  std::vector<uint64_t> tags_;
  std::vector<uint8_t> next_;
  uint64_t epoch_ = 1;
};

// A hardware unit that serves one request after another. serve() returns the time at which the
// request has been served.
struct Server {
  double free = 0;
  double serve(double from, double cost) {
    free = (free > from ? free : from) + cost;
    return free;
  }
};

enum class Unit : uint8_t { Other, Scalar, Vector, Matrix, Lds, Load, Store, Atomic, ScalarLoad,
                            Flush, Invalidate, Wait, Sleep, Branch };

// The properties of an instruction that are known after decoding.
struct Cost {
  bool known = false;
  Unit unit = Unit::Other;
  float issue = 4, latency = 0;       // cycles until the next instruction; of a matrix instruction
  uint8_t bytes = 4;                  // per lane and access
  uint8_t accesses = 1;               // LDS accesses at separate offsets
};

struct WaveTiming {
  double now = 0;
  double mark = 0;                    // the time up to which the profile is complete
  uint32_t at = 0;                    // the instruction that runs, or ran last
  bool queued = false;                // waits in Timing::turns_
  double taken = 0;                   // when the address unit accepted the wave's last access
  double matrix_until = 0;            // when all matrix results are written
  uint32_t unit = 0, simd = 0;        // numbers in the whole device
  std::vector<double> vector_queue, scalar_queue;   // the end times of accesses in flight
  double ready[512] = {};             // by register: when a matrix instruction has written it
};

class Timing {
 public:
  Timing(const TimingModel& model, Grid& grid);
  ~Timing();                          // writes the profile to ARK_ROCM_EMULATOR_PROFILE, if set
  void add(Wave& w);
  // Removes the wave whose clock is furthest behind from the queue and returns it. Returns null if
  // no wave can run.
  Wave* next();
  void queue(Wave& w);
  bool ahead(const Wave& w) const;    // true if it is more than kSlack ahead of the queued waves
  void before(Wave& w, const Inst& i);
  void after(Wave& w, const Inst& i);
  void released(Workgroup& group);    // a barrier has opened
  double nanoseconds() const { return latest_ / model_.ghz; }
  uint64_t ticks(const Wave& w) const;   // of 10 ns

 private:
  struct ComputeUnit {
    explicit ComputeUnit(uint32_t lines) : l1(lines), scalar(256) {}
    LineCache l1, scalar;
    Server lds, addresses;
  };
  struct Simd {
    Server vector, matrix, scalar;
  };
  struct Die {
    explicit Die(uint32_t lines) : l2(lines) {}
    LineCache l2;
    Server l2_port, fabric;
    uint64_t dirty = 0;
  };
  struct Shared {                      // a line that coherent accesses touch
    Server server;
    double visible = 0;                // when the last write can be seen
    uint32_t die = 0;                  // of the last write
  };
  struct Turn {
    double time;
    uint64_t order;
    Wave* wave;
    bool operator<(const Turn& other) const {
      return time != other.time ? time > other.time : order > other.order;
    }
  };
  struct LdsUse {
    double cycles = 0, conflicts = 0;  // busy cycles; how many are bank conflicts
  };
  struct Spent {
    double cycles = 0;                 // of all waves
    LdsUse lds;
  };
  Cost cost_of(const Inst& i) const;
  Cost& known(const Inst& i);
  enum class Through : uint8_t { None, Vector, Scalar };   // the compute unit's cache
  double arrived(uint64_t line, uint64_t way, double at);
  double fetch(WaveTiming& t, uint64_t line, double at, Through through);
  void access(Wave& w, const Inst& i, const Cost& cost);
  double coherent(WaveTiming& t, uint64_t line, double at, bool writes, bool changes);
  LdsUse lds_use(Wave& w, const Inst& i, const Cost& cost) const;
  void wait(WaveTiming& t, uint32_t imm) const;
  double operands_ready(const Wave& w, const Inst& i) const;
  void spend(WaveTiming& t);

  const TimingModel& model_;
  Grid& grid_;
  Places places_;
  std::vector<ComputeUnit> units_;
  std::vector<Simd> simds_;
  std::vector<Die> dies_;
  LineCache mall_;
  Server mall_port_, memory_;
  std::unordered_map<uint64_t, Shared> shared_;
  std::vector<std::unique_ptr<WaveTiming>> waves_;
  Spent& spent(uint32_t pc);
  std::vector<Spent> spent_;           // by instruction
  std::vector<uint64_t> memory_bytes_; // read from memory, by half microsecond
  std::vector<Cost> costs_;
  std::priority_queue<Turn> turns_;
  uint64_t order_ = 0;
  double latest_ = 0;
};

}  // namespace ark_emu
