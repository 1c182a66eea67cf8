// The caches behind a compute unit's first-level cache: which lines they hold, and when they write
// dirty lines to the next level. A device has several inner caches (each serves a part of its
// compute units) and one outer cache. CDNA3 has no outer cache; here it models the level at which
// stores of agent scope are visible to all XCDs (dies) of a device.
//
//           first             inner (part)                          outer (device)
//   gfx90a  L1 of a CU        -                                     L2
//   CDNA3+  L1 of a CU        L2 of an XCD                          agent scope
//   RDNA3   L0 of a CU        L1 of a shader array, no stores       L2
#include <algorithm>
#include <bit>
#include <cstring>

#include "stale.h"

namespace ark_emu {
namespace {

constexpr uint32_t kInnerLines = 32768, kOuterLines = 65536;
constexpr uint64_t kForgets = 64;   // on average, one of this many hits counts as a miss
constexpr ByteMask kAll = ~ByteMask{0};

// Returns the mask that selects `bytes` bytes (at least 1) from `offset` on.
ByteMask bytes_mask(uint64_t offset, int bytes) {
  return (kAll >> (static_cast<int>(kStaleLine) - bytes)) << offset;
}

// Reads a line from memory, in pieces of 8 bytes. Each piece is read in one access.
void read_home(uint64_t line, uint8_t* out) {
  const auto* from = reinterpret_cast<const uint64_t*>(line * kStaleLine);
  for (uint64_t k = 0; k < kStaleLine / 8; k++) {
    const uint64_t value = __atomic_load_n(from + k, __ATOMIC_RELAXED);
    std::memcpy(out + 8 * k, &value, 8);
  }
}

template <class T>
bool write_piece(uint64_t address, const uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  T* cell = reinterpret_cast<T*>(address);
  const bool changed = __atomic_load_n(cell, __ATOMIC_RELAXED) != value;
  __atomic_store_n(cell, value, __ATOMIC_RELAXED);
  return changed;
}

bool write_home(uint64_t address, const uint8_t* from, uint64_t bytes) {
  bool changed = false;
  while (bytes > 0) {
    const uint64_t aligned = address % 8 == 0 ? 8 : address & -address;
    const uint64_t step = std::bit_floor(std::min(aligned, bytes));
    changed |= step == 8   ? write_piece<uint64_t>(address, from)
               : step == 4 ? write_piece<uint32_t>(address, from)
               : step == 2 ? write_piece<uint16_t>(address, from)
                           : write_piece<uint8_t>(address, from);
    address += step;
    from += step;
    bytes -= step;
  }
  return changed;
}

// Calls each(offset, bytes) for every run of consecutive set bits of the mask.
template <class F>
void each_run(ByteMask mask, F each) {
  for (uint64_t at = 0; at < kStaleLine;) {
    if (((mask >> at) & 1) == 0) {
      at++;
      continue;
    }
    uint64_t end = at;
    while (end < kStaleLine && ((mask >> end) & 1) != 0) end++;
    each(at, end - at);
    at = end;
  }
}

void line_home(CacheLine& at) {
  const uint64_t base = (at.tag - 1) * kStaleLine;
  each_run(at.dirty, [&](uint64_t offset, uint64_t bytes) {
    write_home(base + offset, at.data + offset, bytes);
  });
  at.dirty = 0;
}

void fill(CacheLine& at, const uint8_t* fresh) {
  if (at.valid == 0) {
    std::memcpy(at.data, fresh, kStaleLine);
  } else {
    each_run(~at.valid, [&](uint64_t offset, uint64_t bytes) {
      std::memcpy(at.data + offset, fresh + offset, bytes);
    });
  }
  at.valid = kAll;
}

bool put(CacheLine& at, uint64_t offset, const uint8_t* from, int bytes) {
  const auto size = static_cast<size_t>(bytes);
  const bool changed = std::memcmp(at.data + offset, from, size) != 0;
  std::memcpy(at.data + offset, from, size);
  at.valid |= bytes_mask(offset, bytes);
  return changed;
}

}  // namespace

void Cache::make(uint32_t lines, uint64_t salt) {
  lines_ = reinterpret_cast<CacheLine*>(pages_.map(lines * sizeof(CacheLine)));
  shift_ = static_cast<unsigned>(64 - std::countr_zero(lines));
  salt_ = Random{salt}.next();
}

void Cache::take(CacheLine& at, uint64_t line, bool local) {
  at.tag = line + 1;
  at.valid = at.dirty = 0;
  at.local = local;
}

void Cache::refresh(CacheLine& at) {
  const bool dropped = at.round != round_ || (!at.local && at.foreign_round != foreign_round_);
  if (dropped) at.valid = at.dirty;
  at.round = round_;
  at.foreign_round = foreign_round_;
}

CacheLine* Cache::find(uint64_t line) {
  CacheLine& at = place(line);
  if (at.tag != line + 1) return nullptr;
  refresh(at);
  return at.valid == 0 ? nullptr : &at;
}

void Cache::mark_dirty(CacheLine& at, ByteMask bytes) {
  at.dirty |= bytes;
  if (at.listed) return;
  at.listed = true;
  dirty_.push_back(static_cast<uint32_t>(&at - lines_));
}

DeviceCaches::DeviceCaches(Arch arch, uint64_t salt) : arch_(arch) {
  for (Cache& cache : inner_) cache.make(kInnerLines, ++salt * 64);
  outer_.make(kOuterLines, salt + 1);
}

void DeviceCaches::to_outer(CacheLine& at) {
  CacheLine& to = outer_.claim(at.tag - 1, at.local, line_home);
  each_run(at.dirty, [&](uint64_t offset, uint64_t bytes) {
    put(to, offset, at.data + offset, static_cast<int>(bytes));
  });
  outer_.mark_dirty(to, at.dirty);
  at.dirty = 0;
}

CacheLine& DeviceCaches::claim_inner(unsigned part, uint64_t line, Placement place) {
  return inner_[part].claim(line, place.local, [this](CacheLine& gone) { to_outer(gone); });
}

CacheLine& DeviceCaches::claim_outer(uint64_t line, Placement place) {
  return outer_.claim(line, place.local, line_home);
}

void DeviceCaches::read_outer(uint64_t line, Placement place, Reach reach, Random& random,
                              uint8_t* out) {
  if (!place.outer) {
    if (CacheLine* at = outer_.find(line); at != nullptr && at->dirty != 0) line_home(*at);
    return read_home(line, out);
  }
  CacheLine& at = claim_outer(line, place);
  if (reach == Reach::System && cdna3() && !place.local) {
    line_home(at);
    at.valid = 0;
  } else if (!place.local && random.below(kForgets) == 0) {
    at.valid = at.dirty;
  }
  if (at.valid != kAll) {
    uint8_t fresh[kStaleLine];
    read_home(line, fresh);
    fill(at, fresh);
  }
  std::memcpy(out, at.data, kStaleLine);
}

void DeviceCaches::read(unsigned part, uint64_t line, Placement place, Reach reach, Random& random,
                        uint8_t* out) {
  const bool held = arch_ == Arch::gfx1100 || (cdna3() && place.inner);
  if (!held) return read_outer(line, place, reach, random, out);
  CacheLine& at = claim_inner(part, line, place);
  if (reach >= Reach::Agent || random.below(kForgets) == 0) at.valid = at.dirty;
  if (at.valid != kAll) {
    uint8_t fresh[kStaleLine];
    read_outer(line, place, reach, random, fresh);
    fill(at, fresh);
  }
  std::memcpy(out, at.data, kStaleLine);
}

bool DeviceCaches::write(unsigned part, uint64_t address, const uint8_t* from, int bytes,
                         Placement place, Reach reach) {
  const uint64_t line = address / kStaleLine, offset = address % kStaleLine;
  const ByteMask mask = bytes_mask(offset, bytes);
  bool changed = false;
  if (cdna3() && place.inner) {
    CacheLine& at = claim_inner(part, line, place);
    changed = put(at, offset, from, bytes);
    if (!place.through && reach < Reach::Agent) {
      inner_[part].mark_dirty(at, mask);
      return changed;
    }
    at.dirty &= ~mask;
  } else if (arch_ == Arch::gfx1100) {
    if (CacheLine* at = inner_[part].find(line); at != nullptr) at->valid = 0;
  }
  if (place.outer && !(cdna3() && reach == Reach::System)) {
    CacheLine& at = claim_outer(line, place);
    changed |= put(at, offset, from, bytes);
    outer_.mark_dirty(at, mask);
    return changed;
  }
  if (CacheLine* at = outer_.find(line); at != nullptr) {
    put(*at, offset, from, bytes);
    at->dirty &= ~mask;
  }
  return changed | write_home(address, from, static_cast<uint64_t>(bytes));
}

uint8_t* DeviceCaches::cell(unsigned part, uint64_t address, int bytes, Placement place,
                            Reach reach) {
  const uint64_t line = address / kStaleLine, offset = address % kStaleLine;
  if (arch_ != Arch::gfx90a) {
    if (CacheLine* at = inner_[part].find(line); at != nullptr) {
      if (at->dirty != 0) to_outer(*at);
      at->valid = 0;
    }
  }
  // A peer does not see stores that were released only to this device, even if the memory is not
  // cached.
  const bool narrow = cdna3() && reach < Reach::System;
  const bool stays = narrow ? place.outer || place.peer : place.outer && !cdna3();
  if (!stays) {
    if (CacheLine* at = outer_.find(line); at != nullptr) {
      line_home(*at);
      at->valid = 0;
    }
    return reinterpret_cast<uint8_t*>(address);
  }
  CacheLine& at = claim_outer(line, place);
  if (at.valid != kAll) {
    uint8_t fresh[kStaleLine];
    read_home(line, fresh);
    fill(at, fresh);
  }
  outer_.mark_dirty(at, bytes_mask(offset, bytes));
  return at.data + offset;
}

void DeviceCaches::write_back(unsigned part, Reach reach) {
  if (cdna3() && reach >= Reach::Agent) {
    inner_[part].write_back([this](CacheLine& at) { to_outer(at); });
  }
  if (reach == Reach::System) outer_.write_back(line_home);
}

void DeviceCaches::invalidate(unsigned part, Reach reach) {
  if (reach >= Reach::Agent) inner_[part].drop_clean();
  if (reach == Reach::System) outer_.drop_foreign();
}

void DeviceCaches::drop_clean() {
  for (Cache& cache : inner_) cache.drop_clean();
  outer_.drop_foreign();
}

void DeviceCaches::settle() {
  for (Cache& cache : inner_) cache.write_back([this](CacheLine& at) { to_outer(at); });
  outer_.write_back(line_home);
  for (Cache& cache : inner_) cache.drop_clean();
  outer_.drop_clean();
}

}  // namespace ark_emu
