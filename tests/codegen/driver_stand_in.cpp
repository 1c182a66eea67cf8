// A stand-in for libcuda.so.1 on machines without a GPU: enough of the driver API for ark_cuda's
// device object, behind the unmodified cuda-bindings. Device memory is host memory, and a kernel
// runs nothing. Tests use it to check that every call and every struct fits the bindings' version,
// and that nothing is freed or unloaded while a kernel runs.
//
// STAND_IN_KERNEL: `ends` (default) at once, `aborts` when the host's abort word is raised, `stuck`
// never. STAND_IN_LOG: a file that gets one line for each module that is loaded or unloaded, and
// for each fault.

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

using Result = int;
using Address = unsigned long long;
constexpr Result kSuccess = 0, kInvalid = 1, kNotFound = 500, kNotReady = 600;

namespace {

struct Block {
  int file;
  size_t size;
};
std::mutex lock;
std::map<Address, Block> blocks;
std::map<Address, Block> peers;
int modules = 0;
std::vector<uint64_t> launched;  // see stand_in_launched
thread_local std::vector<void*> contexts;
void* const kBroken = reinterpret_cast<void*>(0x66);  // a stream that takes no launches
volatile uint32_t* abort_word = nullptr;  // of the kernel that was launched last

std::string setting(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

void tell(const char* what) {
  const std::string path = setting("STAND_IN_LOG");
  if (path.empty()) return;
  if (FILE* out = std::fopen(path.c_str(), "a")) {
    std::fprintf(out, "%s\n", what);
    std::fclose(out);
  }
}

bool running() {
  const std::string mode = setting("STAND_IN_KERNEL");
  if (abort_word == nullptr || mode.empty() || mode == "ends") return false;
  if (mode == "stuck") return true;
  if (*abort_word == 0) return true;
  abort_word = nullptr;
  return false;
}

void must_be_idle(const char* what) {
  if (!running()) return;
  tell(what);
  std::fprintf(stderr, "stand-in: %s while a kernel runs\n", what);
  _exit(99);
}

Address map(int file, size_t size) {
  void* at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  return at == MAP_FAILED ? 0 : reinterpret_cast<Address>(at);
}

// The 64 bytes of an exported memory handle: the process, the file descriptor, the size, and a
// pattern that shows if a copy of the handle is incomplete.
struct Handle {
  int32_t process, file;
  uint64_t size;
  uint8_t pattern[48];
};
static_assert(sizeof(Handle) == 64, "as the driver's");

}  // namespace

#define API extern "C" __attribute__((visibility("default"))) Result

API cuInit(unsigned) { return kSuccess; }
API cuDriverGetVersion(int* version) { return *version = 13000, kSuccess; }
API cuGetErrorName(Result, const char** text) { return *text = "STAND_IN", kSuccess; }
API cuGetErrorString(Result, const char** text) { return *text = "a stand-in's", kSuccess; }
API cuDeviceGetCount(int* count) { return *count = 1, kSuccess; }
API cuDeviceGet(int* device, int index) { return *device = index, kSuccess; }
API cuDeviceGetName(char* name, int size, int) {
  std::snprintf(name, static_cast<size_t>(size), "Stand-in");
  return kSuccess;
}
API cuDeviceGetUuid(char* uuid, int) {
  for (int i = 0; i < 16; ++i) uuid[i] = static_cast<char>(160 + i);
  return kSuccess;
}
API cuDeviceTotalMem(size_t* size, int) { return *size = 1ull << 30, kSuccess; }
API cuDeviceGetAttribute(int* value, int attribute, int) {
  // The members of CUdevice_attribute that are used: compute capability, multiprocessors, shared
  // memory, clock, bus width.
  switch (attribute) {
    case 75: *value = 9; break;
    case 76: *value = 0; break;
    case 16: *value = 4; break;
    case 97: *value = 232448; break;
    case 36: *value = 2619000; break;
    case 37: *value = 5120; break;
    default: *value = 1;
  }
  return kSuccess;
}
API cuDevicePrimaryCtxRetain(void** context, int) {
  return *context = reinterpret_cast<void*>(0x10), kSuccess;
}
API cuDevicePrimaryCtxRelease(int) { return must_be_idle("context released"), kSuccess; }
API cuDeviceCanAccessPeer(int* can, int, int) { return *can = 1, kSuccess; }
API cuCtxEnablePeerAccess(void*, unsigned) { return kSuccess; }
API cuCtxPushCurrent(void* context) { return contexts.push_back(context), kSuccess; }
API cuCtxPushCurrent_v2(void* context) { return cuCtxPushCurrent(context); }
API cuCtxGetCurrent(void** context) {
  return *context = contexts.empty() ? nullptr : contexts.back(), kSuccess;
}
API cuCtxPopCurrent(void** context) {
  if (contexts.empty()) return 201;
  *context = contexts.back();
  return contexts.pop_back(), kSuccess;
}
API cuCtxPopCurrent_v2(void** context) { return cuCtxPopCurrent(context); }

API cuMemAlloc(Address* address, size_t size) {
  const int file = memfd_create("stand-in", 0);
  if (file < 0 || ftruncate(file, static_cast<off_t>(size)) != 0) return 2;
  *address = map(file, size);
  std::lock_guard<std::mutex> hold(lock);
  blocks[*address] = {file, size};
  return *address ? kSuccess : 2;
}
API cuMemFree(Address address) {
  must_be_idle("memory freed");
  std::lock_guard<std::mutex> hold(lock);
  const auto found = blocks.find(address);
  if (found == blocks.end()) return kInvalid;
  munmap(reinterpret_cast<void*>(address), found->second.size);
  close(found->second.file);
  blocks.erase(found);
  return kSuccess;
}
API cuMemHostAlloc(void** pointer, size_t size, unsigned) {
  return *pointer = std::calloc(1, size), kSuccess;
}
API cuMemHostGetDevicePointer(Address* address, void* pointer, unsigned) {
  return *address = reinterpret_cast<Address>(pointer), kSuccess;
}
API cuMemFreeHost(void* pointer) {
  must_be_idle("host memory freed");
  std::free(pointer);
  return kSuccess;
}
API cuMemGetInfo(size_t* free_bytes, size_t* total) {
  return *free_bytes = 1ull << 29, *total = 1ull << 30, kSuccess;
}
API cuMemcpyAsync(Address to, Address from, size_t size, void*) {
  std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), size);
  return kSuccess;
}
API cuMemsetD8Async(Address at, unsigned char value, size_t count, void*) {
  std::memset(reinterpret_cast<void*>(at), value, count);
  return kSuccess;
}

API cuIpcGetMemHandle(Handle* handle, Address address) {
  std::lock_guard<std::mutex> hold(lock);
  const auto found = blocks.find(address);
  if (found == blocks.end()) return kInvalid;
  *handle = {getpid(), found->second.file, found->second.size, {}};
  for (int i = 0; i < 48; ++i) handle->pattern[i] = static_cast<uint8_t>(i * 5 + 1);
  return kSuccess;
}
API cuIpcOpenMemHandle(Address* address, Handle handle, unsigned) {
  for (int i = 0; i < 48; ++i) {
    if (handle.pattern[i] != static_cast<uint8_t>(i * 5 + 1)) return kInvalid;
  }
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.process, handle.file);
  const int file = open(path, O_RDWR);
  if (file < 0) return kInvalid;
  *address = map(file, handle.size);
  std::lock_guard<std::mutex> hold(lock);
  peers[*address] = {file, handle.size};
  return kSuccess;
}
API cuIpcCloseMemHandle(Address address) {
  must_be_idle("a peer's memory let go");
  std::lock_guard<std::mutex> hold(lock);
  const auto found = peers.find(address);
  if (found == peers.end()) return kInvalid;
  munmap(reinterpret_cast<void*>(address), found->second.size);
  close(found->second.file);
  peers.erase(found);
  return kSuccess;
}

API cuModuleLoadData(void** module, const void*) {
  tell("loaded");
  return *module = reinterpret_cast<void*>(0x1000ull + static_cast<unsigned>(++modules)), kSuccess;
}
API cuModuleGetFunction(void** function, void* module, const char* name) {
  if (std::strcmp(name, "ark_loop") != 0) return kNotFound;
  return *function = module, kSuccess;
}
API cuModuleUnload(void*) {
  must_be_idle("module unloaded");
  tell("unloaded");
  return kSuccess;
}
API cuFuncGetAttribute(int* value, int, void*) { return *value = 32, kSuccess; }
API cuFuncSetAttribute(void*, int, int) { return kSuccess; }
API cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks_each, void*, int, size_t) {
  return *blocks_each = 1, kSuccess;
}
API cuLaunchCooperativeKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                              unsigned by, unsigned bz, unsigned shared, void* stream,
                              void** params) {
  if (stream == kBroken) return kInvalid;
  launched = {reinterpret_cast<uint64_t>(function), gx, gy, gz, bx, by, bz, shared};
  launched.push_back(reinterpret_cast<uint64_t>(stream));
  launched.push_back(reinterpret_cast<uint64_t>(params[0]));
  // The kernel's only parameter is a struct ArkParams, whose seventh address is that of ArkHost;
  // the third word of ArkHost is `abort`.
  const uint64_t host = static_cast<const uint64_t*>(params[0])[6];
  abort_word = host ? reinterpret_cast<volatile uint32_t*>(host) + 2 : nullptr;
  return kSuccess;
}
API cuStreamCreate(void** stream, unsigned) {
  return *stream = reinterpret_cast<void*>(0x20), kSuccess;
}
API cuStreamDestroy(void*) { return must_be_idle("stream destroyed"), kSuccess; }
API cuStreamSynchronize(void*) { return kSuccess; }
API cuEventCreate(void** event, unsigned) {
  static uintptr_t count = 0x30;
  return *event = reinterpret_cast<void*>(++count), kSuccess;
}
API cuEventDestroy(void*) { return kSuccess; }
API cuEventRecord(void* event, void* stream) {
  launched.push_back(reinterpret_cast<uint64_t>(event));
  return launched.push_back(reinterpret_cast<uint64_t>(stream)), kSuccess;
}
API cuStreamWaitEvent(void*, void*, unsigned) { return kSuccess; }
// Returns the arguments of the last launch, and the events after it with their streams. The result
// is their number.
extern "C" int stand_in_launched(uint64_t* words) {
  std::copy(launched.begin(), launched.end(), words);
  return static_cast<int>(launched.size());
}
API cuEventQuery(void*) { return running() ? kNotReady : kSuccess; }
API cuEventElapsedTime(float* ms, void*, void*) { return *ms = 1.0f, kSuccess; }

namespace {
#define ENTRY(name) {#name, reinterpret_cast<void*>(name)}
const std::map<std::string, void*> kTable = {
    ENTRY(cuInit), ENTRY(cuDriverGetVersion), ENTRY(cuGetErrorName), ENTRY(cuGetErrorString),
    ENTRY(cuDeviceGetCount), ENTRY(cuDeviceGet), ENTRY(cuDeviceGetName), ENTRY(cuDeviceGetUuid),
    ENTRY(cuDeviceTotalMem), ENTRY(cuDeviceGetAttribute), ENTRY(cuDevicePrimaryCtxRetain),
    ENTRY(cuDevicePrimaryCtxRelease), ENTRY(cuDeviceCanAccessPeer), ENTRY(cuCtxEnablePeerAccess),
    ENTRY(cuCtxPushCurrent), ENTRY(cuCtxPopCurrent), ENTRY(cuCtxGetCurrent),
    ENTRY(cuMemAlloc), ENTRY(cuMemFree),
    ENTRY(cuMemHostAlloc), ENTRY(cuMemHostGetDevicePointer), ENTRY(cuMemFreeHost),
    ENTRY(cuMemGetInfo), ENTRY(cuMemcpyAsync), ENTRY(cuMemsetD8Async), ENTRY(cuIpcGetMemHandle),
    ENTRY(cuIpcOpenMemHandle), ENTRY(cuIpcCloseMemHandle), ENTRY(cuModuleLoadData),
    ENTRY(cuModuleGetFunction), ENTRY(cuModuleUnload), ENTRY(cuFuncGetAttribute),
    ENTRY(cuFuncSetAttribute), ENTRY(cuOccupancyMaxActiveBlocksPerMultiprocessor),
    ENTRY(cuLaunchCooperativeKernel), ENTRY(cuStreamCreate), ENTRY(cuStreamDestroy),
    ENTRY(cuStreamSynchronize), ENTRY(cuEventCreate), ENTRY(cuEventDestroy), ENTRY(cuEventRecord),
    ENTRY(cuEventQuery), ENTRY(cuEventElapsedTime), ENTRY(cuStreamWaitEvent),
};
}  // namespace

// The function through which the bindings find all others.
API cuGetProcAddress_v2(const char* name, void** function, int, uint64_t, int* status) {
  std::string plain = name;
  const auto mark = plain.rfind("_v");
  if (mark != std::string::npos && kTable.count(plain.substr(0, mark))) plain.resize(mark);
  const auto found = kTable.find(plain);
  *function = nullptr;
  if (plain == "cuGetProcAddress") *function = reinterpret_cast<void*>(cuGetProcAddress_v2);
  if (found != kTable.end()) *function = found->second;
  if (status) *status = *function ? 0 : 1;
  return *function ? kSuccess : kNotFound;
}
