// Handlers of RDNA3 that its decoder and its registry share.
#pragma once

#include "ops.h"
#include "wave.h"

namespace ark_emu {

// Both halves of a VOPD: `inst` is X, `inst.second` is Y. Both read their sources first.
void run_vopd(Wave& wave, const Inst& inst);

void register_wmma(Ops& ops);

}  // namespace ark_emu
