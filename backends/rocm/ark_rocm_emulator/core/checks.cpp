#include "checks.h"

#include "grid.h"
#include "memory.h"

namespace ark_emu {

struct ShadowPages {};
struct GridChecks {};
struct WaveChecks {};

void GridChecksDeleter::operator()(GridChecks* checks) const { delete checks; }
GridChecksPtr begin_checks(Grid&) { return nullptr; }
void add_wave_checks(Grid&, Wave&) {}
std::shared_ptr<ShadowPages> make_shadow(const Region&) { return nullptr; }
void shadow_mark_written(ShadowPages&, uint64_t, uint64_t) {}
void check_before(Wave&, const Inst&) {}
void check_after(Wave&, const Inst&) {}
void check_access(Wave&, const Inst&, const Addresses&, AccessKind, int) {}
void check_wait(Wave&, const Inst&) {}
void check_cache_control(Wave&, const Inst&) {}
void check_barrier_reached(Wave&) {}
void check_barrier_passed(Workgroup&) {}
void check_wave_ended(Wave&) {}

}  // namespace ark_emu
