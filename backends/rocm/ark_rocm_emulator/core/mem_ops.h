// What the FLAT and MUBUF handlers share: conversions after a load, atomic operands, the way to
// LDS.
#pragma once

#include "access.h"
#include "grid.h"
#include "wave.h"

namespace ark_emu {

// What becomes of a byte or short: extended to a dword, or put in one half of it.
enum class Convert : uint8_t { Unsigned, Signed, Low, High, SignedLow, SignedHigh };

template <int Bytes, Convert C>
void convert_rows(uint32_t* rows) {
  constexpr bool kSigned =
      C == Convert::Signed || C == Convert::SignedLow || C == Convert::SignedHigh;
  if constexpr (Bytes < 4 && kSigned) {
    constexpr int kShift = 32 - 8 * Bytes;
    for (int l = 0; l < kLanes; l++) {
      rows[l] = static_cast<uint32_t>(static_cast<int32_t>(rows[l] << kShift) >> kShift);
    }
  }
}

template <int Bytes, Convert C>
void put_loaded(Wave& w, const Inst& i, uint32_t* rows) {
  convert_rows<Bytes, C>(rows);
  uint32_t* to = w.row(i.dst[0].reg);
  if constexpr (C == Convert::Low || C == Convert::SignedLow) {
    for (int l = 0; l < kLanes; l++) rows[l] = (rows[l] & 0xffff) | (to[l] & 0xffff0000);
  } else if constexpr (C == Convert::High || C == Convert::SignedHigh) {
    for (int l = 0; l < kLanes; l++) rows[l] = rows[l] << 16 | (to[l] & 0xffff);
  }
  for (int d = 0; d < (Bytes + 3) / 4; d++) w.blend(to + d * kLanes, rows + d * kLanes, w.exec());
}

struct AtomicData {
  const uint32_t *data, *data2;
};

// The data registers of an atomic; compare-and-swap holds {new value, expected value}.
inline AtomicData atomic_data(Wave& w, const Operand& operand, AtomicOp op, int bytes) {
  const uint32_t* rows = w.row(operand.reg);
  if (op != AtomicOp::CmpSwap && op != AtomicOp::CmpSwapF) return {rows, nullptr};
  return {rows + bytes / 4 * kLanes, rows};
}

// Direct-to-LDS: lane l's data goes to M0 + offset + l * size, sizes below a dword as a dword.
inline void store_to_lds(Wave& w, const Inst& i, uint64_t active, int bytes, const uint32_t* rows) {
  const int size = bytes < 4 ? 4 : bytes;
  Addresses to;
  to.space = Space::Lds;
  to.active = active;
  const uint32_t reach = w.grid->program->arch() == Arch::gfx950 ? 0x3ffff : 0xffff;
  const uint64_t base = (w.m0() & reach) + static_cast<uint64_t>(static_cast<int64_t>(i.imm));
  for (int l = 0; l < kLanes; l++) to.at[l] = base + static_cast<uint64_t>(l * size);
  store_lanes(w, i, to, size, rows);
}

}  // namespace ark_emu
