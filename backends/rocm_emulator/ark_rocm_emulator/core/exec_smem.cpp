// Handlers of the SMEM format: scalar loads, and the invalidation of the scalar cache.
#include "access.h"
#include "checks.h"
#include "grid.h"
#include "memory.h"
#include "ops.h"
#include "wave.h"

namespace ark_emu {
namespace {

uint64_t scalar_address(const Wave& w, const Inst& i) {
  const uint64_t base = w.scalar64(i.src[0]);
  const uint64_t offset = static_cast<uint64_t>(static_cast<int64_t>(i.imm)) +
                          (i.src[1].kind == Kind::Sgpr ? w.scalar32(i.src[1]) : 0);
  return (base + offset) & ~3ull;
}

// Returns the address of a scalar load in the form of a vector access with one active lane.
Addresses single(uint64_t address) {
  Addresses a;
  a.active = 1;
  a.at[0] = address;
  return a;
}

template <int Dwords>
void load(Wave& w, const Inst& i) {
  const uint64_t address = scalar_address(w, i);
  uint32_t row[kLanes];
  uint32_t values[Dwords];
  for (int d = 0; d < Dwords; d++) {
    load_lanes(w, i, single(address + static_cast<uint64_t>(4 * d)), 4, row);
    values[d] = row[0];
  }
  for (int d = 0; d < Dwords; d++) w.s[i.dst[0].reg + d] = values[d];
}

// Loads through a resource descriptor. Dwords beyond num_records read as 0.
template <int Dwords>
void buffer_load(Wave& w, const Inst& i) {
  const uint32_t* s = &w.s[i.src[0].reg];
  const uint64_t base = s[0] | static_cast<uint64_t>(s[1] & 0xffff) << 32;
  const uint32_t stride = (s[1] >> 16) & 0x3fff;
  const uint64_t size = stride == 0 ? s[2] : static_cast<uint64_t>(s[2]) * stride;
  const uint64_t offset = (static_cast<uint64_t>(static_cast<int64_t>(i.imm)) +
                           (i.src[1].kind == Kind::Sgpr ? w.scalar32(i.src[1]) : 0)) &
                          ~3ull;
  uint32_t values[Dwords] = {};
  for (int d = 0; d < Dwords; d++) {
    const uint64_t at = offset + static_cast<uint64_t>(4 * d);
    if (at + 4 > size) continue;
    uint32_t row[kLanes];
    load_lanes(w, i, single(base + at), 4, row);
    values[d] = row[0];
  }
  for (int d = 0; d < Dwords; d++) w.s[i.dst[0].reg + d] = values[d];
}

}  // namespace

void register_smem(Ops& ops) {
  ops.add("s_load_dword", "b32=b64", load<1>, kMemory);
  ops.add("s_load_dwordx2", "b64=b64", load<2>, kMemory);
  ops.add("s_load_dwordx4", "b128=b64", load<4>, kMemory);
  ops.add("s_load_dwordx8", "b256=b64", load<8>, kMemory);
  ops.add("s_load_dwordx16", "b512=b64", load<16>, kMemory);
  ops.add("s_buffer_load_dword", "b32=b128", buffer_load<1>, kMemory);
  ops.add("s_buffer_load_dwordx2", "b64=b128", buffer_load<2>, kMemory);
  ops.add("s_buffer_load_dwordx4", "b128=b128", buffer_load<4>, kMemory);
  ops.add("s_buffer_load_dwordx8", "b256=b128", buffer_load<8>, kMemory);
  ops.add("s_buffer_load_dwordx16", "b512=b128", buffer_load<16>, kMemory);
  ops.add("s_dcache_inv", "=", [](Wave& w, const Inst&) {
    if (w.checks != nullptr) check_scalar_invalidate(w);
  }, kSync);
}

}  // namespace ark_emu
