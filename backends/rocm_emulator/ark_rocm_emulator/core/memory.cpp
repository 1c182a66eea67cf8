#include "memory.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>

#include "checks.h"
#include "stale.h"

namespace ark_emu {
namespace {

// Returns the first region that starts above the address.
RegionList::const_iterator above(const RegionList& list, uint64_t address) {
  return std::upper_bound(list.begin(), list.end(), address, [](uint64_t a, const auto& entry) {
    return a < entry->region.base;
  });
}

std::string hex(uint64_t value) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%" PRIx64, value);
  return text;
}

}  // namespace

void Memory::publish(RegionList list) {
  regions_ = std::make_shared<const RegionList>(std::move(list));
  version_.fetch_add(1, std::memory_order_acq_rel);
}

void Memory::add(Region region) {
  if (region.size == 0 || region.base + region.size < region.base) {
    throw Error("region '" + region.name + "' has no bytes or wraps around the address space");
  }
  const std::lock_guard lock(mutex_);
  RegionList list = *regions_;
  const auto next = above(list, region.base);
  const bool hits_next = next != list.end() && (*next)->region.base < region.base + region.size;
  const bool hits_previous = next != list.begin() && (*(next - 1))->end() > region.base;
  if (hits_next || hits_previous) {
    const RegionEntry& other = hits_next ? **next : **(next - 1);
    throw Error("region '" + region.name + "' at " + hex(region.base) + " overlaps '" +
                other.region.name + "' at " + hex(other.region.base) + "; unregister that first");
  }
  auto entry = std::make_shared<RegionEntry>();
  entry->region = std::move(region);
  entry->shadow = make_shadow(entry->region);
  list.insert(next, std::move(entry));
  publish(std::move(list));
}

void Memory::remove(uint64_t base) {
  const std::lock_guard lock(mutex_);
  RegionList list = *regions_;
  const auto found = std::find_if(list.begin(), list.end(),
                                  [base](const auto& entry) { return entry->region.base == base; });
  if (found == list.end()) throw Error("no region starts at " + hex(base));
  list.erase(found);
  publish(std::move(list));
}

void Memory::set_access(uint64_t base, uint64_t mask) {
  change(base, [mask](Region& region) { region.access = mask; });
}

void Memory::set_shared(uint64_t base, void* records) {
  change(base, [records](Region& region) {
    region.shared = true;
    region.records = records;
  });
  const auto entry = find(base);
  if (entry->shadow != nullptr) shadow_share(*entry->shadow, records);
}

void Memory::change(uint64_t base, const std::function<void(Region&)>& how) {
  const std::lock_guard lock(mutex_);
  RegionList list = *regions_;
  for (auto& entry : list) {
    if (entry->region.base != base) continue;
    auto changed = std::make_shared<RegionEntry>(*entry);
    how(changed->region);
    entry = std::move(changed);
    publish(std::move(list));
    return;
  }
  throw Error("no region starts at " + hex(base));
}

std::shared_ptr<const RegionEntry> Memory::find(uint64_t address) const {
  const std::shared_ptr<const RegionList> list = snapshot();
  const auto next = above(*list, address);
  if (next == list->begin() || address >= (*(next - 1))->end()) return nullptr;
  return *(next - 1);
}

std::shared_ptr<const RegionList> Memory::snapshot() const {
  const std::lock_guard lock(mutex_);
  return regions_;
}

DeviceCaches& Memory::caches(int device, Arch arch) {
  const std::lock_guard lock(mutex_);
  auto& made = caches_[device];
  if (made == nullptr) made = std::make_shared<DeviceCaches>(arch, static_cast<uint64_t>(device));
  return *made;
}

void MemoryView::refresh() {
  const uint64_t now = memory_->version();
  if (now == version_) return;
  version_ = now;
  regions_ = memory_->snapshot();
  last_ = nullptr;
}

const RegionEntry* MemoryView::find_slow(uint64_t address, uint64_t size) {
  refresh();
  const auto next = above(*regions_, address);
  if (next == regions_->begin()) return nullptr;
  const RegionEntry& entry = **(next - 1);
  if (address + size > entry.end() || address + size < address) return nullptr;
  if (!entry.accessible(device_)) return nullptr;
  last_ = &entry;
  return last_;
}

const RegionEntry* MemoryView::nearest(uint64_t address) const {
  const auto next = above(*regions_, address);
  if (next != regions_->begin()) return (next - 1)->get();
  return next == regions_->end() ? nullptr : next->get();
}

std::string describe_address(const MemoryView& view, uint64_t address) {
  const RegionEntry* near = view.nearest(address);
  if (near == nullptr) return hex(address) + " (no memory is registered)";
  const Region& region = near->region;
  const std::string of = "'" + region.name + "' (" + std::to_string(region.size) + " bytes at " +
                         hex(region.base) + ", device " + std::to_string(region.device) + ")";
  if (address < region.base) return hex(address) + ", below every region; the first is " + of;
  if (address < near->end()) return hex(address) + ", in " + of + " at offset " +
                                    std::to_string(address - region.base);
  return hex(address) + ", " + std::to_string(address - near->end()) + " bytes past the end of " +
         of;
}

}  // namespace ark_emu
