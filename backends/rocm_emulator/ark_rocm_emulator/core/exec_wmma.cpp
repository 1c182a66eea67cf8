// Handlers of RDNA3's WMMA 16x16x16 for a wave of 32 lanes. Layouts from AMD's RDNA3 instruction
// set document, section "Wave Matrix Multiply Accumulate". Lane l (0 to 15) holds row l of A and
// column l of B; its registers hold consecutive elements along K. Lanes 16 to 31 hold copies of
// these. Element (r, c) of C and D is in register r / 2, of lane c for even rows and of lane 16 + c
// for odd rows. EXEC is ignored.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <string>

#include "exec_gfx11.h"
#include "half.h"
#include "lanes.h"
#include "matrix_rows.h"
#include "widened.h"

namespace ark_emu {
namespace {

constexpr int kSize = 16;

// Returns the row of lanes of register number `offset` of an operand. For a constant, each lane has
// the constant.
const uint32_t* operand_row(Wave& w, const Operand& operand, int offset, uint32_t* tmp) {
  if (operand.kind == Kind::Vgpr) return w.row(operand.reg + offset);
  fill_row(tmp, operand.lo, kLanes);
  return tmp;
}

template <class T>
using Tile = T[kSize][kSize];

// Throws a fault for a wave of 64 lanes. In such waves WMMA's operands have other layouts, which
// are not emulated.
void expect_wave32(const Wave& w, const Inst& i) {
  if (w.lanes == 32) return;
  throw Fault{ErrorKind::UnknownOpcode,
              "the emulator executes " + *i.name + " in waves of 32 only; this kernel was compiled "
              "for waves of 64 (-mwavefrontsize64)"};
}

enum class In : uint8_t { F16, BF16 };

template <In kIn>
float widen(uint32_t bits) {
  const auto half = static_cast<uint16_t>(bits);
  return kIn == In::F16 ? half_to_float(half) : bf16_to_float(half);
}

using Lines = const double (*)[kSize];

template <In kIn, class T>
void widen_rows(const uint32_t* words, int apart, T (*to)[kSize]) {
  const auto widen_both = kIn == In::F16 ? widen_halves<T> : widen_bf16<T>;
  for (int e = 0; e < kSize; e += 2) widen_both(words + e / 2 * apart, kSize, to[e], to[e + 1]);
}

// Returns source number k of the instruction (0: A, 1: B) converted to double. The first index of
// the result is the place along K, the second one is the row of A or the column of B. An earlier
// conversion of the same registers is used if there is one. A source with modifiers is put into
// `unshared`. The modifiers neg and neg_hi negate the elements at even and odd places along K.
template <In kIn>
Lines load_floats(Wave& w, const Inst& i, int k, Widened& unshared) {
  const Operand& operand = i.src[k];
  const bool negated[2] = {(i.neg >> k & 1) != 0, (i.abs >> k & 1) != 0};
  const bool in_registers = operand.kind == Kind::Vgpr;
  Widened* place = &unshared;
  alignas(64) uint32_t constant[kLanes];
  const uint32_t* words = in_registers ? w.row(operand.reg) : constant;
  if (!in_registers) fill_row(constant, operand.lo, kLanes);
  if (in_registers && !negated[0] && !negated[1]) {
    place = &widened(w, k, operand.reg, kSize / 2);
    const auto maker = reinterpret_cast<Widened::Maker>(widen_rows<kIn, float>);
    const Widened::Kind kind = {maker, kSize, 1, 0};
    if (place->holds(kind, words, kSize / 2, kSize, kLanes)) return place->doubles<kSize>();
  }
  place->fill<kSize>(kSize * kSize, false, [&](auto* lines) {
    widen_rows<kIn>(words, in_registers ? kLanes : 0, lines);
    for (int e = 0; e < kSize; e++) {
      if (!negated[e % 2]) continue;
      for (auto& value : lines[e]) value = -value;
    }
  });
  return place->doubles<kSize>();
}

// Applies the modifiers abs and neg of the addend C.
void modify_addend(const Inst& i, Tile<double>& sums) {
  const bool positive = ((i.abs >> 2) & 1) != 0, negated = ((i.neg >> 2) & 1) != 0;
  if (!positive && !negated) return;
  for (auto& row : sums) {
    for (double& value : row) {
      if (positive) value = std::fabs(value);
      if (negated) value = -value;
    }
  }
}

// The register and the lane at which a row of C and D begins.
int result_word(int row) { return row / 2; }
int result_lane(int row) { return row % 2 * kSize; }

template <In kIn>
void wmma_f32(Wave& w, const Inst& i) {
  expect_wave32(w, i);
  alignas(64) Tile<double> sums;
  Widened left, right;
  alignas(64) uint32_t constant[kLanes];
  const Lines a = load_floats<kIn>(w, i, 0, left), b = load_floats<kIn>(w, i, 1, right);
  if (i.src[2].kind == Kind::Vgpr && i.src[2].reg == i.dst[0].reg && ((i.abs | i.neg) & 4) == 0) {
    uint32_t* d = w.row(i.dst[0].reg);
    const auto word = [](int row) { return result_word(row) * kLanes + result_lane(row); };
    multiply<kSize>(
        a, b, kSize, [=](int row, int column) { return from_floats(d + word(row) + column); },
        [=](int row, int column, Doubles sum) { to_floats(d + word(row) + column, sum); });
    return;
  }
  for (int row = 0; row < kSize; row++) {
    const uint32_t* c = operand_row(w, i.src[2], result_word(row), constant) + result_lane(row);
    for (int column = 0; column < kSize; column++) sums[row][column] = as_float(c[column]);
  }
  modify_addend(i, sums);
  multiply_add(a, b, kSize, sums);
  for (int row = 0; row < kSize; row++) {
    uint32_t* to = w.row(i.dst[0].reg + result_word(row)) + result_lane(row);
    for (int column = 0; column < kSize; column++) {
      to[column] = as_bits(static_cast<float>(sums[row][column]));
    }
  }
}

// The handler for 16-bit results: elements of C and D use one half of a register each, the high
// half with op_sel[2].
template <In kIn>
void wmma_16(Wave& w, const Inst& i) {
  expect_wave32(w, i);
  alignas(64) Tile<double> sums;
  Widened left, right;
  alignas(64) uint32_t constant[kLanes];
  const Lines a = load_floats<kIn>(w, i, 0, left), b = load_floats<kIn>(w, i, 1, right);
  const int shift = (i.opsel & 4) != 0 ? 16 : 0;
  for (int row = 0; row < kSize; row++) {
    const uint32_t* c = operand_row(w, i.src[2], result_word(row), constant) + result_lane(row);
    for (int column = 0; column < kSize; column++) {
      sums[row][column] = widen<kIn>(c[column] >> shift);
    }
  }
  modify_addend(i, sums);
  multiply_add(a, b, kSize, sums);
  for (int row = 0; row < kSize; row++) {
    uint32_t* to = w.row(i.dst[0].reg + result_word(row)) + result_lane(row);
    for (int column = 0; column < kSize; column++) {
      const double sum = sums[row][column];
      const uint32_t rounded = kIn == In::F16 ? double_to_half(sum, Round::Nearest)
                                              : float_to_bf16(static_cast<float>(sum));
      to[column] = (to[column] & ~(0xffffu << shift)) | rounded << shift;
    }
  }
}

// The handler for integers of kBits bits. Bit k of the modifier neg is set if source number k (0:
// A, 1: B) is signed. The modifier clamp saturates the 32-bit sum.
template <int kBits>
void wmma_i32(Wave& w, const Inst& i) {
  constexpr int kPerWord = 32 / kBits;
  expect_wave32(w, i);
  alignas(64) uint32_t constant[kLanes];
  const auto load = [&](int k, Tile<int32_t>& tile) {
    const bool is_signed = ((i.neg >> k) & 1) != 0;
    for (int e = 0; e < kSize; e++) {
      const uint32_t* words = operand_row(w, i.src[k], e / kPerWord, constant);
      const int above = 32 - kBits - kBits * (e % kPerWord);
      for (int line = 0; line < kSize; line++) {
        const uint32_t top = words[line] << above;
        tile[e][line] = is_signed ? static_cast<int32_t>(top) >> (32 - kBits)
                                  : static_cast<int32_t>(top >> (32 - kBits));
      }
    }
  };
  alignas(64) Tile<int32_t> a, b, sums = {};
  load(0, a);
  load(1, b);
  multiply_add(a, b, kSize, sums);
  for (int row = 0; row < kSize; row++) {
    const uint32_t* c = operand_row(w, i.src[2], result_word(row), constant) + result_lane(row);
    uint32_t* to = w.row(i.dst[0].reg + result_word(row)) + result_lane(row);
    for (int column = 0; column < kSize; column++) {
      int64_t sum = int64_t{static_cast<int32_t>(c[column])} + sums[row][column];
      if (i.clamp) sum = std::clamp<int64_t>(sum, INT32_MIN, INT32_MAX);
      to[column] = static_cast<uint32_t>(sum);
    }
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
