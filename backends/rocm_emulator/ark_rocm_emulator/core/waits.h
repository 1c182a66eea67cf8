// Decodes an s_waitcnt: the counters for which it waits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine.h"
#include "inst.h"

namespace ark_emu {


constexpr size_t kNoWait = ~size_t{0};

// For each counter, the number of operations that may still be in flight after the wait.
struct WaitCounts {
  size_t vm = kNoWait, vs = kNoWait, lgkm = kNoWait;
};

// s_waitcnt and its gfx11 relatives.
inline bool is_wait(const Inst& i) { return i.op->name.starts_with("s_waitcnt"); }
WaitCounts wait_counts(const Inst& i, Arch arch);

}  // namespace ark_emu
