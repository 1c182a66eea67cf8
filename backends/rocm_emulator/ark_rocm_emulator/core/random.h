// The random generator splitmix64. It gives the same numbers on every host.
#pragma once

#include <cstdint>

namespace ark_emu {

struct Random {
  uint64_t state;
  uint64_t next() {
    uint64_t z = (state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  uint64_t below(uint64_t limit) { return ((next() >> 32) * limit) >> 32; }   // limit < 2^32
};

}  // namespace ark_emu
