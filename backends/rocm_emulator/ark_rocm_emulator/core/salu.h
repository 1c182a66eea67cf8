// Code that the scalar ALU's one-operand and two-operand instructions share: templates that make
// handlers from plain functions, and the list of bit operations. These operations exist in two
// forms: of two registers (SOP2), and of a register and EXEC (SOP1).
#pragma once

#include <cstdint>

#include "inst.h"
#include "wave.h"

namespace ark_emu {

using U32 = uint32_t;
using U64 = uint64_t;
using I32 = int32_t;
using I64 = int64_t;

template <class T>
T scalar(const Wave& w, const Operand& operand) {
  if constexpr (sizeof(T) == 8) {
    return w.scalar64(operand);
  } else {
    return w.scalar32(operand);
  }
}

inline void put_scalar(Wave& w, const Operand& operand, U32 value) {
  w.put_scalar32(operand, value);
}
inline void put_scalar(Wave& w, const Operand& operand, U64 value) {
  w.put_scalar64(operand, value);
}

// The handler of a scalar operation on one source of type A. Scc: true if it sets SCC to 1 for a
// nonzero result and to 0 otherwise.
template <class A, bool Scc, class F>
Handler scalar1(F) {
  return [](Wave& w, const Inst& i) {
    const auto r = F{}(scalar<A>(w, i.src[0]));
    put_scalar(w, i.dst[0], r);
    if (Scc) w.scc = r != 0;
  };
}

// Like scalar1, for two sources, of types A and B.
template <class A, class B, bool Scc, class F>
Handler scalar2(F) {
  return [](Wave& w, const Inst& i) {
    const auto r = F{}(scalar<A>(w, i.src[0]), scalar<B>(w, i.src[1]));
    put_scalar(w, i.dst[0], r);
    if (Scc) w.scc = r != 0;
  };
}

// Calls add(name, function of two unsigned integers) for every bit operation of SOP2.
template <class Add>
void each_bit_operation(Add add) {
  add("s_and", [](auto a, auto b) { return a & b; });
  add("s_or", [](auto a, auto b) { return a | b; });
  add("s_xor", [](auto a, auto b) { return a ^ b; });
  add("s_andn2", [](auto a, auto b) { return a & ~b; });
  add("s_orn2", [](auto a, auto b) { return a | ~b; });
  add("s_nand", [](auto a, auto b) { return ~(a & b); });
  add("s_nor", [](auto a, auto b) { return ~(a | b); });
  add("s_xnor", [](auto a, auto b) { return ~(a ^ b); });
}

}  // namespace ark_emu
