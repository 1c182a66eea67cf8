// Modules: code objects on devices, their kernels and variables.
#include <cstdio>
#include <cstring>

#include "runtime.h"

namespace ark_hip {

namespace {

enum FunctionAttribute : int {
  kAttributeMaxThreads = 0,
  kAttributeStaticLds = 1,
  kAttributeConst = 2,
  kAttributeScratch = 3,
  kAttributeRegisters = 4,
  kAttributePtxVersion = 5,
  kAttributeBinaryVersion = 6,
  kAttributeCacheMode = 7,
  kAttributeDynamicLds = 8,
  kAttributeCarveout = 9,
};

// Returns the size in bytes of a code object, computed from its headers, because HIP's callers do
// not pass a size. The code object is an ELF file or an offload bundle. Returns 0 if it is neither,
// or if its headers point to memory that the process cannot read.
size_t image_size(const uint8_t* image) {
  static const uint8_t elf[4] = {0x7f, 'E', 'L', 'F'};
  static const char bundle[] = "__CLANG_OFFLOAD_BUNDLE__";
  constexpr uint64_t kMost = uint64_t(1) << 32;
  uint64_t end = 64;  // end of the part of the image that was found so far
  if (!readable(image, end)) return 0;
  const auto word = [image](uint64_t at, size_t width) {
    uint64_t value = 0;
    memcpy(&value, image + at, width);
    return value;
  };
  // Adds [offset, offset + size) to the image. Returns false if the range is invalid or cannot be
  // read.
  const auto reach = [image, &end](uint64_t offset, uint64_t size) {
    if (offset > kMost || size > kMost - offset) return false;
    const uint64_t wanted = std::max(end, offset + size);
    if (wanted > end && !readable(image, wanted)) return false;
    end = wanted;
    return true;
  };
  if (memcmp(image, elf, 4) == 0) {
    const uint64_t sections = word(0x28, 8), segments = word(0x20, 8);
    if (!reach(sections, word(0x3a, 2) * word(0x3c, 2))) return 0;
    for (uint64_t k = 0; k < word(0x38, 2); ++k) {
      const uint64_t header = segments + k * word(0x36, 2);
      if (!reach(header, 56) || !reach(word(header + 8, 8), word(header + 32, 8))) return 0;
    }
    return end;
  }
  if (memcmp(image, bundle, sizeof bundle - 1) == 0) {
    const uint64_t count = word(24, 8);
    uint64_t at = 32;
    for (uint64_t k = 0; k < count; ++k) {
      if (!reach(at, 24) || !reach(word(at, 8), word(at + 8, 8))) return 0;
      const uint64_t id_size = word(at + 16, 8);
      if (!reach(at + 24, id_size)) return 0;
      at += 24 + id_size;
    }
    return end;
  }
  return 0;
}

// The dynamic LDS that a launch may request in addition to the kernel's static LDS.
int64_t spare_lds(const Function& function) {
  const int64_t limit = ark_emu::lds_limit(function.module->code->arch());
  return std::max<int64_t>(0, limit - function.info->lds_bytes);
}

hipError_t load(hipModule_t* out, const uint8_t* image, size_t size) {
  HIP_ENTER();
  int device = current_device;
  auto module = std::make_unique<Module>();
  std::string want = ark_emu::arch_name(rt->devices[size_t(device)]->arch);
  try {
    module->code = ark_emu::CodeObject::from_bytes({image, size}, want);
    if (module->code->arch() != rt->devices[size_t(device)]->arch)
      return answer(hipErrorNoBinaryForGpu);
    module->loaded[device] = rt->machine->load_on_device(module->code, device);
  } catch (const ark_emu::Error&) {
    return answer(hipErrorInvalidImage);
  } catch (const std::bad_alloc&) {
    return answer(hipErrorOutOfMemory);
  }
  std::lock_guard<std::mutex> hold(rt->lock);
  rt->modules.insert(module.get());
  *out = reinterpret_cast<hipModule_t>(module.release());
  return hipSuccess;
}

Module* known_module(Runtime& rt, hipModule_t handle) {
  auto* module = reinterpret_cast<Module*>(handle);
  return rt.modules.count(module) ? module : nullptr;
}

}  // namespace

Function* known_function(Runtime& rt, hipFunction_t handle) {
  auto* function = reinterpret_cast<Function*>(handle);
  std::lock_guard<std::mutex> hold(rt.lock);
  return rt.functions.count(function) ? function : nullptr;
}

}  // namespace ark_hip

using namespace ark_hip;

HIP_EXPORT hipError_t hipModuleLoadData(hipModule_t* module, const void* image) {
  if (!module || !image) return answer(hipErrorInvalidValue);
  auto* bytes = static_cast<const uint8_t*>(image);
  size_t size = image_size(bytes);
  return size ? load(module, bytes, size) : answer(hipErrorInvalidImage);
}

HIP_EXPORT hipError_t hipModuleLoadDataEx(hipModule_t* module, const void* image, unsigned, int*,
                                          void**) {
  return hipModuleLoadData(module, image);
}

HIP_EXPORT hipError_t hipModuleLoad(hipModule_t* module, const char* path) {
  if (!module || !path) return answer(hipErrorInvalidValue);
  FILE* file = fopen(path, "rb");
  if (!file) return answer(hipErrorFileNotFound);
  std::vector<uint8_t> bytes;
  uint8_t chunk[65536];
  for (size_t got; (got = fread(chunk, 1, sizeof chunk, file)) > 0;)
    bytes.insert(bytes.end(), chunk, chunk + got);
  fclose(file);
  return load(module, bytes.data(), bytes.size());
}

HIP_EXPORT hipError_t hipModuleUnload(hipModule_t handle) {
  HIP_ENTER();
  Module* module = nullptr;
  {
    std::lock_guard<std::mutex> hold(rt->lock);
    module = known_module(*rt, handle);
  }
  if (!module) return answer(hipErrorInvalidHandle);
  for (auto& [device, loaded] : module->loaded)
    if (!quiet(*rt, device, "hipModuleUnload")) return answer(hipErrorNotReady);
  std::lock_guard<std::mutex> hold(rt->lock);
  if (rt->modules.erase(module) == 0) return answer(hipErrorInvalidHandle);  // another thread did
  for (auto& function : module->functions) rt->functions.erase(function.get());
  delete module;
  return hipSuccess;
}

HIP_EXPORT hipError_t hipModuleGetFunction(hipFunction_t* function, hipModule_t handle,
                                           const char* name) {
  HIP_ENTER();
  if (!function || !name || !*name) return answer(hipErrorInvalidValue);
  std::lock_guard<std::mutex> hold(rt->lock);
  Module* module = known_module(*rt, handle);
  if (!module) return answer(hipErrorInvalidHandle);
  const ark_emu::KernelInfo* info = module->code->find_kernel(name);
  if (!info) return answer(hipErrorNotFound);
  for (auto& known : module->functions)
    if (known->info == info) {
      *function = reinterpret_cast<hipFunction_t>(known.get());
      return hipSuccess;
    }
  auto made = std::make_unique<Function>();
  made->module = module;
  made->info = info;
  rt->functions.insert(made.get());
  *function = reinterpret_cast<hipFunction_t>(made.get());
  module->functions.push_back(std::move(made));
  return hipSuccess;
}

HIP_EXPORT hipError_t hipModuleGetFunctionCount(unsigned* count, hipModule_t handle) {
  HIP_ENTER();
  std::lock_guard<std::mutex> hold(rt->lock);
  Module* module = known_module(*rt, handle);
  if (!module) return answer(hipErrorInvalidHandle);
  if (!count) return answer(hipErrorInvalidValue);
  *count = unsigned(module->code->kernels().size());
  return hipSuccess;
}

HIP_EXPORT hipError_t hipModuleGetGlobal(void** address, size_t* size, hipModule_t handle,
                                         const char* name) {
  HIP_ENTER();
  if ((!address && !size) || !name || !*name) return answer(hipErrorInvalidValue);
  std::lock_guard<std::mutex> hold(rt->lock);
  Module* module = known_module(*rt, handle);
  if (!module) return answer(hipErrorInvalidHandle);
  for (const auto& symbol : module->code->symbols()) {
    if (symbol.function || symbol.name != name) continue;
    auto& loaded = module->loaded[current_device];
    try {
      if (!loaded) loaded = rt->machine->load_on_device(module->code, current_device);
    } catch (const ark_emu::Error&) {
      return answer(hipErrorOutOfMemory);
    }
    if (address) *address = reinterpret_cast<void*>(loaded->address_of(name));
    if (size) *size = symbol.size;
    return hipSuccess;
  }
  return answer(hipErrorNotFound);
}

HIP_EXPORT hipError_t hipFuncGetAttribute(int* value, int attribute, hipFunction_t handle) {
  HIP_ENTER();
  if (!value) return answer(hipErrorInvalidValue);
  Function* function = known_function(*rt, handle);
  if (!function) return answer(hipErrorInvalidHandle);
  const ark_emu::KernelInfo& kernel = *function->info;
  ark_emu::Arch arch = function->module->code->arch();
  switch (attribute) {
    case kAttributeMaxThreads: *value = int(kernel.max_flat_workgroup); break;
    case kAttributeStaticLds: *value = int(kernel.lds_bytes); break;
    case kAttributeScratch: *value = int(kernel.scratch_bytes); break;
    case kAttributeRegisters: *value = int(kernel.vgprs); break;
    case kAttributePtxVersion:
    case kAttributeBinaryVersion:
      *value = arch_facts(arch).major * 10 + arch_facts(arch).minor;
      break;
    case kAttributeConst:
    case kAttributeCacheMode:
    case kAttributeCarveout: *value = 0; break;
    case kAttributeDynamicLds: *value = int(spare_lds(*function)); break;
    default: return answer(hipErrorInvalidValue);
  }
  return hipSuccess;
}

HIP_EXPORT hipError_t hipFuncGetAttributes(hipFuncAttributes* attributes, const void* handle) {
  HIP_ENTER();
  if (!attributes) return answer(hipErrorInvalidValue);
  auto* function = known_function(*rt, static_cast<hipFunction_t>(const_cast<void*>(handle)));
  if (!function) return answer(hipErrorInvalidDeviceFunction);
  const ark_emu::KernelInfo& kernel = *function->info;
  memset(attributes, 0, sizeof *attributes);
  attributes->localSizeBytes = kernel.scratch_bytes;
  attributes->maxDynamicSharedSizeBytes = int(spare_lds(*function));
  attributes->maxThreadsPerBlock = int(kernel.max_flat_workgroup);
  attributes->numRegs = int(kernel.vgprs);
  attributes->sharedSizeBytes = kernel.lds_bytes;
  return hipSuccess;
}

// A launch may request all of LDS, so there is no limit to raise. The value is checked as HIP does.
HIP_EXPORT hipError_t hipFuncSetAttribute(const void* handle, int attribute, int value) {
  HIP_ENTER();
  auto* function = known_function(*rt, static_cast<hipFunction_t>(const_cast<void*>(handle)));
  if (!function) return answer(hipErrorInvalidDeviceFunction);
  if (attribute != kAttributeDynamicLds && attribute != kAttributeCarveout)
    return answer(hipErrorInvalidValue);
  if (attribute == kAttributeDynamicLds && (value < 0 || value > spare_lds(*function)))
    return answer(hipErrorInvalidValue);
  return hipSuccess;
}
