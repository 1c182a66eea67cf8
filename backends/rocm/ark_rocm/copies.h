// Gives HIP's copy functions the names that ark/runtime/proxy/driver_copies.h expects. Through them
// the proxy (the host thread that copies for kernels) uses the copy engines.
#pragma once

#include "driver_copies.h"

class HipDriver {
 public:
  static constexpr int NOT_READY = 600;

  HipDriver(const Library& library, int device) : device_(device) {
    library.find(enter_, "hipSetDevice");
    library.find(stream_, "hipStreamCreateWithFlags");
    library.find(end_stream, "hipStreamDestroy");
    library.find(finish, "hipStreamSynchronize");
    library.find(copy_, "hipMemcpyAsync");
    library.find(event_, "hipEventCreateWithFlags");
    library.find(end_event, "hipEventDestroy");
    library.find(record, "hipEventRecord");
    library.find(query, "hipEventQuery");
  }

  int open() { return enter_(device_); }
  void close() {}
  int stream(void** queue) { return stream_(queue, NON_BLOCKING); }
  int event(void** event) { return event_(event, NO_TIMING); }
  int copy(uint64_t target, uint64_t source, size_t size, void* queue) {
    const void* from = reinterpret_cast<const void*>(source);
    return copy_(reinterpret_cast<void*>(target), from, size, ANY_DIRECTION, queue);
  }

  int (*end_stream)(void*);
  int (*finish)(void*);
  int (*end_event)(void*);
  int (*record)(void*, void*);
  int (*query)(void*);

 private:
  static constexpr unsigned NON_BLOCKING = 1, NO_TIMING = 2;
  static constexpr int ANY_DIRECTION = 4;
  int device_;
  int (*enter_)(int);
  int (*stream_)(void**, unsigned);
  int (*copy_)(void*, const void*, size_t, int, void*);
  int (*event_)(void**, unsigned);
};

using Copies = DriverCopies<HipDriver>;
