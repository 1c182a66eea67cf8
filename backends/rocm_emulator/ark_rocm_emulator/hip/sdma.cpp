// Runs the DMA engines: on grids' threads while kernels run, and on a separate thread for queues
// that the host fills.
#include "sdma.h"

#include <sys/mman.h>

#include <cstring>

namespace ark_hip {

namespace {

enum PacketOp : uint32_t {
  kNop = 0,
  kCopy = 1,
  kWrite = 2,
  kFence = 5,
  kTrap = 6,
  kPollRegMem = 8,
  kAtomic = 10,
  kConstFill = 11,
};

// The atomic operations of a packet, with the numbers that the texture cache uses for them.
enum AtomicOp : uint32_t {
  kSwap32 = 8,
  kAdd32 = 15,
  kSwap64 = 40,
  kAdd64 = 47,
};

constexpr int kFirstQueue = 1;
constexpr int kDmaFailure = 100;  // kind of a queue's failure, distinct from ark_emu::ErrorKind
bool progress_all(Runtime& rt) {
  std::vector<std::shared_ptr<SdmaQueue>> queues;
  {
    std::lock_guard<std::mutex> hold(rt.lock);
    for (auto& [id, queue] : rt.dma_queues) queues.push_back(queue);
  }
  bool worked = false;
  for (auto& queue : queues) worked = queue->progress() || worked;
  return worked;
}

void serve_host(Runtime* rt) {
  while (!rt->dma_stop.load()) {
    progress_all(*rt);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

template <class T>
T atomic_step(uint64_t address, uint32_t op, T value) {
  auto* there = reinterpret_cast<T*>(address);
  if (op == kSwap32 || op == kSwap64) return __atomic_exchange_n(there, value, __ATOMIC_SEQ_CST);
  return __atomic_fetch_add(there, value, __ATOMIC_SEQ_CST);
}

bool compare(uint32_t function, uint32_t seen, uint32_t wanted) {
  switch (function) {
    case 1: return seen < wanted;
    case 2: return seen <= wanted;
    case 3: return seen == wanted;
    case 4: return seen != wanted;
    case 5: return seen >= wanted;
    case 6: return seen > wanted;
    default: return true;
  }
}

// The engine's memory accesses if checks are off. Its writes count as writes by the host.
class Unchecked final : public ark_emu::Agent {
 public:
  explicit Unchecked(ark_emu::Machine& machine) : machine_(machine) {}
  void acquire(uint64_t, uint64_t) override {}
  std::string read(uint64_t, uint64_t) override { return {}; }
  std::string write(uint64_t address, uint64_t size) override {
    machine_.host_wrote(address, size);
    return {};
  }
  std::string publish(uint64_t address, uint64_t size, bool, bool) override {
    return write(address, size);
  }

 private:
  ark_emu::Machine& machine_;
};

}  // namespace

SdmaQueue::SdmaQueue(Runtime& rt, int device, uint64_t ring_bytes)
    : rt_(rt),
      device_(device),
      ring_bytes_(ring_bytes),
      random_{rt.settings.seed * 0x2545f4914f6cdd1dull + uint64_t(device)} {
  constexpr uint64_t kPage = 4096;
  span_ = ring_bytes + kPage;
  void* memory = mmap(nullptr, span_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw ark_emu::Error("no memory for a DMA queue");
  base_ = uint64_t(memory);
  ark_emu::Region region;
  region.base = base_;
  region.size = span_;
  region.device = device;
  region.kind = ark_emu::MemKind::Queue;
  region.access = ~uint64_t(0);
  region.initialised = true;
  region.name = "sdma queue of device " + std::to_string(device);
  rt.machine->add_region(std::move(region));
  if (rt.settings.checks) {
    agent_ = ark_emu::make_agent(*rt.machine);
  } else {
    agent_ = std::make_unique<Unchecked>(*rt.machine);
  }
}

SdmaQueue::~SdmaQueue() {
  rt_.machine->remove_region(base_);
  munmap(reinterpret_cast<void*>(base_), span_);
}

uint32_t SdmaQueue::word(uint64_t at, int index) const {
  uint64_t offset = (at + uint64_t(index) * 4) % ring_bytes_;
  return __atomic_load_n(reinterpret_cast<uint32_t*>(base_ + offset), __ATOMIC_ACQUIRE);
}

void SdmaQueue::fail(const std::string& why) {
  broken_ = true;
  std::lock_guard<std::mutex> hold(rt_.lock);
  Device& device = *rt_.devices[size_t(device_)];
  if (device.sticky == hipSuccess) device.sticky = hipErrorIllegalAddress;
  rt_.failures.push_back({"DMA queue of emulated device " + std::to_string(device_) + ": " + why,
                          kDmaFailure, device_});
}

bool SdmaQueue::reachable(uint64_t address, uint64_t size, const char* what) {
  ark_emu::Region region;
  bool inside =
      rt_.machine->find_region(address, &region) && address + size <= region.base + region.size;
  if (inside && (region.device == device_ || (region.access >> device_ & 1))) return true;
  char text[160];
  snprintf(text, sizeof text, "%s of %llu bytes at 0x%llx is %s.", what, (unsigned long long)size,
           (unsigned long long)address,
           inside ? "memory of another device that was not opened to it" : "in no allocation");
  fail(text);
  return false;
}

bool SdmaQueue::sound(const std::string& wrong) {
  if (!wrong.empty()) fail("Race: the engine " + wrong + ".");
  return wrong.empty();
}

SdmaQueue::Step SdmaQueue::copy_part(uint64_t from, uint64_t to, uint64_t size) {
  const uint64_t rest = size - moved_, least = std::min<uint64_t>(rest, 256);
  const uint64_t part = least + random_.below(rest - least + 1);
  if (!sound(agent_->read(from + moved_, part))) return Step::Broken;
  if (!sound(agent_->write(to + moved_, part))) return Step::Broken;
  memmove(reinterpret_cast<void*>(to + moved_), reinterpret_cast<void*>(from + moved_), part);
  ark_emu::Region region;   // shared memory: other processes see only host writes
  if (rt_.machine->find_region(to, &region) && region.records != nullptr)
    rt_.machine->host_wrote(to + moved_, part);
  moved_ += part;
  if (moved_ < size) return Step::Part;
  moved_ = 0;
  return Step::Done;
}

// Executes the packet at ring offset `at` (in bytes, counted without wrapping). `length` is set to
// its size in bytes.
SdmaQueue::Step SdmaQueue::execute(uint64_t at, uint64_t available, uint64_t* length) {
  uint32_t header = word(at, 0), op = header & 0xff;
  auto whole = [&](uint64_t words) {
    *length = words * 4;
    // The whole packet is read before it has any effect, because a thread that sees an effect may
    // overwrite the packet's slot.
    if (*length <= available) return sound(fetched(at, *length));
    fail("the doorbell was rung in the middle of a packet (operation " + std::to_string(op) + ").");
    return false;
  };
  switch (op) {
    case kNop: return whole(1 + (header >> 16 & 0x3fff)) ? Step::Done : Step::Broken;
    case kTrap: return whole(2) ? Step::Done : Step::Broken;
    case kCopy: {
      if (!whole(7)) return Step::Broken;
      if (header >> 8 & 0xff) break;  // only linear copies
      uint64_t size = uint64_t(word(at, 1) & 0x3fffffff) + 1, from = wide(at, 3), to = wide(at, 5);
      if (!reachable(from, size, "the source") || !reachable(to, size, "the target"))
        return Step::Broken;
      return copy_part(from, to, size);
    }
    case kWrite: {
      uint64_t words = uint64_t(word(at, 3) & 0xfffff) + 1, to = wide(at, 1);
      if (!whole(4 + words) || !reachable(to, words * 4, "the target")) return Step::Broken;
      for (uint64_t k = 0; k < words; ++k) {
        uint32_t value = word(at, int(4 + k));
        copy_bytes(rt_, reinterpret_cast<void*>(to + k * 4), &value, 4);
      }
      return Step::Done;
    }
    case kConstFill: {
      uint64_t size = uint64_t(word(at, 4) & 0x3fffffff) + 1, to = wide(at, 1);
      if (!whole(5) || !reachable(to, size, "the target")) return Step::Broken;
      uint32_t value = word(at, 3);
      uint64_t width = uint64_t(1) << (header >> 30);
      for (uint64_t k = 0; k < size; ++k)
        reinterpret_cast<uint8_t*>(to)[k] =
            uint8_t(value >> 8 * (k % std::min<uint64_t>(width, 4)));
      rt_.machine->host_wrote(to, size);
      return Step::Done;
    }
    case kFence: {
      uint64_t to = wide(at, 1);
      if (!whole(4) || !reachable(to, 4, "the fence")) return Step::Broken;
      if (!sound(agent_->publish(to, 4, true))) return Step::Broken;
      __atomic_store_n(reinterpret_cast<uint32_t*>(to), word(at, 3), __ATOMIC_SEQ_CST);
      return Step::Done;
    }
    case kAtomic: {
      uint32_t kind = header >> 25 & 0x7f;
      uint64_t to = wide(at, 1), bytes = kind == kAdd64 || kind == kSwap64 ? 8 : 4;
      if (!whole(8)) return Step::Broken;
      if (kind != kAdd32 && kind != kSwap32 && bytes == 4) break;
      if (!reachable(to, bytes, "the atomic")) return Step::Broken;
      if (!sound(agent_->publish(to, bytes, true, kind == kAdd32 || kind == kAdd64)))
        return Step::Broken;
      if (bytes == 8)
        atomic_step<uint64_t>(to, kind, wide(at, 3));
      else
        atomic_step<uint32_t>(to, kind, word(at, 3));
      return Step::Done;
    }
    case kPollRegMem: {
      uint64_t from = wide(at, 1);
      if (!whole(6) || !reachable(from, 4, "the polled word")) return Step::Broken;
      uint32_t seen = __atomic_load_n(reinterpret_cast<uint32_t*>(from), __ATOMIC_SEQ_CST);
      if (!compare(header >> 28 & 7, seen & word(at, 4), word(at, 3))) return Step::Wait;
      agent_->acquire(from, 4);
      return Step::Done;
    }
    default: break;
  }
  char text[96];
  snprintf(text, sizeof text, "packet 0x%08x at byte %llu of the ring is not one that is modelled.",
           header, (unsigned long long)(at % ring_bytes_));
  fail(text);
  return Step::Broken;
}

// Reads the packet from the ring, in two pieces if it crosses the ring's end.
std::string SdmaQueue::fetched(uint64_t at, uint64_t length) {
  const uint64_t begin = at % ring_bytes_, first = std::min(length, ring_bytes_ - begin);
  const std::string wrong = agent_->read(base_ + begin, first);
  return wrong.empty() && first < length ? agent_->read(base_, length - first) : wrong;
}

bool SdmaQueue::progress() {
  std::unique_lock<std::mutex> hold(lock_, std::try_to_lock);
  if (!hold || broken_) return false;
  auto* read = reinterpret_cast<uint64_t*>(read_pointer());
  uint64_t at = *read;
  uint64_t until = __atomic_load_n(reinterpret_cast<uint64_t*>(doorbell()), __ATOMIC_ACQUIRE);
  if (until <= at || random_.below(4) == 0) return false;
  uint64_t written =
      __atomic_load_n(reinterpret_cast<uint64_t*>(write_pointer()), __ATOMIC_ACQUIRE);
  if (written < until) {
    fail("the doorbell says " + std::to_string(until) + " bytes, the write pointer only " +
         std::to_string(written) + ". Store the write pointer first.");
    return false;
  }
  if (until - at > ring_bytes_) {
    fail("packets overran the ring of " + std::to_string(ring_bytes_) +
         " bytes. Wait for the read pointer.");
    return false;
  }
  agent_->acquire(doorbell(), 8);
  bool worked = false;
  while (at < until) {
    uint64_t length = 0;
    Step step = execute(at, until - at, &length);
    worked = worked || step == Step::Part;
    if (step != Step::Done) break;
    if (!sound(agent_->publish(read_pointer(), 8, false))) break;
    at += length;
    __atomic_store_n(read, at, __ATOMIC_RELEASE);
    executed_ += 1;
    worked = true;
  }
  return worked;
}

void close_dma(Runtime& rt) {
  rt.dma_stop = true;
  if (rt.dma_thread.joinable()) rt.dma_thread.join();
  std::lock_guard<std::mutex> hold(rt.lock);
  rt.dma_queues.clear();
}

}  // namespace ark_hip

using namespace ark_hip;

// Creates a queue of `device` with a ring of `ring_bytes` (a multiple of 4096). Fills
// addresses[0..3] with the ring, the write pointer, the read pointer and the doorbell. Returns the
// queue's number, or -1.
HIP_EXPORT int ark_emulator_sdma_create(int device, uint64_t ring_bytes, uint64_t* addresses) {
  Runtime* rt = runtime();
  if (!rt || device < 0 || size_t(device) >= rt->devices.size() || ring_bytes == 0 ||
      ring_bytes % 4096)
    return -1;
  auto queue = std::make_shared<SdmaQueue>(*rt, device, ring_bytes);
  addresses[0] = queue->ring();
  addresses[1] = queue->write_pointer();
  addresses[2] = queue->read_pointer();
  addresses[3] = queue->doorbell();
  std::lock_guard<std::mutex> hold(rt->lock);
  if (!rt->dma_thread.joinable()) {
    rt->machine->set_engine_hook([rt] { return progress_all(*rt); });
    rt->dma_thread = std::thread(serve_host, rt);
  }
  int id = rt->dma_queues.empty() ? kFirstQueue : rt->dma_queues.rbegin()->first + 1;
  rt->dma_queues[id] = std::move(queue);
  return id;
}

HIP_EXPORT int ark_emulator_sdma_destroy(int id) {
  Runtime* rt = runtime();
  if (!rt) return -1;
  std::shared_ptr<SdmaQueue> queue;  // destroyed after the lock is free
  std::lock_guard<std::mutex> hold(rt->lock);
  auto found = rt->dma_queues.find(id);
  if (found == rt->dma_queues.end()) return -1;
  queue = std::move(found->second);
  rt->dma_queues.erase(found);
  return 0;
}

// The number of packets that the queue has executed.
HIP_EXPORT uint64_t ark_emulator_sdma_executed(int id) {
  Runtime* rt = runtime();
  if (!rt) return 0;
  std::lock_guard<std::mutex> hold(rt->lock);
  auto found = rt->dma_queues.find(id);
  return found == rt->dma_queues.end() ? 0 : found->second->executed();
}
