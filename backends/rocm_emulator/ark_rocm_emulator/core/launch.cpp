// Runs one grid: either all workgroups at the same time with interleaved waves, or independent
// workgroups one by one on several threads.
#include "launch.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "grid.h"
#include "timing.h"

namespace ark_emu {
namespace {

LaunchResult bad_launch(const LaunchDesc& desc, const std::string& what) {
  LaunchResult result;
  result.kind = ErrorKind::BadLaunch;
  result.message = "bad launch: " + what + " [seed " + std::to_string(desc.options.seed) + "]";
  return result;
}

// Runs a grid whose workgroups are independent, on several threads. If several workgroups fault,
// the fault of the one with the lowest number is reported, so the result does not depend on the
// threads.
LaunchResult run_groups(Memory& memory, const LaunchDesc& desc, const std::atomic<bool>& cancel) {
  const auto count = static_cast<uint32_t>(desc.grid.count());
  const uint32_t hardware = std::max(1u, std::thread::hardware_concurrency());
  // With a step budget (a limit of executed instructions), workgroups run in order on one thread,
  // so that the budget always ends at the same point.
  const bool spread = desc.options.parallel && desc.options.step_budget == 0;
  const uint32_t threads = spread ? std::min({hardware, count, 32u}) : 1;
  std::atomic<uint32_t> next{0}, lowest_fault{count};
  std::mutex mutex;
  LaunchResult total;
  uint32_t faulted = count;
  const auto work = [&] {
    LaunchResult mine;
    uint64_t instructions = 0;
    uint32_t at = count;
    try {
      Grid grid(memory, desc);
      grid.prepare(1);
      for (;;) {
        const uint32_t index = next.fetch_add(1);
        if (index >= count || index > lowest_fault.load()) break;
        grid.run_group(index, cancel);
        if (grid.result.ok()) continue;
        mine = grid.result;
        at = index;
        uint32_t seen = lowest_fault.load();
        while (at < seen && !lowest_fault.compare_exchange_weak(seen, at)) {
        }
        break;
      }
      instructions = grid.clock;
    } catch (const std::exception& error) {
      mine = bad_launch(desc, error.what());
      at = 0;
    }
    const std::lock_guard lock(mutex);
    const uint64_t all = total.instructions + instructions;
    if (at < faulted) {
      total = mine;
      faulted = at;
    }
    total.instructions = all;
  };
  std::vector<std::thread> pool;
  for (uint32_t k = 1; k < threads; k++) pool.emplace_back(work);
  work();
  for (std::thread& thread : pool) thread.join();
  return total;
}

LaunchResult run_launch(Memory& memory, const LaunchDesc& desc, const std::atomic<bool>& cancel,
                        const Hook& hook) {
  const auto start = std::chrono::steady_clock::now();
  LaunchResult result;
  try {
    Grid grid(memory, desc);
    try {
      grid.prepare(0);
      const bool plain =
          !desc.options.checks && !desc.options.stale && desc.options.timing == 0;
      if (plain && grid.independent()) {
        result = run_groups(memory, desc, cancel);
      } else {
        Grid whole(memory, desc);
        whole.prepare(static_cast<uint32_t>(desc.grid.count()));
        whole.populate();
        whole.run(cancel, hook);
        result = whole.result;
        result.instructions = whole.clock;
        if (whole.timing != nullptr) result.nanoseconds = whole.timing->nanoseconds();
      }
    } catch (const Fault& fault) {
      grid.finish(fault, nullptr, 0);
      result = grid.result;
    }
  } catch (const std::exception& error) {   // an Error, or out of host memory
    result = bad_launch(desc, error.what());
  }
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return result;
}

class LaunchImpl : public Launch {
 public:
  LaunchImpl(std::shared_ptr<Machine> machine, Memory& memory, LaunchDesc desc, Hook hook,
             std::function<void()> at_end)
      : machine_(std::move(machine)), desc_(std::move(desc)) {
    thread_ = std::thread([this, &memory, hook = std::move(hook), at_end = std::move(at_end)] {
      LaunchResult result = run_launch(memory, desc_, cancel_, hook);
      at_end();
      const std::lock_guard lock(mutex_);
      result_ = std::move(result);
      done_ = true;
      ended_.notify_all();
    });
  }
  ~LaunchImpl() override {
    cancel_ = true;
    thread_.join();
  }
  bool done() const override {
    const std::lock_guard lock(mutex_);
    return done_;
  }
  const LaunchResult& wait() override {
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [this] { return done_; });
    return result_;
  }
  bool wait_for_ms(uint64_t ms) override {
    std::unique_lock lock(mutex_);
    return ended_.wait_for(lock, std::chrono::milliseconds(ms), [this] { return done_; });
  }
  void cancel() override { cancel_ = true; }

 private:
  std::shared_ptr<Machine> machine_;
  LaunchDesc desc_;
  std::atomic<bool> cancel_{false};
  mutable std::mutex mutex_;
  std::condition_variable ended_;
  bool done_ = false;
  LaunchResult result_;
  std::thread thread_;
};

}  // namespace

std::shared_ptr<Launch> start_launch(std::shared_ptr<Machine> machine, Memory& memory,
                                     LaunchDesc desc, Hook hook, std::function<void()> at_end) {
  return std::make_shared<LaunchImpl>(std::move(machine), memory, std::move(desc), std::move(hook),
                                      std::move(at_end));
}

}  // namespace ark_emu
