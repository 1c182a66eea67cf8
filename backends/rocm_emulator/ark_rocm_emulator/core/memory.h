// The machine's memory: which address ranges exist and which devices may access them. A grid holds
// a snapshot of these ranges and looks up addresses without a lock.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "engine.h"

namespace ark_emu {

class DeviceCaches;   // stale.h
struct ShadowPages;   // checks.h: the records of the bytes of a region

// A registered region with the records of the checks.
struct RegionEntry {
  Region region;
  std::shared_ptr<ShadowPages> shadow;
  uint64_t end() const { return region.base + region.size; }
  bool accessible(int device) const {
    return region.device == device || ((region.access >> device) & 1) != 0;
  }
};

using RegionList = std::vector<std::shared_ptr<const RegionEntry>>;   // by base, disjoint

class Memory {
 public:
  void add(Region region);
  void remove(uint64_t base);
  void set_access(uint64_t base, uint64_t mask);
  void set_shared(uint64_t base, void* records);
  std::shared_ptr<const RegionEntry> find(uint64_t address) const;
  std::shared_ptr<const RegionList> snapshot() const;
  // The emulated caches that the grids of a device share, if values may be stale.
  DeviceCaches& caches(int device, Arch arch);
  uint64_t version() const { return version_.load(std::memory_order_acquire); }

 private:
  void publish(RegionList list);
  void change(uint64_t base, const std::function<void(Region&)>& how);
  mutable std::mutex mutex_;
  std::shared_ptr<const RegionList> regions_ = std::make_shared<RegionList>();
  std::atomic<uint64_t> version_{1};
  std::map<int, std::shared_ptr<DeviceCaches>> caches_;   // by device
};

// A grid's view of the memory. It remembers the last region that was looked up, and is updated when
// regions have changed.
class MemoryView {
 public:
  MemoryView(const Memory& memory, int device) : memory_(&memory), device_(device) { refresh(); }
  // Returns the region that holds [address, address + size) and that the device may access; null if
  // there is none.
  const RegionEntry* find(uint64_t address, uint64_t size) {
    if (last_ != nullptr && address >= last_->region.base && address + size <= last_->end()) {
      return last_;
    }
    return find_slow(address, size);
  }
  void refresh();
  // Returns the nearest region below or around the address, for messages.
  const RegionEntry* nearest(uint64_t address) const;

 private:
  const RegionEntry* find_slow(uint64_t address, uint64_t size);
  const Memory* memory_;
  int device_;
  uint64_t version_ = 0;
  std::shared_ptr<const RegionList> regions_;
  const RegionEntry* last_ = nullptr;
};

// Describes an address for messages, such as "0x7f.., 64 bytes past the end of 'hipMalloc#3' (4096
// bytes at 0x7f.., device 0)".
std::string describe_address(const MemoryView& view, uint64_t address);

}  // namespace ark_emu
