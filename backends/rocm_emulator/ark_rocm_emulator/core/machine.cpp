// Machine: virtual devices, their memory and code, and grids that run together.
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>

#include "checks.h"
#include "checks_agent.h"
#include "code_object.h"
#include "engine.h"
#include "grid.h"
#include "launch.h"
#include "memory.h"

namespace ark_emu {
namespace {

struct ArchInfo {
  const char* name;
  int lanes;
  uint32_t lds;
};

constexpr std::array<ArchInfo, kArchCount> kArchs = {{
    {"gfx90a", 64, 65536}, {"gfx942", 64, 65536}, {"gfx950", 64, 163840}, {"gfx1100", 32, 65536}}};

constexpr uint64_t kGuard = 4096;   // unregistered bytes around an allocation

class MachineImpl : public Machine, public std::enable_shared_from_this<MachineImpl> {
 public:
  explicit MachineImpl(std::vector<Arch> devices) : devices_(std::move(devices)) {}
  ~MachineImpl() override {
    for (const auto& [base, size] : owned_) {
      memory_->remove(base);
      unmap(base, size);
    }
  }

  int device_count() const override { return static_cast<int>(devices_.size()); }
  Arch arch(int device) const override {
    check_device(device);
    return devices_[static_cast<size_t>(device)];
  }
  void add_region(Region region) override { memory_->add(std::move(region)); }
  void remove_region(uint64_t base) override { memory_->remove(base); }
  void set_access(uint64_t base, uint64_t mask) override {
    memory_->set_access(base, mask);
  }
  void set_shared(uint64_t base, void* records) override {
    memory_->set_shared(base, records);
  }
  bool find_region(uint64_t address, Region* out) const override {
    const auto entry = memory_->find(address);
    if (entry == nullptr) return false;
    if (out != nullptr) *out = entry->region;
    return true;
  }

  uint64_t allocate(int device, MemKind kind, uint64_t size, std::string name) override {
    if (kind != MemKind::Host) check_device(device);
    if (size == 0) throw Error("an allocation of 0 bytes");
    constexpr uint64_t kPage = 4096;
    // A guard area on each side of an allocation ensures that an access just outside of the
    // allocation never reaches another allocation.
    const uint64_t mapped = (size + kPage - 1) / kPage * kPage + 2 * kGuard;
    void* memory = mmap(nullptr, mapped, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
      throw Error("the host has no " + std::to_string(size) + " bytes for device memory");
    }
    const auto base = reinterpret_cast<uint64_t>(memory) + kGuard;
    std::memset(reinterpret_cast<void*>(base), 0xcb, size);
    Region region;
    region.base = base;
    region.size = size;
    region.device = kind == MemKind::Host ? -1 : device;
    region.kind = kind;
    if (kind == MemKind::Host) region.access = ~0ull;
    region.initialised = kind == MemKind::Host;
    region.name =
        name.empty() ? "allocation of " + std::to_string(size) + " bytes" : std::move(name);
    try {
      memory_->add(std::move(region));
    } catch (...) {
      munmap(memory, mapped);
      throw;
    }
    const std::lock_guard lock(mutex_);
    owned_[base] = mapped;
    return base;
  }

  void release(uint64_t base) override {
    uint64_t size = 0;
    {
      const std::lock_guard lock(mutex_);
      const auto found = owned_.find(base);
      if (found == owned_.end()) throw Error("release of an address that allocate did not return");
      size = found->second;
      owned_.erase(found);
    }
    memory_->remove(base);
    const std::lock_guard lock(mutex_);
    if (running_ == 0) {
      unmap(base, size);
    } else {
      released_.emplace_back(base, size);   // a running grid may be about to touch it
    }
  }

  void host_wrote(uint64_t address, uint64_t size) override {
    while (size > 0) {
      const auto entry = memory_->find(address);
      if (entry == nullptr) return;
      const uint64_t here = std::min(size, entry->end() - address);
      if (entry->shadow) shadow_mark_written(*entry->shadow, address - entry->region.base, here);
      address += here;
      size -= here;
    }
  }

  std::shared_ptr<LoadedCode> load_on_device(std::shared_ptr<CodeObject> code,
                                             int device) override {
    check_device(device);
    if (code->arch() != arch(device)) {
      throw Error(std::string("the code object is for ") + arch_name(code->arch()) + ", device " +
                  std::to_string(device) + " is a " + arch_name(arch(device)));
    }
    return std::make_shared<LoadedCodeImpl>(std::static_pointer_cast<CodeObjectImpl>(code), memory_,
                                            device);
  }

  std::shared_ptr<Launch> launch(LaunchDesc desc) override {
    begin_run();
    return start_launch(shared_from_this(), *memory_, std::move(desc), hook(),
                        [this] { end_run(); });
  }

  std::vector<LaunchResult> run_together(std::vector<LaunchDesc> descs, uint64_t seed) override;

  std::shared_ptr<Memory> memory() const { return memory_; }

  void set_engine_hook(Hook hook) override {
    const std::lock_guard lock(mutex_);
    hook_ = std::move(hook);
  }

 private:
  static void unmap(uint64_t base, uint64_t mapped) {
    munmap(reinterpret_cast<void*>(base - kGuard), mapped);
  }
  void check_device(int device) const {
    if (device >= 0 && device < device_count()) return;
    throw Error("device " + std::to_string(device) + " does not exist; there are " +
                std::to_string(device_count()));
  }
  Hook hook() const {
    const std::lock_guard lock(mutex_);
    return hook_;
  }
  void begin_run() {
    const std::lock_guard lock(mutex_);
    running_++;
  }
  void end_run() {
    const std::lock_guard lock(mutex_);
    if (--running_ > 0) return;
    for (const auto& [base, size] : released_) unmap(base, size);
    released_.clear();
  }

  std::vector<Arch> devices_;
  std::shared_ptr<Memory> memory_ = std::make_shared<Memory>();
  mutable std::mutex mutex_;
  std::map<uint64_t, uint64_t> owned_;
  std::vector<std::pair<uint64_t, uint64_t>> released_;   // released while grids ran
  int running_ = 0;                                       // grids
  Hook hook_;
};

std::vector<LaunchResult> MachineImpl::run_together(std::vector<LaunchDesc> descs, uint64_t seed) {
  const Hook engines = hook();
  begin_run();
  const std::shared_ptr<void> running(nullptr, [this](void*) { end_run(); });
  std::vector<std::unique_ptr<Grid>> grids;
  std::vector<Grid*> live;
  for (LaunchDesc& desc : descs) {
    auto grid = std::make_unique<Grid>(*memory_, desc);
    grid->random.state = seed * 0x2545f4914f6cdd1dull + grids.size();
    try {
      grid->prepare(static_cast<uint32_t>(desc.grid.count()));
      grid->populate();
      live.push_back(grid.get());
    } catch (const Fault& fault) {
      grid->finish(fault, nullptr, 0);
    }
    grids.push_back(std::move(grid));
  }
  Random random{seed};
  uint64_t slices = 0;
  while (!live.empty()) {
    const uint64_t pick = random.below(live.size());
    Grid* grid = live[pick];
    if (!grid->step()) live.erase(live.begin() + static_cast<int64_t>(pick));
    if ((++slices & 63) != 0) continue;
    const bool worked = engines && engines();
    bool stuck = !live.empty() && !worked;
    for (Grid* each : live) stuck &= each->quiet();
    if (worked) {
      for (Grid* each : live) each->note_change();
    }
    if (stuck) {
      for (Grid* each : live) each->look_for_deadlock();
    }
    std::erase_if(live, [](const Grid* each) { return each->ended; });
  }
  std::vector<LaunchResult> results;
  for (auto& grid : grids) {
    grid->result.instructions = grid->clock;
    results.push_back(grid->result);
  }
  return results;
}

}  // namespace

Arch arch_from_name(std::string_view name) {
  const std::string_view base = name.substr(0, name.find(':'));
  for (int k = 0; k < kArchCount; k++) {
    if (base == kArchs[static_cast<size_t>(k)].name) return static_cast<Arch>(k);
  }
  throw Error("'" + std::string(name) +
              "' is not emulated; supported: gfx90a, gfx942, gfx950 and gfx1100");
}

const char* arch_name(Arch arch) { return kArchs[static_cast<size_t>(arch)].name; }
int wave_size(Arch arch) { return kArchs[static_cast<size_t>(arch)].lanes; }
uint32_t lds_limit(Arch arch) { return kArchs[static_cast<size_t>(arch)].lds; }

std::shared_ptr<Machine> Machine::create(const std::vector<Arch>& devices) {
  if (devices.empty() || devices.size() > 64) {
    throw Error("a machine has 1 to 64 devices, " + std::to_string(devices.size()) + " requested");
  }
  return std::make_shared<MachineImpl>(devices);
}

std::unique_ptr<Agent> make_agent(Machine& machine) {
  return checked_agent(static_cast<MachineImpl&>(machine).memory());
}

}  // namespace ark_emu
