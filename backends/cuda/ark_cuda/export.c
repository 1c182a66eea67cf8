// The device code of an exported model for NVIDIA GPUs. It uses the first GPU and calls the
// driver's API, which is opened when an instance of the model is created. It uses the primary
// context, as other libraries do.
#include "driver.h"

#include <stdlib.h>

// The driver's functions, under the versioned names that libcuda exports since CUDA 4, with their
// parameter types.
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
  ENTRY(encode, "cuTensorMapEncodeTiled",                                                    \
        (void*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*,     \
         const uint32_t*, int, int, int, int))                                               \
  ENTRY(encode_windows, "cuTensorMapEncodeIm2col",                                           \
        (void*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const int32_t*,      \
         const int32_t*, uint32_t, uint32_t, const uint32_t*, int, int, int, int))           \
  ENTRY(words, "cuGetErrorString", (int, const char**))

#define OUT_OF_MEMORY 2             // CUDA_ERROR_OUT_OF_MEMORY
#define HOST_PORTABLE_MAPPED 3u     // CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP
#define MAX_DYNAMIC_SHARED_BYTES 8  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

struct loaded {
  void *module, *function;
};

struct ark_device {
  void* library;
  int number;
  void* context;
#define MEMBER(name, symbol, arguments) int(*name) arguments;
  FUNCTIONS(MEMBER)
#undef MEMBER
  struct loaded kernels[];  // of the model
};

static int failed(ark_instance* i, int status, int code, const char* doing) {
  const char* words = NULL;
  if (i->device->words(code, &words) != 0 || words == NULL) words = "unknown";
  return ark_fail(i, status, "%s: the driver says \"%s\" (%d)", doing, words, code);
}

static int open_library(ark_instance* i) {
  struct ark_device* d = i->device;
  d->library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (d->library == NULL) {
    return ark_fail(i, ARK_NO_DEVICE, "no NVIDIA driver was found (%s); install one", dlerror());
  }
#define SYMBOL(name, symbol, arguments) {symbol, &d->name},
  const ark_symbol symbols[] = {FUNCTIONS(SYMBOL)};
#undef SYMBOL
  const size_t count = sizeof symbols / sizeof *symbols;
  return ark_find_symbols(i, d->library, symbols, count, "libcuda", "driver");
}

static int load(ark_instance* i) {
  struct ark_device* d = i->device;
  const ark_model* m = i->model;
  int code = 0;
  for (uint32_t k = 0; code == 0 && k < m->kernel_count; ++k) {
    const int shared_bytes = (int)m->kernels[k].shared_bytes;
    code = d->load(&d->kernels[k].module, m->kernels[k].image);
    if (code == 0) code = d->function_of(&d->kernels[k].function, d->kernels[k].module, "ark_loop");
    if (code == 0) code = d->set(d->kernels[k].function, MAX_DYNAMIC_SHARED_BYTES, shared_bytes);
  }
  return code == 0 ? ARK_OK : failed(i, ARK_NO_DEVICE, code, m->made_for);
}

int ark_device_open(ark_instance* i) {
  const size_t kernels = i->model->kernel_count * sizeof(struct loaded);
  struct ark_device* d = i->device = calloc(1, sizeof *d + kernels);
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
    for (uint32_t k = 0; k < i->model->kernel_count; ++k) {
      if (d->kernels[k].module != NULL) d->unload(d->kernels[k].module);
    }
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

// The driver's enumerator for the element type of a tensor map.
static int type_of(const char* dtype) {
  if (strcmp(dtype, "bf16") == 0) return 9;
  if (strcmp(dtype, "fp16") == 0) return 6;
  return strcmp(dtype, "fp32") == 0 ? 7 : 0;  // bytes
}

int ark_device_map(ark_instance* i, const ark_box_map* map, uint64_t address, void* made) {
  struct ark_device* d = i->device;
  static const uint32_t steps[] = {1, 1, 1, 1, 1};
  // A tensor map must be at a multiple of 64 bytes.
  uint64_t room[(ARK_MAP_BYTES + 64) / sizeof(uint64_t)];
  void* encoded = (void*)(((uintptr_t)room + 63) / 64 * 64);
  void* context = NULL;
  d->push(d->context);
  // Not interleaved, swizzled by 128 bytes unless it is of bytes, and zero outside of the matrix.
  const int swizzled = strcmp(map->dtype, "byte") == 0 ? 0 : 3;
  const int to_cache = map->fetched == 128 ? 2 : 3;
  const int type = type_of(map->dtype);
  void* at = (void*)(uintptr_t)address;
  const int code = map->steps[0] != 0
                       ? d->encode_windows(encoded, type, map->rank, at, map->dims, map->strides,
                                           map->lower, map->upper, map->box[0], map->box[1],
                                           map->steps, 0, swizzled, to_cache, 0)
                       : d->encode(encoded, type, map->rank, at, map->dims, map->strides, map->box,
                                   steps, 0, swizzled, to_cache, 0);
  d->pop(&context);
  if (code != 0) return failed(i, ARK_BAD_ARGUMENT, code, "describing a matrix to the GPU");
  memcpy(made, encoded, ARK_MAP_BYTES);
  return ARK_OK;
}

int ark_device_run(ark_instance* i, uint32_t number, const struct ArkParams* params) {
  struct ark_device* d = i->device;
  const ark_model* m = i->model;
  const ark_kernel* kernel = &m->kernels[number];
  struct ArkParams copy = *params;
  void* arguments[] = {&copy};
  void* context = NULL;
  d->push(d->context);
  // The launch is cooperative: the driver refuses it unless all blocks are resident together.
  int code = d->launch(d->kernels[number].function, m->processors, 1, 1, kernel->threads, 1, 1,
                       kernel->shared_bytes, NULL, arguments);
  if (code == 0) code = d->synchronize();
  d->pop(&context);
  return code == 0 ? ARK_OK : failed(i, ARK_NO_DEVICE, code, "running the loop kernel");
}
