// Vector comparisons: v_cmp_* writes a lane mask, v_cmpx_* writes EXEC too.
#include <cmath>
#include <string>

#include "lanes.h"
#include "ops.h"

namespace ark_emu {
namespace {

// flags: 0 or ~0 for each lane.
[[gnu::noinline]] void finish_compare(Wave& w, const Inst& i, const uint32_t* flags) {
  uint64_t bits = row_bits(flags, w.lanes);
  if (i.ext == Ext::Dpp || i.ext == Ext::Dpp8) bits &= w.dpp_lanes;
  const uint64_t result = bits & w.exec();
  w.put_mask(i, 0, bits);
  if ((i.op->flags & kWritesExec) != 0) w.set_exec(result);
}

// Lanes of source k: raw dwords, of 64-bit types the low ones and then the high ones.
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

template <class T, class F>
void compare(Wave& w, const Inst& i) {
  alignas(64) Row2 t0, t1;
  alignas(64) Row flags;
  const uint32_t *a = lanes_of<T>(w, i, 0, t0), *b = lanes_of<T>(w, i, 1, t1);
  each_lane(w, [&](int l) { flags[l] = F{}(value_at<T>(a, l), value_at<T>(b, l)) ? ~0u : 0; });
  finish_compare(w, i, flags);
}

// 32 bits without modifiers; F on lanes of two such sources.
template <class T, unsigned kUniform, class F>
void compare_whole(Wave& w, const Inst& i) {
  alignas(64) Row flags;
  const Source<(kUniform & 1) != 0> a(w, i.src[0]);
  const Source<(kUniform & 2) != 0> b(w, i.src[1]);
  each_lane(w, [&flags, a, b](int l) {
    flags[l] = F{}(std::bit_cast<T>(a[l]), std::bit_cast<T>(b[l])) ? ~0u : 0;
  });
  finish_compare(w, i, flags);
}

template <class T, class F>
Handlers compare32() {
  Handlers all = compare<T, F>;
  all.whole[0] = compare_whole<T, 0, F>;
  all.whole[1] = compare_whole<T, 1, F>;
  all.whole[2] = compare_whole<T, 2, F>;
  return all;
}

template <class F>
void compare_half(Wave& w, const Inst& i) {
  alignas(64) Row t0, t1, flags;
  const uint32_t *a = w.src16(i, 0, t0), *b = w.src16(i, 1, t1);
  each_lane(w, [&](int l) {
    flags[l] = F{}(half_to_float(static_cast<uint16_t>(a[l])),
                   half_to_float(static_cast<uint16_t>(b[l])))
                   ? ~0u
                   : 0;
  });
  finish_compare(w, i, flags);
}

// The ten classes of v_cmp_class, as bit numbers, from sign, exponent and mantissa.
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

template <class F>
void add_float(Ops& ops, const char* name, F) {
  const auto add = [&ops, name](const char* prefix, bool writes) {
    const std::string base = std::string(prefix) + name;
    const uint32_t flags = kFloat | (writes ? uint32_t{kWritesExec} : 0u);
    ops.add(base + "_f16", "m=f16,f16", compare_half<F>, flags | kMode64);
    ops.add(base + "_f32", "m=f32,f32", compare32<float, F>(), flags);
    ops.add(base + "_f64", "m=f64,f64", compare<double, F>, flags | kMode64);
  };
  add("v_cmp_", false);
  add("v_cmpx_", true);
}

template <class T, class F>
void add_int_type(Ops& ops, const char* name, const char* type) {
  const std::string tail = std::string(name) + "_" + type;
  const std::string signature = "m=" + std::string(type) + "," + type;
  for (const bool writes : {false, true}) {
    const std::string full = (writes ? "v_cmpx_" : "v_cmp_") + tail;
    const uint32_t flags = writes ? uint32_t{kWritesExec} : 0u;
    if constexpr (sizeof(T) == 4) {
      ops.add(full, signature, compare32<T, F>(), flags);
    } else {
      ops.add(full, signature, compare<T, F>, flags);
    }
  }
}

template <class F>
void add_int(Ops& ops, const char* name, F) {
  add_int_type<int16_t, F>(ops, name, "i16");
  add_int_type<uint16_t, F>(ops, name, "u16");
  add_int_type<int32_t, F>(ops, name, "i32");
  add_int_type<uint32_t, F>(ops, name, "u32");
  add_int_type<int64_t, F>(ops, name, "i64");
  add_int_type<uint64_t, F>(ops, name, "u64");
}

}  // namespace

void register_valu_cmp(Ops& ops) {
  add_float(ops, "f", [](auto, auto) { return false; });
  add_float(ops, "lt", [](auto a, auto b) { return a < b; });
  add_float(ops, "eq", [](auto a, auto b) { return a == b; });
  add_float(ops, "le", [](auto a, auto b) { return a <= b; });
  add_float(ops, "gt", [](auto a, auto b) { return a > b; });
  add_float(ops, "lg", [](auto a, auto b) { return a < b || a > b; });
  add_float(ops, "ge", [](auto a, auto b) { return a >= b; });
  add_float(ops, "o", [](auto a, auto b) { return a == a && b == b; });
  add_float(ops, "u", [](auto a, auto b) { return a != a || b != b; });
  add_float(ops, "nge", [](auto a, auto b) { return !(a >= b); });
  add_float(ops, "nlg", [](auto a, auto b) { return !(a < b || a > b); });
  add_float(ops, "ngt", [](auto a, auto b) { return !(a > b); });
  add_float(ops, "nle", [](auto a, auto b) { return !(a <= b); });
  add_float(ops, "neq", [](auto a, auto b) { return !(a == b); });
  add_float(ops, "nlt", [](auto a, auto b) { return !(a < b); });
  add_float(ops, "tru", [](auto, auto) { return true; });
  add_int(ops, "f", [](auto, auto) { return false; });
  add_int(ops, "lt", [](auto a, auto b) { return a < b; });
  add_int(ops, "eq", [](auto a, auto b) { return a == b; });
  add_int(ops, "le", [](auto a, auto b) { return a <= b; });
  add_int(ops, "gt", [](auto a, auto b) { return a > b; });
  add_int(ops, "ne", [](auto a, auto b) { return a != b; });
  add_int(ops, "ge", [](auto a, auto b) { return a >= b; });
  add_int(ops, "t", [](auto, auto) { return true; });
  for (const bool writes : {false, true}) {
    const std::string name = writes ? "v_cmpx_class_" : "v_cmp_class_";
    const uint32_t flags = kFloat | (writes ? uint32_t{kWritesExec} : 0u);
    ops.add(name + "f16", "m=f16,b16", compare_class<uint16_t, 10>, flags);
    ops.add(name + "f32", "m=f32,b32", compare_class<uint32_t, 23>, flags);
    ops.add(name + "f64", "m=f64,b32", compare_class<uint64_t, 52>, flags);
  }
}

}  // namespace ark_emu
