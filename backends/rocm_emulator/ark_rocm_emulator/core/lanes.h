// Loops over the lanes of a wave, as templates over the per-lane function. Handlers are built from
// these templates. The function is a stateless lambda, so the compiler can inline it and vectorise
// the loop.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "half.h"
#include "inst.h"
#include "wave.h"

namespace ark_emu {

inline float as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t as_bits(float value) { return std::bit_cast<uint32_t>(value); }
inline double as_double(uint32_t lo, uint32_t hi) {
  return std::bit_cast<double>(lo | static_cast<uint64_t>(hi) << 32);
}
inline uint64_t join(uint32_t lo, uint32_t hi) { return lo | static_cast<uint64_t>(hi) << 32; }
inline void split(uint64_t value, uint32_t* out, int lane) {
  out[lane] = static_cast<uint32_t>(value);
  out[kLanes + lane] = static_cast<uint32_t>(value >> 32);
}

// Calls f(lane) for all lanes of the wave, active or not; f touches only its own lane's data.
template <class F>
[[gnu::always_inline]] inline void each_lane(const Wave& w, F f) {
  const int lanes = w.lanes;
  int from = 0;
  do {   // a wave has at least 32 lanes
    ARK_LANES
    for (int l = from; l < from + 32; l++) f(l);
    from += 32;
  } while (from < lanes);
}

// Source k of an instruction without modifiers: a row (a value per lane), or one value for all
// lanes.
template <bool kUniform>
struct Source {
  const uint32_t* row;
  Source(Wave& w, const Operand& operand) : row(w.row(operand.reg)) {}
  uint32_t operator[](int lane) const { return row[lane]; }
};
template <>
struct Source<true> {
  uint32_t value;
  Source(const Wave& w, const Operand& operand)
      : value(operand.kind == Kind::Sgpr ? w.s[operand.reg] : operand.lo) {}
  uint32_t operator[](int) const { return value; }
};

// Like each_lane, for handlers that do little work: the loop over 32 lanes is unrolled, and the
// number of lanes is tested only once, before the second half.
template <class F>
[[gnu::always_inline]] inline void whole_lanes(const Wave& w, F f) {
  ARK_LANES
  for (int l = 0; l < 32; l++) f(l);
  if (w.lanes == 32) return;
  ARK_LANES
  for (int l = 32; l < 64; l++) f(l);
}

// A handler for Handlers::whole (see inst.h): applies F to the 32-bit sources `k...` of all lanes.
template <class F, unsigned kUniform, int... k>
void run_whole(Wave& w, const Inst& i) {
  uint32_t* to = w.row(i.dst[0].reg);
  const auto apply = [&w, to](const auto... source) {
    whole_lanes(w, [=](int l) { to[l] = F{}(source[l]...); });
  };
  apply(Source<(kUniform >> k & 1) != 0>(w, i.src[k])...);
}

// Returns `run` together with handlers of run_whole, for those combinations of uniform sources that
// compilers emit.
template <class F>
Handlers with_whole1(Handler run, F) {
  Handlers all = run;
  all.whole[0] = run_whole<F, 0, 0>;
  return all;
}

template <class F>
Handlers with_whole2(Handler run, F) {
  Handlers all = run;
  all.whole[0] = run_whole<F, 0, 0, 1>;
  all.whole[1] = run_whole<F, 1, 0, 1>;
  all.whole[2] = run_whole<F, 2, 0, 1>;
  return all;
}

template <class F>
Handlers with_whole3(Handler run, F) {
  Handlers all = run;
  all.whole[0] = run_whole<F, 0, 0, 1, 2>;
  all.whole[1] = run_whole<F, 1, 0, 1, 2>;
  all.whole[2] = run_whole<F, 2, 0, 1, 2>;
  all.whole[4] = run_whole<F, 4, 0, 1, 2>;
  all.whole[6] = run_whole<F, 6, 0, 1, 2>;
  return all;
}

using Row = uint32_t[kLanes];
using Row2 = uint32_t[2 * kLanes];

// The handlers of an operation on one 32-bit integer, whose result has 32 bits.
template <class F>
Handlers int1(F each) {
  const Handler run = [](Wave& w, const Inst& i) {
    alignas(64) Row t0, out;
    const uint32_t* a = w.src32(i, 0, t0);
    uint32_t* to = w.target(i, out);
    each_lane(w, [&](int l) { to[l] = F{}(a[l]); });
    if (to == out) w.put32(i, out);
  };
  return with_whole1(run, each);
}

template <class F>
Handlers int2(F each) {
  const Handler run = [](Wave& w, const Inst& i) {
    alignas(64) Row t0, t1, out;
    const uint32_t *a = w.src32(i, 0, t0), *b = w.src32(i, 1, t1);
    uint32_t* to = w.target(i, out);
    each_lane(w, [&](int l) { to[l] = F{}(a[l], b[l]); });
    if (to == out) w.put32(i, out);
  };
  return with_whole2(run, each);
}

template <class F>
Handlers int3(F each) {
  const Handler run = [](Wave& w, const Inst& i) {
    alignas(64) Row t0, t1, t2, out;
    const uint32_t *a = w.src32(i, 0, t0), *b = w.src32(i, 1, t1), *c = w.src32(i, 2, t2);
    uint32_t* to = w.target(i, out);
    each_lane(w, [&](int l) { to[l] = F{}(a[l], b[l], c[l]); });
    if (to == out) w.put32(i, out);
  };
  return with_whole3(run, each);
}

// Applies the clamp modifier to an integer result: saturates the exact value.
template <bool Signed>
uint32_t saturated(int64_t value) {
  constexpr int64_t kLow = Signed ? INT32_MIN : 0, kHigh = Signed ? INT32_MAX : UINT32_MAX;
  return static_cast<uint32_t>(value < kLow ? kLow : value > kHigh ? kHigh : value);
}

template <bool Signed, class F>
Handler exact3(F) {
  return [](Wave& w, const Inst& i) {
    alignas(64) Row t0, t1, t2, out;
    const uint32_t *a = w.src32(i, 0, t0), *b = w.src32(i, 1, t1), *c = w.src32(i, 2, t2);
    uint32_t* to = w.target(i, out);
    if (i.clamp) {
      each_lane(w, [&](int l) { to[l] = saturated<Signed>(F{}(a[l], b[l], c[l])); });
    } else {
      each_lane(w, [&](int l) { to[l] = static_cast<uint32_t>(F{}(a[l], b[l], c[l])); });
    }
    if (to == out) w.put32(i, out);
  };
}

template <bool Signed, class F>
Handler exact2(F) {
  return [](Wave& w, const Inst& i) {
    alignas(64) Row t0, t1, out;
    const uint32_t *a = w.src32(i, 0, t0), *b = w.src32(i, 1, t1);
    uint32_t* to = w.target(i, out);
    if (i.clamp) {
      each_lane(w, [&](int l) { to[l] = saturated<Signed>(F{}(a[l], b[l])); });
    } else {
      each_lane(w, [&](int l) { to[l] = static_cast<uint32_t>(F{}(a[l], b[l])); });
    }
    if (to == out) w.put32(i, out);
  };
}

// The handlers of an operation on one f32, whose result is an f32.
template <class F>
Handlers float1(F) {
  return int1([](uint32_t a) { return as_bits(F{}(as_float(a))); });
}

template <class F>
Handlers float2(F) {
  return int2([](uint32_t a, uint32_t b) { return as_bits(F{}(as_float(a), as_float(b))); });
}

template <class F>
Handlers float3(F) {
  return int3([](uint32_t a, uint32_t b, uint32_t c) {
    return as_bits(F{}(as_float(a), as_float(b), as_float(c)));
  });
}

// Source k as 64-bit values. A source whose operand type has 32 bits is zero-extended.
inline const uint32_t* src_wide(Wave& w, const Inst& i, int k, uint32_t* tmp) {
  if (i.src[k].dwords == 2) return w.src64(i, k, tmp);
  const uint32_t* narrow = w.src32(i, k, tmp + kLanes);
  each_lane(w, [&](int l) { tmp[l] = narrow[l]; });
  fill_row(tmp + kLanes, 0, w.lanes);
  return tmp;
}

// Stores results of 64 bits; if the destination has 32 bits, only their low halves.
template <class F>
[[gnu::always_inline]] inline void wide_lanes(Wave& w, const Inst& i, uint32_t* out, F f) {
  if (i.dst[0].dwords == 2) {
    uint32_t* to = w.target(i, out);
    each_lane(w, [&](int l) { split(f(l), to, l); });
    if (to == out) w.put64(i, out);
  } else {
    each_lane(w, [&](int l) { out[l] = static_cast<uint32_t>(f(l)); });
    w.put32(i, out);
  }
}

template <class F>
Handler wide1(F) {
  return [](Wave& w, const Inst& i) {
    alignas(64) Row2 t0, out;
    const uint32_t* a = src_wide(w, i, 0, t0);
    wide_lanes(w, i, out, [&](int l) { return F{}(join(a[l], a[kLanes + l])); });
  };
}

template <class F>
Handler wide2(F) {
  return [](Wave& w, const Inst& i) {
    alignas(64) Row2 t0, t1, out;
    const uint32_t *a = src_wide(w, i, 0, t0), *b = src_wide(w, i, 1, t1);
    wide_lanes(w, i, out, [&](int l) {
      return F{}(join(a[l], a[kLanes + l]), join(b[l], b[kLanes + l]));
    });
  };
}

template <class F>
Handler wide3(F) {
  return [](Wave& w, const Inst& i) {
    alignas(64) Row2 t0, t1, t2, out;
    const uint32_t *a = src_wide(w, i, 0, t0), *b = src_wide(w, i, 1, t1),
                   *c = src_wide(w, i, 2, t2);
    wide_lanes(w, i, out, [&](int l) {
      return F{}(join(a[l], a[kLanes + l]), join(b[l], b[kLanes + l]), join(c[l], c[kLanes + l]));
    });
  };
}

template <class F>
Handler double1(F) {
  return wide1([](uint64_t a) { return std::bit_cast<uint64_t>(F{}(std::bit_cast<double>(a))); });
}

template <class F>
Handler double2(F) {
  return wide2([](uint64_t a, uint64_t b) {
    return std::bit_cast<uint64_t>(F{}(std::bit_cast<double>(a), std::bit_cast<double>(b)));
  });
}

template <class F>
Handler double3(F) {
  return wide3([](uint64_t a, uint64_t b, uint64_t c) {
    return std::bit_cast<uint64_t>(
        F{}(std::bit_cast<double>(a), std::bit_cast<double>(b), std::bit_cast<double>(c)));
  });
}

// The handler of an operation on one 16-bit integer. The source is zero-extended, and the low half
// of the result is kept.
template <class F>
Handler short1(F) {
  return [](Wave& w, const Inst& i) {
    alignas(64) Row t0, out;
    const uint32_t* a = w.src16(i, 0, t0);
    each_lane(w, [&](int l) { out[l] = F{}(static_cast<uint16_t>(a[l])); });
    w.put16(i, out);
  };
}

template <class F>
Handler short2(F) {
  return [](Wave& w, const Inst& i) {
    alignas(64) Row t0, t1, out;
    const uint32_t *a = w.src16(i, 0, t0), *b = w.src16(i, 1, t1);
    each_lane(w, [&](int l) {
      out[l] = F{}(static_cast<uint16_t>(a[l]), static_cast<uint16_t>(b[l]));
    });
    w.put16(i, out);
  };
}

template <class F>
Handler short3(F) {
  return [](Wave& w, const Inst& i) {
    alignas(64) Row t0, t1, t2, out;
    const uint32_t *a = w.src16(i, 0, t0), *b = w.src16(i, 1, t1), *c = w.src16(i, 2, t2);
    each_lane(w, [&](int l) {
      out[l] = F{}(static_cast<uint16_t>(a[l]), static_cast<uint16_t>(b[l]),
                   static_cast<uint16_t>(c[l]));
    });
    w.put16(i, out);
  };
}

// Arithmetic of f16 is computed in double, in which sums and products of f16 are exact, and rounded
// once to f16. With the default MODE, add, mul, min and max are computed in float. This gives the
// same results, because float has at least 2 * 11 + 2 bits.
uint16_t round_half(const Wave& w, double value);      // by MODE
uint16_t flush_half(const Wave& w, uint16_t value);    // f16 denormals to zero if MODE says so

// True if MODE.FP16_OVFL is set: a result that overflows f16, an 8-bit float or a matrix result
// then becomes the largest number instead of infinity.
inline bool saturates(const Wave& w) { return ((w.mode >> 23) & 1) != 0; }

template <class F>
void half_lanes(Wave& w, const uint32_t* a, const uint32_t* b, const uint32_t* c, uint32_t* out) {
  if (w.default_mode) {
    for (int l = 0; l < kLanes; l++) {
      out[l] = float_to_half(F{}(half_to_float(static_cast<uint16_t>(a[l])),
                                 half_to_float(static_cast<uint16_t>(b[l])),
                                 half_to_float(static_cast<uint16_t>(c[l]))));
    }
    return;
  }
  for (int l = 0; l < kLanes; l++) {
    const double r = F{}(double(half_to_float(flush_half(w, static_cast<uint16_t>(a[l])))),
                         double(half_to_float(flush_half(w, static_cast<uint16_t>(b[l])))),
                         double(half_to_float(flush_half(w, static_cast<uint16_t>(c[l])))));
    out[l] = flush_half(w, round_half(w, r));
  }
}

template <class F>
Handler half2(F) {   // F's arguments and result have the same floating type
  return [](Wave& w, const Inst& i) {
    alignas(64) Row t0, t1, out;
    const uint32_t *a = w.src16(i, 0, t0), *b = w.src16(i, 1, t1);
    half_lanes<decltype([](auto x, auto y, auto) { return F{}(x, y); })>(w, a, b, b, out);
    w.put16(i, out);
  };
}

template <class F>
Handler half1(F) {
  return [](Wave& w, const Inst& i) {
    alignas(64) Row t0, out;
    const uint32_t* a = w.src16(i, 0, t0);
    half_lanes<decltype([](auto x, auto, auto) { return F{}(x); })>(w, a, a, a, out);
    w.put16(i, out);
  };
}

}  // namespace ark_emu
