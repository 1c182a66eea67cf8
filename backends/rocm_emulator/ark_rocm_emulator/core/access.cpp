#include "access.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <mutex>

#include "checks.h"
#include "checks_state.h"
#include "decode.h"
#include "floats.h"
#include "grid.h"
#include "half.h"
#include "lane_bytes.h"
#include "memory.h"
#include "stale.h"

namespace ark_emu {
namespace {

[[noreturn]] void out_of_bounds(const Wave& w, const Inst& i, int lane, uint64_t address,
                                int bytes) {
  throw Fault{ErrorKind::OutOfBounds,
              *i.name + " touches " + std::to_string(bytes) + " bytes that device " +
                  std::to_string(w.grid->device) + " may not access: " +
                  describe_address(w.grid->view, address),
              lane, address};
}

// Checks that the active lanes may access their addresses in global memory. Returns the region of
// memory if all lanes access the same one, which is the common case. Otherwise checks each lane's
// address and returns null.
const RegionEntry* check_global_range(Wave& w, const Inst& i, const Addresses& a, int bytes) {
  uint64_t low = ~0ull, high = 0;
  if (a.active == w.full) {
    for (int l = 0; l < w.lanes; l++) {
      low = std::min(low, a.at[l]);
      high = std::max(high, a.at[l]);
    }
  } else {
    for (uint64_t rest = a.active; rest != 0; rest &= rest - 1) {
      const uint64_t address = a.at[std::countr_zero(rest)];
      low = std::min(low, address);
      high = std::max(high, address);
    }
  }
  const auto size = static_cast<uint64_t>(bytes);
  const RegionEntry* all = w.grid->view.find(low, high - low + size);
  if (all != nullptr) return all;
  for (uint64_t rest = a.active; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    if (w.grid->view.find(a.at[lane], size) == nullptr) {
      out_of_bounds(w, i, lane, a.at[lane], bytes);
    }
  }
  return nullptr;   // several regions
}

void check_lds_range(Wave& w, const Inst& i, const Addresses& a, int bytes) {
  const uint64_t size = w.group->lds.size();
  if (a.active == w.full) {
    uint64_t high = 0;
    for (int l = 0; l < w.lanes; l++) high = std::max(high, a.at[l]);
    if (high + static_cast<uint64_t>(bytes) <= size) return;
  }
  for (uint64_t rest = a.active; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    if (a.at[lane] + static_cast<uint64_t>(bytes) <= size) continue;
    throw Fault{ErrorKind::LdsRange,
                *i.name + " touches LDS bytes " + std::to_string(a.at[lane]) + " to " +
                    std::to_string(a.at[lane] + static_cast<uint64_t>(bytes)) +
                    ", the workgroup has " + std::to_string(size),
                lane, a.at[lane]};
  }
}

// Returns the host address of a byte of a lane's private memory. Private memory is interleaved as
// on the hardware: dword n of all lanes comes before dword n + 1 of all lanes.
uint8_t* scratch_byte(Wave& w, const Inst& i, int lane, uint64_t offset) {
  const auto lanes = static_cast<uint64_t>(w.lanes);
  const uint64_t at = offset / 4 * 4 * lanes + static_cast<uint64_t>(lane) * 4 + offset % 4;
  if (offset >= w.scratch_size / lanes) {
    throw Fault{ErrorKind::OutOfBounds,
                *i.name + " touches private memory at offset " + std::to_string(offset) +
                    ", each lane has " + std::to_string(w.scratch_size / lanes) + " bytes",
                lane, offset};
  }
  return w.scratch + at;
}

void load_scratch(Wave& w, const Inst& i, const Addresses& a, int bytes, uint32_t* rows) {
  for (uint64_t rest = a.active; rest != 0; rest &= rest - 1) {
    const int l = std::countr_zero(rest);
    uint8_t buffer[16] = {};
    for (int b = 0; b < bytes; b++) {
      buffer[b] = *scratch_byte(w, i, l, a.at[l] + static_cast<uint64_t>(b));
    }
    for (int d = 0; d * 4 < bytes; d++) std::memcpy(&rows[d * kLanes + l], buffer + 4 * d, 4);
  }
}

void store_scratch(Wave& w, const Inst& i, const Addresses& a, int bytes, const uint32_t* rows) {
  for (uint64_t rest = a.active; rest != 0; rest &= rest - 1) {
    const int l = std::countr_zero(rest);
    uint8_t buffer[16];
    for (int d = 0; d * 4 < bytes; d++) std::memcpy(buffer + 4 * d, &rows[d * kLanes + l], 4);
    for (int b = 0; b < bytes; b++) {
      *scratch_byte(w, i, l, a.at[l] + static_cast<uint64_t>(b)) = buffer[b];
    }
  }
}

// The host address to which the lanes' offsets (in LDS) or addresses (global, base 0) are added.
uint8_t* base_of(Wave& w, const Addresses& a) {
  return a.space == Space::Lds ? w.group->lds.data() : nullptr;
}

void notify_stores(const Addresses& a, const RegionEntry* region, int bytes, MemoryView& view) {
  for (uint64_t rest = a.active; rest != 0; rest &= rest - 1) {
    const int l = std::countr_zero(rest);
    const RegionEntry* entry = region != nullptr
                                   ? region
                                   : view.find(a.at[l], static_cast<uint64_t>(bytes));
    if (entry == nullptr || !entry->region.on_store) continue;
    uint64_t value = 0;
    std::memcpy(&value, reinterpret_cast<const void*>(a.at[l]),
                static_cast<size_t>(std::min(bytes, 8)));
    entry->region.on_store(a.at[l], value, bytes);
  }
}

void note_polls(Wave& w, const Addresses& a, int bytes) {
  for (uint64_t rest = a.active; rest != 0; rest &= rest - 1) {
    const uint64_t address = a.at[std::countr_zero(rest)];
    auto& seen = w.watched->addresses;
    if (seen.size() >= 64 || std::find(seen.begin(), seen.end(), address) != seen.end()) continue;
    seen.push_back(address);
    uint32_t value = 0;
    std::memcpy(&value, reinterpret_cast<const void*>(address),
                static_cast<size_t>(std::min(bytes, 4)));
    w.watched->values.push_back(value);
  }
}

template <class T>
T float_op(AtomicOp op, T old, T data) {
  if (op == AtomicOp::AddF) return old + data;
  return op == AtomicOp::MinF ? min_number(old, data) : max_number(old, data);
}

uint32_t packed_add(AtomicOp op, uint32_t old, uint32_t data) {
  uint32_t result = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const auto a = static_cast<uint16_t>(old >> shift), b = static_cast<uint16_t>(data >> shift);
    const uint32_t sum = op == AtomicOp::PkAddF16
                             ? float_to_half(half_to_float(a) + half_to_float(b))
                             : float_to_bf16(bf16_to_float(a) + bf16_to_float(b));
    result |= sum << shift;
  }
  return result;
}

template <class U, class S, class F>
U apply(AtomicOp op, U old, U data, U data2) {
  switch (op) {
    case AtomicOp::Swap: return data;
    case AtomicOp::CmpSwap: return old == data ? data2 : old;
    case AtomicOp::CmpSwapF:
      return std::bit_cast<F>(old) == std::bit_cast<F>(data) ? data2 : old;
    case AtomicOp::Add: return old + data;
    case AtomicOp::Sub: return old - data;
    case AtomicOp::Rsub: return data - old;
    case AtomicOp::SMin: return static_cast<S>(data) < static_cast<S>(old) ? data : old;
    case AtomicOp::UMin: return std::min(data, old);
    case AtomicOp::SMax: return static_cast<S>(data) > static_cast<S>(old) ? data : old;
    case AtomicOp::UMax: return std::max(data, old);
    case AtomicOp::And: return old & data;
    case AtomicOp::Or: return old | data;
    case AtomicOp::Xor: return old ^ data;
    case AtomicOp::Inc: return old >= data ? 0 : old + 1;
    case AtomicOp::Dec: return old == 0 || old > data ? data : old - 1;
    case AtomicOp::MskOr: return (old & ~data) | data2;
    case AtomicOp::Wrap: return old >= data ? old - data : old + data2;
    case AtomicOp::SubClamped: return old < data ? 0 : old - data;
    case AtomicOp::AddF: case AtomicOp::MinF: case AtomicOp::MaxF:
      return std::bit_cast<U>(float_op(op, std::bit_cast<F>(old), std::bit_cast<F>(data)));
    case AtomicOp::PkAddF16: case AtomicOp::PkAddBf16:
      return packed_add(op, static_cast<uint32_t>(old), static_cast<uint32_t>(data));
  }
  return old;
}

// Performs an atomic operation on one value of type T in memory. Returns the old value. Sets
// `changed` if the operation changed it.
template <class T>
uint64_t modify(uint8_t* cell, AtomicOp op, uint64_t data, uint64_t data2, bool& changed) {
  T* at = reinterpret_cast<T*>(cell);
  T old = __atomic_load_n(at, __ATOMIC_RELAXED);
  for (;;) {
    const T next = static_cast<T>(atomic_result(op, sizeof(T), old, data, data2));
    if (__atomic_compare_exchange_n(at, &old, next, true, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
      changed |= next != old;
      return old;
    }
  }
}

// Reports an atomic operation on memory behind a PCIe link that supports loads and stores only.
void check_link(Wave& w, const Inst& i, const Addresses& a) {
  for (uint64_t rest = a.active; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    const Region& region = w.grid->view.find(a.at[lane], 1)->region;
    if (!region.far && (region.device < 0 || region.device == w.grid->device)) continue;
    throw Fault{ErrorKind::Link,
                *i.name + " reads, modifies and writes memory of another device, but the link to " +
                    "it supports only loads and stores: " +
                    describe_address(w.grid->view, a.at[lane]),
                lane, a.at[lane]};
  }
}

// True if the access goes through emulated caches, in which values may be stale. Code, private
// memory and queues are not cached.
bool is_stale(Wave& w, const Addresses& a) {
  if (w.stale == nullptr || a.space != Space::Global) return false;
  const RegionEntry* entry = w.grid->view.find(a.at[std::countr_zero(a.active)], 1);
  return entry->region.kind != MemKind::Code && entry->region.kind != MemKind::Queue;
}

}  // namespace

void load_lanes(Wave& w, const Inst& i, const Addresses& a, int bytes, uint32_t* rows) {
  if (a.active == 0) return;
  if (a.space == Space::Scratch) return load_scratch(w, i, a, bytes, rows);
  if (a.space == Space::Lds) {
    check_lds_range(w, i, a, bytes);
  } else {
    check_global_range(w, i, a, bytes);
  }
  const CheckedAccess checked(w);
  if (w.checks != nullptr) check_access(w, i, a, AccessKind::Read, bytes);
  if (w.watched != nullptr && a.space == Space::Global) note_polls(w, a, bytes);
  if (is_stale(w, a)) return w.grid->stale->load(w, i, a, bytes, rows);
  const uint8_t* base = base_of(w, a);
  with_bytes(bytes, [&](auto size) {
    if (a.active == w.full) {
      read_all<size>(base, a.at, w.lanes, rows);
    } else {
      read_active<size>(base, a.at, a.active, rows);
    }
  });
}

void store_lanes(Wave& w, const Inst& i, const Addresses& a, int bytes, const uint32_t* rows) {
  if (a.active == 0) return;
  if (a.space == Space::Scratch) return store_scratch(w, i, a, bytes, rows);
  const RegionEntry* region = nullptr;
  if (a.space == Space::Lds) {
    check_lds_range(w, i, a, bytes);
  } else {
    region = check_global_range(w, i, a, bytes);
  }
  {
    const CheckedAccess checked(w);
    if (w.checks != nullptr) {
      w.checks->storing = rows;
      check_access(w, i, a, AccessKind::Write, bytes);
      w.checks->storing = nullptr;
      check_lanes(w, i, a, bytes, rows);
    }
    bool changed = false;
    if (is_stale(w, a)) {
      changed = w.grid->stale->store(w, i, a, bytes, rows);
    } else {
      changed = with_bytes(bytes, [&](auto size) {
        return write_active<size>(base_of(w, a), a.at, a.active, w.full, w.lanes, rows);
      });
    }
    w.changed |= changed;
  }   // doorbells are notified without the lock, because engines may report writes
  if (a.space == Space::Global && (region == nullptr || region->region.on_store)) {
    notify_stores(a, region, bytes, w.grid->view);
  }
}

uint64_t atomic_result(AtomicOp op, int bytes, uint64_t old, uint64_t data, uint64_t data2) {
  if (bytes == 8) return apply<uint64_t, int64_t, double>(op, old, data, data2);
  return apply<uint32_t, int32_t, float>(op, static_cast<uint32_t>(old),
                                         static_cast<uint32_t>(data), static_cast<uint32_t>(data2));
}

void atomic_lanes(Wave& w, const Inst& i, const Addresses& a, AtomicOp op, int bytes,
                  const uint32_t* data, const uint32_t* data2, uint32_t* before) {
  if (a.active == 0) return;
  const RegionEntry* region = nullptr;
  if (a.space == Space::Scratch) {
    throw Fault{ErrorKind::OutOfBounds, *i.name + " on private memory: atomics need global or LDS"};
  }
  if (a.space == Space::Lds) {
    check_lds_range(w, i, a, bytes);
  } else {
    region = check_global_range(w, i, a, bytes);
  }
  if (w.grid->desc.options.stores_only && a.space == Space::Global) check_link(w, i, a);
  for (uint64_t rest = a.active; rest != 0; rest &= rest - 1) {
    const int l = std::countr_zero(rest);
    if (a.at[l] % static_cast<uint64_t>(bytes) == 0) continue;
    throw Fault{ErrorKind::Misaligned,
                *i.name + " at an address that is not a multiple of " + std::to_string(bytes), l,
                a.at[l]};
  }
  {
    const CheckedAccess checked(w);
    if (w.checks != nullptr) check_access(w, i, a, AccessKind::Atomic, bytes);
    if (w.watched != nullptr && a.space == Space::Global) note_polls(w, a, bytes);
    const auto value = [bytes](const uint32_t* rows, int l) -> uint64_t {
      if (rows == nullptr) return 0;
      return bytes == 4 ? rows[l] : rows[l] | static_cast<uint64_t>(rows[kLanes + l]) << 32;
    };
    bool changed = false;
    const bool stale = is_stale(w, a);
    std::unique_lock<std::mutex> held;
    if (stale) held = std::unique_lock(w.grid->stale->caches().mutex);
    for (uint64_t rest = a.active; rest != 0; rest &= rest - 1) {
      const int l = std::countr_zero(rest);
      uint8_t* cell = stale ? w.grid->stale->cell(w, i, a.at[l], bytes) : base_of(w, a) + a.at[l];
      const uint64_t old =
          bytes == 4 ? modify<uint32_t>(cell, op, value(data, l), value(data2, l), changed)
                     : modify<uint64_t>(cell, op, value(data, l), value(data2, l), changed);
      if (before == nullptr) continue;
      before[l] = static_cast<uint32_t>(old);
      if (bytes == 8) before[kLanes + l] = static_cast<uint32_t>(old >> 32);
    }
    w.changed |= changed;
  }
  if (a.space == Space::Global && (region == nullptr || region->region.on_store)) {
    notify_stores(a, region, bytes, w.grid->view);
  }
}

}  // namespace ark_emu
