// Handlers of MUBUF: buffer loads, stores and atomics through a resource descriptor, and the
// cache-control instructions of that format. Addressing as in AMD's CDNA3 instruction set document,
// section "Buffer addressing": raw buffers, structured buffers, and swizzled buffers, which gfx90a
// uses for private memory.
#include <string>

#include "access.h"
#include "checks.h"
#include "mem_ops.h"
#include "ops.h"
#include "wave.h"

namespace ark_emu {
namespace {

struct Resource {
  uint64_t base;
  uint32_t stride, records;
  bool swizzle, add_tid;
  uint32_t index_stride;
};

Resource resource(const Wave& w, const Operand& operand) {
  const uint32_t* s = &w.s[operand.reg];
  const bool rdna = w.lanes == 32;
  Resource r;
  r.base = s[0] | static_cast<uint64_t>(s[1] & 0xffff) << 32;
  r.stride = (s[1] >> 16) & 0x3fff;
  r.records = s[2];
  r.swizzle = rdna ? (s[1] >> 30) != 0 : (s[1] >> 31) != 0;
  r.add_tid = ((s[3] >> 23) & 1) != 0;
  r.index_stride = 8u << ((s[3] >> 21) & 3);
  return r;
}

}  // namespace

// Returns the addresses of the lanes that are in the buffer's range. Other lanes read 0, and their
// writes are dropped.
[[gnu::noinline]] Addresses buffer_addresses(Wave& w, const Inst& i, int bytes) {
  Addresses a;
  const Resource r = resource(w, i.src[2]);
  const uint64_t soffset = w.scalar32(i.src[3]);
  const uint32_t* index_row = i.idxen ? w.row(i.src[0].reg) : nullptr;
  const uint32_t* offset_row = i.offen ? w.row(i.src[0].reg + (i.idxen ? 1 : 0)) : nullptr;
  for (int l = 0; l < w.lanes; l++) {
    if (((w.exec() >> l) & 1) == 0) continue;
    uint64_t index = index_row != nullptr ? index_row[l] : 0;
    if (r.add_tid) index += static_cast<uint64_t>(l);
    const uint64_t offset =
        (offset_row != nullptr ? offset_row[l] : 0) + static_cast<uint64_t>(i.imm);
    uint64_t at;
    bool inside;
    if (r.swizzle) {
      constexpr uint64_t kElement = 4;
      const uint64_t index_high = index / r.index_stride, index_low = index % r.index_stride;
      at = (index_high * r.stride + offset / kElement * kElement) * r.index_stride +
           index_low * kElement + offset % kElement;
      inside = true;   // private memory: the region check covers it
    } else {
      at = index * r.stride + offset;
      inside = i.idxen && r.stride != 0
                   ? index < r.records && offset < r.stride
                   : offset + soffset + static_cast<uint64_t>(bytes) <= r.records;
    }
    if (!inside) continue;
    a.active |= 1ull << l;
    a.at[l] = r.base + soffset + at;
  }
  return a;
}

namespace {

// True if consecutive dwords of a lane are not neighbours in memory (the buffer is swizzled private
// memory). Such memory is accessed dword by dword, and an unaligned dword is part of two dwords.
bool is_swizzled(const Wave& w, const Inst& i) { return resource(w, i.src[2]).swizzle; }

bool is_aligned(Wave& w, const Inst& i, uint32_t unit) {
  const auto imm = static_cast<uint32_t>(i.imm);
  if (!i.offen) return imm % unit == 0;
  const uint32_t* offset = w.row(i.src[0].reg + (i.idxen ? 1 : 0));
  for (int l = 0; l < w.lanes; l++) {
    if (((w.exec() >> l) & 1) != 0 && (offset[l] + imm) % unit != 0) return false;
  }
  return true;
}

// True if, for some lane, only one of the first and the last dword of the access is in the buffer's
// range. The dwords are then checked separately.
bool straddles_end(Wave& w, const Inst& i, int bytes) {
  if (bytes <= 4) return false;
  Inst last = i;
  last.imm += bytes - 4;
  return buffer_addresses(w, i, 4).active != buffer_addresses(w, last, 4).active;
}

// There are many handlers, one for each operation and width. Their common code is in functions that
// are not inlined, so that it is compiled once.

// Loads (or stores, if Store) the lanes' elements byte by byte.
template <bool Store>
void each_byte(Wave& w, const Inst& i, int bytes, uint32_t* rows) {
  alignas(64) uint32_t byte[kLanes];
  Inst one = i;
  for (int b = 0; b < bytes; b++, one.imm++) {
    uint32_t* row = rows + b / 4 * kLanes;
    const int shift = b % 4 * 8;
    const Addresses a = buffer_addresses(w, one, 1);
    if (Store) {
      for (int l = 0; l < kLanes; l++) byte[l] = row[l] >> shift;
      store_lanes(w, one, a, 1, byte);
    } else {
      std::memset(byte, 0, sizeof byte);
      load_lanes(w, one, a, 1, byte);
      for (int l = 0; l < kLanes; l++) row[l] |= byte[l] << shift;
    }
  }
}

template <bool Store>
[[gnu::noinline]] void each_part(Wave& w, const Inst& i, int bytes, uint32_t* rows) {
  const auto part = [&](const Inst& one, int size, uint32_t* at) {
    const Addresses a = buffer_addresses(w, one, size);
    if (Store) {
      store_lanes(w, one, a, size, at);
    } else {
      load_lanes(w, one, a, size, at);
    }
  };
  const int unit = bytes < 4 ? bytes : 4;
  if (!is_swizzled(w, i) && !straddles_end(w, i, bytes)) {
    part(i, bytes, rows);
  } else if (is_swizzled(w, i) && !is_aligned(w, i, static_cast<uint32_t>(unit))) {
    each_byte<Store>(w, i, bytes, rows);
  } else {
    Inst one = i;
    for (int d = 0; d < bytes / unit; d++, one.imm += 4) part(one, unit, rows + d * kLanes);
  }
}

[[gnu::noinline]] void run_atomic(Wave& w, const Inst& i, AtomicOp op, int bytes) {
  alignas(64) uint32_t before[2 * kLanes] = {};
  const AtomicData d = atomic_data(w, i.src[1], op, bytes);
  atomic_lanes(w, i, buffer_addresses(w, i, bytes), op, bytes, d.data, d.data2, before);
  if (!i.glc) return;
  for (int k = 0; k < bytes / 4; k++) {
    w.blend(w.row(i.src[1].reg + static_cast<unsigned>(k)), before + k * kLanes, w.exec());
  }
}

struct Buffer {
  template <int Bytes, Convert C>
  static void load(Wave& w, const Inst& i) {
    alignas(64) uint32_t rows[4 * kLanes] = {};
    each_part<false>(w, i, Bytes, rows);
    if (!i.lds) {
      put_loaded<Bytes, C>(w, i, rows);
      return;
    }
    convert_rows<Bytes, C>(rows);
    store_to_lds(w, i, w.exec(), Bytes, rows);
  }

  template <int Bytes, bool High>
  static void store(Wave& w, const Inst& i) {
    alignas(64) uint32_t rows[4 * kLanes];
    std::memcpy(rows, w.row(i.src[1].reg), static_cast<size_t>((Bytes + 3) / 4) * kLanes * 4);
    if (High) {
      for (int l = 0; l < kLanes; l++) rows[l] >>= 16;
    }
    each_part<true>(w, i, Bytes, rows);
  }

  template <AtomicOp Op, int Bytes>
  static void atomic(Wave& w, const Inst& i) {
    run_atomic(w, i, Op, Bytes);
  }
};

void cache_control(Wave& w, const Inst& i) {
  std::atomic_thread_fence(std::memory_order_acq_rel);
  if (w.checks != nullptr) check_cache_control(w, i);
}

}  // namespace

void register_buffer(Ops& ops) {
  using Text = std::string;
  each_memory_operation<Buffer>(
      [&ops](const Text& name, const Text& type, Handler run) {
        ops.add("buffer_load_" + name, type + "=p", run, kMemory);
      },
      [&ops](const Text& name, const Text& type, Handler run) {
        ops.add("buffer_store_" + name, "=p," + type, run, kMemory | kStore);
      },
      // The value that a buffer atomic returns is written to the registers of its data operand, so
      // its signature has no destination.
      [&ops](const Text& name, const Text&, const Text& data, uint32_t flags, Handler run) {
        ops.add("buffer_atomic_" + name, "=p," + data, run, flags | kMemory | kSync | kStore);
      });
  for (const char* name : {"buffer_wbl2", "buffer_inv", "buffer_invl2", "buffer_wbinvl1",
                           "buffer_wbinvl1_vol", "buffer_gl0_inv", "buffer_gl1_inv"}) {
    ops.add(name, "=", cache_control, kMemory | kSync);
  }
}

}  // namespace ark_emu
