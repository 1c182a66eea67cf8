// The state of the race checks, which use vector clocks. Each wave has a slot (a number) and counts
// epochs. An access is recorded with its wave's slot and epoch. A wave's vector clock has an epoch
// for every other slot: all accesses of that slot up to this epoch happen before the wave's next
// access. README.md, "Checks", describes when epochs become visible on a GPU.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "byte_set.h"
#include "checks.h"
#include "engine.h"
#include "records.h"

namespace ark_emu {

using Clock = std::vector<uint32_t>;   // by slot; missing entries are 0
using SharedClock = std::shared_ptr<Clock>;

// The scope of a fence, and the smallest scope that contains two waves: the workgroup, the device
// (agent) or the system.
enum class Scope : uint8_t { Group = 0, Agent = 1, System = 2 };

// The accesses that a release publishes: the wave's own accesses up to epoch `own`, and those of
// other waves that were ordered before the release (`seen`, by slot).
struct Published {
  uint32_t own = 0;
  SharedClock seen;
};

// What the flags of a wave publish to readers in the same workgroup, on the same device, or in the
// system. It applies to flags that the wave writes from epoch `time` on.
struct ReleaseRecord {
  uint32_t time = 0;
  Published group, agent, system, lds;
  SharedClock cleared = nullptr;         // WaveChecks::cleared at that time
  Published past = {};                   // loads that had completed: see Passing
};

// The history of one slot. A wave of a later grid that reuses the slot continues the history, so
// epochs never decrease.
struct SlotHistory {
  uint32_t epoch = 0, start = 0;         // last epoch used; first epoch of the current wave
  uint32_t group = 0, grid = 0;          // the last owner
  int device = 0;
  bool live = false;                     // the last wave of this slot has not ended
  std::deque<ReleaseRecord> records;     // the latest kMaxRecords
};

constexpr size_t kMaxRecords = 4096;

struct World {   // one per process: grids of all machines share memory
  std::mutex mutex;
  uint64_t time = 0;                     // counts loads of scalar lines and cache clears, in order
  std::vector<SlotHistory> slots;
  std::vector<uint32_t> free_slots;
  uint32_t next_grid = 1;
  uint32_t endings = 1;                  // counts waves and engines that have ended
  static World& get();
};

struct ShadowPages;
struct SharedCell;                       // checks_shared.h

// An LDS load that conflicts with an atomic operation. It is correct if its wave then uses an
// atomic operation on the same cell (the load provided the expected value). Otherwise it is a race.
struct LdsDoubt {
  uint64_t index;
  uint32_t slot, pc;                     // of the load
  Fault race;
};

// The accesses to a cell, four bytes of memory or LDS: the last writers, and the readers since.
struct CellState {
  Records writes, reads;
  bool flag = false;                     // global memory: some wave has polled it or used an atomic
  uint32_t full = 0;                     // World::endings when all of kMaxReaders were running
  uint64_t version = 0;                  // the SharedCell::version that was imported last
  void reset() {
    writes.clear();
    reads.clear();
    flag = false;
    full = 0;
    version = 0;
  }
};

struct Contributor {
  uint32_t slot, epoch;
};

// A pair of unordered stores to a cell. It is a race unless a later access shows that the cell is a
// flag, so that the stores were meant to be atomic.
struct Doubt {
  ShadowPages* shadow;
  uint64_t index;
  Fault race;
};

// A line of memory that a scalar load brought into the scalar cache of a wave's compute unit.
struct ScalarHold {
  static constexpr uint64_t kLine = 64;
  static constexpr size_t kMost = 16;    // records per line; with more, a stale read may be missed
  struct Load {
    uint32_t epoch = 0, complete = 0;    // the wave's epoch; epoch of its last completed stores
    SharedClock seen;
  };
  uint32_t slot = 0;
  int device = 0;
  Load first, last;                      // first and last load since the wave cleared its cache
  uint64_t time = 0;                     // World::time at `first`
  std::array<uint8_t, kLine> bytes;      // the contents of the line at that time
};

struct ShadowPages {
  static constexpr uint64_t kCells = 1024;
  bool track_init = false;
  SharedCell* shared = nullptr;          // by cell, if other processes map the memory too
  uint64_t size = 0;
  ByteSet initialised;                   // made at the first checked access
  std::unordered_map<uint64_t, std::unique_ptr<std::array<CellState, kCells>>> pages;
  std::unordered_map<uint64_t, std::vector<Contributor>> syncs;   // by cell: atomics on it
  std::unordered_map<uint64_t, std::vector<ScalarHold>> held;     // by line (address / kLine)
  CellState& cell(uint64_t index) {
    if (index / kCells != last_number) {
      last_number = index / kCells;
      auto& page = pages[last_number];
      if (page == nullptr) page = std::make_unique<std::array<CellState, kCells>>();
      last = page.get();
    }
    return (*last)[index % kCells];
  }
  // The page that was used last: most accesses of a wave lie in one page.
  uint64_t last_number = ~0ull;
  std::array<CellState, kCells>* last = nullptr;
};

// A memory operation in flight.
struct Outstanding {
  uint32_t sequence, epoch;
  bool smem, lds;                        // lds: changes or reads LDS
};

struct PendingAcquire {
  Contributor from;
  Scope needed;
  uint32_t vm_sequence, lgkm_sequence;   // of the load that read the flag
  bool l2_done;                          // the outer cache was invalidated since
};

// A load of a flag that has not returned yet. The wave that wrote the flag had waited for some
// loads before. Once this load has returned the flag's value, stores of this wave come after those
// loads, even without a fence. The writer's stores are not ordered in this way.
struct Passing {
  Contributor from;
  uint32_t vm_sequence, lgkm_sequence;
};

struct RegisterPending {
  uint32_t vm = 0, lgkm = 0;             // sequence numbers; 0: nothing
  uint32_t pc = 0;
};

// State for the wait states around matrix instructions (checks_matrix.cpp): the class of an
// instruction, and the last matrix instruction that touched a register.
struct MatrixRole {
  bool known = false;
  bool matrix = false, vector = false, memory = false;
  bool sparse = false;                   // adds to its destination
  bool dot = false, fma64 = false, f64 = false;
  bool xdl = false;                      // AMD's term: not an f64 product; gfx942, gfx950: nor f32
  uint8_t passes = 0;
  uint8_t states = 1;                    // wait states that it takes
};
struct HazardTouch {
  uint64_t state = 0;
  const Inst* by = nullptr;
};
struct MatrixHistory {
  uint64_t states = 0;                   // wait states that have passed
  bool used = false;                     // it has executed a matrix instruction or dot product
  HazardTouch exec, f64;                 // last vector write of EXEC; last f64 product
  std::array<HazardTouch, 512> by_matrix, by_vector, by_dot, as_c;
};

struct WaveChecks {
  uint32_t slot = 0, epoch = 1, grid = 0;
  SharedClock seen, seen_lds;
  SharedClock past;                      // by slot: epoch up to which its loads have completed
  std::vector<Passing> passing;
  std::unordered_map<uint32_t, uint32_t> passed;   // slot -> epoch already joined into `past`
  std::deque<Outstanding> vm, vs, lgkm;
  uint32_t next_sequence = 1, vm_done = 0, lgkm_done = 0;
  // The states that waves of this device (released_agent) or of any device (released_system) would
  // see if this wave set a flag now.
  Published released_agent, released_system;
  // The state that was last published to other processes, with its number.
  Published told, told_past;
  uint32_t told_as = 0;
  uint64_t started = 0;                  // world_time() when the wave began
  uint32_t last_store = 0;               // epoch of the last store that a cache may delay
  struct WriteBack {
    Published what;
    Scope scope;
  };
  std::vector<WriteBack> write_backs;
  // cleared: the accesses that were ordered before the wave when its scalar cache was last cleared.
  // An invalidation takes effect at the wait that covers it; until then these accesses are in
  // `clearing`.
  SharedClock cleared, clearing;
  std::vector<PendingAcquire> acquires;
  std::vector<Doubt> doubts;             // reported when the wave ends
  const uint32_t* storing = nullptr;     // rows of the store that is being checked
  std::unordered_map<uint64_t, uint32_t> joined;   // (slot, relation) -> epoch already joined
  std::array<RegisterPending, 512> vgprs;
  std::array<RegisterPending, 128> sgprs;
  MatrixHistory matrix;
};

struct GroupChecks {
  ShadowPages lds;
  std::vector<LdsDoubt> doubts;          // reported when the last wave ends
  uint64_t cleared_at = 0;               // World::time when its scalar cache was last cleared
  bool clears = false;                   // one of its waves has cleared the cache
};

struct GridChecks {
  uint32_t number = 0;
  std::vector<std::unique_ptr<WaveChecks>> waves;
  std::vector<uint32_t> slots;
  std::unordered_map<const Workgroup*, GroupChecks> groups;
  // Properties of loads, by program counter. polls: the result of poll_at. spins: true if the load
  // polls one address. expects: true if it loads the expected value of an atomic.
  std::unordered_map<uint32_t, uint32_t> polls;
  std::unordered_map<uint32_t, bool> spins, expects;
  std::vector<MatrixRole> matrix_roles;  // by pc
};

// The properties of a wave's access that all its lanes share.
struct Access {
  Wave& w;
  const Inst& i;
  AccessKind kind;
  bool lds;
  Stamp stamp;
  bool coherent;                         // a load that sees other waves' flags
  // The index of this wave's record in the last cell, which often is the same in the next one.
  mutable size_t hint = 0;
  mutable std::optional<bool> spins = std::nullopt;   // of this instruction, once it is known
};

bool is_rdna(const Wave& w);
// Returns the kind by which an access is recorded (such as atomic or plain). The bits of the
// instruction determine it; see README.md, "Checks".
Stamp stamp_of(const Wave& w, const Inst& i, AccessKind kind, bool lds, int bytes);
// Called before an instruction: reports an error if it accesses a matrix instruction's registers
// too early.
void check_matrix_hazards(Wave& w, const Inst& i);
// Functions of checks_access.cpp: checks that need only one access.
void check_alignment(const Access& x, uint64_t address, int bytes, int lane);
void check_arguments(const Access& x, uint64_t address, int bytes, int lane);
void check_initialised(const Access& x, ShadowPages& shadow, uint64_t offset, int bytes, int lane,
                       uint64_t address);
void check_float_atomic(const Access& x, const Region& region, int lane, uint64_t address);
// Functions of checks_scalar.cpp: called before a scalar load reads a cell, and after it has loaded
// a line.
void check_scalar_cache(const Access& x, ShadowPages& shadow, uint64_t index, uint8_t bytes,
                        uint64_t address);
void hold_line(const Access& x, ShadowPages& shadow, uint64_t offset, uint64_t address);
// True if the wave that used the slot at that epoch has ended.
bool has_ended(uint32_t slot, uint32_t epoch);
// Called at the wait that completes the wave's invalidations of the scalar cache.
void scalar_cleared(WaveChecks& c);
// The epochs up to which all of the wave's global and LDS operations have completed.
uint32_t complete_global(const WaveChecks& c);
uint32_t complete_lds(const WaveChecks& c);
// Returns the epoch up to which all of the wave's loads have received their values.
uint32_t complete_loads(const WaveChecks& c);
// Called when the set of accesses that a release of this wave would publish has changed. Adds a
// ReleaseRecord of the new set, which later flags of the wave publish.
void note_release(Wave& w);
// Orders the wave after everything that another wave had released when it made the access `from` (a
// slot and an epoch). relation: the smallest scope that contains both waves.
void join_release(Wave& w, Contributor from, Scope relation);
// Processes loads of flags that have returned: the loads that a flag's writer had waited for are
// from now on ordered before this wave.
void pass_flags(WaveChecks& c);
Scope relation_to(const Wave& w, const WaveChecks& c, uint32_t slot);
// Raises the entries of `into` to those of `from`, except that of slot `except`.
constexpr uint32_t kNoSlot = ~0u;
void join_clock(SharedClock& into, const Clock& from, uint32_t except = kNoSlot);
void raise_clock(SharedClock& into, uint32_t slot, uint32_t epoch);
uint32_t clock_at(const SharedClock& clock, uint32_t slot);

}  // namespace ark_emu
