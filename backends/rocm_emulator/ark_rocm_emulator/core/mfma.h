// Code that the matrix instructions of CDNA (D = A * B + C) share: element types, reading the
// operands' registers, and writing D. Layouts are from AMD's CDNA3 and CDNA4 instruction set
// documents, chapter "Matrix arithmetic", and AMD's matrix instruction calculator. Sums are
// computed in double and rounded once, because the hardware's order of additions is not documented.
// EXEC and MODE's rounding are ignored.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>

#include "grid.h"
#include "lanes.h"
#include "matrix_rows.h"
#include "ops.h"

namespace ark_emu {

// True if 8-bit floats have the FNUZ formats (gfx942), false if they have those of the OCP standard
// (gfx950).
inline bool has_fnuz(const Wave& w) { return w.grid->program->arch() != Arch::gfx950; }

// True if denormals are flushed: MI200's matrix and dot product instructions for f16 and bf16 read
// denormals as zero and never return any (MIOpen's documentation, "MI200 MFMA behavior specifics";
// for V_DOT2 also PyTorch's, "Numerical accuracy").
inline bool flushes_denormals(const Wave& w) { return w.grid->program->arch() == Arch::gfx90a; }

inline uint32_t without_denormal(uint32_t bits) {
  return (bits & 0x7f800000u) == 0 ? bits & 0x80000000u : bits;
}

// Element types of A and B. Each struct has the number of bits, and a function that returns, as
// numbers, the elements in bits shift to shift + kBits - 1 of `count` dwords.
template <int kWidth>
struct InHalf {   // f16 or bf16. kWidth: the number of bits of the exponent
  static constexpr int kBits = 16;
  // Converts both halves of `count` dwords (at most kLanes) to numbers.
  template <class T>
  static void widen_both(const Wave& w, const uint32_t* from, int count, T* low, T* high) {
    alignas(64) uint32_t flushed[kLanes];
    if (flushes_denormals(w)) {
      for (int l = 0; l < count; l++) {
        flushed[l] = kept(from[l] & 0xffff) | kept(from[l] >> 16) << 16;
      }
      from = flushed;
    }
    if constexpr (kWidth == 5) {
      widen_halves(from, count, low, high);
    } else {
      widen_bf16(from, count, low, high);
    }
  }
  template <class T>
  static void widen(const Wave& w, const uint32_t* from, int shift, int count, T* to) {
    for (int l = 0; l < count; l++) {
      const uint32_t bits = from[l] >> shift & 0xffff, value = flushes_denormals(w) ? kept(bits) : bits;
      to[l] = kWidth == 5 ? half_to_float(static_cast<uint16_t>(value)) : as_float(value << 16);
    }
  }

 private:
  static uint32_t kept(uint32_t bits) {
    return (bits & (kWidth == 5 ? 0x7c00 : 0x7f80)) == 0 ? bits & 0x8000 : bits;
  }
};
using InF16 = InHalf<5>;
using InBF16 = InHalf<8>;

template <uint32_t kKept>
struct InFloat {   // f32, the only type for which MODE may flush denormals; kKept: the bits used
  static constexpr int kBits = 32;
  template <class T>
  static void widen(const Wave& w, const uint32_t* from, int, int count, T* to) {
    const bool flushes = (w.mode & 0x10) == 0;
    for (int l = 0; l < count; l++) {
      const uint32_t bits = from[l] & kKept;
      to[l] = as_float(flushes && (bits & 0x7f800000u) == 0 ? bits & 0x80000000u : bits);
    }
  }
};
using InF32 = InFloat<~0u>;
using InXF32 = InFloat<0xffffe000u>;   // 10 bits of mantissa

struct InI8 {
  static constexpr int kBits = 8;
  static void widen(const Wave&, const uint32_t* from, int shift, int count, int32_t* to) {
    for (int l = 0; l < count; l++) to[l] = static_cast<int8_t>(from[l] >> shift);
  }
};

template <Small kFnuz, Small kOcp>
struct InSmall {
  static constexpr int kBits = 8;
  template <class T>
  static void widen(const Wave& w, const uint32_t* from, int shift, int count, T* to) {
    const float* table = small_table(has_fnuz(w) ? kFnuz : kOcp);
    for (int l = 0; l < count; l++) to[l] = table[(from[l] >> shift) & 0xff];
  }
};
using InFp8 = InSmall<Small::E4M3Fnuz, Small::E4M3>;
using InBf8 = InSmall<Small::E5M2Fnuz, Small::E5M2>;

// Integers are summed as integers.
template <class In>
using SumOf = std::conditional_t<std::is_same_v<In, InI8>, int32_t, double>;

inline uint32_t word_of(Wave& w, const Operand& operand, int offset, int lane) {
  if (operand.kind == Kind::Vgpr) return w.row(operand.reg + static_cast<unsigned>(offset))[lane];
  return operand.lo;
}

// Returns the row of lanes of register number `offset` of an operand. For a constant, each lane has
// the constant.
inline const uint32_t* words_of(Wave& w, const Operand& operand, int offset, uint32_t* tmp) {
  if (operand.kind == Kind::Vgpr) return w.row(operand.reg + static_cast<unsigned>(offset));
  fill_row(tmp, operand.lo, kLanes);
  return tmp;
}

// Element e of a lane's registers.
template <class In>
SumOf<In> element(Wave& w, const Operand& operand, int e, int lane) {
  constexpr int kPerWord = 32 / In::kBits;
  const uint32_t word = word_of(w, operand, e / kPerWord, lane);
  SumOf<In> value;
  In::widen(w, &word, In::kBits * (e % kPerWord), 1, &value);
  return value;
}

// The block, row and column of C and D that a lane's register r holds.
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

// The index of the dword in the registers of C and D at which row `row` of block `block` begins.
template <int kSize>
constexpr int word_in_d(int block, int row) {
  if (kSize == 32) return (16 * block + 4 * (row / 8) + row % 4) * kLanes + row / 4 % 2 * 32;
  if (kSize == 16) return (4 * block + row % 4) * kLanes + row / 4 * 16;
  return row * kLanes + 4 * block;
}

inline uint32_t total(double sum, uint32_t addend) {
  return as_bits(static_cast<float>(sum + as_float(addend)));
}

inline uint32_t total(int32_t sum, uint32_t addend) { return static_cast<uint32_t>(sum) + addend; }

// Returns sum + addend. If MODE requests it, an overflow gives the largest number instead of
// infinity.
inline uint32_t limited(double sum, uint32_t addend) {
  const double exact = sum + as_float(addend);
  const float result = static_cast<float>(exact);
  if (!std::isinf(result) || !std::isfinite(exact)) return as_bits(result);
  return as_bits(std::copysign(std::numeric_limits<float>::max(), result));
}

inline uint32_t limited(int32_t sum, uint32_t addend) {
  const int64_t exact = int64_t{sum} + static_cast<int32_t>(addend);
  return static_cast<uint32_t>(std::clamp<int64_t>(exact, INT32_MIN, INT32_MAX));
}

template <int kSize, class T, class F>
[[gnu::always_inline]] inline void write_with(Wave& w, const Inst& i, const Operand& c,
                                              const T (*sums)[kSize][kSize], int blocks, F add) {
  const int regs = kSize * kSize * blocks / 64;
  // C may overlap D. The order of the steps ensures that no register is written before it is read.
  const bool backwards = c.kind == Kind::Vgpr && c.reg < i.dst[0].reg;
  for (int step = 0; step < regs; step++) {
    const int reg = backwards ? regs - 1 - step : step;
    alignas(64) uint32_t tmp[kLanes];
    const uint32_t* addend = words_of(w, c, reg, tmp);
    uint32_t* to = w.row(i.dst[0].reg + static_cast<unsigned>(reg));
    for (int lane = 0; lane < 64; lane += kSize) {   // a row of the matrix
      const Place p = place<kSize>(reg, lane);
      const T* sum = sums[p.block][p.row];
      ARK_LANES
      for (int l = 0; l < kSize; l++) to[lane + l] = add(sum[l], addend[lane + l]);
    }
  }
}

// D = C + sums.
template <int kSize, class T>
void write_d(Wave& w, const Inst& i, const Operand& c, const T (*sums)[kSize][kSize], int blocks) {
  if (saturates(w)) {
    write_with(w, i, c, sums, blocks, [](T sum, uint32_t addend) { return limited(sum, addend); });
  } else {
    write_with(w, i, c, sums, blocks, [](T sum, uint32_t addend) { return total(sum, addend); });
  }
}

constexpr uint32_t kMatrix = kNoModifiers | kOwnRounding;   // flags of all matrix operations

// The operand type with the given number of dwords.
inline std::string type_of_width(int dwords) {
  return dwords == 1 ? "b32" : "b" + std::to_string(32 * dwords);
}

void register_mfma_scale(Ops& ops);
void register_mfma_sparse(Ops& ops);

}  // namespace ark_emu
