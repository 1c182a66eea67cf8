// Products of small matrices in the host's vectors, for MFMA and WMMA. Operands lie by (k, line), so
// that a row of lanes is a row of the matrix. Sums are formed in double, one k after the other.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "half.h"
#include "rows.h"

namespace ark_emu {

// A vector of the host that holds doubles, and how many of them are accumulated at a time.
#if defined(__AVX512F__)
using Doubles = __m512d;
constexpr int kAccumulators = 16;
inline Doubles spread(double value) { return _mm512_set1_pd(value); }
inline Doubles load_doubles(const double* from) { return _mm512_loadu_pd(from); }
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
constexpr int kAccumulators = 8;
inline Doubles spread(double value) { return _mm256_set1_pd(value); }
inline Doubles load_doubles(const double* from) { return _mm256_loadu_pd(from); }
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
inline Doubles load_doubles(const double* from) { return *from; }
inline void store_doubles(double* to, Doubles value) { *to = value; }
inline Doubles add_product(Doubles a, Doubles b, Doubles sum) { return sum + a * b; }
inline Doubles from_floats(const uint32_t* from) { return std::bit_cast<float>(*from); }
inline void to_floats(uint32_t* to, Doubles value) {
  *to = std::bit_cast<uint32_t>(static_cast<float>(value));
}
#endif
constexpr int kDoubles = sizeof(Doubles) / sizeof(double);

// left * right for one block, both by (k, line), a vector of a row at a time: its sums begin with
// begin(row, column) and go to end(row, column, sums). The product of two numbers of 24 bits or fewer
// is exact in double, so that fused and separate additions round alike.
template <int kSize, int kDepth, class Begin, class End>
[[gnu::always_inline]] inline void multiply(const double (&left)[kDepth][kSize],
                                            const double (&right)[kDepth][kSize], Begin begin,
                                            End end) {
  static_assert(kSize % kDoubles == 0);
  constexpr int kVectors = kSize / kDoubles;
  constexpr int kColumns = std::min(kVectors, kAccumulators / 2);
  constexpr int kRows = std::min(kAccumulators / kColumns, kSize);
  for (int row = 0; row < kSize; row += kRows) {
    for (int column = 0; column < kSize; column += kColumns * kDoubles) {
      Doubles sum[kRows][kColumns];
      for (int r = 0; r < kRows; r++) {
        for (int c = 0; c < kColumns; c++) sum[r][c] = begin(row + r, column + c * kDoubles);
      }
      for (int k = 0; k < kDepth; k++) {
        Doubles other[kColumns];
        for (int c = 0; c < kColumns; c++) other[c] = load_doubles(&right[k][column + c * kDoubles]);
        for (int r = 0; r < kRows; r++) {
          const Doubles scale = spread(left[k][row + r]);
          for (int c = 0; c < kColumns; c++) sum[r][c] = add_product(scale, other[c], sum[r][c]);
        }
      }
      for (int r = 0; r < kRows; r++) {
        for (int c = 0; c < kColumns; c++) end(row + r, column + c * kDoubles, sum[r][c]);
      }
    }
  }
}

// sums += left * right.
template <int kSize, int kDepth>
void multiply_add(const double (&left)[kDepth][kSize], const double (&right)[kDepth][kSize],
                  double (&sums)[kSize][kSize]) {
  if constexpr (kSize % kDoubles != 0) {
    for (int k = 0; k < kDepth; k++) {
      for (int row = 0; row < kSize; row++) {
        for (int c = 0; c < kSize; c++) sums[row][c] += left[k][row] * right[k][c];
      }
    }
  } else {
    multiply(
        left, right, [&](int row, int column) { return load_doubles(&sums[row][column]); },
        [&](int row, int column, Doubles sum) { store_doubles(&sums[row][column], sum); });
  }
}

// Integers of 8 bits or fewer: their sums fit 32 bits.
template <int kSize, int kDepth>
void multiply_add(const int32_t (&left)[kDepth][kSize], const int32_t (&right)[kDepth][kSize],
                  int32_t (&sums)[kSize][kSize]) {
  for (int row = 0; row < kSize; row++) {
    for (int k = 0; k < kDepth; k++) {
      const int32_t scale = left[k][row];
      for (int c = 0; c < kSize; c++) sums[row][c] += scale * right[k][c];
    }
  }
}

// The f16 in bits shift to shift + 15 of `count` dwords.
inline void widen_halves(const uint32_t* from, int shift, int count, double* to) {
  int l = 0;
#if defined(__AVX512F__) && defined(__F16C__)
  for (; l + 16 <= count; l += 16) {
    alignas(32) uint16_t halves[16];
    for (int k = 0; k < 16; k++) halves[k] = static_cast<uint16_t>(from[l + k] >> shift);
    for (int k = 0; k < 16; k += 8) {
      const __m128i eight = _mm_load_si128(reinterpret_cast<const __m128i*>(halves + k));
      _mm512_storeu_pd(to + l + k, _mm512_maskz_cvtps_pd(0xff, _mm256_cvtph_ps(eight)));
    }
  }
#elif defined(__AVX2__) && defined(__F16C__)
  const __m128i by = _mm_cvtsi32_si128(shift), low = _mm_set1_epi32(0xffff);
  for (; l + 4 <= count; l += 4) {
    const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + l));
    const __m128i halves = _mm_and_si128(_mm_srl_epi32(words, by), low);
    _mm256_storeu_pd(to + l, _mm256_cvtps_pd(_mm_cvtph_ps(_mm_packus_epi32(halves, halves))));
  }
#endif
  for (; l < count; l++) to[l] = half_to_float(static_cast<uint16_t>(from[l] >> shift));
}

}  // namespace ark_emu
