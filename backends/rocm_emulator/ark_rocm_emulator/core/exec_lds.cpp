// Handlers of the DS format: reads, writes and atomics on the workgroup's LDS.
#include <algorithm>
#include <bit>
#include <string>

#include "access.h"
#include "mem_ops.h"
#include "ops.h"
#include "wave.h"

namespace ark_emu {
namespace {

// There are many handlers, one for each operation and width. Their common code is in functions that
// are not inlined, so that it is compiled once.
[[gnu::noinline]] Addresses lds_addresses(Wave& w, const Inst& i, uint64_t offset) {
  Addresses a;
  a.space = Space::Lds;
  a.active = w.exec();
  const uint32_t* address = w.row(i.src[0].reg);
  for (int l = 0; l < kLanes; l++) a.at[l] = static_cast<uint32_t>(address[l] + offset);
  return a;
}

uint64_t offset16(const Inst& i) { return static_cast<uint32_t>(i.imm) & 0xffff; }

template <int Bytes, Convert C>
void read(Wave& w, const Inst& i) {
  alignas(64) uint32_t rows[4 * kLanes];
  load_lanes(w, i, lds_addresses(w, i, offset16(i)), Bytes, rows);
  put_loaded<Bytes, C>(w, i, rows);
}

template <int Bytes, bool High>
void write(Wave& w, const Inst& i) {
  alignas(64) uint32_t shifted[kLanes];
  const uint32_t* rows = w.row(i.src[1].reg);
  if (High) {
    for (int l = 0; l < kLanes; l++) shifted[l] = rows[l] >> 16;
    rows = shifted;
  }
  store_lanes(w, i, lds_addresses(w, i, offset16(i)), Bytes, rows);
}

// Returns the byte offset of element `which` (0 or 1) of an operation such as ds_read2. The
// instruction encodes the offset in units of `scale` bytes: an element, or 64 elements.
uint64_t pair_offset(const Inst& i, int which, int scale) {
  return ((static_cast<uint32_t>(i.imm) >> (8 * which)) & 0xff) * static_cast<uint64_t>(scale);
}

template <int Bytes>
void read_pair(Wave& w, const Inst& i, int stride) {
  constexpr int kDwords = Bytes / 4;
  alignas(64) uint32_t rows[4 * kLanes];
  for (int k = 0; k < 2; k++) {
    const Addresses a = lds_addresses(w, i, pair_offset(i, k, Bytes * stride));
    load_lanes(w, i, a, Bytes, rows + k * kDwords * kLanes);
  }
  for (int d = 0; d < 2 * kDwords; d++) {
    w.blend(w.row(i.dst[0].reg + static_cast<unsigned>(d)), rows + d * kLanes, w.exec());
  }
}

template <int Bytes, int Stride>
void read2(Wave& w, const Inst& i) {
  read_pair<Bytes>(w, i, Stride);
}

[[gnu::noinline]] void write_pair(Wave& w, const Inst& i, int bytes, int stride) {
  for (int k = 0; k < 2; k++) {
    const Addresses a = lds_addresses(w, i, pair_offset(i, k, bytes * stride));
    store_lanes(w, i, a, bytes, w.row(i.src[1 + k].reg));
  }
}

template <int Bytes, int Stride>
void write2(Wave& w, const Inst& i) {
  write_pair(w, i, Bytes, Stride);
}

template <int Bytes>
[[gnu::noinline]] void exchange_pair(Wave& w, const Inst& i, int stride) {
  constexpr int kDwords = Bytes / 4;
  alignas(64) uint32_t rows[4 * kLanes];
  for (int k = 0; k < 2; k++) {
    const Addresses a = lds_addresses(w, i, pair_offset(i, k, Bytes * stride));
    atomic_lanes(w, i, a, AtomicOp::Swap, Bytes, w.row(i.src[1 + k].reg), nullptr,
                 rows + k * kDwords * kLanes);
  }
  for (int d = 0; d < 2 * kDwords; d++) {
    w.blend(w.row(i.dst[0].reg + static_cast<unsigned>(d)), rows + d * kLanes, w.exec());
  }
}

[[gnu::noinline]] void run_atomic(Wave& w, const Inst& i, AtomicOp op, int bytes, bool swapped) {
  alignas(64) uint32_t before[2 * kLanes];
  const bool two = i.op->src_count > 2;
  const uint32_t* first = w.row(i.src[1].reg);
  const uint32_t* second = two ? w.row(i.src[2].reg) : nullptr;
  if (swapped) std::swap(first, second);
  atomic_lanes(w, i, lds_addresses(w, i, offset16(i)), op, bytes, first, second, before);
  if (i.op->dst_count == 0) return;
  for (int d = 0; d < bytes / 4; d++) {
    w.blend(w.row(i.dst[0].reg + static_cast<unsigned>(d)), before + d * kLanes, w.exec());
  }
}

template <AtomicOp Op, int Bytes, bool Swapped>
void atomic(Wave& w, const Inst& i) {
  run_atomic(w, i, Op, Bytes, Swapped);
}

template <int Bytes, int Stride>
void exchange2(Wave& w, const Inst& i) {
  exchange_pair<Bytes>(w, i, Stride);
}

// Loads that transpose: 16 lanes read rows of 16 elements, one to four lanes per row, and each lane
// gets a column (CDNA4 document, section "MFMA transpose load from LDS").
template <int kBits>
void read_transposed(Wave& w, const Inst& i) {
  constexpr int kBytes = kBits == 6 ? 12 : 8, kDwords = kBytes / 4;
  constexpr int kEach = 8 * kBytes / kBits, kLanesToARow = 16 / kEach;
  constexpr uint64_t kAlign = kBits == 6 ? 16 : 8;
  const Addresses a = lds_addresses(w, i, offset16(i));
  if (a.active != ~0ull) {
    throw Fault{ErrorKind::UnknownOpcode, *i.name + " with inactive lanes has no defined result"};
  }
  for (int l = 0; l < kLanes; l++) {
    if (a.at[l] % kAlign == 0) continue;
    throw Fault{ErrorKind::Misaligned,
                *i.name + " at an address that is not a multiple of " + std::to_string(kAlign), l,
                a.at[l]};
  }
  alignas(64) uint32_t rows[kDwords * kLanes], out[kDwords * kLanes] = {};
  load_lanes(w, i, a, kBytes, rows);
  const auto element = [&rows](int lane, int e) {
    const int at = e * kBits;
    uint64_t bits = rows[at / 32 * kLanes + lane];
    if (at % 32 + kBits > 32) bits |= uint64_t{rows[(at / 32 + 1) * kLanes + lane]} << 32;
    return (bits >> (at % 32)) & ((1u << kBits) - 1);
  };
  for (int l = 0; l < kLanes; l++) {
    const int first = l & ~15, column = l & 15;
    for (int e = 0; e < kEach; e++) {
      const int from = first + e * kLanesToARow + column / kEach;
      const uint64_t bits = element(from, column % kEach) << (e * kBits % 32);
      uint32_t* to = out + e * kBits / 32 * kLanes + l;
      to[0] |= static_cast<uint32_t>(bits);
      if (bits >> 32 != 0) to[kLanes] |= static_cast<uint32_t>(bits >> 32);
    }
  }
  for (int d = 0; d < kDwords; d++) {
    w.blend(w.row(i.dst[0].reg + static_cast<unsigned>(d)), out + d * kLanes, w.exec());
  }
}

// ds_append and ds_consume: add the number of active lanes to the counter at M0 + offset, or
// subtract it. All lanes get the old value.
[[gnu::noinline]] void count_active(Wave& w, const Inst& i, AtomicOp op) {
  if (w.exec() == 0) return;
  const int first = std::countr_zero(w.exec());
  Addresses a;
  a.space = Space::Lds;
  a.active = 1ull << first;
  a.at[first] = offset16(i) + (w.m0() & 0xffff);
  alignas(64) uint32_t data[kLanes] = {}, before[kLanes] = {};
  data[first] = static_cast<uint32_t>(std::popcount(w.exec()));
  atomic_lanes(w, i, a, op, 4, data, nullptr, before);
  std::fill(before, before + kLanes, before[first]);
  w.blend(w.row(i.dst[0].reg), before, w.exec());
}

template <AtomicOp Op>
void count_lanes(Wave& w, const Inst& i) {
  count_active(w, i, Op);
}

// The lanes' addresses for instructions without an address operand: lane l accesses M0 + offset + 4
// * l.
Addresses thread_addresses(Wave& w, const Inst& i) {
  Addresses a;
  a.space = Space::Lds;
  a.active = w.exec();
  for (int l = 0; l < kLanes; l++) {
    a.at[l] = offset16(i) + (w.m0() & 0xffff) + static_cast<uint64_t>(4 * l);
  }
  return a;
}

constexpr uint32_t kFlags = kMemory | kLdsOp;

// Registers an atomic with and without a returned value, such as "ds_add_u32" and "ds_add_rtn_u32".
// two: true if it has two data operands.
[[gnu::noinline]] void add_both(Ops& ops, const char* name, const char* type, bool two,
                                const char* width, Handler run) {
  const std::string data = width;
  const std::string sources = "=p," + data + (two ? "," + data : "");
  const std::string base = std::string("ds_") + name;
  constexpr uint32_t kAll = kFlags | kStore;
  ops.add(base + "_" + type, sources, run, kAll);
  ops.add(base + "_rtn_" + type, data + sources, run, kAll);
}

template <AtomicOp Op, int Bytes, bool Swapped = false>
void add_atomic(Ops& ops, const char* name, const char* type, bool two = false) {
  add_both(ops, name, type, two, Bytes == 4 ? "b32" : "b64", atomic<Op, Bytes, Swapped>);
}

void register_atomics(Ops& ops) {
  add_atomic<AtomicOp::Add, 4>(ops, "add", "u32");
  add_atomic<AtomicOp::Sub, 4>(ops, "sub", "u32");
  add_atomic<AtomicOp::Rsub, 4>(ops, "rsub", "u32");
  add_atomic<AtomicOp::Inc, 4>(ops, "inc", "u32");
  add_atomic<AtomicOp::Dec, 4>(ops, "dec", "u32");
  add_atomic<AtomicOp::SMin, 4>(ops, "min", "i32");
  add_atomic<AtomicOp::SMax, 4>(ops, "max", "i32");
  add_atomic<AtomicOp::UMin, 4>(ops, "min", "u32");
  add_atomic<AtomicOp::UMax, 4>(ops, "max", "u32");
  add_atomic<AtomicOp::And, 4>(ops, "and", "b32");
  add_atomic<AtomicOp::Or, 4>(ops, "or", "b32");
  add_atomic<AtomicOp::Xor, 4>(ops, "xor", "b32");
  add_atomic<AtomicOp::MskOr, 4>(ops, "mskor", "b32", true);
  add_atomic<AtomicOp::CmpSwap, 4>(ops, "cmpst", "b32", true);
  add_atomic<AtomicOp::CmpSwapF, 4>(ops, "cmpst", "f32", true);
  add_atomic<AtomicOp::CmpSwap, 4, true>(ops, "cmpstore", "b32", true);
  add_atomic<AtomicOp::CmpSwapF, 4, true>(ops, "cmpstore", "f32", true);
  add_atomic<AtomicOp::MinF, 4>(ops, "min", "f32");
  add_atomic<AtomicOp::MaxF, 4>(ops, "max", "f32");
  add_atomic<AtomicOp::AddF, 4>(ops, "add", "f32");
  add_atomic<AtomicOp::PkAddF16, 4>(ops, "pk_add", "f16");
  add_atomic<AtomicOp::PkAddBf16, 4>(ops, "pk_add", "bf16");
  add_atomic<AtomicOp::Add, 8>(ops, "add", "u64");
  add_atomic<AtomicOp::Sub, 8>(ops, "sub", "u64");
  add_atomic<AtomicOp::Rsub, 8>(ops, "rsub", "u64");
  add_atomic<AtomicOp::Inc, 8>(ops, "inc", "u64");
  add_atomic<AtomicOp::Dec, 8>(ops, "dec", "u64");
  add_atomic<AtomicOp::SMin, 8>(ops, "min", "i64");
  add_atomic<AtomicOp::SMax, 8>(ops, "max", "i64");
  add_atomic<AtomicOp::UMin, 8>(ops, "min", "u64");
  add_atomic<AtomicOp::UMax, 8>(ops, "max", "u64");
  add_atomic<AtomicOp::And, 8>(ops, "and", "b64");
  add_atomic<AtomicOp::Or, 8>(ops, "or", "b64");
  add_atomic<AtomicOp::Xor, 8>(ops, "xor", "b64");
  add_atomic<AtomicOp::MskOr, 8>(ops, "mskor", "b64", true);
  add_atomic<AtomicOp::CmpSwap, 8>(ops, "cmpst", "b64", true);
  add_atomic<AtomicOp::CmpSwapF, 8>(ops, "cmpst", "f64", true);
  add_atomic<AtomicOp::CmpSwap, 8, true>(ops, "cmpstore", "b64", true);
  add_atomic<AtomicOp::CmpSwapF, 8, true>(ops, "cmpstore", "f64", true);
  add_atomic<AtomicOp::MinF, 8>(ops, "min", "f64");
  add_atomic<AtomicOp::MaxF, 8>(ops, "max", "f64");
  add_atomic<AtomicOp::AddF, 8>(ops, "add", "f64");
  ops.add("ds_wrap_rtn_b32", "b32=p,b32,b32", atomic<AtomicOp::Wrap, 4, false>, kFlags | kStore);
  ops.add("ds_append", "b32=", count_lanes<AtomicOp::Add>, kFlags | kStore);
  ops.add("ds_consume", "b32=", count_lanes<AtomicOp::Sub>, kFlags | kStore);
  ops.add("ds_wrxchg_rtn_b32", "b32=p,b32", atomic<AtomicOp::Swap, 4, false>, kFlags | kStore);
  ops.add("ds_wrxchg_rtn_b64", "b64=p,b64", atomic<AtomicOp::Swap, 8, false>, kFlags | kStore);
  ops.add("ds_wrxchg2_rtn_b32", "b64=p,b32,b32", exchange2<4, 1>, kFlags | kStore);
  ops.add("ds_wrxchg2st64_rtn_b32", "b64=p,b32,b32", exchange2<4, 64>, kFlags | kStore);
  ops.add("ds_wrxchg2_rtn_b64", "b128=p,b64,b64", exchange2<8, 1>, kFlags | kStore);
  ops.add("ds_wrxchg2st64_rtn_b64", "b128=p,b64,b64", exchange2<8, 64>, kFlags | kStore);
}

}  // namespace

void register_lds(Ops& ops) {
  const auto reads = [&ops](const char* name, const char* type, Handler run) {
    ops.add(name, std::string(type) + "=p", run, kFlags);
  };
  reads("ds_read_b32", "b32", read<4, Convert::Unsigned>);
  reads("ds_read_b64", "b64", read<8, Convert::Unsigned>);
  reads("ds_read_b96", "b96", read<12, Convert::Unsigned>);
  reads("ds_read_b128", "b128", read<16, Convert::Unsigned>);
  reads("ds_read_i8", "b32", read<1, Convert::Signed>);
  reads("ds_read_u8", "b32", read<1, Convert::Unsigned>);
  reads("ds_read_i16", "b32", read<2, Convert::Signed>);
  reads("ds_read_u16", "b32", read<2, Convert::Unsigned>);
  reads("ds_read_u8_d16", "b32", read<1, Convert::Low>);
  reads("ds_read_u8_d16_hi", "b32", read<1, Convert::High>);
  reads("ds_read_i8_d16", "b32", read<1, Convert::SignedLow>);
  reads("ds_read_i8_d16_hi", "b32", read<1, Convert::SignedHigh>);
  reads("ds_read_u16_d16", "b32", read<2, Convert::Low>);
  reads("ds_read_u16_d16_hi", "b32", read<2, Convert::High>);
  reads("ds_read2_b32", "b64", read2<4, 1>);
  reads("ds_read2st64_b32", "b64", read2<4, 64>);
  reads("ds_read2_b64", "b128", read2<8, 1>);
  reads("ds_read2st64_b64", "b128", read2<8, 64>);
  const auto writes = [&ops](const char* name, const char* sources, Handler run) {
    ops.add(name, std::string("=p,") + sources, run, kFlags | kStore);
  };
  writes("ds_write_b32", "b32", write<4, false>);
  writes("ds_write_b64", "b64", write<8, false>);
  writes("ds_write_b96", "b96", write<12, false>);
  writes("ds_write_b128", "b128", write<16, false>);
  writes("ds_write_b8", "b32", write<1, false>);
  writes("ds_write_b16", "b32", write<2, false>);
  writes("ds_write_b8_d16_hi", "b32", write<1, true>);
  writes("ds_write_b16_d16_hi", "b32", write<2, true>);
  writes("ds_write2_b32", "b32,b32", write2<4, 1>);
  writes("ds_write2st64_b32", "b32,b32", write2<4, 64>);
  writes("ds_write2_b64", "b64,b64", write2<8, 1>);
  writes("ds_write2st64_b64", "b64,b64", write2<8, 64>);
  ops.add("ds_read_addtid_b32", "b32=", [](Wave& w, const Inst& i) {
    alignas(64) uint32_t rows[kLanes];
    load_lanes(w, i, thread_addresses(w, i), 4, rows);
    put_loaded<4, Convert::Unsigned>(w, i, rows);
  }, kFlags);
  ops.add("ds_write_addtid_b32", "=,b32", [](Wave& w, const Inst& i) {
    store_lanes(w, i, thread_addresses(w, i), 4, w.row(i.src[1].reg));
  }, kFlags | kStore);
  reads("ds_read_b64_tr_b16", "b64", read_transposed<16>);
  reads("ds_read_b64_tr_b8", "b64", read_transposed<8>);
  reads("ds_read_b64_tr_b4", "b64", read_transposed<4>);
  reads("ds_read_b96_tr_b6", "b96", read_transposed<6>);
  register_atomics(ops);
}

}  // namespace ark_emu
