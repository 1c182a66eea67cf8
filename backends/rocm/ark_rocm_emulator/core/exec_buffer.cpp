// MUBUF: buffer loads, stores and atomics through a resource descriptor, and the cache-control
// instructions of that format. Addressing as in AMD's CDNA3 instruction set document, section
// "Buffer addressing": raw and structured buffers, and the swizzled one that serves as private
// memory on gfx90a.
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

// Addresses of the lanes that are in range; reads elsewhere give 0 and writes are dropped.
Addresses buffer_addresses(Wave& w, const Inst& i, int bytes) {
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

// Private memory is reached dword by dword: consecutive dwords of a lane lie apart.
bool is_swizzled(const Wave& w, const Inst& i) { return resource(w, i.src[2]).swizzle; }

template <int Bytes, bool Store>
void each_part(Wave& w, const Inst& i, uint32_t* rows) {
  const auto part = [&](const Inst& one, int bytes, uint32_t* at) {
    const Addresses a = buffer_addresses(w, one, bytes);
    if (Store) {
      store_lanes(w, one, a, bytes, at);
    } else {
      load_lanes(w, one, a, bytes, at);
    }
  };
  if (Bytes <= 4 || !is_swizzled(w, i)) {
    part(i, Bytes, rows);
    return;
  }
  Inst one = i;
  for (int d = 0; d < Bytes / 4; d++, one.imm += 4) part(one, 4, rows + d * kLanes);
}

template <int Bytes, Convert C>
void load(Wave& w, const Inst& i) {
  alignas(64) uint32_t rows[4 * kLanes] = {};
  each_part<Bytes, false>(w, i, rows);
  if (!i.lds) {
    put_loaded<Bytes, C>(w, i, rows);
    return;
  }
  convert_rows<Bytes, C>(rows);
  store_to_lds(w, i, w.exec(), Bytes, rows);
}

template <int Bytes, bool High>
void store(Wave& w, const Inst& i) {
  alignas(64) uint32_t rows[4 * kLanes];
  std::memcpy(rows, w.row(i.src[1].reg), static_cast<size_t>((Bytes + 3) / 4) * kLanes * 4);
  if (High) {
    for (int l = 0; l < kLanes; l++) rows[l] >>= 16;
  }
  each_part<Bytes, true>(w, i, rows);
}

template <AtomicOp Op, int Bytes>
void atomic(Wave& w, const Inst& i) {
  alignas(64) uint32_t before[2 * kLanes] = {};
  const AtomicData d = atomic_data(w, i.src[1], Op, Bytes);
  atomic_lanes(w, i, buffer_addresses(w, i, Bytes), Op, Bytes, d.data, d.data2, before);
  if (!i.glc) return;
  for (unsigned k = 0; k < Bytes / 4; k++) {
    w.blend(w.row(i.src[1].reg + k), before + k * kLanes, w.exec());
  }
}

template <AtomicOp Op>
void add_atomic(Ops& ops, const char* name) {
  constexpr uint32_t kFlags = kMemory | kSync | kStore;
  constexpr bool kTwo = Op == AtomicOp::CmpSwap;
  const std::string base = std::string("buffer_atomic_") + name;
  ops.add(base, kTwo ? "=p,b64" : "=p,b32", atomic<Op, 4>, kFlags);
  ops.add(base + "_x2", kTwo ? "=p,b128" : "=p,b64", atomic<Op, 8>, kFlags);
}

void cache_control(Wave& w, const Inst& i) {
  std::atomic_thread_fence(std::memory_order_acq_rel);
  if (w.checks != nullptr) check_cache_control(w, i);
}

}  // namespace

void register_buffer(Ops& ops) {
  const auto loads = [&ops](const char* name, const char* type, Handler run) {
    ops.add(std::string("buffer_load_") + name, std::string(type) + "=p", run, kMemory);
  };
  loads("ubyte", "b32", load<1, Convert::Unsigned>);
  loads("sbyte", "b32", load<1, Convert::Signed>);
  loads("ushort", "b32", load<2, Convert::Unsigned>);
  loads("sshort", "b32", load<2, Convert::Signed>);
  loads("dword", "b32", load<4, Convert::Unsigned>);
  loads("dwordx2", "b64", load<8, Convert::Unsigned>);
  loads("dwordx3", "b96", load<12, Convert::Unsigned>);
  loads("dwordx4", "b128", load<16, Convert::Unsigned>);
  loads("ubyte_d16", "b32", load<1, Convert::Low>);
  loads("ubyte_d16_hi", "b32", load<1, Convert::High>);
  loads("sbyte_d16", "b32", load<1, Convert::SignedLow>);
  loads("sbyte_d16_hi", "b32", load<1, Convert::SignedHigh>);
  loads("short_d16", "b32", load<2, Convert::Low>);
  loads("short_d16_hi", "b32", load<2, Convert::High>);
  const auto stores = [&ops](const char* name, const char* type, Handler run) {
    ops.add(std::string("buffer_store_") + name, std::string("=p,") + type, run, kMemory | kStore);
  };
  stores("byte", "b32", store<1, false>);
  stores("byte_d16_hi", "b32", store<1, true>);
  stores("short", "b32", store<2, false>);
  stores("short_d16_hi", "b32", store<2, true>);
  stores("dword", "b32", store<4, false>);
  stores("dwordx2", "b64", store<8, false>);
  stores("dwordx3", "b96", store<12, false>);
  stores("dwordx4", "b128", store<16, false>);
  add_atomic<AtomicOp::Swap>(ops, "swap");
  add_atomic<AtomicOp::CmpSwap>(ops, "cmpswap");
  add_atomic<AtomicOp::Add>(ops, "add");
  add_atomic<AtomicOp::Sub>(ops, "sub");
  add_atomic<AtomicOp::SMin>(ops, "smin");
  add_atomic<AtomicOp::UMin>(ops, "umin");
  add_atomic<AtomicOp::SMax>(ops, "smax");
  add_atomic<AtomicOp::UMax>(ops, "umax");
  add_atomic<AtomicOp::And>(ops, "and");
  add_atomic<AtomicOp::Or>(ops, "or");
  add_atomic<AtomicOp::Xor>(ops, "xor");
  add_atomic<AtomicOp::Inc>(ops, "inc");
  add_atomic<AtomicOp::Dec>(ops, "dec");
  add_atomic<AtomicOp::SubClamped>(ops, "csub");
  const auto floats = [&ops](const char* name, const char* sources, Handler run) {
    ops.add(std::string("buffer_atomic_") + name, sources, run, kMemory | kSync | kStore | kFloat);
  };
  floats("add_f32", "=p,b32", atomic<AtomicOp::AddF, 4>);
  floats("min_f32", "=p,b32", atomic<AtomicOp::MinF, 4>);
  floats("max_f32", "=p,b32", atomic<AtomicOp::MaxF, 4>);
  floats("cmpswap_f32", "=p,b64", atomic<AtomicOp::CmpSwapF, 4>);
  floats("pk_add_f16", "=p,b32", atomic<AtomicOp::PkAddF16, 4>);
  floats("pk_add_bf16", "=p,b32", atomic<AtomicOp::PkAddBf16, 4>);
  floats("add_f64", "=p,b64", atomic<AtomicOp::AddF, 8>);
  floats("min_f64", "=p,b64", atomic<AtomicOp::MinF, 8>);
  floats("max_f64", "=p,b64", atomic<AtomicOp::MaxF, 8>);
  for (const char* name : {"buffer_wbl2", "buffer_inv", "buffer_invl2", "buffer_wbinvl1",
                           "buffer_wbinvl1_vol", "buffer_gl0_inv", "buffer_gl1_inv"}) {
    ops.add(name, "=", cache_control, kMemory | kSync);
  }
}

}  // namespace ark_emu
