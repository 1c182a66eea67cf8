// Creates and configures the emulated devices, and reports their failures. The ark_emulator_*
// functions are not part of HIP. The Python package calls them to choose devices and to read the
// emulator's messages.
#include "runtime.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

namespace ark_hip {

thread_local int current_device = 0;

namespace {

std::mutex g_lock;
Runtime* g_runtime = nullptr;  // never destroyed: threads of the emulator may outlive main
Settings g_settings;
std::vector<std::pair<Runtime*, Settings>> g_waiting;  // saved by ark_emulator_enter
std::string g_error = "no emulated device was asked for";

thread_local hipError_t last_error = hipSuccess;

// The most and the least bytes of address space to reserve for a device's memory. If the system
// does not grant a size, half of it is tried. Physical pages are allocated only when they are used.
constexpr uint64_t kMostArenaBytes = uint64_t(1) << 40, kLeastArenaBytes = uint64_t(1) << 32;

Arena make_arena(int device) {
  Arena arena;
  std::string name = "ark-emulated-device-" + std::to_string(device);
  arena.fd = memfd_create(name.c_str(), MFD_CLOEXEC);
  if (arena.fd < 0)
    throw ark_emu::Error("cannot create the memory file of an emulated device: " +
                         std::string(strerror(errno)));
  for (uint64_t size = kMostArenaBytes; size >= kLeastArenaBytes; size /= 2) {
    if (ftruncate(arena.fd, off_t(size)) != 0) continue;
    void* base =
        mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, arena.fd, 0);
    if (base == MAP_FAILED) continue;
    arena.base = uint64_t(base);
    arena.capacity = size;
    return arena;
  }
  close(arena.fd);
  throw ark_emu::Error("the system refused to reserve address space for an emulated device");
}

// A child of fork has none of the threads of its parent's runtime, so it starts with a new one.
void forget_after_fork() {
  g_runtime = nullptr;
  for (auto& [waiting, settings] : g_waiting) waiting = nullptr;
}

Runtime* make_runtime() {
  [[maybe_unused]] static const int registered =
      pthread_atfork(nullptr, nullptr, forget_after_fork);
  if (g_settings.archs.empty()) return nullptr;
  try {
    auto rt = std::make_unique<Runtime>();
    rt->settings = g_settings;
    std::vector<ark_emu::Arch> archs;
    for (const std::string& name : g_settings.archs) archs.push_back(ark_emu::arch_from_name(name));
    rt->machine = ark_emu::Machine::create(archs);
    for (size_t i = 0; i < archs.size(); ++i) {
      auto device = std::make_unique<Device>();
      device->arch = archs[i];
      device->arena = make_arena(int(i));
      rt->devices.push_back(std::move(device));
    }
    return rt.release();
  } catch (const std::exception& error) {
    g_error = error.what();
    g_settings.archs.clear();
    return nullptr;
  }
}

// Stops all running work of a stream and waits until it has stopped.
void drain(Stream& stream) {
  for (;;) {
    std::shared_ptr<Op> last;
    {
      std::lock_guard<std::mutex> hold(stream.lock);
      for (auto& waiting : stream.queue) {
        std::lock_guard<std::mutex> inner(waiting->lock);
        if (waiting->launch) waiting->launch->cancel();
      }
      last = stream.last;
    }
    if (!last || last->wait_for(std::chrono::milliseconds(20))) return;
  }
}

void close_runtime(Runtime* rt) {
  close_dma(*rt);
  {
    std::lock_guard<std::mutex> hold(rt->lock);
    for (auto& device : rt->devices) device->sticky = hipErrorIllegalState;  // no new work starts
  }
  for (auto& device : rt->devices) {
    for (Stream* stream : device->streams) drain(*stream);
    if (device->null_stream) drain(*device->null_stream);
  }
  for (auto& device : rt->devices) {
    for (Stream* stream : device->streams) delete stream;
    device->null_stream.reset();
  }
  for (Module* module : rt->modules) delete module;
  for (auto& [base, allocation] : rt->allocations) {
    rt->machine->remove_region(base);
    // Freed host memory loses its pages but keeps its addresses: a view of it may still exist after
    // its device is closed, especially after a failed run.
    if (allocation.device < 0 && !allocation.registered)
      mmap(reinterpret_cast<void*>(base), allocation.size, PROT_READ | PROT_WRITE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
  }
  rt->machine.reset();
  for (auto& device : rt->devices) {
    munmap(reinterpret_cast<void*>(device->arena.base), device->arena.capacity);
    close(device->arena.fd);
  }
  delete rt;
}

}  // namespace

const ArchFacts& arch_facts(ark_emu::Arch arch) {
  static const ArchFacts facts[] = {
      {"gfx90a:sramecc+:xnack-", 9, 0, 512, 8, 4, 8, 64 * 1024},
      {"gfx942:sramecc+:xnack-", 9, 4, 512, 8, 4, 8, 64 * 1024},
      {"gfx950:sramecc+:xnack-", 9, 5, 512, 8, 4, 8, 160 * 1024},
      {"gfx1100", 11, 0, 1536, 24, 4, 16, 128 * 1024},
  };
  return facts[int(arch)];
}

Runtime* runtime() {
  std::lock_guard<std::mutex> hold(g_lock);
  if (!g_runtime) g_runtime = make_runtime();
  return g_runtime;
}

const std::string& configuration_error() { return g_error; }

hipError_t answer(hipError_t error) {
  if (error != hipSuccess) last_error = error;
  return error;
}

}  // namespace ark_hip

using namespace ark_hip;

// Replaces the current devices by `count` devices of `arch`. The current ones are kept unchanged
// until ark_emulator_leave. Returns null, or an error message (then nothing has changed).
HIP_EXPORT const char* ark_emulator_enter(const char* arch, int count, int version) {
  std::lock_guard<std::mutex> hold(g_lock);
  Settings before = g_settings;
  g_settings = Settings();
  g_settings.archs.assign(size_t(count), arch);
  g_settings.version = version;
  g_error.clear();
  Runtime* made = make_runtime();
  if (!made) {
    g_settings = before;
    return g_error.c_str();
  }
  g_waiting.emplace_back(g_runtime, before);
  g_runtime = made;
  current_device = 0;
  last_error = hipSuccess;
  return nullptr;
}

// Closes the devices of the last ark_emulator_enter: running kernels are cancelled, and handles and
// pointers become invalid. The earlier devices are current again.
HIP_EXPORT void ark_emulator_leave() {
  Runtime* old = nullptr;
  {
    std::lock_guard<std::mutex> hold(g_lock);
    if (g_waiting.empty()) return;
    old = g_runtime;
    g_runtime = g_waiting.back().first;
    g_settings = g_waiting.back().second;
    g_waiting.pop_back();
    current_device = 0;
    last_error = hipSuccess;
  }
  if (old) close_runtime(old);
}

// Sets a member of Settings by name for later launches. Returns -1 if there is no such setting.
HIP_EXPORT int ark_emulator_set(const char* name, uint64_t value) {
  std::lock_guard<std::mutex> hold(g_lock);
  auto apply = [&](Settings& s) {
    std::string key = name;
    if (key == "seed")
      s.seed = value;
    else if (key == "checks")
      s.checks = value != 0;
    else if (key == "stale")
      s.stale = value != 0;
    else if (key == "stores_only")
      s.stores_only = value != 0;
    else if (key == "parallel")
      s.parallel = value != 0;
    else if (key == "implicit_sync")
      s.implicit_sync = value != 0;
    else if (key == "report")
      s.report = value != 0;
    else if (key == "compute_units")
      s.compute_units = int(value);
    else if (key == "max_slice")
      s.max_slice = uint32_t(value);
    else if (key == "timing")
      s.timing = uint32_t(value);
    else if (key == "step_budget")
      s.step_budget = value;
    else if (key == "external_wait_ms")
      s.external_wait_ms = uint32_t(value);
    else
      return -1;
    return 0;
  };
  if (g_runtime) apply(g_runtime->settings);
  return apply(g_settings);
}

// Returns one of the failures of kernels so far: copies message `index` into `text` and returns its
// ErrorKind, or -1 past the last one.
HIP_EXPORT int ark_emulator_failure(int index, char* text, size_t size) {
  Runtime* rt = runtime();
  if (!rt) return -1;
  std::lock_guard<std::mutex> hold(rt->lock);
  if (index < 0 || size_t(index) >= rt->failures.size()) return -1;
  const Failure& failure = rt->failures[size_t(index)];
  if (size) {
    strncpy(text, failure.message.c_str(), size - 1);
    text[size - 1] = 0;
  }
  return failure.kind;
}

// Returns the reason why no emulated device exists, or an empty string.
HIP_EXPORT const char* ark_emulator_error() {
  runtime();
  return configuration_error().c_str();
}

// Returns the number of instructions that waves have executed in finished launches, and sets
// *launches to the number of these launches.
HIP_EXPORT uint64_t ark_emulator_instructions(uint64_t* launches) {
  Runtime* rt = runtime();
  if (!rt) return 0;
  std::lock_guard<std::mutex> hold(rt->lock);
  if (launches) *launches = rt->launches;
  return rt->instructions;
}

HIP_EXPORT hipError_t hipInit(unsigned flags) {
  if (flags != 0) return answer(hipErrorInvalidValue);
  HIP_ENTER();
  return answer(hipSuccess);
}

HIP_EXPORT hipError_t hipGetLastError() {
  hipError_t error = last_error;
  last_error = hipSuccess;
  return error;
}

HIP_EXPORT hipError_t hipExtGetLastError() { return hipGetLastError(); }

HIP_EXPORT hipError_t hipPeekAtLastError() { return last_error; }

static hipError_t version_into(int* out) {
  if (!out) return answer(hipErrorInvalidValue);
  Runtime* rt = runtime();
  *out = rt && rt->settings.version ? rt->settings.version : 60000000;
  return hipSuccess;
}
HIP_EXPORT hipError_t hipRuntimeGetVersion(int* version) { return version_into(version); }
HIP_EXPORT hipError_t hipDriverGetVersion(int* version) { return version_into(version); }
