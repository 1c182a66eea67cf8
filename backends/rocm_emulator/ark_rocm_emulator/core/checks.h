// The optional checks: for uninitialised memory, for waits before registers are used, for the
// happens-before order between waves, and for stale lines in scalar caches. All state is reached
// through ShadowPages (per region of memory), GridChecks and WaveChecks. With checks off, none of
// it exists and none of these functions is called.
#pragma once

#include <memory>
#include <mutex>

#include "access.h"
#include "engine.h"
#include "wave.h"

namespace ark_emu {

struct Grid;
class SharedLock;
struct ShadowPages;   // the records of the bytes of a region
struct Workgroup;

enum class AccessKind : uint8_t { Read, Write, Atomic };

// check_before runs before an instruction and reports registers whose load has not been waited for.
// check_after runs after the instruction and records which operations it has left in flight.
void check_before(Wave& w, const Inst& i);
void check_after(Wave& w, const Inst& i);
// Locks the state of the checks while an access is checked and performed, so that no grid on
// another thread sees the access without its record. Does nothing if checks are off.
class CheckedAccess {
 public:
  explicit CheckedAccess(const Wave& w);
  ~CheckedAccess();

 private:
  std::unique_lock<std::mutex> lock_;
  std::unique_ptr<SharedLock> shared_;
};

// Checks one access of all active lanes. Called by the handlers of memory instructions, inside a
// CheckedAccess.
void check_access(Wave& w, const Inst& i, const Addresses& a, AccessKind kind, int bytes);
// Called before a store: reports lanes that would store different bytes to the same address.
void check_lanes(Wave& w, const Inst& i, const Addresses& a, int bytes, const uint32_t* rows);
void check_wait(Wave& w, const Inst& i);            // s_waitcnt and its gfx11 relatives
void check_cache_control(Wave& w, const Inst& i);   // buffer_wbl2, buffer_inv, ...
void check_scalar_invalidate(Wave& w);              // s_dcache_inv
void check_barrier_reached(Wave& w);
void check_barrier_passed(Workgroup& group);
void check_wave_ended(Wave& w);

struct GridChecks;
struct GridChecksDeleter {
  void operator()(GridChecks* checks) const;
};
using GridChecksPtr = std::unique_ptr<GridChecks, GridChecksDeleter>;
GridChecksPtr begin_checks(Grid& grid);
void add_wave_checks(Grid& grid, Wave& w);

std::shared_ptr<ShadowPages> make_shadow(const Region& region);
void shadow_share(ShadowPages& shadow, void* records);   // Region::records, from now on
void shadow_mark_written(ShadowPages& shadow, uint64_t offset, uint64_t size);

}  // namespace ark_emu
