// Handlers of RDNA3's instructions that its decoder and the table of operations share.
#pragma once

#include "ops.h"
#include "wave.h"

namespace ark_emu {

// Sets the handler of both halves of a VOPD, `inst` (X) and `other` (Y, which becomes its second
// half). Both read their sources first.
void set_vopd_handlers(Inst& inst, const Inst& other);

void register_wmma(Ops& ops);

}  // namespace ark_emu
