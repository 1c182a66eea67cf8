// Opcode tables of gfx1100, as text for Decoder.
#pragma once

#include <vector>

#include "decode.h"

namespace ark_emu {

extern const std::vector<OpcodeText> kGfx11Scalar;
extern const std::vector<OpcodeText> kGfx11Memory;
extern const std::vector<OpcodeText> kGfx11Vector;
extern const std::vector<OpcodeText> kGfx11Compare;

}  // namespace ark_emu
