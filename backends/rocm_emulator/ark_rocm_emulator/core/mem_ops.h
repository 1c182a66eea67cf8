// Code that the FLAT and MUBUF handlers share: conversions after a load, atomic operands, the
// transfer to LDS, and the list of operations.
#pragma once

#include <string>

#include "access.h"
#include "grid.h"
#include "wave.h"

namespace ark_emu {

// The lanes' addresses in FLAT, GLOBAL, SCRATCH and MUBUF operations.
Addresses flat_addresses(Wave& w, const Inst& i);
Addresses buffer_addresses(Wave& w, const Inst& i, int bytes);

// How a loaded byte or short is converted: extended to a dword, or put in one half of it.
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

// Returns the data registers of an atomic operation. Those of compare-and-swap are {new value,
// expected value}.
inline AtomicData atomic_data(Wave& w, const Operand& operand, AtomicOp op, int bytes) {
  const uint32_t* rows = w.row(operand.reg);
  if (op != AtomicOp::CmpSwap && op != AtomicOp::CmpSwapF) return {rows, nullptr};
  return {rows + bytes / 4 * kLanes, rows};
}

// Stores loaded data to LDS, for loads that write LDS directly: the data of lane l goes to M0 +
// offset + l * size. Sizes below a dword count as a dword.
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

// Enumerates the operations that FLAT and MUBUF both have, and calls one of the arguments for each:
// load(name, type, handler), store(name, type, handler) or atomic(name, type of the result, type of
// the data, flags, handler). The handlers are static templates of M: load<Bytes, Convert>,
// store<Bytes, High>, atomic<AtomicOp, Bytes>.
template <class M, class Load, class Store, class Atomic>
void each_memory_operation(Load load, Store store, Atomic atomic) {
  struct Access {
    const char *name, *type;
    Handler run;
  };
  static constexpr Access kLoads[] = {
      {"ubyte", "b32", M::template load<1, Convert::Unsigned>},
      {"sbyte", "b32", M::template load<1, Convert::Signed>},
      {"ushort", "b32", M::template load<2, Convert::Unsigned>},
      {"sshort", "b32", M::template load<2, Convert::Signed>},
      {"dword", "b32", M::template load<4, Convert::Unsigned>},
      {"dwordx2", "b64", M::template load<8, Convert::Unsigned>},
      {"dwordx3", "b96", M::template load<12, Convert::Unsigned>},
      {"dwordx4", "b128", M::template load<16, Convert::Unsigned>},
      {"ubyte_d16", "b32", M::template load<1, Convert::Low>},
      {"ubyte_d16_hi", "b32", M::template load<1, Convert::High>},
      {"sbyte_d16", "b32", M::template load<1, Convert::SignedLow>},
      {"sbyte_d16_hi", "b32", M::template load<1, Convert::SignedHigh>},
      {"short_d16", "b32", M::template load<2, Convert::Low>},
      {"short_d16_hi", "b32", M::template load<2, Convert::High>},
  };
  static constexpr Access kStores[] = {
      {"byte", "b32", M::template store<1, false>},
      {"byte_d16_hi", "b32", M::template store<1, true>},
      {"short", "b32", M::template store<2, false>},
      {"short_d16_hi", "b32", M::template store<2, true>},
      {"dword", "b32", M::template store<4, false>},
      {"dwordx2", "b64", M::template store<8, false>},
      {"dwordx3", "b96", M::template store<12, false>},
      {"dwordx4", "b128", M::template store<16, false>},
  };
  struct Integer {
    const char* name;
    Handler narrow, wide;   // 32 and 64 bits
    bool two = false;       // has two data operands: new and expected value
  };
  static constexpr Integer kIntegers[] = {
      {"swap", M::template atomic<AtomicOp::Swap, 4>, M::template atomic<AtomicOp::Swap, 8>},
      {"cmpswap", M::template atomic<AtomicOp::CmpSwap, 4>, M::template atomic<AtomicOp::CmpSwap, 8>, true},
      {"add", M::template atomic<AtomicOp::Add, 4>, M::template atomic<AtomicOp::Add, 8>},
      {"sub", M::template atomic<AtomicOp::Sub, 4>, M::template atomic<AtomicOp::Sub, 8>},
      {"smin", M::template atomic<AtomicOp::SMin, 4>, M::template atomic<AtomicOp::SMin, 8>},
      {"umin", M::template atomic<AtomicOp::UMin, 4>, M::template atomic<AtomicOp::UMin, 8>},
      {"smax", M::template atomic<AtomicOp::SMax, 4>, M::template atomic<AtomicOp::SMax, 8>},
      {"umax", M::template atomic<AtomicOp::UMax, 4>, M::template atomic<AtomicOp::UMax, 8>},
      {"and", M::template atomic<AtomicOp::And, 4>, M::template atomic<AtomicOp::And, 8>},
      {"or", M::template atomic<AtomicOp::Or, 4>, M::template atomic<AtomicOp::Or, 8>},
      {"xor", M::template atomic<AtomicOp::Xor, 4>, M::template atomic<AtomicOp::Xor, 8>},
      {"inc", M::template atomic<AtomicOp::Inc, 4>, M::template atomic<AtomicOp::Inc, 8>},
      {"dec", M::template atomic<AtomicOp::Dec, 4>, M::template atomic<AtomicOp::Dec, 8>},
      {"csub", M::template atomic<AtomicOp::SubClamped, 4>, M::template atomic<AtomicOp::SubClamped, 8>},
  };
  struct Real {
    const char *name, *result, *data;
    Handler run;
  };
  static constexpr Real kReals[] = {
      {"add_f32", "b32", "b32", M::template atomic<AtomicOp::AddF, 4>},
      {"min_f32", "b32", "b32", M::template atomic<AtomicOp::MinF, 4>},
      {"max_f32", "b32", "b32", M::template atomic<AtomicOp::MaxF, 4>},
      {"cmpswap_f32", "b32", "b64", M::template atomic<AtomicOp::CmpSwapF, 4>},
      {"pk_add_f16", "b32", "b32", M::template atomic<AtomicOp::PkAddF16, 4>},
      {"pk_add_bf16", "b32", "b32", M::template atomic<AtomicOp::PkAddBf16, 4>},
      {"add_f64", "b64", "b64", M::template atomic<AtomicOp::AddF, 8>},
      {"min_f64", "b64", "b64", M::template atomic<AtomicOp::MinF, 8>},
      {"max_f64", "b64", "b64", M::template atomic<AtomicOp::MaxF, 8>},
  };
  for (const Access& a : kLoads) load(a.name, a.type, a.run);
  for (const Access& a : kStores) store(a.name, a.type, a.run);
  for (const Integer& a : kIntegers) {
    atomic(a.name, "b32", a.two ? "b64" : "b32", 0u, a.narrow);
    atomic(std::string(a.name) + "_x2", "b64", a.two ? "b128" : "b64", 0u, a.wide);
  }
  for (const Real& a : kReals) atomic(a.name, a.result, a.data, uint32_t{kFloat}, a.run);
}

}  // namespace ark_emu
