// A cache of operands of matrix instructions, converted to types in which the host computes. A
// kernel uses each operand for several products, and comparing an operand's registers with those of
// a cached conversion takes a tenth of the time of converting them. An entry is valid as long as
// the registers hold the same values.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <memory>

#include "grid.h"

namespace ark_emu {

// True if `count` dwords (a multiple of 16) are the same.
inline bool same_dwords(const uint32_t* a, const uint32_t* b, int count) {
#if defined(__AVX512F__)
  constexpr int kOrXor = 0xf6;   // the bits of x | (y ^ z)
  __m512i different = _mm512_setzero_si512();
  for (int l = 0; l < count; l += 16) {
    different = _mm512_ternarylogic_epi64(different, _mm512_loadu_si512(a + l),
                                          _mm512_loadu_si512(b + l), kOrXor);
  }
  return _mm512_test_epi64_mask(different, different) == 0;
#elif defined(__AVX2__)
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

// An operand whose elements are all integers of at most kBits bits (without the sign) in a common
// unit, which is a power of two. Sums of their products are exact in 32 bits, for every depth that
// an instruction has. Examples are zeros, codes of quantised weights, and small integers.
struct Integers {
  static constexpr int kBits = 12, kMost = 512;   // kMost: elements
  bool exact = false;
  int bits = 0;   // of the largest integer
  int unit = 0;   // as a power of two
  // Row n holds rows 2 n (low halves) and 2 n + 1 (high halves) of the operand.
  alignas(64) uint32_t pairs[kMost / 2];

  // Fills this in from `count` elements (a multiple of 64) in rows of `size` elements.
  void find(const float* at, int count, int size) {
    constexpr int kSample = 32;
    exact = false;
    if (count % (2 * size) != 0) return;
    // Most operands whose elements have more bits are recognised after a few elements.
    uint32_t ones = 0;
    const int sampled = exponent_of(at, kSample);
    if (!in_range(sampled) || !all(at, kSample, scale_of(sampled), ones)) return;
    const int exponent = exponent_of(at, count);
    if (!in_range(exponent)) return;
    const float scale = scale_of(exponent);
    ones = 0;
    if (!all(at, count, scale, ones)) return;
    const int zeros = ones == 0 ? kBits : std::countr_zero(ones);
    exact = true;
    bits = kBits - zeros;
    unit = exponent - (kBits - 1) + zeros;
    const float fitting = scale / static_cast<float>(1 << zeros);
    for (int n = 0; n < count; n += 2 * size) {
      ARK_LANES
      for (int l = 0; l < size; l++) {
        const auto even = static_cast<int32_t>(at[n + l] * fitting),
                   odd = static_cast<int32_t>(at[n + size + l] * fitting);
        const auto low = static_cast<uint32_t>(even) & 0xffff;
        pairs[n / 2 + l] = low | static_cast<uint32_t>(odd) << 16;
      }
    }
  }

  template <int kSize>
  const uint32_t (*rows() const)[kSize] {
    return reinterpret_cast<const uint32_t(*)[kSize]>(pairs);
  }

 private:
  // The exponent of the largest element. Infinity and NaN have 128, denormals -127.
  static int exponent_of(const float* at, int count) {
    uint32_t most = 0;
    for (int l = 0; l < count; l++) {
      most = std::max(most, std::bit_cast<uint32_t>(at[l]) & 0x7fffffff);
    }
    return most == 0 ? 0 : static_cast<int>(most >> 23) - 127;
  }
  // True if the scale of this exponent is a normal float.
  static bool in_range(int exponent) { return exponent >= -110 && exponent <= 127; }
  static float scale_of(int exponent) {
    return std::bit_cast<float>(static_cast<uint32_t>(kBits - 1 - exponent + 127) << 23);
  }
  // True if all elements are integers after multiplication with `scale`. Adds the bits that are set
  // in the integers to `ones`.
  static bool all(const float* at, int count, float scale, uint32_t& ones) {
    uint32_t wrong = 0, some = 0;
    for (int l = 0; l < count; l++) {
      const float scaled = at[l] * scale;
      const auto whole = static_cast<int32_t>(scaled);
      wrong |= std::bit_cast<uint32_t>(scaled - static_cast<float>(whole));
      some |= static_cast<uint32_t>(whole);
    }
    ones |= some;
    return (wrong & 0x7fffffff) == 0;   // zeros may be negative
  }
};

// An entry of the cache: the source registers, the conversion, and the results, indexed by the
// place along K and the line (a row of A or a column of B).
struct Widened {
  static constexpr int kDwords = 256, kElements = 512;  // the most that an operand has
  static constexpr int kFirst = 16;                     // the fewest dwords of a row
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
    // The first dwords differ between most operands that differ.
    bool same = kind == wanted && same_dwords(words, from, kFirst);
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

  // Fills in the results: `count` elements in rows of kSize lines. search: small integers may be of
  // use. widen: converts the source into an array of either type.
  template <int kSize, class F>
  void fill(int count, bool search, F widen) {
    elements = count;
    has_doubles = false;
    if (search && attempt()) {
      widen(reinterpret_cast<float(*)[kSize]>(floats));
      integers.find(floats, count, kSize);
      if (!integers.exact) pause = kPause;
    } else {
      integers.exact = false;
      widen(reinterpret_cast<double(*)[kSize]>(at));
      has_doubles = true;
    }
  }

  template <int kSize>
  const double (*doubles())[kSize] {
    if (!has_doubles) {
      ARK_LANES
      for (int l = 0; l < elements; l++) at[l] = floats[l];
      has_doubles = true;
    }
    return reinterpret_cast<const double(*)[kSize]>(at);
  }

  Kind kind;
  Integers integers;

 private:
  // True if small integers are looked for. They are not if the preceding operands were no integers.
  static constexpr int kPause = 7;
  bool attempt() {
    if (pause == 0) return true;
    pause--;
    return false;
  }
  int pause = 0, elements = 0;
  bool has_doubles = false;
  alignas(64) uint32_t from[kDwords];
  alignas(64) float floats[kElements];
  alignas(64) double at[kElements];
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
