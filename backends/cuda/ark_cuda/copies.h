// Copies by the copy engines, through the driver, on streams of their own beside the loop kernel.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <deque>
#include <stdexcept>
#include <string>

class Copies {
 public:
  Copies(const std::string& library, int device) : device_(device) {
    library_ = dlopen(library.c_str(), RTLD_NOW);
    if (library_ == nullptr) throw std::runtime_error(dlerror());
    find(retain_, "cuDevicePrimaryCtxRetain");
    find(release_, "cuDevicePrimaryCtxRelease_v2");
    find(enter_, "cuCtxSetCurrent");
    find(stream_, "cuStreamCreate");
    find(end_stream_, "cuStreamDestroy_v2");
    find(copy_, "cuMemcpyAsync");
    find(event_, "cuEventCreate");
    find(end_event_, "cuEventDestroy_v2");
    find(record_, "cuEventRecord");
    find(query_, "cuEventQuery");
    find(finish_, "cuStreamSynchronize");
  }
  ~Copies() { dlclose(library_); }

  void open() {
    void* context = nullptr;
    check(retain_(&context, device_), "cuDevicePrimaryCtxRetain");
    open_ = true;
    check(enter_(context), "cuCtxSetCurrent");
    for (void*& queue : queues_) check(stream_(&queue, 1u), "cuStreamCreate");
  }

  void start(uint64_t target, uint64_t source, uint64_t size) {
    void* queue = queues_[started_++ % QUEUES];
    check(copy_(target, source, size, queue), "cuMemcpyAsync");
    void* event = nullptr;
    if (spare_.empty()) {
      check(event_(&event, 2u), "cuEventCreate");
    } else {
      event = spare_.back();
      spare_.pop_back();
    }
    waiting_.push_back(event);
    check(record_(event, queue), "cuEventRecord");
  }

  uint32_t completed() {
    while (!waiting_.empty()) {
      const int code = query_(waiting_.front());
      if (code == NOT_READY) break;
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
        finish_(queue);
        end_stream_(queue);
      }
      queue = nullptr;
    }
    for (void* event : waiting_) end_event_(event);
    for (void* event : spare_) end_event_(event);
    waiting_.clear();
    spare_.clear();
    started_ = done_ = 0;
    enter_(nullptr);
    release_(device_);
    open_ = false;
  }

 private:
  static constexpr int QUEUES = 4, NOT_READY = 600;
  template <typename F>
  void find(F& function, const char* name) {
    function = reinterpret_cast<F>(dlsym(library_, name));
    if (function == nullptr) throw std::runtime_error(std::string("the driver lacks ") + name);
  }
  static void check(int code, const char* what) {
    if (code == 0) return;
    throw std::runtime_error(std::string(what) + " failed with the driver's error " +
                             std::to_string(code));
  }

  void* library_;
  int device_;
  bool open_ = false;
  int (*retain_)(void**, int);
  int (*release_)(int);
  int (*enter_)(void*);
  int (*stream_)(void**, unsigned);
  int (*end_stream_)(void*);
  int (*copy_)(uint64_t, uint64_t, size_t, void*);
  int (*event_)(void**, unsigned);
  int (*end_event_)(void*);
  int (*record_)(void*, void*);
  int (*query_)(void*);
  int (*finish_)(void*);
  void* queues_[QUEUES] = {};
  std::deque<void*> waiting_, spare_;
  uint32_t started_ = 0, done_ = 0;
};
