// Products of small matrices in the host's vectors, for MFMA and WMMA. Operands are indexed by (k,
// line), where a line is a row of A or a column of B. A register of all lanes can then be copied
// without a permutation. Sums are formed in double, one k after the other.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "half.h"
#include "rows.h"

namespace ark_emu {

// Vectors of the host. Doubles: a vector of doubles. Pairs: a vector of dwords, each with two
// integers of 16 bits; in sums of products, a dword is one integer. kAccumulators: the number of
// vectors that are accumulated at a time.
#if defined(__AVX512F__)
using Doubles = __m512d;
constexpr int kAccumulators = 16;
inline Doubles spread(double value) { return _mm512_set1_pd(value); }
inline Doubles load_vector(const double* from) { return _mm512_loadu_pd(from); }
inline void store_doubles(double* to, Doubles value) { _mm512_storeu_pd(to, value); }
inline Doubles add_product(Doubles a, Doubles b, Doubles sum) { return _mm512_fmadd_pd(a, b, sum); }
inline Doubles from_floats(const uint32_t* from) {
  return _mm512_maskz_cvtps_pd(0xff, _mm256_loadu_ps(reinterpret_cast<const float*>(from)));
}
inline void to_floats(uint32_t* to, Doubles value) {
  _mm256_storeu_ps(reinterpret_cast<float*>(to), _mm512_maskz_cvtpd_ps(0xff, value));
}
#elif defined(__AVX2__) && defined(__FMA__)
using Doubles = __m256d;
constexpr int kAccumulators = 12;   // of 16 registers; 2 units with 4 cycles latency need 8 or more
inline Doubles spread(double value) { return _mm256_set1_pd(value); }
inline Doubles load_vector(const double* from) { return _mm256_loadu_pd(from); }
inline void store_doubles(double* to, Doubles value) { _mm256_storeu_pd(to, value); }
inline Doubles add_product(Doubles a, Doubles b, Doubles sum) { return _mm256_fmadd_pd(a, b, sum); }
inline Doubles from_floats(const uint32_t* from) {
  return _mm256_cvtps_pd(_mm_loadu_ps(reinterpret_cast<const float*>(from)));
}
inline void to_floats(uint32_t* to, Doubles value) {
  _mm_storeu_ps(reinterpret_cast<float*>(to), _mm256_cvtpd_ps(value));
}
#else
using Doubles = double;
constexpr int kAccumulators = 4;
inline Doubles spread(double value) { return value; }
inline Doubles load_vector(const double* from) { return *from; }
inline void store_doubles(double* to, Doubles value) { *to = value; }
inline Doubles add_product(Doubles a, Doubles b, Doubles sum) { return sum + a * b; }
inline Doubles from_floats(const uint32_t* from) { return std::bit_cast<float>(*from); }
inline void to_floats(uint32_t* to, Doubles value) {
  *to = std::bit_cast<uint32_t>(static_cast<float>(value));
}
#endif
constexpr int kDoubles = sizeof(Doubles) / sizeof(double);

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define ARK_PAIRS 1
using Pairs = __m512i;
inline Pairs no_pairs() { return _mm512_setzero_si512(); }
inline Pairs spread(uint32_t value) { return _mm512_set1_epi32(static_cast<int>(value)); }
inline Pairs load_vector(const uint32_t* from) { return _mm512_loadu_si512(from); }
inline Pairs add_product(Pairs a, Pairs b, Pairs sum) {
#if defined(__AVX512VNNI__)
  return _mm512_dpwssd_epi32(sum, a, b);
#else
  return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
#endif
}
// Stores sum * unit + c as floats, where sum * unit is a float.
inline void add_sums(uint32_t* to, Pairs sum, float unit, const uint32_t* c) {
  const __m512 exact = _mm512_maskz_cvtepi32_ps(0xffff, sum);
  _mm512_storeu_ps(to, _mm512_fmadd_ps(exact, _mm512_set1_ps(unit), _mm512_loadu_ps(c)));
}
// The same where sum * unit is a double.
inline void add_sums(uint32_t* to, Pairs sum, double unit, const uint32_t* c) {
  const __m256i half[2] = {_mm512_maskz_extracti64x4_epi64(0xff, sum, 0),
                           _mm512_maskz_extracti64x4_epi64(0xff, sum, 1)};
  for (int k = 0; k < 2; k++) {
    const Doubles exact = _mm512_maskz_cvtepi32_pd(0xff, half[k]);
    to_floats(to + 8 * k, add_product(exact, spread(unit), from_floats(c + 8 * k)));
  }
}
#elif defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
#define ARK_PAIRS 1
using Pairs = __m256i;
inline Pairs no_pairs() { return _mm256_setzero_si256(); }
inline Pairs spread(uint32_t value) { return _mm256_set1_epi32(static_cast<int>(value)); }
inline Pairs load_vector(const uint32_t* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
inline Pairs add_product(Pairs a, Pairs b, Pairs sum) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
}
inline void add_sums(uint32_t* to, Pairs sum, float unit, const uint32_t* c) {
  const __m256 addend = _mm256_loadu_ps(reinterpret_cast<const float*>(c));
  _mm256_storeu_ps(reinterpret_cast<float*>(to),
                   _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_set1_ps(unit), addend));
}
inline void add_sums(uint32_t* to, Pairs sum, double unit, const uint32_t* c) {
  const __m128i half[2] = {_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1)};
  for (int k = 0; k < 2; k++) {
    const Doubles exact = _mm256_cvtepi32_pd(half[k]);
    to_floats(to + 4 * k, add_product(exact, spread(unit), from_floats(c + 4 * k)));
  }
}
#endif

// kInPairs: true if rows of kSize elements are multiplied as pairs of integers. In plain C++ they
// are not, because compilers vectorise doubles better.
#if defined(ARK_PAIRS)
template <int kSize>
constexpr bool kInPairs = kSize % (sizeof(Pairs) / sizeof(uint32_t)) == 0;
#else
template <int kSize>
constexpr bool kInPairs = false;
#endif

// Computes kRows rows of the product of left and right, from `row` on, kColumns vectors wide. Both
// matrices are indexed by (k, line).
template <int kRows, int kColumns, int kSize, class T, class Begin, class End>
[[gnu::always_inline]] inline void multiply_rows(const T (*left)[kSize], const T (*right)[kSize],
                                                 int depth, int row, int column, Begin begin,
                                                 End end) {
  using Vector = decltype(load_vector(*right));
  constexpr int kWidth = sizeof(Vector) / sizeof(T);
  Vector sum[kRows][kColumns];
  for (int r = 0; r < kRows; r++) {
    for (int c = 0; c < kColumns; c++) sum[r][c] = begin(row + r, column + c * kWidth);
  }
  for (int k = 0; k < depth; k++) {
    Vector other[kColumns];
    for (int c = 0; c < kColumns; c++) other[c] = load_vector(&right[k][column + c * kWidth]);
    for (int r = 0; r < kRows; r++) {
      const Vector scale = spread(left[k][row + r]);
      for (int c = 0; c < kColumns; c++) sum[r][c] = add_product(scale, other[c], sum[r][c]);
    }
  }
  for (int r = 0; r < kRows; r++) {
    for (int c = 0; c < kColumns; c++) end(row + r, column + c * kWidth, sum[r][c]);
  }
}

// Computes the product of the transposed `left` and `right`, which are both stored as [k][row or
// column]. An element is a double or a pair of integers. Each sum starts at begin(row, column), and
// end(row, column, sums) stores a vector of sums of a row. The product of two numbers of 24 bits or
// fewer is exact in double, so fused and separate additions round alike. The rows are divided into
// nearly equal shares, each with enough independent accumulators. A share of few rows would be
// slow, because each addition would wait for the preceding one.
template <int kSize, class T, class Begin, class End>
[[gnu::always_inline]] inline void multiply(const T (*left)[kSize], const T (*right)[kSize],
                                            int depth, Begin begin, End end) {
  constexpr int kWidth = sizeof(load_vector(*right)) / sizeof(T);
  static_assert(kSize % kWidth == 0);
  constexpr int kColumns = std::min(kSize / kWidth, 2);
  constexpr int kMost = kAccumulators / kColumns, kShares = (kSize + kMost - 1) / kMost;
  // The start of each share, and the positions of its rows in C and D, are compile-time constants.
  const auto share = [&]<int kShare>(std::integral_constant<int, kShare>) {
    constexpr int kFirst = kSize * kShare / kShares;
    constexpr int kRows = kSize * (kShare + 1) / kShares - kFirst;
    for (int column = 0; column < kSize; column += kColumns * kWidth) {
      multiply_rows<kRows, kColumns>(left, right, depth, kFirst, column, begin, end);
    }
  };
  [&]<int... kShare>(std::integer_sequence<int, kShare...>) {
    (share(std::integral_constant<int, kShare>()), ...);
  }(std::make_integer_sequence<int, kShares>());
}

// sums += left * right.
template <int kSize>
void multiply_add(const double (*left)[kSize], const double (*right)[kSize], int depth,
                  double (&sums)[kSize][kSize]) {
  if constexpr (kSize % kDoubles != 0) {
    for (int k = 0; k < depth; k++) {
      for (int row = 0; row < kSize; row++) {
        for (int c = 0; c < kSize; c++) sums[row][c] += left[k][row] * right[k][c];
      }
    }
  } else {
    multiply<kSize>(
        left, right, depth, [&](int row, int column) { return load_vector(&sums[row][column]); },
        [&](int row, int column, Doubles sum) { store_doubles(&sums[row][column], sum); });
  }
}

// Computes a product of integers of 8 bits or fewer, whose sums fit 32 bits.
template <int kSize>
void multiply_add(const int32_t (*left)[kSize], const int32_t (*right)[kSize], int depth,
                  int32_t (&sums)[kSize][kSize]) {
  for (int row = 0; row < kSize; row++) {
    for (int k = 0; k < depth; k++) {
      const int32_t scale = left[k][row];
      for (int c = 0; c < kSize; c++) sums[row][c] += scale * right[k][c];
    }
  }
}

// Converts the f16 in the low and in the high halves of `count` dwords to numbers.
template <class T>
void widen_halves(const uint32_t* from, int count, T* low, T* high) {
  int l = 0;
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float>) {
    for (; l + 16 <= count; l += 16) {
      const __m512i words = _mm512_loadu_si512(from + l), above = _mm512_srli_epi32(words, 16);
      const __m256i halves[2] = {_mm512_maskz_cvtepi32_epi16(0xffff, words),
                                 _mm512_maskz_cvtepi32_epi16(0xffff, above)};
      _mm512_storeu_ps(low + l, _mm512_maskz_cvtph_ps(0xffff, halves[0]));
      _mm512_storeu_ps(high + l, _mm512_maskz_cvtph_ps(0xffff, halves[1]));
    }
  }
#endif
#if defined(__AVX2__) && defined(__F16C__)
  const __m128i apart = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  for (; l + 4 <= count; l += 4) {
    const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + l));
    const __m256 floats = _mm256_cvtph_ps(_mm_shuffle_epi8(words, apart));
    const __m128 first = _mm256_castps256_ps128(floats), second = _mm256_extractf128_ps(floats, 1);
    if constexpr (std::is_same_v<T, float>) {
      _mm_storeu_ps(low + l, first);
      _mm_storeu_ps(high + l, second);
    } else {
      _mm256_storeu_pd(low + l, _mm256_cvtps_pd(first));
      _mm256_storeu_pd(high + l, _mm256_cvtps_pd(second));
    }
  }
#endif
  for (; l < count; l++) {
    low[l] = half_to_float(static_cast<uint16_t>(from[l]));
    high[l] = half_to_float(static_cast<uint16_t>(from[l] >> 16));
  }
}

// Converts the bf16 in the low and in the high halves of `count` dwords to numbers.
template <class T>
void widen_bf16(const uint32_t* from, int count, T* low, T* high) {
  ARK_LANES
  for (int l = 0; l < count; l++) {
    low[l] = std::bit_cast<float>(from[l] << 16);
    high[l] = std::bit_cast<float>(from[l] & 0xffff0000u);
  }
}

}  // namespace ark_emu
