// An NVIDIA GPU as the device of an exported model: the first one, by the driver's API, which is
// opened when an instance is made. The primary context is used, as other libraries do.
#include "device.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

// The driver's names with the version that libcuda has had since CUDA 4, and what they take.
#define FUNCTIONS(ENTRY)                                                                     \
  ENTRY(init, "cuInit", (unsigned))                                                          \
  ENTRY(get, "cuDeviceGet", (int*, int))                                                     \
  ENTRY(retain, "cuDevicePrimaryCtxRetain", (void**, int))                                   \
  ENTRY(release, "cuDevicePrimaryCtxRelease_v2", (int))                                      \
  ENTRY(push, "cuCtxPushCurrent_v2", (void*))                                                \
  ENTRY(pop, "cuCtxPopCurrent_v2", (void**))                                                 \
  ENTRY(synchronize, "cuCtxSynchronize", (void))                                             \
  ENTRY(alloc, "cuMemAlloc_v2", (uint64_t*, size_t))                                         \
  ENTRY(release_memory, "cuMemFree_v2", (uint64_t))                                          \
  ENTRY(alloc_host, "cuMemHostAlloc", (void**, size_t, unsigned))                            \
  ENTRY(host_address, "cuMemHostGetDevicePointer_v2", (uint64_t*, void*, unsigned))          \
  ENTRY(free_host, "cuMemFreeHost", (void*))                                                 \
  ENTRY(copy_in, "cuMemcpyHtoD_v2", (uint64_t, const void*, size_t))                         \
  ENTRY(copy_out, "cuMemcpyDtoH_v2", (void*, uint64_t, size_t))                              \
  ENTRY(fill, "cuMemsetD8_v2", (uint64_t, unsigned char, size_t))                            \
  ENTRY(load, "cuModuleLoadData", (void**, const void*))                                     \
  ENTRY(unload, "cuModuleUnload", (void*))                                                   \
  ENTRY(function_of, "cuModuleGetFunction", (void**, void*, const char*))                    \
  ENTRY(set, "cuFuncSetAttribute", (void*, int, int))                                        \
  ENTRY(launch, "cuLaunchCooperativeKernel",                                                 \
        (void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, \
         void**))                                                                            \
  ENTRY(words, "cuGetErrorString", (int, const char**))

#define OUT_OF_MEMORY 2             // CUDA_ERROR_OUT_OF_MEMORY
#define HOST_PORTABLE_MAPPED 3u     // CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP
#define MAX_DYNAMIC_SHARED_BYTES 8  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

struct ark_device {
  void* library;
  int number;
  void *context, *module, *function;
#define MEMBER(name, symbol, arguments) int(*name) arguments;
  FUNCTIONS(MEMBER)
#undef MEMBER
};

static int failed(ark_instance* i, int status, int code, const char* doing) {
  const char* words = NULL;
  if (i->device->words(code, &words) != 0 || words == NULL) words = "unknown";
  return ark_fail(i, status, "%s: the driver says \"%s\" (%d)", doing, words, code);
}

// ISO C has no conversion from an object's address to a function's.
static int find(ark_instance* i, const char* symbol, void* function) {
  void* found = dlsym(i->device->library, symbol);
  if (found == NULL) {
    return ark_fail(i, ARK_NO_DEVICE, "libcuda has no %s; install a newer driver", symbol);
  }
  memcpy(function, &found, sizeof found);
  return ARK_OK;
}

static int open_library(ark_instance* i) {
  struct ark_device* d = i->device;
  d->library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (d->library == NULL) {
    return ark_fail(i, ARK_NO_DEVICE, "no NVIDIA driver was found (%s); install one", dlerror());
  }
  int status = ARK_OK;
#define FIND(name, symbol, arguments) \
  if (status == ARK_OK) status = find(i, symbol, &d->name);
  FUNCTIONS(FIND)
#undef FIND
  return status;
}

static int load(ark_instance* i) {
  struct ark_device* d = i->device;
  const ark_model* m = i->model;
  int code = d->load(&d->module, m->image);
  if (code != 0) return failed(i, ARK_NO_DEVICE, code, m->made_for);
  code = d->function_of(&d->function, d->module, "ark_loop");
  if (code == 0) code = d->set(d->function, MAX_DYNAMIC_SHARED_BYTES, (int)m->shared_bytes);
  return code == 0 ? ARK_OK : failed(i, ARK_NO_DEVICE, code, m->made_for);
}

int ark_device_open(ark_instance* i) {
  struct ark_device* d = i->device = calloc(1, sizeof *d);
  if (d == NULL) return ark_fail(i, ARK_NO_MEMORY, "the system gave no memory");
  const int status = open_library(i);
  if (status != ARK_OK) return status;
  int code = d->init(0);
  if (code == 0) code = d->get(&d->number, 0);
  if (code != 0) return failed(i, ARK_NO_DEVICE, code, "opening the first GPU");
  void* context = NULL;
  code = d->retain(&context, d->number);
  if (code != 0) return failed(i, ARK_NO_DEVICE, code, "opening the first GPU");
  d->context = context;
  d->push(d->context);
  const int loaded = load(i);
  d->pop(&context);
  return loaded;
}

void ark_device_close(ark_instance* i) {
  struct ark_device* d = i->device;
  void* context = NULL;
  if (d == NULL) return;
  if (d->context != NULL) {
    d->push(d->context);
    if (d->module != NULL) d->unload(d->module);
    d->pop(&context);
    d->release(d->number);
  }
  if (d->library != NULL) dlclose(d->library);
  free(d);
  i->device = NULL;
}

int ark_device_alloc(ark_instance* i, uint64_t nbytes, int mapped, ark_memory* made) {
  struct ark_device* d = i->device;
  const size_t size = nbytes < 256 ? 256 : (size_t)nbytes;
  void* context = NULL;
  d->push(d->context);
  int code = mapped ? d->alloc_host(&made->host, size, HOST_PORTABLE_MAPPED)
                    : d->alloc(&made->address, size);
  if (code == 0 && mapped) {
    memset(made->host, 0, size);
    code = d->host_address(&made->address, made->host, 0);
  } else if (code == 0) {
    code = d->fill(made->address, 0, size);
  }
  d->pop(&context);
  if (code == 0) return ARK_OK;
  return failed(i, code == OUT_OF_MEMORY ? ARK_NO_MEMORY : ARK_NO_DEVICE, code, "allocating");
}

void ark_device_free(ark_instance* i, ark_memory* memory) {
  struct ark_device* d = i->device;
  void* context = NULL;
  d->push(d->context);
  if (memory->host != NULL) {
    d->free_host(memory->host);
  } else if (memory->address != 0) {
    d->release_memory(memory->address);
  }
  d->pop(&context);
}

int ark_device_write(ark_instance* i, uint64_t to, const void* from, size_t nbytes) {
  struct ark_device* d = i->device;
  void* context = NULL;
  if (nbytes == 0) return ARK_OK;
  d->push(d->context);
  const int code = d->copy_in(to, from, nbytes);
  d->pop(&context);
  return code == 0 ? ARK_OK : failed(i, ARK_NO_DEVICE, code, "copying to the GPU");
}

int ark_device_read(ark_instance* i, void* to, uint64_t from, size_t nbytes) {
  struct ark_device* d = i->device;
  void* context = NULL;
  if (nbytes == 0) return ARK_OK;
  d->push(d->context);
  const int code = d->copy_out(to, from, nbytes);
  d->pop(&context);
  return code == 0 ? ARK_OK : failed(i, ARK_NO_DEVICE, code, "copying from the GPU");
}

int ark_device_zero(ark_instance* i, uint64_t at, size_t nbytes) {
  struct ark_device* d = i->device;
  void* context = NULL;
  if (nbytes == 0) return ARK_OK;
  d->push(d->context);
  const int code = d->fill(at, 0, nbytes);
  d->pop(&context);
  return code == 0 ? ARK_OK : failed(i, ARK_NO_DEVICE, code, "clearing memory of the GPU");
}

int ark_device_run(ark_instance* i, const struct ArkParams* params) {
  struct ark_device* d = i->device;
  const ark_model* m = i->model;
  struct ArkParams copy = *params;
  void* arguments[] = {&copy};
  void* context = NULL;
  d->push(d->context);
  // Cooperative: the driver refuses the launch unless all blocks are resident together.
  int code = d->launch(d->function, m->processors, 1, 1, m->threads, 1, 1, m->shared_bytes, NULL,
                       arguments);
  if (code == 0) code = d->synchronize();
  d->pop(&context);
  return code == 0 ? ARK_OK : failed(i, ARK_NO_DEVICE, code, "running the loop kernel");
}
