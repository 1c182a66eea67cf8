// HIP's copies and fills (hipMemcpy, hipMemset, ...), in streams, with the checks that HIP makes
// before it queues them.
#include <cstring>

#include "runtime.h"

namespace ark_hip {

namespace {

// True if a copy may access the range of addresses. The range must lie in one allocation, in one
// variable, or in host memory that HIP did not allocate. known: set to true in the first two cases.
bool plausible(Runtime& rt, const void* address, uint64_t size, bool* known) {
  const uint64_t begin = uint64_t(address);
  // Tests whether `begin` is in [base, base + span). If so, sets `fits` to whether the whole range
  // is.
  bool fits = false;
  const auto inside = [begin, size, &fits](uint64_t base, uint64_t span) {
    if (begin < base || begin - base >= span) return false;
    fits = size <= span - (begin - base);
    return true;
  };
  std::lock_guard<std::mutex> hold(rt.lock);
  *known = true;
  if (const Allocation* found = find_allocation(rt, begin)) {
    inside(found->base, found->size);
    return fits;
  }
  for (auto& module : rt.modules)
    for (auto& [device, loaded] : module->loaded)
      for (const auto& symbol : loaded->code().symbols())
        if (inside(loaded->image() + symbol.offset, symbol.size)) return fits;
  *known = false;
  for (auto& device : rt.devices)
    if (begin - device->arena.base < device->arena.capacity) return false;
  return readable(address, size);
}

hipError_t copy(void* to, const void* from, size_t size, hipMemcpyKind kind, hipStream_t stream,
                bool wait) {
  HIP_ENTER();
  if (kind < 0 || (kind > hipMemcpyDefault && kind != hipMemcpyDeviceToDeviceNoCU))
    return answer(hipErrorInvalidMemcpyDirection);
  if (size == 0) return hipSuccess;
  if (!to || !from) return answer(hipErrorInvalidValue);
  bool to_known = false, from_known = false;
  if (!plausible(*rt, to, size, &to_known) || !plausible(*rt, from, size, &from_known))
    return answer(hipErrorInvalidValue);
  if (!to_known && !from_known && kind != hipMemcpyHostToHost && kind != hipMemcpyDefault)
    return answer(hipErrorInvalidValue);
  Stream* on = resolve(*rt, stream);
  if (!on) return answer(hipErrorInvalidHandle);
  std::shared_ptr<std::vector<uint8_t>> staged;
  const void* source = from;
  if (!wait &&
      !from_known) {  // pageable memory: the caller may reuse it as soon as the call returns
    auto* bytes = static_cast<const uint8_t*>(from);
    staged = std::make_shared<std::vector<uint8_t>>(bytes, bytes + size);
    source = staged->data();
  }
  auto op = enqueue(*on, [rt, to, source, size, staged] {
    copy_bytes(*rt, to, source, size);
    return hipSuccess;
  });
  if (wait || !to_known) op->wait();
  return answer(sticky_error(*rt, on->device));
}

hipError_t fill(void* to, const void* pattern, size_t width, size_t count, hipStream_t stream,
                bool wait) {
  HIP_ENTER();
  if (count == 0) return hipSuccess;
  bool known = false;
  if (!to || count > ~uint64_t(0) / width || !plausible(*rt, to, width * count, &known) || !known)
    return answer(hipErrorInvalidValue);
  Stream* on = resolve(*rt, stream);
  if (!on) return answer(hipErrorInvalidHandle);
  uint32_t value = 0;
  memcpy(&value, pattern, width);
  auto op = enqueue(*on, [rt, to, value, width, count] {
    auto* bytes = static_cast<uint8_t*>(to);
    if (width == 1)
      memset(bytes, int(value), count);
    else
      for (size_t i = 0; i < count; ++i) memcpy(bytes + i * width, &value, width);
    rt->machine->host_wrote(uint64_t(to), width * count);
    return hipSuccess;
  });
  if (wait) op->wait();
  return answer(sticky_error(*rt, on->device));
}

}  // namespace

void copy_bytes(Runtime& rt, void* to, const void* from, uint64_t size) {
  memmove(to, from, size);
  ark_emu::Region region;
  if (rt.machine->find_region(uint64_t(to), &region)) rt.machine->host_wrote(uint64_t(to), size);
}

}  // namespace ark_hip

using namespace ark_hip;

HIP_EXPORT hipError_t hipMemcpy(void* to, const void* from, size_t size, hipMemcpyKind kind) {
  return copy(to, from, size, kind, nullptr, true);
}
HIP_EXPORT hipError_t hipMemcpyWithStream(void* to, const void* from, size_t size,
                                          hipMemcpyKind kind, hipStream_t s) {
  return copy(to, from, size, kind, s, true);
}
HIP_EXPORT hipError_t hipMemcpyAsync(void* to, const void* from, size_t size, hipMemcpyKind kind,
                                     hipStream_t s) {
  return copy(to, from, size, kind, s, false);
}
HIP_EXPORT hipError_t hipMemcpyHtoD(void* to, const void* from, size_t size) {
  return copy(to, from, size, hipMemcpyHostToDevice, nullptr, true);
}
HIP_EXPORT hipError_t hipMemcpyDtoH(void* to, void* from, size_t size) {
  return copy(to, from, size, hipMemcpyDeviceToHost, nullptr, true);
}
HIP_EXPORT hipError_t hipMemcpyDtoD(void* to, void* from, size_t size) {
  return copy(to, from, size, hipMemcpyDeviceToDevice, nullptr, true);
}
HIP_EXPORT hipError_t hipMemcpyHtoDAsync(void* to, const void* from, size_t size,
                                         hipStream_t stream) {
  return copy(to, from, size, hipMemcpyHostToDevice, stream, false);
}
HIP_EXPORT hipError_t hipMemcpyDtoHAsync(void* to, void* from, size_t size, hipStream_t stream) {
  return copy(to, from, size, hipMemcpyDeviceToHost, stream, false);
}
HIP_EXPORT hipError_t hipMemcpyDtoDAsync(void* to, void* from, size_t size, hipStream_t stream) {
  return copy(to, from, size, hipMemcpyDeviceToDevice, stream, false);
}

HIP_EXPORT hipError_t hipMemset(void* to, int value, size_t size) {
  return fill(to, &value, 1, size, nullptr, true);
}
HIP_EXPORT hipError_t hipMemsetAsync(void* to, int value, size_t size, hipStream_t stream) {
  return fill(to, &value, 1, size, stream, false);
}
HIP_EXPORT hipError_t hipMemsetD8(void* to, unsigned char value, size_t count) {
  return fill(to, &value, 1, count, nullptr, true);
}
HIP_EXPORT hipError_t hipMemsetD16(void* to, unsigned short value, size_t count) {
  return fill(to, &value, 2, count, nullptr, true);
}
HIP_EXPORT hipError_t hipMemsetD32(void* to, int value, size_t count) {
  return fill(to, &value, 4, count, nullptr, true);
}
HIP_EXPORT hipError_t hipMemsetD32Async(void* to, int value, size_t count, hipStream_t stream) {
  return fill(to, &value, 4, count, stream, false);
}
