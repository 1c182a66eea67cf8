// Checks that need only one access: alignment, uninitialised bytes, the end of the kernel
// arguments, and lanes of one store that write different bytes to one address.
#include <algorithm>
#include <bit>

#include "checks_state.h"
#include "grid.h"
#include "memory.h"

namespace ark_emu {
namespace {

std::string place(const Access& x, uint64_t address) {
  return x.lds ? "LDS byte " + std::to_string(address)
               : describe_address(x.w.grid->view, address);
}

}  // namespace

// Vector loads and stores of global memory may have any alignment (ROCm runs in unaligned mode, and
// the compiler relies on it). LDS and scalar accesses must be aligned, up to a dword.
void check_alignment(const Access& x, uint64_t address, int bytes, int lane) {
  if (!x.lds && x.i.format != Format::SMEM) return;
  const uint64_t need = bytes >= 4 ? 4 : static_cast<uint64_t>(bytes);
  if (address % need == 0) return;
  throw Fault{ErrorKind::Misaligned,
              *x.i.name + " of " + std::to_string(bytes) + " bytes at an address that is not a " +
                  "multiple of " + std::to_string(need),
              lane, address};
}

// Reports a scalar load past the end of the kernel arguments; called for each dword of the load. A
// wide load may exceed the end by one dword: clang loads three dwords as four if they begin at a
// multiple of 8, and does not use the fourth.
void check_arguments(const Access& x, uint64_t address, int bytes, int lane) {
  const Grid& grid = *x.w.grid;
  if (!grid.beyond_arguments(address, bytes)) return;
  const bool wide = x.i.format == Format::SMEM && x.i.dst[0].dwords == 4;
  if (wide && address < grid.kernarg + (grid.kernel->kernarg_size + 7) / 8 * 8) return;
  throw Fault{ErrorKind::OutOfBounds,
              *x.i.name + " touches " + std::to_string(bytes) + " bytes at offset " +
                  std::to_string(address - grid.kernarg) + " of the kernel arguments, which are " +
                  std::to_string(grid.kernel->kernarg_size) + " bytes",
              lane, address};
}

void check_initialised(const Access& x, ShadowPages& shadow, uint64_t offset, int bytes, int lane,
                       uint64_t address) {
  if (!shadow.track_init) return;
  shadow.initialised.prepare(shadow.size);
  const auto count = static_cast<uint64_t>(bytes);
  if (x.kind == AccessKind::Write) {
    shadow.initialised.add(offset, count);
    return;
  }
  const uint64_t missing = shadow.initialised.missing(offset, count);
  if (missing == offset + count) return;
  const uint64_t at = address + (missing - offset);
  throw Fault{ErrorKind::Uninitialised,
              *x.i.name + " reads bytes that were not written" +
                  (x.lds ? " by the workgroup: " : ": ") + place(x, at),
              lane, at};
}

// On memory that is not coarse-grained, MI200 silently ignores a floating-point atomic (HIP's
// documentation, "Floating-point atomic operations").
void check_float_atomic(const Access& x, const Region& region, int lane, uint64_t address) {
  if (x.kind != AccessKind::Atomic || (x.i.op->flags & kFloat) == 0) return;
  if (x.w.grid->program->arch() != Arch::gfx90a || region.kind == MemKind::Device) return;
  throw Fault{ErrorKind::Race,
              *x.i.name + " changes " + place(x, address) +
                  ", which is fine-grained, uncached or host memory: on gfx90a floating-point " +
                  "atomics have no effect there. Use coarse memory or a compare-and-swap",
              lane, address};
}

void check_lanes(Wave& w, const Inst& i, const Addresses& a, int bytes, const uint32_t* rows) {
  const bool lds = a.space == Space::Lds;
  const auto size = static_cast<uint64_t>(bytes);
  int lanes[kLanes];
  int count = 0;
  bool apart = true;
  for (uint64_t rest = a.active; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    apart &= count == 0 || a.at[lane] >= a.at[lanes[count - 1]] + size;
    lanes[count++] = lane;
  }
  if (apart) return;
  const Stamp stamp = stamp_of(w, i, AccessKind::Write, lds, bytes);
  if (stamp == Stamp::Atomic || stamp == Stamp::MaybeAtomic) return;
  std::stable_sort(lanes, lanes + count, [&a](int p, int q) { return a.at[p] < a.at[q]; });
  const auto byte = [rows](int lane, uint64_t k) {
    return static_cast<uint8_t>(rows[k / 4 * kLanes + static_cast<uint64_t>(lane)] >> (8 * (k % 4)));
  };
  for (int n = 1; n < count; n++) {
    // Reports two lanes that write different bytes to one address. The lanes are sorted by address,
    // so comparing each lane with the next one suffices.
    const int before = lanes[n - 1], after = lanes[n];
    for (uint64_t at = a.at[after]; at < a.at[before] + size; at++) {
      if (byte(before, at - a.at[before]) == byte(after, at - a.at[after])) continue;
      const Access x{w, i, AccessKind::Write, lds, Stamp::Plain, false};
      throw Fault{ErrorKind::Race,
                  *i.name + " writes different values from lanes " + std::to_string(before) +
                      " and " + std::to_string(after) + " to " + place(x, at) +
                      ": it is undefined which value remains",
                  after, at};
    }
  }
}

}  // namespace ark_emu
