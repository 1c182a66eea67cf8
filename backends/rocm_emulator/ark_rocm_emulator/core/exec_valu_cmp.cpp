// Handlers of vector comparisons: v_cmp_* writes a lane mask, v_cmpx_* writes EXEC too.
#include <cmath>
#include <string>
#include <type_traits>
#include <utility>

#include "lanes.h"
#include "ops.h"

namespace ark_emu {
namespace {

// Writes a comparison's result as a lane mask, and to EXEC if the instruction does. flags: 0 or ~0
// for each lane. opposite: true to negate the flags.
[[gnu::noinline]] void finish_compare(Wave& w, const Inst& i, const uint32_t* flags,
                                      bool opposite = false) {
  uint64_t bits = row_bits(flags, w.lanes);
  if (opposite) bits ^= w.full;
  if (i.ext == Ext::Dpp || i.ext == Ext::Dpp8) bits &= w.dpp_lanes;
  const uint64_t result = bits & w.exec();
  w.put_mask(i, 0, bits);
  if ((i.op->flags & kWritesExec) != 0) w.set_exec(result);
}

// Returns the lanes of source k as raw dwords. For 64-bit types the low dwords come first, then the
// high ones.
template <class T>
const uint32_t* lanes_of(Wave& w, const Inst& i, int k, uint32_t* tmp) {
  return sizeof(T) == 8   ? w.src64(i, k, tmp)
         : sizeof(T) == 4 ? w.src32(i, k, tmp)
                          : w.src16(i, k, tmp);
}

template <class T>
T value_at(const uint32_t* raw, int l) {
  if constexpr (sizeof(T) == 8) {
    return std::bit_cast<T>(join(raw[l], raw[kLanes + l]));
  } else if constexpr (sizeof(T) == 4) {
    return std::bit_cast<T>(raw[l]);
  } else {
    return static_cast<T>(raw[l]);
  }
}

// A relation between two operands, expressed by the comparison F, with swapped operands or a
// negated result where needed. So a few comparisons suffice for all relations of a type.
template <class F, bool swapped = false, bool opposite = false>
struct Relation {
  using Comparison = F;
  static constexpr bool kSwapped = swapped, kOpposite = opposite;
};
template <class R>
using Swapped = Relation<typename R::Comparison, !R::kSwapped, R::kOpposite>;
template <class R>
using Not = Relation<typename R::Comparison, R::kSwapped, !R::kOpposite>;

using Never = Relation<decltype([](auto, auto) { return false; })>;
using Less = Relation<decltype([](auto a, auto b) { return a < b; })>;
using Equal = Relation<decltype([](auto a, auto b) { return a == b; })>;
// For floats these relations are not negations of other relations, because an operand may be NaN.
using LessEqual = Relation<decltype([](auto a, auto b) { return a <= b; })>;
using Apart = Relation<decltype([](auto a, auto b) { return a < b || a > b; })>;
using Ordered = Relation<decltype([](auto a, auto b) { return a == a && b == b; })>;

struct HalfBits {};   // f16

template <class T, class F>
[[gnu::noinline]] void compare_rows(Wave& w, const Inst& i, bool swapped, bool opposite) {
  alignas(64) Row2 t0, t1;
  alignas(64) Row flags;
  if constexpr (std::is_same_v<T, HalfBits>) {
    const uint32_t *a = w.src16(i, 0, t0), *b = w.src16(i, 1, t1);
    if (swapped) std::swap(a, b);
    each_lane(w, [&](int l) {
      const float left = half_to_float(static_cast<uint16_t>(a[l]));
      flags[l] = F{}(left, half_to_float(static_cast<uint16_t>(b[l]))) ? ~0u : 0;
    });
  } else {
    const uint32_t *a = lanes_of<T>(w, i, 0, t0), *b = lanes_of<T>(w, i, 1, t1);
    if (swapped) std::swap(a, b);
    each_lane(w, [&](int l) { flags[l] = F{}(value_at<T>(a, l), value_at<T>(b, l)) ? ~0u : 0; });
  }
  finish_compare(w, i, flags, opposite);
}

template <class T, class R>
void compare(Wave& w, const Inst& i) {
  compare_rows<T, typename R::Comparison>(w, i, R::kSwapped, R::kOpposite);
}

// Comparisons of 32-bit sources without modifiers; F compares the lanes of two sources. Bit k of
// kUniform is set if source k is the same in all lanes.
template <class T, unsigned kUniform, class F>
[[gnu::noinline]] void compare_plain(Wave& w, const Inst& i, bool swapped, bool opposite) {
  alignas(64) Row flags;
  const Source<(kUniform & 1) != 0> a(w, i.src[swapped]);
  const Source<(kUniform & 2) != 0> b(w, i.src[!swapped]);
  each_lane(w, [&flags, a, b](int l) {
    flags[l] = F{}(std::bit_cast<T>(a[l]), std::bit_cast<T>(b[l])) ? ~0u : 0;
  });
  finish_compare(w, i, flags, opposite);
}

template <class T, unsigned kUniform, class R>
void compare_whole(Wave& w, const Inst& i) {
  constexpr unsigned kTaken = R::kSwapped ? (kUniform << 1 | kUniform >> 1) & 3 : kUniform;
  compare_plain<T, kTaken, typename R::Comparison>(w, i, R::kSwapped, R::kOpposite);
}

template <class T, class R>
Handlers compare32() {
  Handlers all = compare<T, R>;
  all.whole[0] = compare_whole<T, 0, R>;
  all.whole[1] = compare_whole<T, 1, R>;
  all.whole[2] = compare_whole<T, 2, R>;
  return all;
}

// Returns the class of a float for v_cmp_class, as a bit number from 0 to 9. top: the largest
// exponent. quiet: the bit of the mantissa that marks a quiet NaN.
int float_class(bool negative, uint64_t exponent, uint64_t top, uint64_t mantissa, uint64_t quiet) {
  if (exponent == top && mantissa != 0) return (mantissa & quiet) != 0 ? 1 : 0;
  if (exponent == top) return negative ? 2 : 9;
  if (exponent != 0) return negative ? 3 : 8;
  if (mantissa != 0) return negative ? 4 : 7;
  return negative ? 5 : 6;
}

template <class T, int Mantissa>
void compare_class(Wave& w, const Inst& i) {
  alignas(64) Row2 t0;
  alignas(64) Row t1, flags;
  const uint32_t* a = lanes_of<T>(w, i, 0, t0);
  const uint32_t* b = sizeof(T) == 2 ? w.src16(i, 1, t1) : w.src32(i, 1, t1);
  constexpr int kBits = 8 * sizeof(T);
  constexpr uint64_t kTop = (1ull << (kBits - 1 - Mantissa)) - 1;
  for (int l = 0; l < w.lanes; l++) {
    const uint64_t value = value_at<T>(a, l);
    const int which = float_class((value >> (kBits - 1)) & 1, (value >> Mantissa) & kTop, kTop,
                                  value & ((1ull << Mantissa) - 1), 1ull << (Mantissa - 1));
    flags[l] = (b[l] >> which) & 1 ? ~0u : 0;
  }
  finish_compare(w, i, flags);
}

// Registers a comparison in both forms, v_cmp_... and v_cmpx_...
[[gnu::noinline]] void add_both(Ops& ops, const char* name, const char* type, const Handlers& run,
                                uint32_t flags) {
  const std::string tail = std::string(name) + "_" + type;
  const std::string signature = "m=" + std::string(type) + "," + type;
  ops.add("v_cmp_" + tail, signature, run, flags);
  ops.add("v_cmpx_" + tail, signature, run, flags | kWritesExec);
}

template <class R>
void add_float(Ops& ops, const char* name) {
  add_both(ops, name, "f16", compare<HalfBits, R>, kFloat | kMode64);
  add_both(ops, name, "f32", compare32<float, R>(), kFloat);
  add_both(ops, name, "f64", compare<double, R>, kFloat | kMode64);
}

template <class R>
void add_int(Ops& ops, const char* name) {
  add_both(ops, name, "i16", compare<int16_t, R>, 0);
  add_both(ops, name, "u16", compare<uint16_t, R>, 0);
  add_both(ops, name, "i32", compare32<int32_t, R>(), 0);
  add_both(ops, name, "u32", compare32<uint32_t, R>(), 0);
  add_both(ops, name, "i64", compare<int64_t, R>, 0);
  add_both(ops, name, "u64", compare<uint64_t, R>, 0);
}

}  // namespace

void register_valu_cmp(Ops& ops) {
  add_float<Never>(ops, "f");
  add_float<Less>(ops, "lt");
  add_float<Equal>(ops, "eq");
  add_float<LessEqual>(ops, "le");
  add_float<Swapped<Less>>(ops, "gt");
  add_float<Apart>(ops, "lg");
  add_float<Swapped<LessEqual>>(ops, "ge");
  add_float<Ordered>(ops, "o");
  add_float<Not<Ordered>>(ops, "u");
  add_float<Not<Swapped<LessEqual>>>(ops, "nge");
  add_float<Not<Apart>>(ops, "nlg");
  add_float<Not<Swapped<Less>>>(ops, "ngt");
  add_float<Not<LessEqual>>(ops, "nle");
  add_float<Not<Equal>>(ops, "neq");
  add_float<Not<Less>>(ops, "nlt");
  add_float<Not<Never>>(ops, "tru");
  add_int<Never>(ops, "f");
  add_int<Less>(ops, "lt");
  add_int<Equal>(ops, "eq");
  add_int<Not<Swapped<Less>>>(ops, "le");
  add_int<Swapped<Less>>(ops, "gt");
  add_int<Not<Equal>>(ops, "ne");
  add_int<Not<Less>>(ops, "ge");
  add_int<Not<Never>>(ops, "t");
  for (const bool writes : {false, true}) {
    const std::string name = writes ? "v_cmpx_class_" : "v_cmp_class_";
    const uint32_t flags = kFloat | (writes ? uint32_t{kWritesExec} : 0u);
    ops.add(name + "f16", "m=f16,b16", compare_class<uint16_t, 10>, flags);
    ops.add(name + "f32", "m=f32,b32", compare_class<uint32_t, 23>, flags);
    ops.add(name + "f64", "m=f64,b32", compare_class<uint64_t, 52>, flags);
  }
}

}  // namespace ark_emu
