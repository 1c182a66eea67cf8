// The products whose times can be predicted. Sources: AMD's CDNA 3 and CDNA 4 white papers (clocks,
// units, widths, cache sizes, matrix rates), the MI300 instruction set document (issue of four
// cycles, passes of matrix instructions) and published measurements: reads at 81% of the data
// sheet's bandwidth; 642 ns from a store to a counter until another compute unit of the die reads
// it, and 742 ns across dies; 3.3 us and more for a barrier of all compute units. AMD does not
// publish the latencies of single cache levels, flushes and invalidations. These latencies are
// chosen so that the predictions for the microbenchmarks above are near the measured times
// (docs/rocm-timing.md has the comparison).
#include "timing.h"

namespace ark_emu {
namespace {

constexpr TimingModel kModels[] = {
    {.name = "mi300x", .arch = Arch::gfx942, .ghz = 2.1, .units = 304, .dies = 8,
     .matrix_flops = 512, .lds_width = 128, .l1_width = 64, .l2_width = 2048, .fabric_width = 1024,
     .mall_width = 11900 / 2.1, .memory_width = 5300 * 0.81 / 2.1, .lds_latency = 64,
     .scalar_latency = 60, .l1_latency = 125, .l2_latency = 250, .mall_latency = 500,
     .memory_latency = 800, .coherent_latency = 915, .cross_die = 130, .atomic_step = 14,
     .poll_step = 2, .flush = 500, .invalidate = 120, .barrier = 16, .taken_branch = 16,
     .l1_lines = 256, .l2_lines = 32768, .mall_lines = 2097152},
    {.name = "mi355x", .arch = Arch::gfx950, .ghz = 2.4, .units = 256, .dies = 8,
     .matrix_flops = 1024, .lds_width = 256, .l1_width = 64, .l2_width = 2048,
     .fabric_width = 1024, .mall_width = 8192, .memory_width = 8000 * 0.81 / 2.4,
     .lds_latency = 64, .scalar_latency = 60, .l1_latency = 125, .l2_latency = 280,
     .mall_latency = 570, .memory_latency = 910, .coherent_latency = 1046, .cross_die = 149,
     .atomic_step = 14, .poll_step = 2, .flush = 570, .invalidate = 120, .barrier = 16,
     .taken_branch = 16, .l1_lines = 256, .l2_lines = 32768, .mall_lines = 2097152},
};

}  // namespace

const TimingModel* timing_model(uint32_t number) {
  return number >= 1 && number <= std::size(kModels) ? &kModels[number - 1] : nullptr;
}

}  // namespace ark_emu
