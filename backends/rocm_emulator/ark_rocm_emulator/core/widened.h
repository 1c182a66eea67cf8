// Operands of matrix instructions, widened: kept for as long as the registers hold the same. A
// kernel that multiplies tiles uses each operand for a whole row or column of them, and comparing
// the registers takes a tenth of what widening them does.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>

#include "grid.h"

namespace ark_emu {

// Whether `count` dwords are the same, a multiple of 8.
inline bool same_dwords(const uint32_t* a, const uint32_t* b, int count) {
#if defined(__AVX2__)
  __m256i different = _mm256_setzero_si256();
  for (int l = 0; l < count; l += 8) {
    const __m256i left = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a + l));
    const __m256i right = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b + l));
    different = _mm256_or_si256(different, _mm256_xor_si256(left, right));
  }
  return _mm256_testz_si256(different, different) != 0;
#else
  return std::memcmp(a, b, sizeof(uint32_t) * static_cast<size_t>(count)) == 0;
#endif
}

// One operand: what it was made from, by what, and the result by (k, line).
struct Widened {
  static constexpr int kDwords = 256, kDoubles = 512;  // the most that an operand has
  using Maker = void (*)();

  // What decides about the result beside the registers' contents.
  struct Kind {
    Maker maker = nullptr;  // any function that stands for the type and the layout
    int depth = 0, blocks = 0;
    uint32_t mode = 0;
    bool operator==(const Kind&) const = default;
  };

  // Whether `at` is of that kind and was made from `rows` rows of `lanes` dwords at `words`, which
  // lie `apart` dwords apart. If not, it will have been: the caller fills it.
  bool holds(const Kind& wanted, const uint32_t* words, int rows, int lanes, int apart) {
    bool same = kind == wanted;
    for (int row = 0; same && row < rows; row++) {
      same = same_dwords(words + row * apart, from + row * lanes, lanes);
    }
    if (same) return true;
    kind = wanted;
    for (int row = 0; row < rows; row++) {
      std::memcpy(from + row * lanes, words + row * apart,
                  sizeof(uint32_t) * static_cast<size_t>(lanes));
    }
    return false;
  }

  Kind kind;
  alignas(64) uint32_t from[kDwords];
  alignas(64) double at[kDoubles];
};

// Places for left sides (k = 0) and right ones apart, so that neither takes the other's while both
// are used, and by register, whichever wave's: waves that follow each other often multiply one
// tile.
struct WidenedOperands {
  Widened& of(int k, unsigned reg, int rows) {
    auto& some = places[static_cast<size_t>(k)];
    return some[reg / static_cast<unsigned>(rows) % some.size()];
  }
  std::array<std::array<Widened, 16>, 2> places;
};

inline Widened& widened(Wave& w, int k, unsigned reg, int rows) {
  std::unique_ptr<WidenedOperands>& all = w.grid->widened;
  if (all == nullptr) all = std::make_unique<WidenedOperands>();
  return all->of(k, reg, rows);
}

}  // namespace ark_emu
