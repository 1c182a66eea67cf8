// The public interface of the emulator core. It has three callers: the pybind11 module
// (module.cpp), the HIP stand-in (which is linked with the core into one shared library), and the
// tests through either of them. All functions are safe to call from several host threads unless a
// comment says otherwise.
//
// Device pointers are host pointers: memory is whatever the caller has mapped (mmap, a shared
// memory segment of another process) and registered as a Region. A grid reads and writes it with
// ordinary and atomic host accesses, so another grid, a host thread or another process may share
// it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace ark_emu {

enum class Arch : uint8_t { gfx90a, gfx942, gfx950, gfx1100 };
constexpr int kArchCount = 4;

// Converts a name such as "gfx942" to Arch::gfx942. Feature suffixes (":sramecc+:xnack-") are
// ignored. Throws Error for an architecture that is not emulated.
Arch arch_from_name(std::string_view name);
const char* arch_name(Arch arch);
int wave_size(Arch arch);          // 64 on CDNA, 32 on RDNA (the default of clang for both)
uint32_t lds_limit(Arch arch);     // bytes a workgroup may use

// The exception for an error of the caller, or for a missing part of a file, with a readable
// message.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// ---------------------------------------------------------------- memory

enum class MemKind : uint8_t {
  Device,    // coarse-grained device memory
  Fine,      // fine-grained device memory
  Uncached,  // uncached device memory (flags, queue rings)
  Host,      // host memory mapped into the devices; the host may write it while grids run
  Code,      // loaded code objects
  Queue,     // device-visible queue: ring, write pointer, doorbell; on_store is called
};

struct Region {
  uint64_t base = 0;        // host address == device address
  uint64_t size = 0;        // bytes; an access must be inside one region
  int device = 0;           // the owner, or the device that maps it (IPC); -1: the host
  bool far = false;         // mapped memory of another device
  MemKind kind = MemKind::Device;
  uint64_t access = 0;      // bit d: device d may access it; 0 means the owner only
  bool shared = false;      // mapped by another process too (IPC): a wait on it is never a deadlock
  bool initialised = false; // contents count as written (host memory, IPC imports)
  std::string name;         // for messages: "hipMalloc#3"
  void* records = nullptr;  // the checks' records, shared by processes: kRecordBytes per 4 bytes
  // Called by the emulating thread after a store to this region has been performed (doorbells).
  // Must be quick and must not call back into the Machine.
  std::function<void(uint64_t address, uint64_t value, int bytes)> on_store;
};

constexpr uint64_t kRecordBytes = 256;
// True if the checks of this process can share their records of memory accesses with other
// processes. Must be called before the first memory is shared.
bool can_share_checks();

// ---------------------------------------------------------------- code objects

struct KernelArg {
  std::string name, value_kind, address_space;  // as in the metadata; value_kind "by_value", ...
  uint32_t offset = 0, size = 0;                // bytes
};

struct KernelInfo {
  std::string name;
  uint32_t kernarg_size = 0, kernarg_align = 0;
  uint32_t lds_bytes = 0;           // static
  uint32_t scratch_bytes = 0;       // per lane
  uint32_t vgprs = 0, agprs = 0, sgprs = 0;  // as allocated, from the metadata
  uint32_t vgpr_spills = 0, sgpr_spills = 0;
  uint32_t max_flat_workgroup = 0;  // most lanes of a workgroup; 0: not limited
  int wave_size = 64;
  bool cooperative = false;
  std::vector<KernelArg> args;      // hidden ones included (value_kind "hidden_...")
  uint64_t entry = 0;               // offset of the first instruction in the loaded image
  uint64_t descriptor = 0;          // offset of the kernel descriptor in the loaded image
};

struct SymbolInfo {
  std::string name;
  uint64_t offset = 0, size = 0;    // in the loaded image
  bool function = false;
};

class CodeObjectImpl;

// A code object (the contents of a .hsaco file) in memory, decoded lazily. It is not bound to a
// device; load_on_device creates the image there.
class CodeObject {
 public:
  // Accepts an AMDGPU ELF (code object v4 to v6) or a clang offload bundle holding one for `want`
  // (empty: the only one). Throws Error when the bytes are neither or the architecture is not
  // emulated.
  static std::shared_ptr<CodeObject> from_bytes(std::span<const uint8_t> bytes,
                                                std::string_view want = {});
  virtual ~CodeObject() = default;
  virtual Arch arch() const = 0;
  virtual const std::vector<KernelInfo>& kernels() const = 0;
  virtual const std::vector<SymbolInfo>& symbols() const = 0;   // variables and functions
  virtual const KernelInfo* find_kernel(std::string_view name) const = 0;
  // Returns lines "offset: words text" of one function (its symbol name), or of all code if the
  // name is empty.
  virtual std::string disassemble(std::string_view function = {}) const = 0;
};

// A code object whose variables are in one device's memory. Its destructor unmaps the image.
class LoadedCode {
 public:
  virtual ~LoadedCode() = default;
  virtual const CodeObject& code() const = 0;
  virtual int device() const = 0;
  virtual uint64_t image() const = 0;                    // address of offset 0
  virtual uint64_t address_of(std::string_view symbol) const = 0;   // 0 if there is none
};

// ---------------------------------------------------------------- launches

struct Dim3 {
  uint32_t x = 1, y = 1, z = 1;
  uint64_t count() const { return uint64_t(x) * y * z; }
};

struct LaunchOptions {
  uint64_t seed = 0;            // of the wave scheduler
  bool checks = false;          // shadow memory, hazards, races (slower)
  bool stale = false;           // caches hold old values, operations overtake each other; ignored
                                // if `checks` is set
  bool stores_only = false;     // no read-modify-write over links between devices
  bool parallel = true;         // may spread independent workgroups over threads
  uint32_t max_slice = 256;     // most instructions a wave runs before another one is picked
  uint32_t timing = 0;          // number of a timing model (timing.h); 0: none
  uint64_t step_budget = 0;     // wave-instructions before giving up; 0: none
  uint32_t external_wait_ms = 30000;  // time without progress, while the host or another device may
                                      // still write, after which a deadlock is reported
};

struct LaunchDesc {
  std::shared_ptr<LoadedCode> code;
  std::string kernel;
  Dim3 grid;                    // in workgroups
  Dim3 block;                   // in lanes
  uint32_t dynamic_lds = 0;     // bytes
  std::vector<uint8_t> kernarg; // explicit arguments in the layout of KernelInfo::args; the engine
                                // fills in the hidden ones
  LaunchOptions options;
};

enum class ErrorKind : uint8_t {
  None,
  BadLaunch,        // grid, block, LDS or arguments do not fit the kernel
  UnknownOpcode,
  OutOfBounds,      // global, scratch or buffer address outside every region this device may access
  Uninitialised,    // read of unwritten global memory or LDS (checks)
  LdsRange,
  Misaligned,
  MissingWait,      // register used before s_waitcnt covered its load (checks)
  Race,             // two accesses without happens-before (checks)
  Deadlock,
  Budget,           // step_budget exhausted
  Trap,             // s_trap
  Cancelled,
  Stale,            // scalar load that may return an old cached line (checks)
  Link,             // read-modify-write over a link that supports none (stores_only)
};
const char* error_kind_name(ErrorKind kind);

struct WaveWhere {
  uint32_t workgroup[3] = {0, 0, 0};
  uint32_t wave = 0;            // within the workgroup
  uint64_t pc = 0;              // offset in the image, as disassemble() prints it
  std::string function;         // "kernel+0x1c"
  std::string line;             // disassembled instruction
  std::string state;            // "running", "at barrier", "polls 0x7f.. (hipMalloc#3+0x40) = 7"
};

struct LaunchResult {
  ErrorKind kind = ErrorKind::None;
  std::string message;          // whole message, seed included
  WaveWhere where;              // of the wave at fault
  int lane = -1;
  uint64_t address = 0;         // of the access at fault, where there is one
  std::vector<WaveWhere> waves; // Deadlock: every live wave
  uint64_t instructions = 0;    // wave-instructions executed
  double seconds = 0;           // wall clock, host
  double nanoseconds = 0;       // predicted by the timing model, if there is one
  bool ok() const { return kind == ErrorKind::None; }
};

// A running or finished grid.
class Launch {
 public:
  virtual ~Launch() = default;            // cancels it and waits for its end
  virtual bool done() const = 0;
  virtual const LaunchResult& wait() = 0; // blocks
  virtual bool wait_for_ms(uint64_t ms) = 0;
  virtual void cancel() = 0;
};

// ---------------------------------------------------------------- the machine

class Machine {
 public:
  // Creates a machine with one virtual device per entry. Throws Error if `devices` is empty or
  // longer than 64.
  static std::shared_ptr<Machine> create(const std::vector<Arch>& devices);
  virtual ~Machine() = default;
  virtual int device_count() const = 0;
  virtual Arch arch(int device) const = 0;

  // Registers memory that the caller owns. Overlapping registration throws Error.
  virtual void add_region(Region region) = 0;
  virtual void remove_region(uint64_t base) = 0;
  virtual void set_access(uint64_t base, uint64_t access_mask) = 0;
  // Marks the memory at `base` as mapped by another process, too (Region::shared). records: see
  // Region::records.
  virtual void set_shared(uint64_t base, void* records) = 0;
  // Sets *out to the region that contains `address`. Returns false if there is none.
  virtual bool find_region(uint64_t address, Region* out) const = 0;
  // Maps and registers `size` bytes (page-aligned, filled with 0xCB so that reads of uninitialised
  // memory are noticed); release unmaps it and unregisters it.
  virtual uint64_t allocate(int device, MemKind kind, uint64_t size, std::string name = {}) = 0;
  virtual void release(uint64_t base) = 0;
  // Reports that the host (a copy, a memset, a DMA engine) has written these bytes. They count as
  // initialised. The write is ordered after every access whose effect the writer could see.
  virtual void host_wrote(uint64_t address, uint64_t size) = 0;

  // Maps the image of `code` to the memory of `device`. Throws Error if the architectures differ.
  virtual std::shared_ptr<LoadedCode> load_on_device(std::shared_ptr<CodeObject> code,
                                                     int device) = 0;

  // Starts a grid on a thread of its own. All workgroups are resident; waves are interleaved by the
  // seeded scheduler. Faults of a kernel, and BadLaunch, are results and not exceptions.
  virtual std::shared_ptr<Launch> launch(LaunchDesc desc) = 0;
  // Runs several grids (say one per device) on one thread, interleaved by `seed`: the same inputs
  // and the same seed give the same order of every instruction. Returns when all have ended.
  virtual std::vector<LaunchResult> run_together(std::vector<LaunchDesc> descs, uint64_t seed) = 0;

  // Registers a function that grids call from their threads: from time to time while they run, and
  // whenever all waves of a grid wait. Device-side engines (DMA queues) make progress in it. It
  // returns true if it did any work. In run_together it runs on the single thread and is therefore
  // deterministic, too.
  virtual void set_engine_hook(std::function<bool()> hook) = 0;
};

}  // namespace ark_emu
