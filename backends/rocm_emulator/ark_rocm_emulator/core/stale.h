// Emulates caches and delayed memory operations, so that a program without the required fences
// reads stale values. Caches hold lines until an instruction writes back or invalidates them.
// Memory operations take effect later than they were issued and in another order. The visible
// values are those that the memory model of LLVM's "User Guide for AMDGPU Backend" allows; see
// README.md, "Stale values". With LaunchOptions::stale off none of this exists.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "access.h"
#include "engine.h"
#include "lazy_pages.h"
#include "random.h"
#include "wave.h"

namespace ark_emu {

class Memory;

constexpr uint64_t kStaleLine = 128;     // bytes
using ByteMask = unsigned __int128;      // one bit per byte of a line

// The scope of an access, a write-back or an invalidation: it reaches the threads of the workgroup,
// of the device (agent) or of the system.
enum class Reach : uint8_t { Group, Agent, System };

// Which caches may hold memory of one kind (such as fine-grained memory), for accesses of one
// device.
struct Placement {
  bool inner = false;     // the L2 of an XCD, or RDNA's cache of a shader array
  bool through = false;   // that inner cache is write-through
  bool outer = false;     // the device's one outer cache
  bool local = false;     // the device's own coarse-grained memory: invalidations keep its lines
  bool peer = false;      // memory of another device
};

struct CacheLine {
  uint64_t tag;           // number of the line + 1; 0 if empty
  uint32_t round, foreign_round;   // Cache::round_ and foreign_round_ when it was last touched
  bool local, listed;     // Placement::local; is in Cache::dirty_
  ByteMask valid, dirty;
  alignas(16) uint8_t data[kStaleLine];
};

// A direct-mapped cache. The slot of a line depends on the seed.
class Cache {
 public:
  void make(uint32_t lines, uint64_t salt);   // a power of two
  CacheLine* find(uint64_t line);             // null if the line is not held
  // Returns the cache's entry for a line. If the entry held another line, it is emptied, and if
  // that line was dirty, it is passed to `evict`.
  template <class F>
  CacheLine& claim(uint64_t line, bool local, F evict) {
    CacheLine& at = place(line);
    if (at.tag != line + 1) {
      if (at.tag != 0 && at.dirty != 0) evict(at);
      take(at, line, local);
    }
    refresh(at);
    return at;
  }
  void mark_dirty(CacheLine& at, ByteMask bytes);
  // Passes each dirty line to `write` and marks it as clean.
  template <class F>
  void write_back(F write) {
    for (const uint32_t index : dirty_) {
      CacheLine& at = lines_[index];
      at.listed = false;
      if (at.tag != 0 && at.dirty != 0) write(at);
      at.dirty = 0;
    }
    dirty_.clear();
  }
  void drop_clean() { round_++; }
  void drop_foreign() { foreign_round_++; }   // drops clean lines that are not local

 private:
  CacheLine& place(uint64_t line) {
    return lines_[(line * 0x9e3779b97f4a7c15ull ^ salt_) >> shift_];
  }
  void take(CacheLine& at, uint64_t line, bool local);
  void refresh(CacheLine& at);
  LazyPages pages_;
  CacheLine* lines_ = nullptr;
  uint64_t salt_ = 0;
  unsigned shift_ = 0;
  uint32_t round_ = 1, foreign_round_ = 1;
  std::vector<uint32_t> dirty_;
};

// The caches and other state that the grids of one device share.
class DeviceCaches {
 public:
  DeviceCaches(Arch arch, uint64_t salt);
  std::mutex mutex;   // held around everything below
  // Reads a line as seen by a compute unit whose first-level cache does not hold the line. `part`:
  // the number of the inner cache that serves the unit.
  void read(unsigned part, uint64_t line, Placement place, Reach reach, Random& random,
            uint8_t* out);
  bool write(unsigned part, uint64_t address, const uint8_t* from, int bytes, Placement place,
             Reach reach);   // true if something changed
  // The address of the bytes that an atomic operation changes, at the cache level that performs it.
  uint8_t* cell(unsigned part, uint64_t address, int bytes, Placement place, Reach reach);
  void write_back(unsigned part, Reach reach);
  void invalidate(unsigned part, Reach reach);
  void drop_clean();
  void settle();      // writes everything back and empties the caches

 private:
  bool cdna3() const { return arch_ == Arch::gfx942 || arch_ == Arch::gfx950; }
  void read_outer(uint64_t line, Placement place, Reach reach, Random& random, uint8_t* out);
  void to_outer(CacheLine& at);
  CacheLine& claim_inner(unsigned part, uint64_t line, Placement place);
  CacheLine& claim_outer(uint64_t line, Placement place);
  Arch arch_;
  std::array<Cache, 8> inner_;
  Cache outer_;
};

struct ComputeUnit;

// A memory operation that was issued and has not taken effect yet.
struct Flight {
  const Inst* inst = nullptr;
  Wave* wave = nullptr;
  ComputeUnit* unit = nullptr;
  bool performed = false;
  size_t place = 0;                     // in StaleGrid::pending_
  std::vector<uint64_t> lines;          // the lines that it accesses
  uint32_t s[sizeof(Wave::s) / 4];      // registers when it was issued
  uint32_t address[2 * kLanes], data[4 * kLanes];
};

// A compute unit with its first-level cache. The unit's operations on one line take effect in the
// order of their issue.
struct ComputeUnit {
  Cache cache;
  unsigned part = 0;                    // the number of the inner cache behind it
  std::unordered_map<uint64_t, std::deque<Flight*>> waiting;   // by line, oldest first
};

struct StaleWave {
  ComputeUnit* unit = nullptr;
  unsigned part = 0;
  // The operations that the wait counters count: loads (vmcnt) and stores (vscnt). CDNA has one
  // counter for both and uses only `loads`. A null entry is an operation that has taken effect.
  std::deque<Flight*> loads, stores;
};

class StaleGrid {
 public:
  StaleGrid(Grid& grid, DeviceCaches& caches);
  ~StaleGrid();
  // Adds a wave. wgp: true if its workgroup's waves run on two compute units (RDNA's work-group
  // processor mode).
  void add_wave(Wave& w, bool wgp);
  // Called for each memory or cache-control instruction. Returns true if it was handled here:
  // either it was issued, to take effect later, or it controls caches.
  bool issue(Wave& w, const Inst& i);
  void progress();            // lets a pending operation take effect, at random
  void settle();              // lets all take effect and empties the caches
  // Called from access.cpp when an operation takes effect.
  void load(Wave& w, const Inst& i, const Addresses& a, int bytes, uint32_t* rows);
  bool store(Wave& w, const Inst& i, const Addresses& a, int bytes, const uint32_t* rows);
  uint8_t* cell(Wave& w, const Inst& i, uint64_t address, int bytes);
  DeviceCaches& caches() { return caches_; }

 private:
  void wait(Wave& w, const Inst& i);
  void drain(StaleWave& s);
  void keep(std::deque<Flight*>& flights, size_t left);
  bool lines_of(Wave& w, const Inst& i, std::vector<uint64_t>& lines);
  void make_way(ComputeUnit& unit, const std::vector<uint64_t>& lines, const Flight* until);
  void defer(Wave& w, const Inst& i, std::vector<uint64_t> lines);
  void perform(Flight& f);
  void run(Flight& f);
  void control(Wave& w, const Inst& i);
  void pull(uint64_t line, Placement place);
  Placement placement(Wave& w, uint64_t address) const;
  const uint8_t* content(Wave& w, uint64_t line, uint64_t address, Reach reach, bool scalar);
  Grid& grid_;
  DeviceCaches& caches_;
  Random random_;
  std::vector<std::unique_ptr<ComputeUnit>> units_;
  std::vector<std::unique_ptr<StaleWave>> waves_;
  std::vector<Flight*> pending_;
  std::vector<std::unique_ptr<Flight>> flights_;
  std::vector<Flight*> spare_;
  std::vector<uint64_t> touched_;
  alignas(16) uint8_t fetched_[kStaleLine];
};

}  // namespace ark_emu
