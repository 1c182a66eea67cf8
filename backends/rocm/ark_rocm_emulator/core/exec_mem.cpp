// FLAT, GLOBAL and SCRATCH: loads, stores, atomics, and loads that go straight to LDS.
#include <string>

#include "access.h"
#include "checks.h"
#include "grid.h"
#include "mem_ops.h"
#include "ops.h"
#include "wave.h"

namespace ark_emu {

Addresses flat_addresses(Wave& w, const Inst& i) {
  Addresses a;
  a.active = w.exec();
  const bool scratch = i.format == Format::SCRATCH;
  uint64_t base = static_cast<uint64_t>(static_cast<int64_t>(i.imm));
  if (i.has_saddr) base += scratch ? w.scalar32(i.src[2]) : w.scalar64(i.src[2]);
  const bool vector = i.src[0].kind == Kind::Vgpr;
  const uint32_t* low = vector ? w.row(i.src[0].reg) : nullptr;
  if (!vector) {
    for (int l = 0; l < kLanes; l++) a.at[l] = base;
  } else if (i.src[0].dwords == 2) {
    const uint32_t* high = low + kLanes;
    for (int l = 0; l < kLanes; l++) {
      a.at[l] = base + (low[l] | static_cast<uint64_t>(high[l]) << 32);
    }
  } else {
    for (int l = 0; l < kLanes; l++) a.at[l] = base + low[l];
  }
  if (scratch) {
    a.space = Space::Scratch;
    for (int l = 0; l < kLanes; l++) a.at[l] = static_cast<uint32_t>(a.at[l]);
  }
  return a;
}

namespace {

template <class F>
void with_spaces(Wave& w, const Inst& i, F each) {
  const Addresses a = flat_addresses(w, i);
  if (i.format == Format::FLAT) {
    for_each_space(a, each);
  } else {
    each(a);
  }
}

template <int Bytes, Convert C>
void load(Wave& w, const Inst& i) {
  alignas(64) uint32_t rows[4 * kLanes];
  with_spaces(w, i, [&](const Addresses& a) { load_lanes(w, i, a, Bytes, rows); });
  put_loaded<Bytes, C>(w, i, rows);
}

template <int Bytes, bool High>
void store(Wave& w, const Inst& i) {
  alignas(64) uint32_t shifted[kLanes];
  const uint32_t* rows = w.row(i.src[1].reg);
  if (High) {
    for (int l = 0; l < kLanes; l++) shifted[l] = rows[l] >> 16;
    rows = shifted;
  }
  with_spaces(w, i, [&](const Addresses& a) { store_lanes(w, i, a, Bytes, rows); });
}

template <AtomicOp Op, int Bytes>
void atomic(Wave& w, const Inst& i) {
  alignas(64) uint32_t before[2 * kLanes];
  const AtomicData d = atomic_data(w, i.src[1], Op, Bytes);
  with_spaces(w, i, [&](const Addresses& a) {
    atomic_lanes(w, i, a, Op, Bytes, d.data, d.data2, before);
  });
  if (!i.glc) return;
  w.blend(w.row(i.dst[0].reg), before, w.exec());
  if (Bytes == 8) w.blend(w.row(i.dst[0].reg + 1), before + kLanes, w.exec());
}

template <int Bytes, Convert C>
void load_to_lds(Wave& w, const Inst& i) {
  alignas(64) uint32_t rows[4 * kLanes] = {};
  const Addresses a = flat_addresses(w, i);
  load_lanes(w, i, a, Bytes, rows);
  convert_rows<Bytes, C>(rows);
  store_to_lds(w, i, a.active, Bytes, rows);
}

void add_flat(Ops& ops, const std::string& name, const std::string& signature, Handler run,
              uint32_t flags, bool scratch_too) {
  ops.add("flat_" + name, signature, run, flags | kMemory);
  ops.add("global_" + name, signature, run, flags | kMemory);
  if (scratch_too) ops.add("scratch_" + name, signature, run, flags | kMemory);
}

template <AtomicOp Op>
void add_atomic(Ops& ops, const char* name) {
  constexpr uint32_t kFlags = kSync | kStore;
  constexpr bool kTwo = Op == AtomicOp::CmpSwap;
  add_flat(ops, std::string("atomic_") + name, kTwo ? "b32=p,b64" : "b32=p,b32", atomic<Op, 4>,
           kFlags, false);
  add_flat(ops, std::string("atomic_") + name + "_x2", kTwo ? "b64=p,b128" : "b64=p,b64",
           atomic<Op, 8>, kFlags, false);
}

}  // namespace

void register_mem(Ops& ops) {
  const auto load_op = [&ops](const char* name, const char* type, Handler run) {
    add_flat(ops, name, std::string(type) + "=p", run, 0, true);
  };
  load_op("load_ubyte", "b32", load<1, Convert::Unsigned>);
  load_op("load_sbyte", "b32", load<1, Convert::Signed>);
  load_op("load_ushort", "b32", load<2, Convert::Unsigned>);
  load_op("load_sshort", "b32", load<2, Convert::Signed>);
  load_op("load_dword", "b32", load<4, Convert::Unsigned>);
  load_op("load_dwordx2", "b64", load<8, Convert::Unsigned>);
  load_op("load_dwordx3", "b96", load<12, Convert::Unsigned>);
  load_op("load_dwordx4", "b128", load<16, Convert::Unsigned>);
  load_op("load_ubyte_d16", "b32", load<1, Convert::Low>);
  load_op("load_ubyte_d16_hi", "b32", load<1, Convert::High>);
  load_op("load_sbyte_d16", "b32", load<1, Convert::SignedLow>);
  load_op("load_sbyte_d16_hi", "b32", load<1, Convert::SignedHigh>);
  load_op("load_short_d16", "b32", load<2, Convert::Low>);
  load_op("load_short_d16_hi", "b32", load<2, Convert::High>);
  const auto store_op = [&ops](const char* name, const char* type, Handler run) {
    add_flat(ops, name, std::string("=p,") + type, run, kStore, true);
  };
  store_op("store_byte", "b32", store<1, false>);
  store_op("store_byte_d16_hi", "b32", store<1, true>);
  store_op("store_short", "b32", store<2, false>);
  store_op("store_short_d16_hi", "b32", store<2, true>);
  store_op("store_dword", "b32", store<4, false>);
  store_op("store_dwordx2", "b64", store<8, false>);
  store_op("store_dwordx3", "b96", store<12, false>);
  store_op("store_dwordx4", "b128", store<16, false>);
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
  const auto float_op = [&ops](const char* name, const char* signature, Handler run) {
    add_flat(ops, std::string("atomic_") + name, signature, run, kSync | kStore | kFloat, false);
  };
  float_op("add_f32", "b32=p,b32", atomic<AtomicOp::AddF, 4>);
  float_op("min_f32", "b32=p,b32", atomic<AtomicOp::MinF, 4>);
  float_op("max_f32", "b32=p,b32", atomic<AtomicOp::MaxF, 4>);
  float_op("cmpswap_f32", "b32=p,b64", atomic<AtomicOp::CmpSwapF, 4>);
  float_op("pk_add_f16", "b32=p,b32", atomic<AtomicOp::PkAddF16, 4>);
  float_op("pk_add_bf16", "b32=p,b32", atomic<AtomicOp::PkAddBf16, 4>);
  float_op("add_f64", "b64=p,b64", atomic<AtomicOp::AddF, 8>);
  float_op("min_f64", "b64=p,b64", atomic<AtomicOp::MinF, 8>);
  float_op("max_f64", "b64=p,b64", atomic<AtomicOp::MaxF, 8>);
  const auto lds_op = [&ops](const char* name, Handler run) {
    for (const char* from : {"global_load_lds_", "scratch_load_lds_"}) {
      ops.add(std::string(from) + name, "=p", run, kMemory | kLdsOp);
    }
  };
  lds_op("ubyte", load_to_lds<1, Convert::Unsigned>);
  lds_op("sbyte", load_to_lds<1, Convert::Signed>);
  lds_op("ushort", load_to_lds<2, Convert::Unsigned>);
  lds_op("sshort", load_to_lds<2, Convert::Signed>);
  lds_op("dword", load_to_lds<4, Convert::Unsigned>);
  lds_op("dwordx3", load_to_lds<12, Convert::Unsigned>);
  lds_op("dwordx4", load_to_lds<16, Convert::Unsigned>);
}

}  // namespace ark_emu
