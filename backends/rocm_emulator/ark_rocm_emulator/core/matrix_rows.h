// Products of small matrices in the host's vectors, for MFMA and WMMA. Operands lie by (k, line), so
// that a row of lanes is a row of the matrix. Sums are formed in double, one k after the other.
#pragma once

#include <algorithm>
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
#elif defined(__AVX2__) && defined(__FMA__)
using Doubles = __m256d;
constexpr int kAccumulators = 8;
inline Doubles spread(double value) { return _mm256_set1_pd(value); }
inline Doubles load_doubles(const double* from) { return _mm256_loadu_pd(from); }
inline void store_doubles(double* to, Doubles value) { _mm256_storeu_pd(to, value); }
inline Doubles add_product(Doubles a, Doubles b, Doubles sum) { return _mm256_fmadd_pd(a, b, sum); }
#else
using Doubles = double;
constexpr int kAccumulators = 4;
inline Doubles spread(double value) { return value; }
inline Doubles load_doubles(const double* from) { return *from; }
inline void store_doubles(double* to, Doubles value) { *to = value; }
inline Doubles add_product(Doubles a, Doubles b, Doubles sum) { return sum + a * b; }
#endif
constexpr int kDoubles = sizeof(Doubles) / sizeof(double);

// sums += left * right for one block, both by (k, line). The product of two numbers of 24 bits or
// fewer is exact in double, so that fused and separate additions round alike.
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
    constexpr int kVectors = kSize / kDoubles;
    constexpr int kColumns = kVectors < kAccumulators ? kVectors : kAccumulators;
    constexpr int kRows = std::min(kAccumulators / kColumns, kSize);
    for (int row = 0; row < kSize; row += kRows) {
      for (int column = 0; column < kVectors; column += kColumns) {
        Doubles sum[kRows][kColumns];
        for (int r = 0; r < kRows; r++) {
          for (int c = 0; c < kColumns; c++) {
            sum[r][c] = load_doubles(&sums[row + r][(column + c) * kDoubles]);
          }
        }
        for (int k = 0; k < kDepth; k++) {
          for (int r = 0; r < kRows; r++) {
            const Doubles scale = spread(left[k][row + r]);
            for (int c = 0; c < kColumns; c++) {
              const Doubles other = load_doubles(&right[k][(column + c) * kDoubles]);
              sum[r][c] = add_product(scale, other, sum[r][c]);
            }
          }
        }
        for (int r = 0; r < kRows; r++) {
          for (int c = 0; c < kColumns; c++) {
            store_doubles(&sums[row + r][(column + c) * kDoubles], sum[r][c]);
          }
        }
      }
    }
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
#endif
  for (; l < count; l++) to[l] = half_to_float(static_cast<uint16_t>(from[l] >> shift));
}

}  // namespace ark_emu
