// Handlers of instructions that move data between lanes, or between lanes and scalar registers.
#include <bit>

#include "lanes.h"
#include "ops.h"

namespace ark_emu {
namespace {

int first_lane(const Wave& w) { return w.exec() == 0 ? 0 : std::countr_zero(w.exec()); }

void readfirstlane(Wave& w, const Inst& i) {
  alignas(64) Row tmp;
  w.put_scalar32(i.dst[0], w.src32(i, 0, tmp)[first_lane(w)]);
}

void readlane(Wave& w, const Inst& i) {
  alignas(64) Row tmp;
  const unsigned lane = w.scalar32(i.src[1]) & static_cast<unsigned>(w.lanes - 1);
  w.put_scalar32(i.dst[0], w.src32(i, 0, tmp)[lane]);
}

void writelane(Wave& w, const Inst& i) {   // ignores EXEC
  const unsigned lane = w.scalar32(i.src[1]) & static_cast<unsigned>(w.lanes - 1);
  w.row(i.dst[0].reg)[lane] = w.scalar32(i.src[0]);
}

// ds_permute: each active lane writes its data to the lane that its address names. A lane to which
// no lane writes gets 0.
void permute(Wave& w, const Inst& i) {
  const uint32_t *address = w.row(i.src[0].reg), *data = w.row(i.src[1].reg);
  alignas(64) Row out = {};
  for (int l = 0; l < w.lanes; l++) {
    if (((w.exec() >> l) & 1) == 0) continue;
    const uint32_t to = (address[l] + static_cast<uint32_t>(i.imm)) / 4;
    out[to & static_cast<uint32_t>(w.lanes - 1)] = data[l];
  }
  w.blend(w.row(i.dst[0].reg), out, w.exec());
}

// Copies a row of lanes; inactive lanes get 0.
void active_lanes(Wave& w, const uint32_t* from, uint32_t* to) {
  fill_row(to, 0, w.lanes);
  w.blend(to, from, w.exec());
}

// ds_bpermute: each lane reads the data of the lane that its address names. If that lane is
// inactive, it reads 0.
void bpermute(Wave& w, const Inst& i) {
  const uint32_t* address = w.row(i.src[0].reg);
  alignas(64) Row data, out;
  active_lanes(w, w.row(i.src[1].reg), data);
  const auto offset = static_cast<uint32_t>(i.imm), last = static_cast<uint32_t>(w.lanes - 1);
  each_lane(w, [&](int l) { out[l] = data[(address[l] + offset) / 4 & last]; });
  w.blend(w.row(i.dst[0].reg), out, w.exec());
}

int swizzle_source(uint32_t offset, int lane) {
  if (offset >= 0xe000) {   // fast Fourier transform pattern: reverses the low bits of the lane
    const uint32_t mask = offset & 0x1f;
    const auto low = static_cast<uint32_t>(lane & 31);
    uint32_t reversed = 0;
    for (int b = 0; b < 5; b++) reversed |= ((low >> b) & 1) << (4 - b);
    const uint32_t kept = low & mask, moved = reversed >> std::popcount(mask);
    return (lane & ~31) | static_cast<int>(mask == 0x1f ? low : (kept | moved));
  }
  if (offset >= 0xc000) {   // rotate within 32 lanes, masked lanes keep their bits
    const int step = static_cast<int>((offset >> 5) & 0x1f), mask = static_cast<int>(offset & 0x1f);
    const int in_row = lane & 31;
    const int turned = ((offset >> 10) & 1) != 0 ? in_row - step : in_row + step;
    return (lane & ~31) | ((in_row & mask) | (turned & 31 & ~mask));
  }
  if ((offset & 0x8000) != 0) {   // quad permute
    return (lane & ~3) + static_cast<int>((offset >> (2 * (lane & 3))) & 3);
  }
  const int and_mask = static_cast<int>(offset & 0x1f),
            or_mask = static_cast<int>((offset >> 5) & 0x1f),
            xor_mask = static_cast<int>((offset >> 10) & 0x1f);
  return (lane & ~31) | ((((lane & 31) & and_mask) | or_mask) ^ xor_mask);
}

void swizzle(Wave& w, const Inst& i) {
  alignas(64) Row data, out;
  active_lanes(w, w.row(i.src[0].reg), data);
  for (int l = 0; l < w.lanes; l++) {
    out[l] = data[swizzle_source(static_cast<uint32_t>(i.imm), l)];
  }
  w.blend(w.row(i.dst[0].reg), out, w.exec());
}

// v_permlane16_swap, v_permlane32_swap: exchange odd groups of the destination with even groups of
// the source.
template <int Group>
void permlane_swap(Wave& w, const Inst& i) {
  uint32_t *a = w.row(i.dst[0].reg), *b = w.row(i.src[0].reg);
  for (int l = 0; l < kLanes; l++) {
    if ((l / Group) % 2 == 0) std::swap(b[l], a[l + Group]);
  }
}

}  // namespace

void register_cross(Ops& ops) {
  ops.add("v_readfirstlane_b32", "s=b32", readfirstlane);
  ops.add("v_readlane_b32", "s=b32,b32", readlane);
  ops.add("v_writelane_b32", "b32=b32,b32", writelane);
  ops.add("ds_permute_b32", "b32=p,b32", permute, kMemory);
  ops.add("ds_bpermute_b32", "b32=p,b32", bpermute, kMemory);
  ops.add("ds_swizzle_b32", "b32=p", swizzle, kMemory);
  ops.add("v_permlane16_swap_b32", "b32=b32", permlane_swap<16>);
  ops.add("v_permlane32_swap_b32", "b32=b32", permlane_swap<32>);
}

}  // namespace ark_emu
