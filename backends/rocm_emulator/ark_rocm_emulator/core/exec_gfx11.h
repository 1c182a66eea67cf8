// Handlers of RDNA3 that its decoder and its registry share.
#pragma once

#include "ops.h"
#include "wave.h"

namespace ark_emu {

// Sets what executes both halves of a VOPD, `inst` (X) and `other` (Y, which will be its second). Both
// read their sources first.
void set_vopd_handlers(Inst& inst, const Inst& other);

void register_wmma(Ops& ops);

}  // namespace ark_emu
