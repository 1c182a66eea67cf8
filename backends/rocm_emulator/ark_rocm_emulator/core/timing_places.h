// Assigns addresses, for the timing model, to the memory that a kernel accesses. The model's caches
// choose sets by address, and the host's allocator returns different addresses in each run. So that
// predictions are reproducible, the model places regions of memory one after another in the order
// in which the kernel first accesses them.
#pragma once

#include <cstdint>
#include <unordered_map>

#include "memory.h"

namespace ark_emu {

class Places {
 public:
  // seed: shifts the addresses of all regions. With another seed, different lines share sets of the
  // caches.
  Places(MemoryView& view, uint64_t seed) : view_(view), next_((seed % 1024 + 1) * kApart) {}
  // Returns the model's address of a byte. An address outside of all regions is returned unchanged;
  // the access itself reports the error.
  uint64_t of(uint64_t address) {
    const RegionEntry* entry = view_.find(address, 1);
    if (entry == nullptr) return address;
    const uint64_t base = entry->region.base;
    if (base != base_) {
      const auto [found, added] = bases_.try_emplace(base, next_);
      if (added) next_ += (entry->region.size / kPage + 1) * kPage;
      base_ = base;
      there_ = found->second;
    }
    return address - base + there_;
  }

 private:
  static constexpr uint64_t kPage = uint64_t{2} << 20;
  static constexpr uint64_t kApart = 37 * kPage;
  MemoryView& view_;
  std::unordered_map<uint64_t, uint64_t> bases_;
  uint64_t next_;
  uint64_t base_ = 0, there_ = 0;      // of the region that was accessed last
};

}  // namespace ark_emu
