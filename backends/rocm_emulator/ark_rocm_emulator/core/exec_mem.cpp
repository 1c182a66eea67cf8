// Handlers of the FLAT, GLOBAL and SCRATCH formats: loads, stores, atomics, and loads that write
// LDS directly.
#include <string>

#include "access.h"
#include "checks.h"
#include "grid.h"
#include "mem_ops.h"
#include "ops.h"
#include "wave.h"

namespace ark_emu {

[[gnu::noinline]] Addresses flat_addresses(Wave& w, const Inst& i) {
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

// There are many handlers, one for each operation and width. Their common code is in functions that
// are not inlined, so that it is compiled once.
[[gnu::noinline]] void load_rows(Wave& w, const Inst& i, int bytes, uint32_t* rows) {
  with_spaces(w, i, [&](const Addresses& a) { load_lanes(w, i, a, bytes, rows); });
}

[[gnu::noinline]] void store_rows(Wave& w, const Inst& i, int bytes, const uint32_t* rows) {
  with_spaces(w, i, [&](const Addresses& a) { store_lanes(w, i, a, bytes, rows); });
}

[[gnu::noinline]] void run_atomic(Wave& w, const Inst& i, AtomicOp op, int bytes) {
  alignas(64) uint32_t before[2 * kLanes];
  const AtomicData d = atomic_data(w, i.src[1], op, bytes);
  with_spaces(w, i, [&](const Addresses& a) {
    atomic_lanes(w, i, a, op, bytes, d.data, d.data2, before);
  });
  if (!i.glc) return;
  w.blend(w.row(i.dst[0].reg), before, w.exec());
  if (bytes == 8) w.blend(w.row(i.dst[0].reg + 1), before + kLanes, w.exec());
}

struct Flat {
  template <int Bytes, Convert C>
  static void load(Wave& w, const Inst& i) {
    alignas(64) uint32_t rows[4 * kLanes];
    load_rows(w, i, Bytes, rows);
    put_loaded<Bytes, C>(w, i, rows);
  }

  template <int Bytes, bool High>
  static void store(Wave& w, const Inst& i) {
    alignas(64) uint32_t shifted[kLanes];
    const uint32_t* rows = w.row(i.src[1].reg);
    if (High) {
      for (int l = 0; l < kLanes; l++) shifted[l] = rows[l] >> 16;
      rows = shifted;
    }
    store_rows(w, i, Bytes, rows);
  }

  template <AtomicOp Op, int Bytes>
  static void atomic(Wave& w, const Inst& i) {
    run_atomic(w, i, Op, Bytes);
  }
};

template <int Bytes, Convert C>
void load_to_lds(Wave& w, const Inst& i) {
  alignas(64) uint32_t rows[4 * kLanes] = {};
  const Addresses a = flat_addresses(w, i);
  load_lanes(w, i, a, Bytes, rows);
  convert_rows<Bytes, C>(rows);
  store_to_lds(w, i, a.active, Bytes, rows);
}

}  // namespace

void register_mem(Ops& ops) {
  const auto add = [&ops](const std::string& name, const std::string& signature, Handler run,
                          uint32_t flags) {
    ops.add("flat_" + name, signature, run, flags | kMemory);
    ops.add("global_" + name, signature, run, flags | kMemory);
    const bool atomic = (flags & kSync) != 0;
    if (!atomic) ops.add("scratch_" + name, signature, run, flags | kMemory);
  };
  using Text = std::string;
  each_memory_operation<Flat>(
      [&add](const Text& name, const Text& type, Handler run) {
        add("load_" + name, type + "=p", run, 0);
      },
      [&add](const Text& name, const Text& type, Handler run) {
        add("store_" + name, "=p," + type, run, kStore);
      },
      [&add](const Text& name, const Text& result, const Text& data, uint32_t flags, Handler run) {
        add("atomic_" + name, result + "=p," + data, run, flags | kSync | kStore);
      });
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
