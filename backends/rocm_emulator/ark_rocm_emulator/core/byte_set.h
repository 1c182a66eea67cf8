// A set of bytes of a memory region, with one bit for each byte.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

namespace ark_emu {

class ByteSet {
 public:
  // Makes room for the bytes of a region, unless this has been done.
  void prepare(uint64_t bytes) {
    if (words_.empty()) words_.resize(bytes / kBits + 1);
  }
  bool contains(uint64_t byte) const {
    return byte / kBits < words_.size() && (words_[byte / kBits] >> (byte % kBits) & 1) != 0;
  }
  void add(uint64_t first, uint64_t count) {
    each_word(first, count, [this](uint64_t word, uint64_t mask) {
      words_[word] |= mask;
      return true;
    });
  }
  // Returns the first of `count` bytes that is not in the set, or first + count.
  uint64_t missing(uint64_t first, uint64_t count) const {
    uint64_t first_absent = first + count;
    each_word(first, count, [&](uint64_t word, uint64_t mask) {
      const uint64_t absent = ~words_[word] & mask;
      if (absent == 0) return true;
      first_absent = word * kBits + static_cast<uint64_t>(std::countr_zero(absent));
      return false;
    });
    return first_absent;
  }

 private:
  static constexpr uint64_t kBits = 64;
  // Calls `visit` with the number of each word of the range and the bits that lie in the range,
  // until a call returns false.
  template <class F>
  static void each_word(uint64_t first, uint64_t count, F visit) {
    for (uint64_t at = first, end = first + count; at < end;) {
      const uint64_t some = std::min(kBits - at % kBits, end - at);
      const uint64_t mask = (~0ull >> (kBits - some)) << (at % kBits);
      if (!visit(at / kBits, mask)) return;
      at += some;
    }
  }
  std::vector<uint64_t> words_;
};

}  // namespace ark_emu
