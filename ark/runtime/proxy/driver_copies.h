// Copies by a device's copy engines, on separate streams beside the loop kernel, through the
// library of the device's driver. A vendor's copies.h defines a struct that maps the following
// names to the driver's functions:
//   open(), close()                 called by a thread before its first and after its last call
//   stream(&queue) end_stream(queue) finish(queue)
//   event(&event) end_event(event) record(event, queue) query(event)
//   copy(target, source, bytes, queue)
//   NOT_READY                       the result of query for an event that has not occurred
// Each function returns the driver's result code, which is 0 for success.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <deque>
#include <stdexcept>
#include <string>

// A driver's library, which stays open as long as this object exists.
class Library {
 public:
  explicit Library(const std::string& path) : handle_(dlopen(path.c_str(), RTLD_NOW)) {
    if (handle_ == nullptr) throw std::runtime_error(dlerror());
  }
  ~Library() { dlclose(handle_); }
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  template <typename F>
  void find(F& function, const char* name) const {
    function = reinterpret_cast<F>(dlsym(handle_, name));
    if (function == nullptr) throw std::runtime_error(std::string("the driver lacks ") + name);
  }

 private:
  void* handle_;
};

template <class Driver>
class DriverCopies {
 public:
  DriverCopies(const std::string& library, int device)
      : library_(library), driver_(library_, device) {}

  void open() {
    check(driver_.open(), "opening the device");
    open_ = true;
    for (void*& queue : queues_) check(driver_.stream(&queue), "making a stream");
  }

  void start(uint64_t target, uint64_t source, uint64_t size) {
    void* queue = queues_[started_++ % QUEUES];
    check(driver_.copy(target, source, size, queue), "starting a copy");
    void* event = nullptr;
    if (spare_.empty()) {
      check(driver_.event(&event), "making an event");
    } else {
      event = spare_.back();
      spare_.pop_back();
    }
    waiting_.push_back(event);
    check(driver_.record(event, queue), "recording an event");
  }

  uint32_t completed() {
    while (!waiting_.empty()) {
      const int code = driver_.query(waiting_.front());
      if (code == Driver::NOT_READY) break;
      check(code, "a copy");
      spare_.push_back(waiting_.front());
      waiting_.pop_front();
      ++done_;
    }
    return done_;
  }

  void close() {
    if (!open_) return;
    for (void*& queue : queues_) {
      if (queue != nullptr) {
        driver_.finish(queue);
        driver_.end_stream(queue);
      }
      queue = nullptr;
    }
    for (void* event : waiting_) driver_.end_event(event);
    for (void* event : spare_) driver_.end_event(event);
    waiting_.clear();
    spare_.clear();
    started_ = done_ = 0;
    driver_.close();
    open_ = false;
  }

 private:
  static constexpr int QUEUES = 4;
  static void check(int code, const char* what) {
    if (code == 0) return;
    throw std::runtime_error(std::string(what) + " failed with the driver's error " +
                             std::to_string(code));
  }

  Library library_;
  Driver driver_;
  bool open_ = false;
  void* queues_[QUEUES] = {};
  std::deque<void*> waiting_, spare_;
  uint32_t started_ = 0, done_ = 0;
};
