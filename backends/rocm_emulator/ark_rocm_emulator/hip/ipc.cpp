// Device memory shared between processes of one machine. A handle names the owner's memory file and
// a range of it.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "runtime.h"

namespace {

constexpr uint64_t kMagic = 0x3163706961726b41;

struct Handle {
  uint64_t magic, inode, offset, size;
  int32_t pid, fd;
  uint32_t kind;
  int32_t records_fd;
  int32_t device;
  uint32_t padding[3];
};
static_assert(sizeof(Handle) == sizeof(hipIpcMemHandle_t), "a HIP handle is 64 bytes");

// Maps records of accesses to a device's memory, for `size` bytes of this memory from `offset` on.
// The emulator's race checks of all processes share these records. Null if the records cannot be
// shared; the checks then do not see other processes' accesses.
void* map_records(int fd, uint64_t offset, uint64_t size) {
  constexpr uint64_t kPerByte = ark_emu::kRecordBytes / 4;
  void* at = mmap(nullptr, size * kPerByte, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd,
                  off_t(offset * kPerByte));
  return at == MAP_FAILED ? nullptr : at;
}

// Returns the file that holds the records of accesses to a device's whole memory; -1 if there is
// none.
int records_file(ark_hip::Arena& arena) {
  if (arena.records_fd >= 0 || !ark_emu::can_share_checks()) return arena.records_fd;
  const int fd = memfd_create("ark-emulated-records", MFD_CLOEXEC);
  if (fd >= 0 && ftruncate(fd, off_t(arena.capacity / 4 * ark_emu::kRecordBytes)) != 0) {
    close(fd);
    return -1;
  }
  arena.records_fd = fd;
  return fd;
}

uint64_t span_of(uint64_t size) { return (size + 4095) / 4096 * 4096; }

}  // namespace

using namespace ark_hip;

HIP_EXPORT hipError_t hipIpcGetMemHandle(hipIpcMemHandle_t* handle, void* pointer) {
  HIP_ENTER();
  if (!handle || !pointer) return answer(hipErrorInvalidValue);
  std::lock_guard<std::mutex> hold(rt->lock);
  const Allocation* found = find_allocation(*rt, uint64_t(pointer));
  if (!found || found->device < 0 || found->imported) return answer(hipErrorInvalidDevicePointer);
  Arena& arena = rt->devices[size_t(found->device)]->arena;
  struct stat facts{};
  if (fstat(arena.fd, &facts) != 0) return answer(hipErrorOperatingSystem);
  Allocation& shared = rt->allocations[found->base];
  if (rt->settings.checks && shared.records == nullptr && records_file(arena) >= 0) {
    const uint64_t span = span_of(shared.size);
    shared.records = map_records(arena.records_fd, shared.arena_offset, span);
    // Clears the records: old records belong to memory that has been freed.
    if (shared.records) madvise(shared.records, span / 4 * ark_emu::kRecordBytes, MADV_REMOVE);
  }
  rt->machine->set_shared(shared.base, shared.records);
  Handle made{.magic = kMagic,
              .inode = facts.st_ino,
              .offset = found->arena_offset,
              .size = found->size,
              .pid = getpid(),
              .fd = arena.fd,
              .kind = uint32_t(found->kind),
              .records_fd = arena.records_fd,
              .device = found->device,
              .padding = {}};
  memcpy(handle, &made, sizeof made);
  return hipSuccess;
}

HIP_EXPORT hipError_t hipIpcOpenMemHandle(void** pointer, hipIpcMemHandle_t handle, unsigned) {
  HIP_ENTER();
  if (!pointer) return answer(hipErrorInvalidValue);
  Handle given;
  memcpy(&given, &handle, sizeof given);
  if (given.magic != kMagic) return answer(hipErrorInvalidValue);
  if (given.pid == getpid()) return answer(hipErrorInvalidContext);
  std::lock_guard<std::mutex> hold(rt->lock);
  std::string key(handle.reserved, sizeof handle.reserved);
  for (auto& [base, allocation] : rt->allocations) {
    if (!allocation.imported || allocation.handle != key || allocation.device != current_device)
      continue;
    ++allocation.opened;
    *pointer = reinterpret_cast<void*>(base);
    return hipSuccess;
  }
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", given.pid, given.fd);
  int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return answer(hipErrorMapFailed);
  struct stat facts{};
  bool same = fstat(fd, &facts) == 0 && facts.st_ino == given.inode && given.size > 0;
  const uint64_t most = same ? uint64_t(facts.st_size) : 0;
  same = same && given.offset <= most && given.size <= most - given.offset &&
         given.kind <= uint32_t(ark_emu::MemKind::Uncached);
  void* base = MAP_FAILED;
  if (same)
    base = mmap(nullptr, span_of(given.size), PROT_READ | PROT_WRITE, MAP_SHARED, fd,
                off_t(given.offset));
  close(fd);
  void* records = nullptr;
  if (base != MAP_FAILED && rt->settings.checks && given.records_fd >= 0 &&
      ark_emu::can_share_checks()) {
    snprintf(path, sizeof path, "/proc/%d/fd/%d", given.pid, given.records_fd);
    fd = open(path, O_RDWR | O_CLOEXEC);
    const uint64_t end = (given.offset + span_of(given.size)) / 4 * ark_emu::kRecordBytes;
    if (fd >= 0 && fstat(fd, &facts) == 0 && uint64_t(facts.st_size) >= end)
      records = map_records(fd, given.offset, span_of(given.size));
    if (fd >= 0) close(fd);
  }
  if (base == MAP_FAILED) return answer(hipErrorMapFailed);
  Allocation made{.base = uint64_t(base), .size = given.size, .device = current_device};
  made.kind = ark_emu::MemKind(given.kind);
  made.imported = true;
  made.far = given.device != current_device;
  made.records = records;
  made.handle = key;
  register_region(*rt, made, access_mask(*rt, current_device), "hipIpcOpenMemHandle");
  rt->allocations[made.base] = made;
  *pointer = base;
  return hipSuccess;
}

HIP_EXPORT hipError_t hipIpcCloseMemHandle(void* pointer) {
  HIP_ENTER();
  if (!pointer) return answer(hipErrorInvalidValue);
  if (!quiet(*rt, current_device, "hipIpcCloseMemHandle")) return answer(hipErrorNotReady);
  std::lock_guard<std::mutex> hold(rt->lock);
  auto found = rt->allocations.find(uint64_t(pointer));
  if (found == rt->allocations.end() || !found->second.imported)
    return answer(hipErrorInvalidValue);
  if (--found->second.opened > 0) return hipSuccess;
  rt->machine->remove_region(found->first);
  munmap(pointer, span_of(found->second.size));
  rt->allocations.erase(found);
  return hipSuccess;
}
