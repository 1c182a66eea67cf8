// Creates a grid: checks of the launch, kernel arguments, and the initial state of waves according
// to the LLVM AMDGPU guide ("Initial kernel execution state") and the kernel descriptor.
#include "grid.h"
#include "stale.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "code_object.h"
#include "decode.h"
#include "timing.h"
#include "widened.h"

namespace ark_emu {
namespace {

constexpr uint32_t kMaxLanes = 1024;
constexpr uint64_t kPacketBytes = 64;

std::string dims(const Dim3& d) {
  return std::to_string(d.x) + " x " + std::to_string(d.y) + " x " + std::to_string(d.z);
}

template <class T>
void put(uint8_t* at, T value) {
  std::memcpy(at, &value, sizeof value);
}

uint64_t host_memory() {
  return static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) *
         static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

uint32_t component(const Dim3& d, char axis) { return axis == 'x' ? d.x : axis == 'y' ? d.y : d.z; }

}  // namespace

LazyPages::~LazyPages() {
  if (data_ != nullptr) munmap(data_, size_);
}

uint8_t* LazyPages::map(size_t size) {
  if (size == 0) return nullptr;
  size_ = (size + 4095) / 4096 * 4096;
  void* mapped = mmap(nullptr, size_, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) {
    throw Error("no memory for a grid's registers (" + std::to_string(size_) + " bytes)");
  }
  data_ = static_cast<uint8_t*>(mapped);
  return data_;
}

Grid::Grid(Memory& memory_in, const LaunchDesc& launch)
    : desc(launch), device(launch.code->device()), memory(memory_in), view(memory_in, device) {
  const auto& loaded = static_cast<const LoadedCodeImpl&>(*desc.code);
  program = &loaded.object()->program();
  code_base = loaded.image();
  random.state = desc.options.seed;
}

Grid::~Grid() {
  stale.reset();   // writes cached values back to memory
  if (arguments.data() != nullptr) memory.remove(reinterpret_cast<uint64_t>(arguments.data()));
  if (scratch.data() != nullptr) memory.remove(reinterpret_cast<uint64_t>(scratch.data()));
}

void Grid::check_launch(const KernelDescriptor& descriptor) {
  const auto bad = [this](const std::string& what) {
    throw Fault{ErrorKind::BadLaunch, "kernel '" + desc.kernel + "': " + what};
  };
  if (desc.grid.count() == 0 || desc.block.count() == 0) {
    bad("grid " + dims(desc.grid) + " of blocks " + dims(desc.block) + " has no lanes");
  }
  constexpr uint64_t kMaxGroups = 1ull << 31;
  if (desc.grid.x > kMaxGroups || desc.grid.y > kMaxGroups || desc.grid.z > kMaxGroups ||
      uint64_t{desc.grid.x} * desc.grid.y > kMaxGroups || desc.grid.count() > kMaxGroups) {
    bad("a grid of " + dims(desc.grid) + " workgroups; at most 2^31 are allowed");
  }
  if (std::max({desc.block.x, desc.block.y, desc.block.z}) > kMaxLanes) {
    bad("a block of " + dims(desc.block) + " lanes; a side may have at most 1024");
  }
  const uint32_t limit = kernel->max_flat_workgroup != 0 ? kernel->max_flat_workgroup : kMaxLanes;
  if (desc.block.count() > limit) {
    bad("a block of " + dims(desc.block) + " lanes; it was compiled for at most " +
        std::to_string(limit) + " (__launch_bounds__)");
  }
  const uint64_t lds = uint64_t{descriptor.lds_bytes} + desc.dynamic_lds;
  if (lds > lds_limit(program->arch())) {
    bad("it needs " + std::to_string(lds) + " bytes of LDS, but " + arch_name(program->arch()) +
        " has " + std::to_string(lds_limit(program->arch())));
  }
  uint32_t explicit_end = 0;
  for (const KernelArg& arg : kernel->args) {
    if (!arg.value_kind.starts_with("hidden_")) {
      explicit_end = std::max(explicit_end, arg.offset + arg.size);
    }
  }
  if (desc.kernarg.size() < explicit_end || desc.kernarg.size() > kernel->kernarg_size) {
    bad(std::to_string(desc.kernarg.size()) + " bytes of arguments were given, but it takes " +
        std::to_string(explicit_end) + " bytes");
  }
}

void Grid::prepare(uint32_t resident) {
  const auto& loaded = static_cast<const LoadedCodeImpl&>(*desc.code);
  kernel = loaded.code().find_kernel(desc.kernel);
  if (kernel == nullptr) {
    throw Fault{ErrorKind::BadLaunch, "the code object has no kernel '" + desc.kernel + "'"};
  }
  const KernelDescriptor descriptor = read_descriptor(loaded.object()->elf(), kernel->descriptor);
  check_launch(descriptor);
  lanes = (descriptor.properties >> 10) & 1 ? 32 : 64;
  const auto lane_count = static_cast<uint64_t>(lanes);
  waves_per_group = static_cast<uint32_t>((desc.block.count() + lane_count - 1) / lane_count);
  const uint64_t wave_count = uint64_t{waves_per_group} * resident;
  vgpr_rows = program->arch() == Arch::gfx1100 ? 256 : 512;   // all encodable registers
  const uint64_t used = uint64_t{std::max(kernel->vgprs, 16u)} * kLanes * 4 + sizeof(Wave);
  const uint64_t needed =
      wave_count * used + uint64_t{resident} * (descriptor.lds_bytes + desc.dynamic_lds);
  if (needed > host_memory()) {
    throw Fault{ErrorKind::BadLaunch,
                "kernel '" + desc.kernel + "': its workgroups may wait for each other, so all " +
                    std::to_string(wave_count) + " waves are kept in memory, and " +
                    std::to_string(needed >> 30) + " GiB are more than this machine has"};
  }
  registers.map(wave_count * vgpr_rows * kLanes * 4);
  scratch_per_wave = (uint64_t{kernel->scratch_bytes} + 15) / 16 * 16 * lane_count;
  if (scratch_per_wave * wave_count > 0) {
    Region region;
    region.base = reinterpret_cast<uint64_t>(scratch.map(scratch_per_wave * wave_count));
    region.size = scratch.size();
    region.device = device;
    region.initialised = true;
    region.kind = MemKind::Code;
    region.name = "private memory";
    memory.add(std::move(region));
  }
  make_kernarg();
}

bool Grid::beyond_arguments(uint64_t address, int bytes) const {
  if (address < kernarg || address >= kernarg + arguments.size()) return false;
  const uint64_t end = address + static_cast<uint64_t>(bytes);
  const bool in_packet = address >= packet && end <= packet + kPacketBytes;
  return end > kernarg + kernel->kernarg_size && !in_packet;
}

void Grid::make_kernarg() {
  const size_t packet_at = (size_t{kernel->kernarg_size} + 127) / 64 * 64;
  uint8_t* base = arguments.map(packet_at + kPacketBytes);
  kernarg = reinterpret_cast<uint64_t>(base);
  packet = kernarg + packet_at;
  std::copy(desc.kernarg.begin(), desc.kernarg.end(), base);
  const uint16_t dimensions = desc.grid.z > 1 || desc.block.z > 1   ? 3
                              : desc.grid.y > 1 || desc.block.y > 1 ? 2
                                                                    : 1;
  for (const KernelArg& arg : kernel->args) {
    if (arg.offset + uint64_t{arg.size} > kernel->kernarg_size) continue;
    uint8_t* at = base + arg.offset;
    const std::string& kind = arg.value_kind;
    if (kind.starts_with("hidden_block_count_"))
      put<uint32_t>(at, component(desc.grid, kind.back()));
    if (kind.starts_with("hidden_group_size_")) {
      put<uint16_t>(at, static_cast<uint16_t>(component(desc.block, kind.back())));
    }
    if (kind == "hidden_grid_dims") put<uint16_t>(at, dimensions);
    if (kind == "hidden_dynamic_lds_size") put<uint32_t>(at, desc.dynamic_lds);
    if (kind == "hidden_private_base") put<uint32_t>(at, kPrivateAperture);
    if (kind == "hidden_shared_base") put<uint32_t>(at, kSharedAperture);
  }
  uint8_t* p = base + packet_at;   // the HSA kernel dispatch packet
  put<uint16_t>(p + 2, dimensions);
  for (int k = 0; k < 3; k++) {
    const char axis = "xyz"[k];
    put<uint16_t>(p + 4 + 2 * k, static_cast<uint16_t>(component(desc.block, axis)));
    put<uint32_t>(p + 12 + 4 * k, component(desc.grid, axis) * component(desc.block, axis));
  }
  put<uint32_t>(p + 24, kernel->scratch_bytes);
  put<uint32_t>(p + 28, kernel->lds_bytes + desc.dynamic_lds);
  put<uint64_t>(p + 32, code_base + kernel->descriptor);
  put<uint64_t>(p + 40, kernarg);
  Region region;
  region.base = kernarg;
  region.size = arguments.size();
  region.device = device;
  region.kind = MemKind::Code;
  region.initialised = true;
  region.name = "kernel arguments";
  memory.add(std::move(region));
}

Workgroup& Grid::make_group(uint32_t index, uint32_t slot) {
  const auto& loaded = static_cast<const LoadedCodeImpl&>(*desc.code);
  const KernelDescriptor descriptor = read_descriptor(loaded.object()->elf(), kernel->descriptor);
  auto group = std::make_unique<Workgroup>();
  group->index = index;
  group->id[0] = index % desc.grid.x;
  group->id[1] = index / desc.grid.x % desc.grid.y;
  group->id[2] = static_cast<uint32_t>(index / desc.grid.x / desc.grid.y);
  group->lds.assign(size_t{descriptor.lds_bytes} + desc.dynamic_lds, 0xcb);
  group->live = waves_per_group;
  for (uint32_t k = 0; k < waves_per_group; k++) {
    auto wave = std::make_unique<Wave>();
    wave->id_in_group = k;
    wave->id = index * waves_per_group + k;
    init_wave(*group, *wave, slot * waves_per_group + k, descriptor);
    group->waves.push_back(wave.get());
    ready.push_back(wave.get());
    if (timing != nullptr) timing->add(*wave);
    waves.push_back(std::move(wave));
  }
  live_waves += waves_per_group;
  groups.push_back(std::move(group));
  return *groups.back();
}

void Grid::init_wave(Workgroup& group, Wave& w, uint32_t slot, const KernelDescriptor& d) {
  w.group = &group;
  w.grid = this;
  w.lanes = lanes;
  w.full = lanes == 64 ? ~0ull : 0xffffffffull;
  const bool rdna = program->arch() == Arch::gfx1100;
  w.m0_reg = rdna ? 125 : 124;
  w.keep_high16 = rdna;
  w.v = reinterpret_cast<uint32_t*>(registers.data()) + size_t{slot} * vgpr_rows * kLanes;
  w.scratch = scratch.data() == nullptr ? nullptr : scratch.data() + slot * scratch_per_wave;
  w.scratch_size = scratch_per_wave;
  w.pc = static_cast<uint32_t>(kernel->entry / 4);
  w.mode = ((d.rsrc1 >> 12) & 0xff) | ((d.rsrc1 >> 21) & 1) << 8 | ((d.rsrc1 >> 23) & 1) << 9 |
           ((d.rsrc1 >> 26) & 1) << 23;
  w.default_mode = (w.mode & 0xff) == 0xf0;
  const uint64_t first = uint64_t{w.id_in_group} * static_cast<uint64_t>(lanes);
  const uint64_t count = std::min<uint64_t>(desc.block.count() - first,
                                            static_cast<uint64_t>(lanes));
  w.set_exec(count == 64 ? ~0ull : (1ull << count) - 1);
  init_sgprs(group, w, d);
  for (uint64_t l = 0; l < count; l++) {   // packed work item ids
    const uint64_t item = first + l;
    const uint64_t x = item % desc.block.x, y = item / desc.block.x % desc.block.y,
                   z = item / desc.block.x / desc.block.y;
    w.row(0)[l] = static_cast<uint32_t>(x | y << 10 | z << 20);
  }
  if (checks != nullptr) add_wave_checks(*this, w);
  if (stale != nullptr) stale->add_wave(w, ((d.rsrc1 >> 29) & 1) != 0);
}

void Grid::init_sgprs(const Workgroup& group, Wave& w, const KernelDescriptor& d) {
  unsigned at = 0;
  const auto push = [&w, &at](uint32_t value) { w.s[at++] = value; };
  const auto push64 = [&push](uint64_t value) {
    push(static_cast<uint32_t>(value));
    push(static_cast<uint32_t>(value >> 32));
  };
  const auto base = reinterpret_cast<uint64_t>(scratch.data());
  const uint64_t wave_offset =
      w.scratch == nullptr ? 0 : static_cast<uint64_t>(w.scratch - scratch.data());
  if (d.properties & 1) {   // private segment buffer: swizzled, by lane, 4-byte elements
    push(static_cast<uint32_t>(base));
    push(static_cast<uint32_t>(base >> 32) | 1u << 31);
    push(static_cast<uint32_t>(std::min<uint64_t>(scratch.size(), 0xffffffffu)));
    push(1u << 23 | 3u << 21);
  }
  if (d.properties & 2) push64(packet);
  if (d.properties & 4) push64(0);                 // queue
  if (d.properties & 8) push64(kernarg);
  if (d.properties & 16) push64(0);                // dispatch id
  if (d.properties & 32) push64(base);             // flat scratch
  if (d.properties & 64)
    push(static_cast<uint32_t>(scratch_per_wave / static_cast<uint64_t>(lanes)));
  const unsigned preload = d.kernarg_preload & 0x7f, preload_at = d.kernarg_preload >> 7;
  if (preload > 0) {
    for (unsigned k = 0; k < preload; k++) {
      uint32_t word;
      std::memcpy(&word, arguments.data() + 4 * (preload_at + k), 4);
      push(word);
    }
    w.pc += 64;   // skips the prologue for firmware that does not preload
  }
  at = (d.rsrc2 >> 1) & 31;
  for (int k = 0; k < 3; k++) {
    if ((d.rsrc2 >> (7 + k)) & 1) push(group.id[k]);
  }
  if ((d.rsrc2 >> 10) & 1) push(0);
  if ((d.rsrc2 & 1) != 0 && program->arch() == Arch::gfx90a) {
    push(static_cast<uint32_t>(wave_offset));
  }
}

WaveWhere Grid::where(const Wave& wave, uint32_t pc) const {
  const auto& loaded = static_cast<const LoadedCodeImpl&>(*desc.code);
  WaveWhere w;
  std::copy(wave.group->id, wave.group->id + 3, w.workgroup);
  w.wave = wave.id_in_group;
  w.pc = uint64_t{pc} * 4;
  w.function = loaded.object()->describe(w.pc);
  const Inst& inst = program->at(pc);
  w.line = disassemble(inst, program->arch());
  w.state = wave.status == WaveStatus::Barrier ? "at barrier" : "running";
  return w;
}

}  // namespace ark_emu
