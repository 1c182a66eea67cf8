// What the matrix instructions of CDNA share: element types, reading registers, and D. Layouts from
// AMD's CDNA3 and CDNA4 instruction set documents, chapter "Matrix arithmetic", and AMD's matrix
// instruction calculator. Sums are formed in double and rounded once; the hardware's order of
// additions is not documented. EXEC and MODE's rounding are ignored.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>

#include "grid.h"
#include "lanes.h"
#include "ops.h"

namespace ark_emu {

// gfx942 has the FNUZ flavour of 8-bit floats, gfx950 the one of the OCP standard.
inline bool has_fnuz(const Wave& w) { return w.grid->program->arch() != Arch::gfx950; }

// MI200's matrix and dot product instructions of f16 and bf16 take denormals as zeros and give none
// (MIOpen's documentation, "MI200 MFMA behavior specifics"; for V_DOT2 also PyTorch's, "Numerical
// accuracy").
inline bool flushes_denormals(const Wave& w) { return w.grid->program->arch() == Arch::gfx90a; }

inline uint32_t without_denormal(uint32_t bits) {
  return (bits & 0x7f800000u) == 0 ? bits & 0x80000000u : bits;
}

// Types of elements: bits wide, and the value that enters the arithmetic.
struct InF16 {
  static constexpr int kBits = 16;
  static double value(const Wave& w, uint32_t bits) {
    const bool flushed = (bits & 0x7c00) == 0 && flushes_denormals(w);
    return half_to_float(static_cast<uint16_t>(flushed ? bits & 0x8000 : bits));
  }
};
struct InBF16 {
  static constexpr int kBits = 16;
  static double value(const Wave& w, uint32_t bits) {
    const bool flushed = (bits & 0x7f80) == 0 && flushes_denormals(w);
    return bf16_to_float(static_cast<uint16_t>(flushed ? bits & 0x8000 : bits));
  }
};
struct InF32 {   // the only type whose denormals MODE decides about
  static constexpr int kBits = 32;
  static double value(const Wave& w, uint32_t bits) {
    const bool flushed = (w.mode & 0x10) == 0 && (bits & 0x7f800000u) == 0;
    return as_float(flushed ? bits & 0x80000000u : bits);
  }
};
struct InXF32 {   // 10 bits of mantissa
  static constexpr int kBits = 32;
  static double value(const Wave& w, uint32_t bits) { return InF32::value(w, bits & 0xffffe000u); }
};
struct InI8 {
  static constexpr int kBits = 8;
  static int64_t value(const Wave&, uint32_t bits) { return static_cast<int8_t>(bits); }
};
struct InFp8 {
  static constexpr int kBits = 8;
  static double value(const Wave& w, uint32_t bits) {
    return small_table(has_fnuz(w) ? Small::E4M3Fnuz : Small::E4M3)[bits];
  }
};
struct InBf8 {
  static constexpr int kBits = 8;
  static double value(const Wave& w, uint32_t bits) {
    return small_table(has_fnuz(w) ? Small::E5M2Fnuz : Small::E5M2)[bits];
  }
};

// Integers are summed as integers.
template <class In>
using SumOf = std::conditional_t<std::is_same_v<In, InI8>, int64_t, double>;

inline uint32_t word_of(Wave& w, const Operand& operand, int offset, int lane) {
  if (operand.kind == Kind::Vgpr) return w.row(operand.reg + static_cast<unsigned>(offset))[lane];
  return operand.lo;
}

// Element e of a lane's registers.
template <class In>
SumOf<In> element(Wave& w, const Operand& operand, int e, int lane) {
  constexpr int kPerWord = 32 / In::kBits;
  constexpr uint32_t kMask = In::kBits == 32 ? ~0u : (1u << (In::kBits & 31)) - 1;
  const uint32_t word = word_of(w, operand, e / kPerWord, lane);
  return static_cast<SumOf<In>>(In::value(w, (word >> (In::kBits % 32 * (e % kPerWord))) & kMask));
}

// Where register r of a lane lies in C and D.
struct Place {
  int block, row, column;
};

template <int kSize>
constexpr Place place(int reg, int lane) {
  if (kSize == 32) {
    const int r = reg % 16;
    return {reg / 16, 8 * (r / 4) + 4 * (lane / 32) + r % 4, lane % 32};
  }
  if (kSize == 16) return {reg / 4, 4 * (lane / 16) + reg % 4, lane % 16};
  return {lane / 4, reg, lane % 4};
}

// sums += left * right for one block, both by (k, line).
template <int kSize, int kDepth, class T>
void multiply_add(const T (&left)[kDepth][kSize], const T (&right)[kDepth][kSize],
                  T (&sums)[kSize][kSize]) {
  for (int k = 0; k < kDepth; k++) {
    for (int row = 0; row < kSize; row++) {
      const T scale = left[k][row];
      for (int column = 0; column < kSize; column++) sums[row][column] += scale * right[k][column];
    }
  }
}

inline uint32_t total(double sum, uint32_t addend) {
  return as_bits(static_cast<float>(sum + as_float(addend)));
}

inline uint32_t total(int64_t sum, uint32_t addend) { return static_cast<uint32_t>(sum) + addend; }

// Where MODE asks for it: the largest number instead of an overflow.
inline uint32_t limited(double sum, uint32_t addend) {
  const double exact = sum + as_float(addend);
  const float result = static_cast<float>(exact);
  if (!std::isinf(result) || !std::isfinite(exact)) return as_bits(result);
  return as_bits(std::copysign(std::numeric_limits<float>::max(), result));
}

inline uint32_t limited(int64_t sum, uint32_t addend) {
  const int64_t exact = sum + static_cast<int32_t>(addend);
  return static_cast<uint32_t>(std::clamp<int64_t>(exact, INT32_MIN, INT32_MAX));
}

template <int kSize, int kBlocks, class T, class F>
[[gnu::always_inline]] inline void write_with(Wave& w, const Inst& i, const Operand& c,
                                              const T (&sums)[kBlocks][kSize][kSize], F add) {
  for (int reg = 0; reg < kSize * kSize * kBlocks / 64; reg++) {
    uint32_t out[64];
    for (int lane = 0; lane < 64; lane++) {
      const Place p = place<kSize>(reg, lane);
      out[lane] = add(sums[p.block][p.row][p.column], word_of(w, c, reg, lane));
    }
    std::copy(out, out + 64, w.row(i.dst[0].reg + static_cast<unsigned>(reg)));
  }
}

// D = C + sums.
template <int kSize, int kBlocks, class T>
[[gnu::always_inline]] inline void write_d(Wave& w, const Inst& i, const Operand& c,
                                           const T (&sums)[kBlocks][kSize][kSize]) {
  if (saturates(w)) {
    write_with(w, i, c, sums, [](T sum, uint32_t addend) { return limited(sum, addend); });
  } else {
    write_with(w, i, c, sums, [](T sum, uint32_t addend) { return total(sum, addend); });
  }
}

constexpr uint32_t kMatrix = kNoModifiers | kOwnRounding;   // flags of all of them

// The operand type of that many dwords.
inline std::string type_of_width(int dwords) {
  return dwords == 1 ? "b32" : "b" + std::to_string(32 * dwords);
}

void register_mfma_scale(Ops& ops);
void register_mfma_sparse(Ops& ops);

}  // namespace ark_emu
