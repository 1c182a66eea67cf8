// Handlers of RDNA3 that its decoder and its registry share.
#pragma once

#include "ops.h"
#include "wave.h"

namespace ark_emu {

// What executes both halves of a VOPD: `inst` is X and will have `other`, Y, as its second. Both read
// their sources first.
Handler vopd_handler(const Inst& inst, const Inst& other);

void register_wmma(Ops& ops);

}  // namespace ark_emu
