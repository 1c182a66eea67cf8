// Copies by the copy engines, through HIP, on streams of their own beside the loop kernel.
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
    find(enter_, "hipSetDevice");
    find(stream_, "hipStreamCreateWithFlags");
    find(end_stream_, "hipStreamDestroy");
    find(copy_, "hipMemcpyAsync");
    find(event_, "hipEventCreateWithFlags");
    find(end_event_, "hipEventDestroy");
    find(record_, "hipEventRecord");
    find(query_, "hipEventQuery");
    find(finish_, "hipStreamSynchronize");
  }
  ~Copies() { dlclose(library_); }

  void open() {
    check(enter_(device_), "hipSetDevice");
    for (void*& queue : queues_) check(stream_(&queue, 1u), "hipStreamCreateWithFlags");
  }

  void start(uint64_t target, uint64_t source, uint64_t size) {
    void* queue = queues_[started_++ % QUEUES];
    void* to = reinterpret_cast<void*>(target);
    check(copy_(to, reinterpret_cast<const void*>(source), size, ANY, queue), "hipMemcpyAsync");
    void* event = nullptr;
    check(event_(&event, 2u), "hipEventCreateWithFlags");
    waiting_.push_back(event);
    check(record_(event, queue), "hipEventRecord");
  }

  uint32_t completed() {
    while (!waiting_.empty()) {
      const int code = query_(waiting_.front());
      if (code == NOT_READY) break;
      check(code, "a copy");
      end_event_(waiting_.front());
      waiting_.pop_front();
      ++done_;
    }
    return done_;
  }

  void close() {
    for (void*& queue : queues_) {
      if (queue != nullptr) {
        finish_(queue);
        end_stream_(queue);
      }
      queue = nullptr;
    }
    for (void* event : waiting_) end_event_(event);
    waiting_.clear();
    started_ = done_ = 0;
  }

 private:
  static constexpr int QUEUES = 4, NOT_READY = 600, ANY = 4;
  template <typename F>
  void find(F& function, const char* name) {
    function = reinterpret_cast<F>(dlsym(library_, name));
    if (function == nullptr) throw std::runtime_error(std::string("HIP lacks ") + name);
  }
  static void check(int code, const char* what) {
    if (code == 0) return;
    throw std::runtime_error(std::string(what) + " failed with HIP's error " +
                             std::to_string(code));
  }

  void* library_;
  int device_;
  int (*enter_)(int);
  int (*stream_)(void**, unsigned);
  int (*end_stream_)(void*);
  int (*copy_)(void*, const void*, size_t, int, void*);
  int (*event_)(void**, unsigned);
  int (*end_event_)(void*);
  int (*record_)(void*, void*);
  int (*query_)(void*);
  int (*finish_)(void*);
  void* queues_[QUEUES] = {};
  std::deque<void*> waiting_;
  uint32_t started_ = 0, done_ = 0;
};
