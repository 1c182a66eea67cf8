// Operations on rows of lanes (one dword per lane) in the host's vectors, where compilers do not
// vectorise by themselves. Each function has a plain form that every host compiles.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

// Precedes a loop with one iteration per lane. It allows the compiler to run several iterations at
// once. This is correct even if a result is stored to the register of a source, because no
// iteration reads what another one writes.
#if defined(__clang__)
#define ARK_LANES _Pragma("clang loop vectorize(assume_safety)")
#else
#define ARK_LANES _Pragma("GCC ivdep")
#endif

namespace ark_emu {

constexpr int kLanes = 64;   // lanes of a row; a wave32 uses the lower half

inline void fill_row(uint32_t* to, uint32_t value, int lanes) {
  for (int from = 0; from < lanes; from += 32) {
    for (int l = from; l < from + 32; l++) to[l] = value;
  }
}

// Copies `from` to `to` for the lanes in `bits`; other lanes are unchanged.
inline void blend_row(uint32_t* to, const uint32_t* from, uint64_t bits, int lanes) {
  for (int l = 0; l < lanes; l += 16) {
#if defined(__AVX512F__)
    _mm512_mask_storeu_epi32(to + l, static_cast<__mmask16>(bits >> l),
                             _mm512_loadu_si512(from + l));
#else
    ARK_LANES
    for (int k = l; k < l + 16; k++) {
      const uint32_t mask = 0u - (static_cast<uint32_t>(bits >> l) >> (k - l) & 1);
      to[k] = (from[k] & mask) | (to[k] & ~mask);
    }
#endif
  }
}

// Converts dwords that are 0 or ~0 to one bit per lane.
inline uint64_t row_bits(const uint32_t* flags, int lanes) {
  uint64_t bits = 0;
#if defined(__AVX512F__)
  for (int l = 0; l < lanes; l += 16) {
    const __m512i row = _mm512_load_si512(flags + l);
    bits |= static_cast<uint64_t>(_mm512_test_epi32_mask(row, row)) << l;
  }
#elif defined(__AVX2__)
  for (int l = 0; l < lanes; l += 8) {
    const __m256 row = _mm256_load_ps(reinterpret_cast<const float*>(flags + l));
    bits |= static_cast<uint64_t>(static_cast<unsigned>(_mm256_movemask_ps(row))) << l;
  }
#else
  for (int l = 0; l < lanes; l++) bits |= static_cast<uint64_t>(flags[l] & 1) << l;
#endif
  return bits;
}

// Converts one bit per lane to dwords of 0 or ~0.
inline void bits_row(uint32_t* to, uint64_t bits, int lanes) {
  for (int l = 0; l < lanes; l += 16) {
    const auto some = static_cast<uint32_t>(bits >> l);
    for (int k = 0; k < 16; k++) to[l + k] = 0u - (some >> k & 1);
  }
}

}  // namespace ark_emu
