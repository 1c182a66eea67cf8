// The functions by which the handlers of memory instructions access bytes. The same functions
// access global memory, LDS and private memory (scratch). They check ranges, make each element's
// access atomic, and call the optional checks.
#pragma once

#include <cstdint>

#include "inst.h"
#include "wave.h"

namespace ark_emu {

enum class Space : uint8_t { Global, Lds, Scratch };

// Where each active lane accesses memory: an address (Global), an offset in the workgroup's LDS, or
// an offset in the lane's private memory.
struct Addresses {
  Space space = Space::Global;
  uint64_t active = 0;
  alignas(64) uint64_t at[kLanes] = {};
};

// Reads `bytes` (1, 2, 4, 8, 12, 16) per active lane into rows of dwords, zero-extended; inactive
// lanes of `rows` are unchanged. Throws Fault for an address that may not be read.
void load_lanes(Wave& w, const Inst& i, const Addresses& a, int bytes, uint32_t* rows);
// Writes the low `bytes` of each active lane's rows of dwords to memory.
void store_lanes(Wave& w, const Inst& i, const Addresses& a, int bytes, const uint32_t* rows);

enum class AtomicOp : uint8_t {
  Swap, CmpSwap, Add, Sub, Rsub, SMin, UMin, SMax, UMax, And, Or, Xor, Inc, Dec, MskOr,
  AddF, MinF, MaxF, CmpSwapF, PkAddF16, PkAddBf16, Wrap, SubClamped,
};

// Returns the value that the atomic operation `op` stores to memory that contained `old`. Values
// have 4 or 8 bytes. `data2` is used by three operations: CmpSwap stores it if memory contained
// `data`, MskOr sets its bits, and Wrap adds it if `old` is below `data`.
uint64_t atomic_result(AtomicOp op, int bytes, uint64_t old, uint64_t data, uint64_t data2);
// Performs the lanes' atomic operations one after another. The values that memory had before are
// written to `before` (rows) if it is not null.
void atomic_lanes(Wave& w, const Inst& i, const Addresses& a, AtomicOp op, int bytes,
                  const uint32_t* data, const uint32_t* data2, uint32_t* before);

// Splits the access of a FLAT instruction by memory: its lanes may access global memory, LDS and
// private memory, and the range (aperture) of a lane's address determines which. Calls `each`
// for each memory with the lanes that access it.
template <class F>
void for_each_space(const Addresses& all, F each) {
  Addresses part;
  for (const Space space : {Space::Global, Space::Lds, Space::Scratch}) {
    part.space = space;
    part.active = 0;
    for (int l = 0; l < kLanes; l++) {
      if (((all.active >> l) & 1) == 0) continue;
      const auto high = static_cast<uint32_t>(all.at[l] >> 32);
      const Space of = high == 0x00010000   ? Space::Lds
                       : high == 0x00020000 ? Space::Scratch
                                            : Space::Global;
      if (of != space) continue;
      part.active |= 1ull << l;
      part.at[l] = of == Space::Global ? all.at[l] : static_cast<uint32_t>(all.at[l]);
    }
    if (part.active != 0) each(part);
  }
}

}  // namespace ark_emu
