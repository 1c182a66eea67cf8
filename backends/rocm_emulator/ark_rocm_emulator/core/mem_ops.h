// What the FLAT and MUBUF handlers share: conversions after a load, atomic operands, the way to
// LDS, and the list of operations.
#pragma once

#include <string>

#include "access.h"
#include "grid.h"
#include "wave.h"

namespace ark_emu {

// Where the lanes of FLAT, GLOBAL, SCRATCH and of MUBUF operations lie.
Addresses flat_addresses(Wave& w, const Inst& i);
Addresses buffer_addresses(Wave& w, const Inst& i, int bytes);

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

// Names the operations that FLAT and MUBUF both have. M holds their handlers as static templates:
// load<Bytes, Convert>, store<Bytes, High>, atomic<AtomicOp, Bytes>. Calls load(name, type,
// handler), store(name, type, handler) and atomic(name, type of the result, type of the data,
// flags, handler).
template <class M, class Load, class Store, class Atomic>
void each_memory_operation(Load load, Store store, Atomic atomic) {
  load("ubyte", "b32", M::template load<1, Convert::Unsigned>);
  load("sbyte", "b32", M::template load<1, Convert::Signed>);
  load("ushort", "b32", M::template load<2, Convert::Unsigned>);
  load("sshort", "b32", M::template load<2, Convert::Signed>);
  load("dword", "b32", M::template load<4, Convert::Unsigned>);
  load("dwordx2", "b64", M::template load<8, Convert::Unsigned>);
  load("dwordx3", "b96", M::template load<12, Convert::Unsigned>);
  load("dwordx4", "b128", M::template load<16, Convert::Unsigned>);
  load("ubyte_d16", "b32", M::template load<1, Convert::Low>);
  load("ubyte_d16_hi", "b32", M::template load<1, Convert::High>);
  load("sbyte_d16", "b32", M::template load<1, Convert::SignedLow>);
  load("sbyte_d16_hi", "b32", M::template load<1, Convert::SignedHigh>);
  load("short_d16", "b32", M::template load<2, Convert::Low>);
  load("short_d16_hi", "b32", M::template load<2, Convert::High>);
  store("byte", "b32", M::template store<1, false>);
  store("byte_d16_hi", "b32", M::template store<1, true>);
  store("short", "b32", M::template store<2, false>);
  store("short_d16_hi", "b32", M::template store<2, true>);
  store("dword", "b32", M::template store<4, false>);
  store("dwordx2", "b64", M::template store<8, false>);
  store("dwordx3", "b96", M::template store<12, false>);
  store("dwordx4", "b128", M::template store<16, false>);
  const auto integer = [&atomic]<AtomicOp Op>(const std::string& name) {
    constexpr bool kTwo = Op == AtomicOp::CmpSwap;   // the new value and the expected one
    atomic(name, "b32", kTwo ? "b64" : "b32", 0u, M::template atomic<Op, 4>);
    atomic(name + "_x2", "b64", kTwo ? "b128" : "b64", 0u, M::template atomic<Op, 8>);
  };
  integer.template operator()<AtomicOp::Swap>("swap");
  integer.template operator()<AtomicOp::CmpSwap>("cmpswap");
  integer.template operator()<AtomicOp::Add>("add");
  integer.template operator()<AtomicOp::Sub>("sub");
  integer.template operator()<AtomicOp::SMin>("smin");
  integer.template operator()<AtomicOp::UMin>("umin");
  integer.template operator()<AtomicOp::SMax>("smax");
  integer.template operator()<AtomicOp::UMax>("umax");
  integer.template operator()<AtomicOp::And>("and");
  integer.template operator()<AtomicOp::Or>("or");
  integer.template operator()<AtomicOp::Xor>("xor");
  integer.template operator()<AtomicOp::Inc>("inc");
  integer.template operator()<AtomicOp::Dec>("dec");
  integer.template operator()<AtomicOp::SubClamped>("csub");
  const uint32_t real = kFloat;
  atomic("add_f32", "b32", "b32", real, M::template atomic<AtomicOp::AddF, 4>);
  atomic("min_f32", "b32", "b32", real, M::template atomic<AtomicOp::MinF, 4>);
  atomic("max_f32", "b32", "b32", real, M::template atomic<AtomicOp::MaxF, 4>);
  atomic("cmpswap_f32", "b32", "b64", real, M::template atomic<AtomicOp::CmpSwapF, 4>);
  atomic("pk_add_f16", "b32", "b32", real, M::template atomic<AtomicOp::PkAddF16, 4>);
  atomic("pk_add_bf16", "b32", "b32", real, M::template atomic<AtomicOp::PkAddBf16, 4>);
  atomic("add_f64", "b64", "b64", real, M::template atomic<AtomicOp::AddF, 8>);
  atomic("min_f64", "b64", "b64", real, M::template atomic<AtomicOp::MinF, 8>);
  atomic("max_f64", "b64", "b64", real, M::template atomic<AtomicOp::MaxF, 8>);
}

}  // namespace ark_emu
