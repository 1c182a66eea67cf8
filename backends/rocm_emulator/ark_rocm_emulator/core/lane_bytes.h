// Transfers bytes between host memory and rows of dwords for the lanes of a wave. Aligned elements
// are read and written in one access, so that no other thread sees half of one.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "rows.h"

namespace ark_emu {

// Reads a dword, in one access if it is aligned.
inline uint32_t read_dword(const uint8_t* from) {
  if ((reinterpret_cast<uintptr_t>(from) & 3) == 0) {
    return __atomic_load_n(reinterpret_cast<const uint32_t*>(from), __ATOMIC_RELAXED);
  }
  uint32_t value;
  std::memcpy(&value, from, 4);
  return value;
}

template <int kBytes>
void read_element(const uint8_t* from, uint32_t* rows, int lane) {
  if constexpr (kBytes == 1) {
    rows[lane] = __atomic_load_n(from, __ATOMIC_RELAXED);
  } else if constexpr (kBytes == 2) {
    uint16_t value;
    std::memcpy(&value, from, 2);
    rows[lane] = value;
  } else {
    if (kBytes == 8 && (reinterpret_cast<uintptr_t>(from) & 7) == 0) {
      const auto* cell = reinterpret_cast<const uint64_t*>(from);
      const uint64_t value = __atomic_load_n(cell, __ATOMIC_RELAXED);
      rows[lane] = static_cast<uint32_t>(value);
      rows[kLanes + lane] = static_cast<uint32_t>(value >> 32);
      return;
    }
    for (int d = 0; d * 4 < kBytes; d++) rows[d * kLanes + lane] = read_dword(from + 4 * d);
  }
}

template <class T>
bool write_value(uint8_t* to, T value) {
  if (reinterpret_cast<uintptr_t>(to) % sizeof(T) == 0) {
    T* cell = reinterpret_cast<T*>(to);
    const bool changed = __atomic_load_n(cell, __ATOMIC_RELAXED) != value;
    __atomic_store_n(cell, value, __ATOMIC_RELAXED);
    return changed;
  }
  T old;
  std::memcpy(&old, to, sizeof(T));
  std::memcpy(to, &value, sizeof(T));
  return old != value;
}

template <int kBytes>
bool write_element(uint8_t* to, const uint32_t* rows, int lane) {
  if constexpr (kBytes == 1) return write_value(to, static_cast<uint8_t>(rows[lane]));
  if constexpr (kBytes == 2) return write_value(to, static_cast<uint16_t>(rows[lane]));
  if constexpr (kBytes == 8) {
    return write_value(to, rows[lane] | static_cast<uint64_t>(rows[kLanes + lane]) << 32);
  }
  bool changed = false;
  for (int d = 0; d * 4 < kBytes; d++) changed |= write_value(to + 4 * d, rows[d * kLanes + lane]);
  return changed;
}

// True if the lanes' dwords are contiguous in memory.
inline bool side_by_side(const uint64_t* at, int lanes) {
  uint64_t apart = 0;
  for (int l = 0; l < lanes; l++) apart |= at[l] ^ (at[0] + static_cast<uint64_t>(4 * l));
  return apart == 0;
}

#if defined(__AVX2__)
// Reads the elements of four lanes, 8 or 16 bytes each, with vector registers of 16 bytes, and
// stores them as rows of dwords.
template <int kBytes>
void read_four(const uint8_t* const (&from)[4], uint32_t* rows) {
  __m128i lane[4];
  for (int k = 0; k < 4; k++) {
    const auto* cell = reinterpret_cast<const __m128i*>(from[k]);
    lane[k] = kBytes == 8 ? _mm_loadl_epi64(cell) : _mm_loadu_si128(cell);
  }
  const __m128i low01 = _mm_unpacklo_epi32(lane[0], lane[1]);
  const __m128i low23 = _mm_unpacklo_epi32(lane[2], lane[3]);
  const auto put = [rows](int d, __m128i value) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(rows + d * kLanes), value);
  };
  put(0, _mm_unpacklo_epi64(low01, low23));
  put(1, _mm_unpackhi_epi64(low01, low23));
  if constexpr (kBytes == 16) {
    const __m128i high01 = _mm_unpackhi_epi32(lane[0], lane[1]);
    const __m128i high23 = _mm_unpackhi_epi32(lane[2], lane[3]);
    put(2, _mm_unpacklo_epi64(high01, high23));
    put(3, _mm_unpackhi_epi64(high01, high23));
  }
}
#endif

// Reads an element for each lane: the element of lane l is at address base + at[l].
template <int kBytes>
void read_all(const uint8_t* base, const uint64_t* at, int lanes, uint32_t* rows) {
  if (kBytes == 4 && side_by_side(at, lanes)) {
    std::memcpy(rows, base + at[0], static_cast<size_t>(lanes) * 4);
    return;
  }
#if defined(__AVX2__)
  if constexpr (kBytes == 8 || kBytes == 16) {
    for (int l = 0; l < lanes; l += 4) {
      const uint8_t* from[4];
      for (int k = 0; k < 4; k++) from[k] = base + at[l + k];
      read_four<kBytes>(from, rows + l);
    }
    return;
  }
#endif
  for (int l = 0; l < lanes; l++) read_element<kBytes>(base + at[l], rows, l);
}

template <int kBytes>
void read_active(const uint8_t* base, const uint64_t* at, uint64_t active, uint32_t* rows) {
  for (uint64_t rest = active; rest != 0; rest &= rest - 1) {
    const int l = std::countr_zero(rest);
    read_element<kBytes>(base + at[l], rows, l);
  }
}

// Writes an element for each active lane. Returns true if a byte of memory changed.
template <int kBytes>
bool write_active(uint8_t* base, const uint64_t* at, uint64_t active, uint64_t full, int lanes,
                  const uint32_t* rows) {
  if (kBytes == 4 && active == full && side_by_side(at, lanes)) {
    const auto bytes = static_cast<size_t>(lanes) * 4;
    const bool changed = std::memcmp(base + at[0], rows, bytes) != 0;
    if (changed) std::memcpy(base + at[0], rows, bytes);
    return changed;
  }
  bool changed = false;
  for (uint64_t rest = active; rest != 0; rest &= rest - 1) {
    const int l = std::countr_zero(rest);
    changed |= write_element<kBytes>(base + at[l], rows, l);
  }
  return changed;
}

// Calls f with the number of bytes as a compile-time constant.
template <class F>
auto with_bytes(int bytes, F f) {
  switch (bytes) {
    case 1: return f(std::integral_constant<int, 1>());
    case 2: return f(std::integral_constant<int, 2>());
    case 4: return f(std::integral_constant<int, 4>());
    case 8: return f(std::integral_constant<int, 8>());
    case 12: return f(std::integral_constant<int, 12>());
    default: return f(std::integral_constant<int, 16>());
  }
}

}  // namespace ark_emu
