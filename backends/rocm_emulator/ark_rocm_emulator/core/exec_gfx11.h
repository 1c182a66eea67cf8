// Handlers of RDNA3's instructions. Used by RDNA3's decoder and by the table of operations.
#pragma once

#include "ops.h"
#include "wave.h"

namespace ark_emu {

// Sets the handlers of a dual-issue instruction (VOPD). `inst` is its half X; `other`, its half Y,
// becomes inst.second. Both halves read their sources before either writes a result.
void set_vopd_handlers(Inst& inst, const Inst& other);

void register_wmma(Ops& ops);

}  // namespace ark_emu
