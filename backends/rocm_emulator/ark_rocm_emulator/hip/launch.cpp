// HIP's kernel launches: arguments are gathered, limits are checked as HIP does, and grids run in
// streams on the emulator.
#include <cstdio>
#include <cstring>

#include "runtime.h"

namespace ark_hip {

namespace {

bool hidden(const ark_emu::KernelArg& arg) { return arg.value_kind.compare(0, 7, "hidden_") == 0; }

// Copies the explicit arguments to the layout that the kernel expects. HIP passes them in one of
// two ways: as pointers to each argument (params) or as one buffer (extra).
hipError_t gather(const ark_emu::KernelInfo& kernel, void** params, void** extra,
                  std::vector<uint8_t>* out) {
  uint32_t end = 0;
  bool any = false;
  for (const auto& arg : kernel.args) {
    if (hidden(arg)) continue;
    any = true;
    end = std::max(end, arg.offset + arg.size);
  }
  if (params && extra) return hipErrorInvalidValue;
  if (any && !params && !extra) return hipErrorInvalidValue;
  out->assign(end, 0);
  if (params) {
    for (size_t k = 0, given = 0; k < kernel.args.size(); ++k) {
      const auto& arg = kernel.args[k];
      if (hidden(arg)) continue;
      if (!params[given]) return hipErrorInvalidValue;
      memcpy(out->data() + arg.offset, params[given++], arg.size);
    }
  } else if (extra) {
    const void* buffer = nullptr;
    const size_t* size = nullptr;
    for (size_t k = 0; uintptr_t(extra[k]) != 3;
         k += 2) {  // 1: buffer, 2: pointer to its size, 3: end
      if (uintptr_t(extra[k]) == 1)
        buffer = extra[k + 1];
      else if (uintptr_t(extra[k]) == 2)
        size = static_cast<const size_t*>(extra[k + 1]);
      else
        return hipErrorInvalidValue;
    }
    if (!buffer || !size || *size < end) return hipErrorInvalidValue;
    memcpy(out->data(), buffer, end);
  }
  return hipSuccess;
}

hipError_t error_of(const ark_emu::LaunchResult& result) {
  switch (result.kind) {
    case ark_emu::ErrorKind::None: return hipSuccess;
    case ark_emu::ErrorKind::OutOfBounds:
    case ark_emu::ErrorKind::LdsRange: return hipErrorIllegalAddress;
    case ark_emu::ErrorKind::Deadlock:
    case ark_emu::ErrorKind::Budget: return hipErrorLaunchTimeOut;
    case ark_emu::ErrorKind::Trap: return hipErrorAssert;
    default: return hipErrorLaunchFailure;
  }
}

hipError_t launch(hipFunction_t handle, ark_emu::Dim3 grid, ark_emu::Dim3 block,
                  unsigned dynamic_lds, hipStream_t stream, void** params, void** extra,
                  bool cooperative) {
  HIP_ENTER();
  if (!handle) return answer(hipErrorInvalidImage);
  Function* function = known_function(*rt, handle);
  if (!function) return answer(hipErrorInvalidHandle);
  Stream* on = resolve(*rt, stream);
  if (!on) return answer(hipErrorInvalidHandle);
  const ark_emu::KernelInfo& kernel = *function->info;
  ark_emu::Arch arch = rt->devices[size_t(on->device)]->arch;
  const auto any_zero = [](const ark_emu::Dim3& d) { return d.x == 0 || d.y == 0 || d.z == 0; };
  if (any_zero(grid)) return answer(hipErrorInvalidValue);
  if (any_zero(block)) return answer(hipErrorInvalidConfiguration);
  if (grid.x > kMaxGridX || grid.y > kMaxGridYZ || grid.z > kMaxGridYZ)
    return answer(hipErrorInvalidValue);
  if (std::max({block.x, block.y, block.z}) > kMaxThreads || block.count() > kMaxThreads ||
      kernel.lds_bytes + uint64_t(dynamic_lds) > ark_emu::lds_limit(arch))
    return answer(hipErrorInvalidValue);
  constexpr uint64_t kMostItems = 0xffffffff;  // along a side of the grid
  if (uint64_t(grid.x) * block.x > kMostItems || uint64_t(grid.y) * block.y > kMostItems ||
      uint64_t(grid.z) * block.z > kMostItems)
    return answer(hipErrorInvalidConfiguration);
  if (kernel.max_flat_workgroup && block.count() > kernel.max_flat_workgroup)
    return answer(hipErrorLaunchFailure);
  if (cooperative) {
    int fit =
        blocks_per_unit(kernel, arch, int(block.count()), dynamic_lds) * rt->settings.compute_units;
    if (grid.count() > uint64_t(fit)) return answer(hipErrorCooperativeLaunchTooLarge);
  }
  ark_emu::LaunchDesc desc;
  desc.kernel = kernel.name;
  desc.grid = grid;
  desc.block = block;
  desc.dynamic_lds = dynamic_lds;
  if (hipError_t error = gather(kernel, params, extra, &desc.kernarg)) return answer(error);
  const Settings& s = rt->settings;
  desc.options = {.seed = s.seed,
                  .checks = s.checks,
                  .stale = s.stale,
                  .stores_only = s.stores_only,
                  .parallel = s.parallel,
                  .max_slice = s.max_slice,
                  .timing = s.timing,
                  .step_budget = s.step_budget,
                  .external_wait_ms = s.external_wait_ms};
  {
    std::lock_guard<std::mutex> hold(rt->lock);
    auto& loaded = function->module->loaded[on->device];
    try {
      if (!loaded) loaded = rt->machine->load_on_device(function->module->code, on->device);
    } catch (const ark_emu::Error&) {
      return answer(hipErrorInvalidDeviceFunction);
    }
    desc.code = loaded;
  }
  if (hipError_t error = sticky_error(*rt, on->device)) return answer(error);
  auto op = std::make_shared<Op>();
  op->kernel = true;
  std::weak_ptr<Op> self = op;
  int device = on->device;
  op->run = [rt, self, device, desc = std::move(desc)]() mutable {
    auto running = rt->machine->launch(std::move(desc));
    if (auto op = self.lock()) {
      std::lock_guard<std::mutex> hold(op->lock);
      op->launch = running;
    }
    const ark_emu::LaunchResult& result = running->wait();
    std::lock_guard<std::mutex> hold(rt->lock);
    rt->instructions += result.instructions;
    rt->launches += 1;
    rt->devices[size_t(device)]->predicted += result.nanoseconds;
    if (!result.ok() && result.kind != ark_emu::ErrorKind::Cancelled) {
      rt->failures.push_back({result.message, int(result.kind), device});
      if (rt->settings.report) fprintf(stderr, "ark_rocm_emulator: %s\n", result.message.c_str());
    }
    return error_of(result);
  };
  enqueue_op(*on, op);
  return hipSuccess;
}

}  // namespace

int blocks_per_unit(const ark_emu::KernelInfo& kernel, ark_emu::Arch arch, int block,
                    uint64_t dynamic_lds) {
  const ArchFacts& facts = arch_facts(arch);
  constexpr uint64_t kLdsGranule = 512;
  if (dynamic_lds > ark_emu::lds_limit(arch)) return 0;
  uint64_t lds = (kernel.lds_bytes + dynamic_lds + kLdsGranule - 1) / kLdsGranule * kLdsGranule;
  if (block <= 0 || block > int(kernel.max_flat_workgroup ? kernel.max_flat_workgroup : 1024))
    return 0;
  if (lds > ark_emu::lds_limit(arch)) return 0;
  int registers = std::max(1, int(kernel.vgprs));
  registers = (registers + facts.vgpr_granule - 1) / facts.vgpr_granule * facts.vgpr_granule;
  int waves = std::min(facts.waves_per_simd, facts.vgprs_per_simd / registers) * facts.simds;
  int waves_per_block = (block + kernel.wave_size - 1) / kernel.wave_size;
  int fit = waves / waves_per_block;
  return lds ? std::min<int>(fit, int(facts.lds_per_cu / lds)) : fit;
}

}  // namespace ark_hip

using namespace ark_hip;

HIP_EXPORT hipError_t hipModuleLaunchKernel(hipFunction_t function, unsigned gx, unsigned gy,
                                            unsigned gz, unsigned bx, unsigned by, unsigned bz,
                                            unsigned lds, hipStream_t stream, void** params,
                                            void** extra) {
  return launch(function, {gx, gy, gz}, {bx, by, bz}, lds, stream, params, extra, false);
}

HIP_EXPORT hipError_t hipModuleLaunchCooperativeKernel(hipFunction_t function, unsigned gx,
                                                       unsigned gy, unsigned gz, unsigned bx,
                                                       unsigned by, unsigned bz, unsigned lds,
                                                       hipStream_t stream, void** params) {
  return launch(function, {gx, gy, gz}, {bx, by, bz}, lds, stream, params, nullptr, true);
}

HIP_EXPORT hipError_t hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks,
                                                                         hipFunction_t handle,
                                                                         int block,
                                                                         size_t dynamic_lds) {
  HIP_ENTER();
  if (!blocks || block <= 0) return answer(hipErrorInvalidValue);
  Function* function = known_function(*rt, handle);
  if (!function) return answer(hipErrorInvalidHandle);
  *blocks = blocks_per_unit(*function->info, function->module->code->arch(), block, dynamic_lds);
  return hipSuccess;
}

HIP_EXPORT hipError_t hipModuleOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* blocks, hipFunction_t handle, int block, size_t lds, unsigned) {
  return hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(blocks, handle, block, lds);
}

HIP_EXPORT hipError_t hipModuleOccupancyMaxPotentialBlockSize(int* grid, int* block,
                                                              hipFunction_t handle,
                                                              size_t dynamic_lds, int limit) {
  HIP_ENTER();
  if (!grid || !block) return answer(hipErrorInvalidValue);
  Function* function = known_function(*rt, handle);
  if (!function) return answer(hipErrorInvalidHandle);
  const ark_emu::KernelInfo& kernel = *function->info;
  int most = int(kernel.max_flat_workgroup);
  if (limit > 0 && limit < most) most = limit;
  int best = 0, best_fit = 0;
  for (int size = kernel.wave_size; size <= most; size += kernel.wave_size) {
    int fit = blocks_per_unit(kernel, function->module->code->arch(), size, dynamic_lds);
    if (fit * size >= best_fit * best) best = size, best_fit = fit;
  }
  *block = best;
  *grid = best_fit * rt->settings.compute_units;
  return hipSuccess;
}
