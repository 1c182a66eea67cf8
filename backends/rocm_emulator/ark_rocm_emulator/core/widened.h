// A cache of operands of matrix instructions, converted to the type of the sums ("widened"). A
// kernel uses each operand for several products, and comparing an operand's registers with those of
// a cached conversion takes a tenth of the time of converting them. An entry is valid as long as
// the registers hold the same values.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>

#include "grid.h"

namespace ark_emu {

// True if `count` dwords (a multiple of 8) are the same.
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

// An entry of the cache: the source registers, the conversion, and the result, indexed by the
// place along K and the line (a row of A or a column of B).
struct Widened {
  static constexpr int kDwords = 256, kDoubles = 512;  // the most that an operand has
  using Maker = void (*)();

  // The parameters that, together with the registers' contents, determine the result of the
  // conversion.
  struct Kind {
    Maker maker = nullptr;  // a function that identifies the type and the layout
    int depth = 0, blocks = 0;
    uint32_t mode = 0;
    bool operator==(const Kind&) const = default;
  };

  // True if this entry is of the kind `wanted` and was computed from the given source: `rows` rows
  // of `lanes` dwords at `words`, which are `apart` dwords apart. Otherwise the entry is changed to
  // this kind and source, and the caller must fill in the result.
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

// Left operands (k = 0) and right operands (k = 1) have separate entries, so that neither evicts
// the other while both are used. Entries are chosen by register number and shared by all waves,
// because consecutive waves often multiply the same tile.
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
