// Opcode tables of the gfx9 family, as text for Decoder.
#pragma once

#include <vector>

#include "decode.h"

namespace ark_emu {

extern const std::vector<OpcodeText> kGfx9Scalar;
extern const std::vector<OpcodeText> kGfx9Memory;
extern const std::vector<OpcodeText> kGfx9Vector;
extern const std::vector<OpcodeText> kGfx9Compare;
extern const std::vector<OpcodeText> kGfx90aChanges;   // from here on: what differs from gfx942
extern const std::vector<OpcodeText> kGfx950Changes;

}  // namespace ark_emu
