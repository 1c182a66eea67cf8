// WMMA 16x16x16 of RDNA3 for a wave of 32. Layouts from AMD's RDNA3 instruction set document,
// section "Wave Matrix Multiply Accumulate": lane l (0 to 15) holds row l of A and column l of B, K
// running through its registers, and lanes 16 to 31 hold the same again; element (r, c) of C and D
// is in register r / 2 of lane c for even rows and of lane 16 + c for odd ones. EXEC is ignored.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <string>

#include "exec_gfx11.h"
#include "half.h"

namespace ark_emu {
namespace {

constexpr int kSize = 16;

// Register `offset` of an operand in one lane; a constant is the same everywhere.
uint32_t operand_word(Wave& w, const Operand& operand, int offset, int lane) {
  if (operand.kind == Kind::Vgpr) return w.row(operand.reg + offset)[lane];
  return operand.lo;
}

template <class T>
using Tile = T[kSize][kSize];

// The layouts of a wave of 64 are others.
void expect_wave32(const Wave& w, const Inst& i) {
  if (w.lanes == 32) return;
  throw Fault{ErrorKind::UnknownOpcode,
              "the emulator executes " + *i.name + " in waves of 32 only; this kernel was compiled "
              "for waves of 64 (-mwavefrontsize64)"};
}

// A by row or B by column: `bits` wide elements, the k-th of them for lane `line`.
template <int kBits>
uint32_t element(Wave& w, const Operand& operand, int line, int k) {
  constexpr int kPerWord = 32 / kBits;
  const uint32_t word = operand_word(w, operand, k / kPerWord, line);
  return (word >> (kBits * (k % kPerWord))) & ((1u << kBits) - 1);
}

enum class In : uint8_t { F16, BF16 };

template <In kIn>
float widen(uint32_t bits) {
  const auto half = static_cast<uint16_t>(bits);
  return kIn == In::F16 ? half_to_float(half) : bf16_to_float(half);
}

// neg and neg_hi of source k act on its even and odd elements.
template <In kIn>
void load_floats(Wave& w, const Inst& i, int k, Tile<double>& tile) {
  for (int line = 0; line < kSize; line++) {
    for (int e = 0; e < kSize; e++) {
      const uint8_t negated = e % 2 == 0 ? i.neg : i.abs;
      const double value = widen<kIn>(element<16>(w, i.src[k], line, e));
      tile[line][e] = (negated >> k) & 1 ? -value : value;
    }
  }
}

// Where element (row, column) of C and D lies.
int result_word(int row) { return row / 2; }
int result_lane(int row, int column) { return column + (row % 2) * kSize; }

template <In kIn>
void wmma_f32(Wave& w, const Inst& i) {
  expect_wave32(w, i);
  Tile<double> a, b;
  load_floats<kIn>(w, i, 0, a);
  load_floats<kIn>(w, i, 1, b);
  uint32_t out[8][32];
  for (int row = 0; row < kSize; row++) {
    for (int column = 0; column < kSize; column++) {
      const int word = result_word(row), lane = result_lane(row, column);
      float c = std::bit_cast<float>(operand_word(w, i.src[2], word, lane));
      if ((i.abs >> 2) & 1) c = std::fabs(c);
      if ((i.neg >> 2) & 1) c = -c;
      double sum = c;
      for (int k = 0; k < kSize; k++) sum += a[row][k] * b[column][k];
      out[word][lane] = std::bit_cast<uint32_t>(static_cast<float>(sum));
    }
  }
  for (int word = 0; word < 8; word++) {
    std::copy(out[word], out[word] + 32, w.row(i.dst[0].reg + word));
  }
}

// C and D of 16 bits take one half of a register each: the high one with op_sel[2].
template <In kIn>
void wmma_16(Wave& w, const Inst& i) {
  expect_wave32(w, i);
  Tile<double> a, b;
  load_floats<kIn>(w, i, 0, a);
  load_floats<kIn>(w, i, 1, b);
  const int shift = (i.opsel & 4) != 0 ? 16 : 0;
  uint32_t out[8][32];
  for (int row = 0; row < kSize; row++) {
    for (int column = 0; column < kSize; column++) {
      const int word = result_word(row), lane = result_lane(row, column);
      double sum = widen<kIn>(operand_word(w, i.src[2], word, lane) >> shift);
      if ((i.abs >> 2) & 1) sum = std::fabs(sum);
      if ((i.neg >> 2) & 1) sum = -sum;
      for (int k = 0; k < kSize; k++) sum += a[row][k] * b[column][k];
      const uint32_t rounded = kIn == In::F16 ? double_to_half(sum, Round::Nearest)
                                              : float_to_bf16(static_cast<float>(sum));
      const uint32_t old = w.row(i.dst[0].reg + word)[lane];
      out[word][lane] = (old & ~(0xffffu << shift)) | rounded << shift;
    }
  }
  for (int word = 0; word < 8; word++) {
    std::copy(out[word], out[word] + 32, w.row(i.dst[0].reg + word));
  }
}

// neg bit k: source k is signed. Clamp saturates the 32-bit sum.
template <int kBits>
void wmma_i32(Wave& w, const Inst& i) {
  expect_wave32(w, i);
  const auto load = [&w, &i](int k, Tile<int64_t>& tile) {
    const bool is_signed = ((i.neg >> k) & 1) != 0;
    for (int line = 0; line < kSize; line++) {
      for (int e = 0; e < kSize; e++) {
        const uint32_t value = element<kBits>(w, i.src[k], line, e);
        const uint32_t top = value << (32 - kBits);
        tile[line][e] = is_signed ? static_cast<int32_t>(top) >> (32 - kBits)
                                  : static_cast<int64_t>(value);
      }
    }
  };
  Tile<int64_t> a, b;
  load(0, a);
  load(1, b);
  uint32_t out[8][32];
  for (int row = 0; row < kSize; row++) {
    for (int column = 0; column < kSize; column++) {
      const int word = result_word(row), lane = result_lane(row, column);
      int64_t sum = static_cast<int32_t>(operand_word(w, i.src[2], word, lane));
      for (int k = 0; k < kSize; k++) sum += a[row][k] * b[column][k];
      if (i.clamp) sum = std::clamp<int64_t>(sum, INT32_MIN, INT32_MAX);
      out[word][lane] = static_cast<uint32_t>(sum);
    }
  }
  for (int word = 0; word < 8; word++) {
    std::copy(out[word], out[word] + 32, w.row(i.dst[0].reg + word));
  }
}

}  // namespace

void register_wmma(Ops& ops) {
  ops.add("v_wmma_f32_16x16x16_f16", "b256=b256,b256,b256", wmma_f32<In::F16>, kNoModifiers);
  ops.add("v_wmma_f32_16x16x16_bf16", "b256=b256,b256,b256", wmma_f32<In::BF16>, kNoModifiers);
  ops.add("v_wmma_f16_16x16x16_f16", "b256=b256,b256,b256", wmma_16<In::F16>, kNoModifiers);
  ops.add("v_wmma_bf16_16x16x16_bf16", "b256=b256,b256,b256", wmma_16<In::BF16>, kNoModifiers);
  ops.add("v_wmma_i32_16x16x16_iu8", "b256=b128,b128,b256", wmma_i32<8>, kNoModifiers);
  ops.add("v_wmma_i32_16x16x16_iu4", "b256=b64,b64,b256", wmma_i32<4>, kNoModifiers);
}

}  // namespace ark_emu
