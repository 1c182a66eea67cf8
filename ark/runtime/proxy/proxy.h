// The host's part of the proxy. For each device, a thread takes requests ("triggers") from the FIFO
// that device/proxy.h fills, starts copies, and counts them when they are complete. The thread
// executes no Python.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace ark {

// ArkTrigger and ArkFifo of ark/backend/codegen/layout.py.
struct Trigger {
  uint32_t source, target, high, size;
};
struct Fifo {
  uint32_t done;
  uint32_t pad[15];
  Trigger slots[];
};

// Memory to which triggers may refer. peer: the rank on another host that has the memory, or -1 if
// this process can access it. there: the memory's address in the peer's process.
struct Range {
  uint64_t begin, end;
  int peer;
  uint64_t there;
};

// The interface of classes that copy bytes. Only the proxy's thread calls it. The functions copy
// and add start one operation each. The function completed returns how many operations have ended,
// in the order in which they were started.
class Engine {
 public:
  virtual ~Engine() = default;
  virtual void open() {}
  virtual void copy(const Range& from, const Range& to, uint64_t source, uint64_t target,
                    uint64_t size) = 0;
  virtual void add(const Range& to, uint64_t target, uint32_t value) = 0;
  virtual uint32_t completed() = 0;
  // True if messages have arrived from other hosts since the last call.
  virtual bool stirred() { return false; }
  // Called when the FIFO is empty: sleeps for at most `most`, or until a message arrives from
  // another host or `wake` is called.
  virtual void rest(std::chrono::microseconds most) {
    std::unique_lock<std::mutex> hold(resting_);
    woken_.wait_for(hold, most, [this] { return awake_; });
    awake_ = false;
  }
  // Ends the sleep of `rest`; if no sleep is in progress, the next one returns at once. Called by
  // other threads.
  virtual void wake() {
    {
      std::lock_guard<std::mutex> hold(resting_);
      awake_ = true;
    }
    woken_.notify_one();
  }
  virtual void close() {}

 private:
  std::mutex resting_;
  std::condition_variable woken_;
  bool awake_ = false;
};

class Proxy {
 public:
  Proxy(uint64_t fifo, uint32_t slots, uint64_t abort, Engine& engine)
      : fifo_(reinterpret_cast<Fifo*>(fifo)),
        slots_(slots),
        abort_(reinterpret_cast<uint32_t*>(abort)),
        engine_(engine) {}
  ~Proxy() { stop(); }

  void allow(const Range& range) { ranges_.push_back(range); }

  // Starts the proxy's thread. The FIFO must be empty and its count `done` must be 0.
  void start() {
    stop();
    stopping_ = false;
    thread_ = std::thread([this] { run(); });
  }

  // Waits for the copies in progress. Requests that are still in the FIFO are dropped.
  void stop() {
    stopping_ = true;
    if (thread_.joinable()) thread_.join();
  }

  // Called before a launch: ends the thread's sleep, and makes it poll the FIFO often, because
  // requests will follow soon.
  void wake() {
    hurry_ = true;
    engine_.wake();
  }

  std::string error() {
    std::lock_guard<std::mutex> hold(lock_);
    return error_;
  }
  uint32_t served() const { return served_.load(); }
  uint64_t rests() const { return rests_.load(); }

 private:
  void run() {
    try {
      engine_.open();
      serve();
    } catch (const std::exception& error) {
      {
        std::lock_guard<std::mutex> hold(lock_);
        error_ = error.what();
      }
      // After an error: sets the abort word, which makes the kernel leave, and starts no further
      // copies.
      if (abort_ != nullptr) __atomic_store_n(abort_, 1u, __ATOMIC_RELEASE);
    }
    engine_.close();
  }

  void serve() {
    uint32_t taken = 0, done = 0;
    auto last = std::chrono::steady_clock::now();
    for (uint32_t idle = 0;; ++idle) {
      // Takes several triggers before it polls once for completed copies. Their number is limited,
      // so that the completion of the first one is not reported late.
      uint64_t bytes = 0;
      for (uint32_t i = 0; i < ROW && bytes < ROW_BYTES && take(taken, bytes); ++i) {
        ++taken;
        idle = 0;
      }
      const uint32_t complete = engine_.completed();
      if (complete != done) {
        done = complete;
        served_ = done;
        __atomic_store_n(&fifo_->done, done, __ATOMIC_RELEASE);
        idle = 0;
      }
      if (engine_.stirred() || hurry_.exchange(false)) idle = 0;
      if (idle == 0) last = std::chrono::steady_clock::now();
      if (stopping_) {
        // After this time without progress, the thread does not wait for the remaining operations,
        // because a peer may have ended.
        if (taken == done || std::chrono::steady_clock::now() - last > std::chrono::seconds(2)) {
          return;
        }
      }
      if (idle > 64) pause(last, taken != done);
    }
  }

  // Waits a little: yields the core at first, sleeps for 50 us if nothing has happened for 2 ms,
  // and for 2 ms if nothing has happened for 200 ms.
  void pause(std::chrono::steady_clock::time_point last, bool busy) {
    const auto since = std::chrono::steady_clock::now() - last;
    using std::chrono::microseconds;
    using std::chrono::milliseconds;
    if (busy || since < milliseconds(2)) {
      std::this_thread::yield();
    } else if (since < milliseconds(200)) {
      ++rests_;
      engine_.rest(microseconds(50));
    } else {
      ++rests_;
      engine_.rest(milliseconds(2));
    }
  }

  // Starts the operation that the trigger at this position requests, and adds its size to `bytes`.
  // Returns false if there is no trigger yet.
  bool take(uint32_t at, uint64_t& bytes) {
    Trigger& slot = fifo_->slots[at % slots_];
    const uint32_t last = __atomic_load_n(&slot.size, __ATOMIC_ACQUIRE);
    const uint32_t lap = (at / slots_ & 1u) ^ 1u;
    if (last >> 31 != lap) return false;
    const uint64_t source = slot.source | static_cast<uint64_t>(slot.high & 0xffffu) << 32;
    const uint64_t target = slot.target | static_cast<uint64_t>(slot.high >> 16) << 32;
    const uint64_t size = last & 0x7fffffffu;
    bytes += size;
    if (size == 0) {
      engine_.add(find(target, 4), target, static_cast<uint32_t>(source));
    } else {
      engine_.copy(find(source, size), find(target, size), source, target, size);
    }
    return true;
  }

  const Range& find(uint64_t address, uint64_t size) const {
    for (const Range& range : ranges_) {
      if (range.begin <= address && size <= range.end - range.begin &&
          address - range.begin <= range.end - range.begin - size) {
        return range;
      }
    }
    throw std::runtime_error("a trigger names " + std::to_string(size) + " bytes at " +
                             std::to_string(address) + ", which is no memory of the plan");
  }

  static constexpr uint32_t ROW = 16;
  static constexpr uint64_t ROW_BYTES = 64 << 10;

  Fifo* fifo_;
  uint32_t slots_;
  uint32_t* abort_;
  Engine& engine_;
  std::vector<Range> ranges_;
  std::thread thread_;
  std::mutex lock_;
  std::string error_;
  std::atomic<bool> stopping_{false}, hurry_{false};
  std::atomic<uint32_t> served_{0};
  std::atomic<uint64_t> rests_{0};
};

}  // namespace ark
