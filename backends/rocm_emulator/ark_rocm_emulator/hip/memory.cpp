// HIP's memory functions. Device memory comes from one sparse file per device. An address is never
// allocated twice, so that a use of a freed pointer is detected.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cinttypes>
#include <cstdio>
#include <cstring>

#include "runtime.h"

namespace ark_hip {

namespace {

constexpr uint64_t kPage = 4096;
constexpr uint8_t kFill = 0xCB;  // the contents of unwritten memory

// Rounds a size up to whole pages. Returns 0 if the result overflows.
uint64_t whole_pages(uint64_t size) { return (size + kPage - 1) / kPage * kPage; }

// True if the process can read the byte at an address. The kernel reads the byte and returns EFAULT
// if it is not mapped, where a load would end the process. The raw system call is used instead of
// pwrite, because a sanitizer's version of pwrite reads the byte first.
bool readable_byte(const void* address) {
  static const int probe = memfd_create("ark-emulated-probe", MFD_CLOEXEC);
  return syscall(SYS_pwrite64, probe, address, 1, 0) == 1;
}

uint64_t physical_memory() {
  return uint64_t(sysconf(_SC_PHYS_PAGES)) * uint64_t(sysconf(_SC_PAGESIZE));
}

uint64_t every_device(const Runtime& rt) {
  size_t count = rt.devices.size();
  return count >= 64 ? ~uint64_t(0) : (uint64_t(1) << count) - 1;
}

// Returns the memory that the host can still provide without swapping, or all of the host's memory
// if that is not known.
uint64_t available_memory() {
  uint64_t kilobytes = 0;
  FILE* facts = fopen("/proc/meminfo", "r");
  if (!facts) return physical_memory();
  char line[128];
  while (fgets(line, sizeof line, facts) != nullptr)
    if (sscanf(line, "MemAvailable: %" SCNu64, &kilobytes) == 1) break;
  fclose(facts);
  return kilobytes ? kilobytes * 1024 : physical_memory();
}

hipError_t give_host_memory(Runtime& rt, uint64_t size, unsigned flags, bool managed, void** out) {
  if (whole_pages(size) < size) return hipErrorOutOfMemory;
  void* base =
      mmap(nullptr, whole_pages(size), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) return hipErrorOutOfMemory;
  std::lock_guard<std::mutex> hold(rt.lock);
  Allocation made{.base = uint64_t(base),
                  .size = size,
                  .device = -1,
                  .flags = flags,
                  .kind = ark_emu::MemKind::Host};
  made.managed = managed;
  try {
    register_region(rt, made, every_device(rt), managed ? "hipMallocManaged" : "hipHostMalloc");
  } catch (const ark_emu::Error&) {  // the caller registered this range and then unmapped it
    munmap(base, whole_pages(size));
    return hipErrorHostMemoryAlreadyRegistered;
  }
  rt.allocations[made.base] = made;
  *out = base;
  return hipSuccess;
}

hipError_t release(void* pointer, bool host) {
  HIP_ENTER();
  if (!pointer) return hipSuccess;
  Allocation gone;
  {
    std::lock_guard<std::mutex> hold(rt->lock);
    auto found = rt->allocations.find(uint64_t(pointer));
    if (found == rt->allocations.end()) return answer(hipErrorInvalidValue);
    gone = found->second;
  }
  bool is_host = gone.device < 0 && !gone.managed;
  if (is_host != host || gone.registered || gone.imported) return answer(hipErrorInvalidValue);
  for (size_t d = 0; d < rt->devices.size(); ++d)
    if ((gone.device < 0 || gone.device == int(d)) &&
        !quiet(*rt, int(d), host ? "hipHostFree" : "hipFree"))
      return answer(hipErrorNotReady);
  std::lock_guard<std::mutex> hold(rt->lock);
  if (rt->allocations.erase(gone.base) == 0) return answer(hipErrorInvalidValue);
  rt->machine->remove_region(gone.base);
  if (gone.device < 0) {
    munmap(pointer, whole_pages(gone.size));
  } else {
    Arena& arena = rt->devices[size_t(gone.device)]->arena;
    fallocate(arena.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off_t(gone.arena_offset),
              off_t(whole_pages(gone.size)));
    arena.used -= whole_pages(gone.size);
  }
  return hipSuccess;
}

}  // namespace

bool readable(const void* address, uint64_t size) {
  const uint64_t first = uint64_t(address), last = first + size - 1;
  if (size == 0 || last < first || !readable_byte(address)) return false;
  for (uint64_t page = first / kPage + 1; page <= last / kPage; page++)
    if (!readable_byte(reinterpret_cast<const void*>(page * kPage))) return false;
  return true;
}

const Allocation* find_allocation(Runtime& rt, uint64_t address) {
  auto next = rt.allocations.upper_bound(address);
  if (next == rt.allocations.begin()) return nullptr;
  const Allocation& candidate = std::prev(next)->second;
  return address < candidate.base + candidate.size ? &candidate : nullptr;
}

uint64_t access_mask(Runtime& rt, int owner) {
  uint64_t mask = uint64_t(1) << owner;
  for (size_t d = 0; d < rt.devices.size(); ++d)
    if (rt.devices[d]->peers.count(owner)) mask |= uint64_t(1) << d;
  return mask;
}

void register_region(Runtime& rt, const Allocation& allocation, uint64_t access, const char* call) {
  ark_emu::Region region;
  region.base = allocation.base;
  region.size = allocation.size;
  region.device = allocation.device;
  region.kind = allocation.kind;
  region.access = access;
  region.far = allocation.far;
  region.shared = allocation.imported;
  region.records = allocation.records;
  region.initialised = allocation.imported || allocation.device < 0;
  region.name = std::string(call) + "#" + std::to_string(++rt.names);
  rt.machine->add_region(std::move(region));
}

hipError_t give_memory(Runtime& rt, int device, ark_emu::MemKind kind, uint64_t size,
                       unsigned flags, void** out) {
  std::lock_guard<std::mutex> hold(rt.lock);
  Arena& arena = rt.devices[size_t(device)]->arena;
  uint64_t span = whole_pages(size);
  if (arena.used == 0 && arena.top > arena.capacity / 2) arena.top = 0;
  if (span < size || span > available_memory() || arena.used + span > physical_memory() ||
      arena.top + span + kPage > arena.capacity)
    return hipErrorOutOfMemory;
  Allocation made{
      .base = arena.base + arena.top, .size = size, .device = device, .flags = flags, .kind = kind};
  made.arena_offset = arena.top;
  arena.top += span + kPage;
  arena.used += span;
  memset(reinterpret_cast<void*>(made.base), kFill, span);
  register_region(rt, made, access_mask(rt, device), "hipMalloc");
  rt.allocations[made.base] = made;
  *out = reinterpret_cast<void*>(made.base);
  return hipSuccess;
}

}  // namespace ark_hip

using namespace ark_hip;

HIP_EXPORT hipError_t hipExtMallocWithFlags(void** pointer, size_t size, unsigned flags) {
  HIP_ENTER();
  if (!pointer || flags > kDeviceMallocContiguous) return answer(hipErrorInvalidValue);
  *pointer = nullptr;
  if (size == 0) return hipSuccess;
  if (flags == kMallocSignalMemory && size != 8) return answer(hipErrorInvalidValue);
  ark_emu::MemKind kind = flags == kDeviceMallocFinegrained ? ark_emu::MemKind::Fine
                          : flags == kDeviceMallocUncached || flags == kMallocSignalMemory
                              ? ark_emu::MemKind::Uncached
                              : ark_emu::MemKind::Device;
  return answer(give_memory(*rt, current_device, kind, size, flags, pointer));
}

HIP_EXPORT hipError_t hipMalloc(void** pointer, size_t size) {
  return hipExtMallocWithFlags(pointer, size, 0);
}

HIP_EXPORT hipError_t hipMallocManaged(void** pointer, size_t size, unsigned flags) {
  HIP_ENTER();
  constexpr unsigned kAttachGlobal = 0x1, kAttachHost = 0x2;
  if (!pointer || size == 0 || (flags != kAttachGlobal && flags != kAttachHost))
    return answer(hipErrorInvalidValue);
  return answer(give_host_memory(*rt, size, flags, true, pointer));
}

HIP_EXPORT hipError_t hipHostMalloc(void** pointer, size_t size, unsigned flags) {
  HIP_ENTER();
  if (!pointer || (flags & ~kHostMallocFlagsKnown)) return answer(hipErrorInvalidValue);
  *pointer = nullptr;
  if (size == 0) return hipSuccess;
  return answer(give_host_memory(*rt, size, flags, false, pointer));
}

HIP_EXPORT hipError_t hipHostAlloc(void** pointer, size_t size, unsigned flags) {
  return hipHostMalloc(pointer, size, flags);
}

HIP_EXPORT hipError_t hipFree(void* pointer) { return release(pointer, false); }
HIP_EXPORT hipError_t hipHostFree(void* pointer) { return release(pointer, true); }
HIP_EXPORT hipError_t hipFreeHost(void* pointer) { return release(pointer, true); }

HIP_EXPORT hipError_t hipHostGetDevicePointer(void** device_pointer, void* host_pointer,
                                              unsigned flags) {
  HIP_ENTER();
  if (!device_pointer || !host_pointer || flags != 0) return answer(hipErrorInvalidValue);
  std::lock_guard<std::mutex> hold(rt->lock);
  const Allocation* found = find_allocation(*rt, uint64_t(host_pointer));
  if (!found || found->device >= 0) return answer(hipErrorInvalidValue);
  *device_pointer = host_pointer;
  return hipSuccess;
}

HIP_EXPORT hipError_t hipHostGetFlags(unsigned* flags, void* pointer) {
  HIP_ENTER();
  if (!flags || !pointer) return answer(hipErrorInvalidValue);
  std::lock_guard<std::mutex> hold(rt->lock);
  const Allocation* found = find_allocation(*rt, uint64_t(pointer));
  if (!found || found->device >= 0) return answer(hipErrorInvalidValue);
  *flags = found->flags;
  return hipSuccess;
}

HIP_EXPORT hipError_t hipHostRegister(void* pointer, size_t size, unsigned flags) {
  HIP_ENTER();
  if (!pointer || flags > kHostRegisterFlagsKnown || !readable(pointer, size))
    return answer(hipErrorInvalidValue);
  std::lock_guard<std::mutex> hold(rt->lock);
  if (find_allocation(*rt, uint64_t(pointer))) return answer(hipErrorHostMemoryAlreadyRegistered);
  Allocation made{.base = uint64_t(pointer),
                  .size = size,
                  .device = -1,
                  .flags = flags,
                  .kind = ark_emu::MemKind::Host};
  made.registered = true;
  try {
    register_region(*rt, made, every_device(*rt), "hipHostRegister");
  } catch (const ark_emu::Error&) {
    return answer(hipErrorHostMemoryAlreadyRegistered);
  }
  rt->allocations[made.base] = made;
  return hipSuccess;
}

HIP_EXPORT hipError_t hipHostUnregister(void* pointer) {
  HIP_ENTER();
  std::lock_guard<std::mutex> hold(rt->lock);
  auto found = rt->allocations.find(uint64_t(pointer));
  if (found == rt->allocations.end() || !found->second.registered)
    return answer(hipErrorHostMemoryNotRegistered);
  rt->machine->remove_region(found->first);
  rt->allocations.erase(found);
  return hipSuccess;
}

// Returns the free and the total memory of the host, because emulated devices use that memory.
HIP_EXPORT hipError_t hipMemGetInfo(size_t* free_bytes, size_t* total) {
  HIP_ENTER();
  std::lock_guard<std::mutex> hold(rt->lock);
  uint64_t all = physical_memory();
  if (total) *total = all;
  if (free_bytes) *free_bytes = all - rt->devices[size_t(current_device)]->arena.used;
  return hipSuccess;
}

HIP_EXPORT hipError_t hipMemGetAddressRange(void** base, size_t* size, void* pointer) {
  HIP_ENTER();
  std::lock_guard<std::mutex> hold(rt->lock);
  const Allocation* found = find_allocation(*rt, uint64_t(pointer));
  if (!found) return answer(hipErrorNotFound);
  if (base) *base = reinterpret_cast<void*>(found->base);
  if (size) *size = found->size;
  return hipSuccess;
}

HIP_EXPORT hipError_t hipPointerGetAttributes(hipPointerAttribute_t* attributes,
                                              const void* pointer) {
  HIP_ENTER();
  if (!attributes || !pointer) return answer(hipErrorInvalidValue);
  std::lock_guard<std::mutex> hold(rt->lock);
  const Allocation* found = find_allocation(*rt, uint64_t(pointer));
  memset(attributes, 0, sizeof *attributes);
  attributes->device = -2;  // HIP's number for "no device"
  if (!found) return hipSuccess;
  attributes->type = found->managed      ? hipMemoryTypeManaged
                     : found->device < 0 ? hipMemoryTypeHost
                                         : hipMemoryTypeDevice;
  attributes->device = found->device < 0 ? 0 : found->device;
  attributes->devicePointer = const_cast<void*>(pointer);
  attributes->hostPointer = found->device < 0 ? const_cast<void*>(pointer) : nullptr;
  attributes->isManaged = found->managed;
  attributes->allocationFlags = found->flags;
  return hipSuccess;
}
