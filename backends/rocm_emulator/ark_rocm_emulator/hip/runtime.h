// The state behind the HIP calls: devices, streams, memory, modules. There is one per process,
// created by ark_emulator_enter. Every file of the stand-in uses it.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "abi.h"
#include "engine.h"

namespace ark_hip {

using Clock = std::chrono::steady_clock;

constexpr unsigned kMaxThreads = 1024;                           // of a block, along a side too
constexpr unsigned kMaxGridX = 2147483647, kMaxGridYZ = 65536;   // blocks

struct Settings {
  std::vector<std::string> archs;  // one per device
  uint64_t seed = 0;
  bool checks = false;
  bool stale = false;              // values may be stale (LaunchOptions::stale)
  bool stores_only = false;        // no read-modify-write over links between devices
  bool parallel = true;
  bool implicit_sync = true;       // freeing and unloading wait for kernels, or else fail
  bool report = true;              // print a kernel's failure to stderr when it happens
  int compute_units = 8;           // per device: few, because every workgroup is interpreted
  uint32_t max_slice = 256;
  uint64_t step_budget = 0;
  uint32_t timing = 0;             // number of a timing model of the core; 0: host time
  uint32_t external_wait_ms = 120000;
  int version = 0;                 // the result of hipRuntimeGetVersion
};

// The limits of an architecture's hardware for a workgroup. The number of compute units is in
// Settings.
struct ArchFacts {
  const char* full_name;           // gcnArchName
  int major, minor;
  int vgprs_per_simd, vgpr_granule, simds, waves_per_simd;
  uint32_t lds_per_cu;
};
const ArchFacts& arch_facts(ark_emu::Arch arch);

// An item of work in a stream. It runs when all earlier work of the stream and everything in
// `after` is done.
struct Op {
  std::function<hipError_t()> run;
  std::vector<std::shared_ptr<Op>> after;
  std::mutex lock;
  std::condition_variable changed;
  bool done = false;
  bool kernel = false;             // a launch
  Clock::time_point finished{};
  double predicted = 0;            // the timing model's time at its end, in ns
  std::shared_ptr<ark_emu::Launch> launch;  // while a kernel runs

  void wait();
  bool wait_for(std::chrono::milliseconds time);
  bool is_done();
  void finish();
};

struct Runtime;

struct Stream {
  Runtime& runtime;
  int device = 0;
  unsigned flags = 0;
  bool null_stream = false;
  std::mutex lock;
  std::condition_variable changed;
  std::deque<std::shared_ptr<Op>> queue;
  std::shared_ptr<Op> last;  // the op most recently enqueued
  bool closing = false;
  std::thread worker;

  Stream(Runtime& runtime, int device, unsigned flags, bool null_stream);
  ~Stream();
  bool blocking() const { return !null_stream && !(flags & kStreamNonBlocking); }
};

// An event's handle is its number. No two events of a process have the same number, so a handle that
// outlives its runtime is unknown to later ones.
struct Event {
  int device = 0;
  unsigned flags = 0;
  std::shared_ptr<Op> op;  // null until recorded; under Runtime::lock
};

struct Allocation {
  uint64_t base = 0, size = 0;
  int device = 0;           // -1: host memory
  unsigned flags = 0;
  ark_emu::MemKind kind = ark_emu::MemKind::Device;
  uint64_t arena_offset = 0;
  void* records = nullptr;  // the checks' records, if other processes map the memory, too
  bool managed = false, registered = false, imported = false;
  bool far = false;         // of an import: from another device
  int opened = 1;           // of an import: how often it was opened
  std::string handle{};       // of an import: which handle it came from
};

struct Module {
  std::shared_ptr<ark_emu::CodeObject> code;
  std::map<int, std::shared_ptr<ark_emu::LoadedCode>> loaded;  // by device
  std::vector<std::unique_ptr<struct Function>> functions;
};

struct Function {
  Module* module = nullptr;
  const ark_emu::KernelInfo* info = nullptr;
  int device = 0;
};

// A device's memory: one sparse memory file, so that any part of it can be passed to another
// process by name. top: the offset at which the next allocation begins. used: the bytes allocated.
struct Arena {
  int fd = -1;
  int records_fd = -1;       // file of ark_emu::Region::records; created when first shared
  uint64_t base = 0, capacity = 0, top = 0, used = 0;
};

struct Device {
  ark_emu::Arch arch{};
  Arena arena;
  std::unique_ptr<Stream> null_stream;
  std::unordered_set<Stream*> streams;
  std::set<int> peers;       // devices whose memory this one may reach
  hipError_t sticky = hipSuccess;
  double predicted = 0;      // ns that a timing model has counted
};

class SdmaQueue;

struct Failure {
  std::string message;
  int kind = 0;              // ark_emu::ErrorKind
  int device = 0;
};

struct Runtime {
  Settings settings;
  std::shared_ptr<ark_emu::Machine> machine;
  std::vector<std::unique_ptr<Device>> devices;
  std::mutex lock;           // everything below, and the tables of the devices
  std::map<uint64_t, Allocation> allocations;  // by base
  std::unordered_set<Module*> modules;
  std::unordered_set<Function*> functions;
  std::unordered_map<uintptr_t, std::shared_ptr<Event>> events;  // by number
  std::map<int, std::shared_ptr<SdmaQueue>> dma_queues;
  std::thread dma_thread;          // serves queues that the host fills
  std::atomic<bool> dma_stop{false};
  std::vector<Failure> failures;
  uint64_t instructions = 0;
  uint64_t launches = 0;
  uint64_t names = 0;
};

// Returns the process's runtime. Null if no device was requested; every HIP call then returns
// hipErrorNoDevice.
Runtime* runtime();
const std::string& configuration_error();

extern thread_local int current_device;

// Stores an error for hipGetLastError and returns it.
hipError_t answer(hipError_t error);

// streams.cpp
Stream* resolve(Runtime& rt, hipStream_t handle);  // null if the handle is unknown
std::shared_ptr<Op> enqueue(Stream& stream, std::function<hipError_t()> run);
void enqueue_op(Stream& stream, const std::shared_ptr<Op>& op);
void wait_device(Runtime& rt, int device);
// Called before `call` frees a resource of `device`: waits for its streams. If a kernel is running
// and Settings::implicit_sync is off, it records a failure and returns false.
bool quiet(Runtime& rt, int device, const char* call);
hipError_t sticky_error(Runtime& rt, int device);

// memory.cpp
// True if the process can read every byte. Memory outside of HIP's allocations must be
// mapped by the process.
bool readable(const void* address, uint64_t size);
const Allocation* find_allocation(Runtime& rt, uint64_t address);  // under rt.lock
hipError_t give_memory(Runtime& rt, int device, ark_emu::MemKind kind, uint64_t size,
                       unsigned flags, void** out);
uint64_t access_mask(Runtime& rt, int owner);
void register_region(Runtime& rt, const Allocation& allocation, uint64_t access, const char* call);
void copy_bytes(Runtime& rt, void* to, const void* from, uint64_t size);

// sdma.cpp
void close_dma(Runtime& rt);

// module.cpp, launch.cpp
Function* known_function(Runtime& rt, hipFunction_t handle);  // null if unknown
int blocks_per_unit(const ark_emu::KernelInfo& kernel, ark_emu::Arch arch, int block,
                    uint64_t dynamic_lds);

}  // namespace ark_hip

// Begins a HIP call: sets `rt` to the runtime or, if there is no device, returns the error that
// explains why.
#define HIP_ENTER()                          \
  ark_hip::Runtime* rt = ark_hip::runtime(); \
  if (!rt) return ark_hip::answer(hipErrorNoDevice)
