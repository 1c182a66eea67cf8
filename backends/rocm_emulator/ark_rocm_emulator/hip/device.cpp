// HIP's functions for devices: their count, their properties, and which devices can access each
// other's memory. All names contain "emulated". All numbers, such as the number of compute units,
// are those of the emulated device and not of the GPU model.
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "runtime.h"

namespace ark_hip {

namespace {

bool known_device(const Runtime& rt, int device) {
  return device >= 0 && size_t(device) < rt.devices.size();
}

std::string device_name(const Runtime& rt, int device) {
  return std::string("emulated ") + ark_emu::arch_name(rt.devices[size_t(device)]->arch) +
         " (no GPU)";
}

uint64_t total_memory() {
  return uint64_t(sysconf(_SC_PHYS_PAGES)) * uint64_t(sysconf(_SC_PAGESIZE));
}

void describe(const Runtime& rt, int index, hipDeviceProp_t* p) {
  ark_emu::Arch arch = rt.devices[size_t(index)]->arch;
  const ArchFacts& facts = arch_facts(arch);
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "%s", device_name(rt, index).c_str());
  snprintf(p->gcnArchName, sizeof p->gcnArchName, "%s", facts.full_name);
  snprintf(p->uuid.bytes, sizeof p->uuid.bytes, "emulated-%d", index);
  int wave = ark_emu::wave_size(arch);
  p->totalGlobalMem = total_memory();
  p->sharedMemPerBlock = p->sharedMemPerBlockOptin = ark_emu::lds_limit(arch);
  p->sharedMemPerMultiprocessor = p->maxSharedMemoryPerMultiProcessor = facts.lds_per_cu;
  p->regsPerBlock = p->regsPerMultiprocessor = facts.vgprs_per_simd * facts.simds * wave;
  p->warpSize = wave;
  p->maxThreadsPerBlock = kMaxThreads;
  for (int k = 0; k < 3; ++k) p->maxThreadsDim[k] = kMaxThreads;
  p->maxGridSize[0] = kMaxGridX;
  p->maxGridSize[1] = p->maxGridSize[2] = kMaxGridYZ;
  p->major = facts.major;
  p->minor = facts.minor;
  p->multiProcessorCount = rt.settings.compute_units;
  p->maxThreadsPerMultiProcessor = facts.waves_per_simd * facts.simds * wave;
  p->maxBlocksPerMultiProcessor = facts.waves_per_simd * facts.simds;
  p->canMapHostMemory = p->unifiedAddressing = p->concurrentKernels = p->managedMemory = 1;
  p->cooperativeLaunch = p->hostRegisterSupported = p->computePreemptionSupported = 1;
  p->hostNativeAtomicSupported = p->isLargeBar = 1;
  p->pciBusID = index + 1;
  p->memPitch = 2147483647;
  p->totalConstMem = 2147483647;
}

enum Attribute : int {
  kCanMapHostMemory = 3,
  kConcurrentKernels = 8,
  kCooperativeLaunch = 10,
  kHostNativeAtomic = 15,
  kMajor = 23,
  kManagedMemory = 24,
  kMaxBlocksPerUnit = 25,
  kMaxBlockX = 26,
  kMaxBlockY = 27,
  kMaxBlockZ = 28,
  kMaxGridX = 29,
  kMaxGridY = 30,
  kMaxGridZ = 31,
  kMaxThreadsPerBlock = 56,
  kMaxThreadsPerUnit = 57,
  kMinor = 61,
  kUnits = 63,
  kPciBus = 67,
  kRegistersPerBlock = 71,
  kRegistersPerUnit = 72,
  kLdsPerBlock = 74,
  kLdsOptin = 75,
  kLdsPerUnit = 76,
  kTotalMemory = 84,
  kUnifiedAddressing = 85,
  kWave = 87,
  kHostRegister = 90,
  kMaxLdsPerUnit = 10002,
  kLargeBar = 10011,
  kPhysicalUnits = 10015,
  kFineGrain = 10016,
  kXccs = 10018,
};

// Attributes for which the emulator has no true value (clock rates, cache sizes) are 0.
bool attribute_value(const hipDeviceProp_t& p, int attribute, int64_t* value) {
  switch (attribute) {
    case kCanMapHostMemory:
    case kConcurrentKernels:
    case kCooperativeLaunch:
    case kHostNativeAtomic:
    case kManagedMemory:
    case kUnifiedAddressing:
    case kHostRegister:
    case kLargeBar:
    case kFineGrain:
    case kXccs: *value = 1; return true;
    case kMajor: *value = p.major; return true;
    case kMinor: *value = p.minor; return true;
    case kMaxBlocksPerUnit: *value = p.maxBlocksPerMultiProcessor; return true;
    case kMaxBlockX:
    case kMaxBlockY:
    case kMaxBlockZ: *value = p.maxThreadsDim[attribute - kMaxBlockX]; return true;
    case kMaxGridX:
    case kMaxGridY:
    case kMaxGridZ: *value = p.maxGridSize[attribute - kMaxGridX]; return true;
    case kMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; return true;
    case kMaxThreadsPerUnit: *value = p.maxThreadsPerMultiProcessor; return true;
    case kUnits:
    case kPhysicalUnits: *value = p.multiProcessorCount; return true;
    case kPciBus: *value = p.pciBusID; return true;
    case kRegistersPerBlock: *value = p.regsPerBlock; return true;
    case kRegistersPerUnit: *value = p.regsPerMultiprocessor; return true;
    case kLdsPerBlock:
    case kLdsOptin: *value = int64_t(p.sharedMemPerBlock); return true;
    case kLdsPerUnit:
    case kMaxLdsPerUnit: *value = int64_t(p.maxSharedMemoryPerMultiProcessor); return true;
    case kTotalMemory:
      *value = int64_t(std::min<uint64_t>(p.totalGlobalMem, 2147483647));
      return true;
    case kWave: *value = p.warpSize; return true;
    default: break;
  }
  constexpr int kCommonEnd = 96, kAmdBegin = 10000, kAmdEnd = 10023;
  *value = 0;
  return (attribute > 0 && attribute < kCommonEnd) ||
         (attribute > kAmdBegin && attribute < kAmdEnd);
}

}  // namespace

}  // namespace ark_hip

using namespace ark_hip;

HIP_EXPORT hipError_t hipGetDeviceCount(int* count) {
  if (!count) return answer(hipErrorInvalidValue);
  *count = 0;
  HIP_ENTER();
  *count = int(rt->devices.size());
  return hipSuccess;
}

HIP_EXPORT hipError_t hipSetDevice(int device) {
  HIP_ENTER();
  if (!known_device(*rt, device)) return answer(hipErrorInvalidDevice);
  current_device = device;
  return hipSuccess;
}

HIP_EXPORT hipError_t hipGetDevice(int* device) {
  HIP_ENTER();
  if (!device) return answer(hipErrorInvalidValue);
  *device = current_device;
  return hipSuccess;
}

HIP_EXPORT hipError_t hipDeviceGet(int* device, int ordinal) {
  HIP_ENTER();
  if (!device) return answer(hipErrorInvalidValue);
  if (!known_device(*rt, ordinal)) return answer(hipErrorInvalidDevice);
  *device = ordinal;
  return hipSuccess;
}

// Clears only the error that a kernel's fault has left. Data that the fault has destroyed stays
// lost, as after a reset of a GPU.
HIP_EXPORT hipError_t hipDeviceReset() {
  HIP_ENTER();
  wait_device(*rt, current_device);
  std::lock_guard<std::mutex> hold(rt->lock);
  rt->devices[size_t(current_device)]->sticky = hipSuccess;
  return hipSuccess;
}

HIP_EXPORT hipError_t hipGetDevicePropertiesR0600(hipDeviceProp_t* properties, int device) {
  HIP_ENTER();
  if (!properties) return answer(hipErrorInvalidValue);
  if (!known_device(*rt, device)) return answer(hipErrorInvalidDevice);
  describe(*rt, device, properties);
  return hipSuccess;
}

HIP_EXPORT hipError_t hipDeviceGetAttribute(int* value, int attribute, int device) {
  HIP_ENTER();
  if (!value) return answer(hipErrorInvalidValue);
  if (!known_device(*rt, device)) return answer(hipErrorInvalidDevice);
  hipDeviceProp_t properties;
  describe(*rt, device, &properties);
  int64_t wide = 0;
  if (!attribute_value(properties, attribute, &wide)) return answer(hipErrorInvalidValue);
  *value = int(wide);
  return hipSuccess;
}

HIP_EXPORT hipError_t hipDeviceGetName(char* name, int length, int device) {
  HIP_ENTER();
  if (!name || length <= 0) return answer(hipErrorInvalidValue);
  if (!known_device(*rt, device)) return answer(hipErrorInvalidDevice);
  snprintf(name, size_t(length), "%s", device_name(*rt, device).c_str());
  return hipSuccess;
}

HIP_EXPORT hipError_t hipDeviceComputeCapability(int* major, int* minor, int device) {
  HIP_ENTER();
  if (!major || !minor) return answer(hipErrorInvalidValue);
  if (!known_device(*rt, device)) return answer(hipErrorInvalidDevice);
  const ArchFacts& facts = arch_facts(rt->devices[size_t(device)]->arch);
  *major = facts.major;
  *minor = facts.minor;
  return hipSuccess;
}

HIP_EXPORT hipError_t hipDeviceTotalMem(size_t* bytes, int device) {
  HIP_ENTER();
  if (!bytes) return answer(hipErrorInvalidValue);
  if (!known_device(*rt, device)) return answer(hipErrorInvalidDevice);
  *bytes = total_memory();
  return hipSuccess;
}

HIP_EXPORT hipError_t hipDeviceGetPCIBusId(char* id, int length, int device) {
  HIP_ENTER();
  if (!id || length <= 0) return answer(hipErrorInvalidValue);
  if (!known_device(*rt, device)) return answer(hipErrorInvalidDevice);
  snprintf(id, size_t(length), "0000:%02x:00.0", device + 1);
  return hipSuccess;
}

HIP_EXPORT hipError_t hipDeviceCanAccessPeer(int* can, int device, int peer) {
  HIP_ENTER();
  if (!can) return answer(hipErrorInvalidValue);
  if (!known_device(*rt, device) || !known_device(*rt, peer)) return answer(hipErrorInvalidDevice);
  *can = device != peer;
  return hipSuccess;
}

// Reports the link between two devices. Emulated devices reach each other directly, as over one hop
// of XGMI.
HIP_EXPORT hipError_t hipExtGetLinkTypeAndHopCount(int first, int second, uint32_t* type,
                                                   uint32_t* hops) {
  HIP_ENTER();
  if (!type || !hops || first == second) return answer(hipErrorInvalidValue);
  if (!known_device(*rt, first) || !known_device(*rt, second)) return answer(hipErrorInvalidDevice);
  constexpr uint32_t kPcie = 2, kXgmi = 4;
  *type = rt->settings.stores_only ? kPcie : kXgmi;
  *hops = 1;
  return hipSuccess;
}

HIP_EXPORT hipError_t hipDeviceGetP2PAttribute(int* value, int attribute, int device, int peer) {
  enum : int { kRank, kAccess, kNativeAtomics, kArrays };
  HIP_ENTER();
  if (!value || device == peer) return answer(hipErrorInvalidValue);
  if (!known_device(*rt, device) || !known_device(*rt, peer)) return answer(hipErrorInvalidDevice);
  switch (attribute) {
    case kRank: *value = 0; return hipSuccess;
    case kAccess: *value = 1; return hipSuccess;
    case kNativeAtomics: *value = !rt->settings.stores_only; return hipSuccess;
    case kArrays: *value = 0; return hipSuccess;
    default: return answer(hipErrorInvalidValue);
  }
}

static void refresh_access(Runtime& rt, int owner) {
  for (auto& [base, allocation] : rt.allocations)
    if (allocation.device == owner && !allocation.imported)
      rt.machine->set_access(base, access_mask(rt, owner));
}

HIP_EXPORT hipError_t hipDeviceEnablePeerAccess(int peer, unsigned flags) {
  HIP_ENTER();
  if (flags != 0) return answer(hipErrorInvalidValue);
  if (!known_device(*rt, peer) || peer == current_device) return answer(hipErrorInvalidDevice);
  std::lock_guard<std::mutex> hold(rt->lock);
  if (!rt->devices[size_t(current_device)]->peers.insert(peer).second)
    return answer(hipErrorPeerAccessAlreadyEnabled);
  refresh_access(*rt, peer);
  return hipSuccess;
}

HIP_EXPORT hipError_t hipDeviceDisablePeerAccess(int peer) {
  HIP_ENTER();
  if (!known_device(*rt, peer)) return answer(hipErrorInvalidDevice);
  std::lock_guard<std::mutex> hold(rt->lock);
  if (rt->devices[size_t(current_device)]->peers.erase(peer) == 0)
    return answer(hipErrorPeerAccessNotEnabled);
  refresh_access(*rt, peer);
  return hipSuccess;
}

HIP_EXPORT hipError_t hipMemcpyAsync(void* to, const void* from, size_t size, hipMemcpyKind kind,
                                     hipStream_t stream);
HIP_EXPORT hipError_t hipMemcpy(void* to, const void* from, size_t size, hipMemcpyKind kind);

HIP_EXPORT hipError_t hipMemcpyPeer(void* to, int to_device, const void* from, int from_device,
                                    size_t size) {
  HIP_ENTER();
  if (!known_device(*rt, to_device) || !known_device(*rt, from_device))
    return answer(hipErrorInvalidDevice);
  return hipMemcpy(to, from, size, hipMemcpyDeviceToDevice);
}

HIP_EXPORT hipError_t hipMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device,
                                         size_t size, hipStream_t stream) {
  HIP_ENTER();
  if (!known_device(*rt, to_device) || !known_device(*rt, from_device))
    return answer(hipErrorInvalidDevice);
  return hipMemcpyAsync(to, from, size, hipMemcpyDeviceToDevice, stream);
}
