// The functions of the CUDA driver by which the proxy copies with copy engines, under the names
// that ark/runtime/proxy/driver_copies.h expects.
#pragma once

#include "driver_copies.h"

class CudaDriver {
 public:
  static constexpr int NOT_READY = 600;

  CudaDriver(const Library& library, int device) : device_(device) {
    library.find(retain_, "cuDevicePrimaryCtxRetain");
    library.find(release_, "cuDevicePrimaryCtxRelease_v2");
    library.find(enter_, "cuCtxSetCurrent");
    library.find(stream_, "cuStreamCreate");
    library.find(end_stream, "cuStreamDestroy_v2");
    library.find(finish, "cuStreamSynchronize");
    library.find(copy, "cuMemcpyAsync");
    library.find(event_, "cuEventCreate");
    library.find(end_event, "cuEventDestroy_v2");
    library.find(record, "cuEventRecord");
    library.find(query, "cuEventQuery");
  }

  int open() {
    void* context = nullptr;
    const int code = retain_(&context, device_);
    return code != 0 ? code : enter_(context);
  }
  void close() {
    enter_(nullptr);
    release_(device_);
  }
  int stream(void** queue) { return stream_(queue, NON_BLOCKING); }
  int event(void** event) { return event_(event, NO_TIMING); }

  int (*end_stream)(void*);
  int (*finish)(void*);
  int (*end_event)(void*);
  int (*record)(void*, void*);
  int (*query)(void*);
  int (*copy)(uint64_t, uint64_t, size_t, void*);

 private:
  static constexpr unsigned NON_BLOCKING = 1, NO_TIMING = 2;
  int device_;
  int (*retain_)(void**, int);
  int (*release_)(int);
  int (*enter_)(void*);
  int (*stream_)(void**, unsigned);
  int (*event_)(void**, unsigned);
};

using Copies = DriverCopies<CudaDriver>;
