// The device code of an exported model for AMD GPUs. It uses the first GPU and calls HIP's runtime
// library, which is opened when an instance of the model is created.
#include "driver.h"

#include <stdlib.h>

// HIP's functions with their parameter types.
#define FUNCTIONS(ENTRY)                                                                     \
  ENTRY(init, "hipInit", (unsigned))                                                         \
  ENTRY(select, "hipSetDevice", (int))                                                       \
  ENTRY(synchronize, "hipDeviceSynchronize", (void))                                         \
  ENTRY(alloc, "hipMalloc", (void**, size_t))                                                \
  ENTRY(release_memory, "hipFree", (void*))                                                  \
  ENTRY(alloc_host, "hipHostMalloc", (void**, size_t, unsigned))                             \
  ENTRY(host_address, "hipHostGetDevicePointer", (void**, void*, unsigned))                  \
  ENTRY(free_host, "hipHostFree", (void*))                                                   \
  ENTRY(copy, "hipMemcpy", (void*, const void*, size_t, int))                                \
  ENTRY(fill, "hipMemset", (void*, int, size_t))                                             \
  ENTRY(load, "hipModuleLoadData", (void**, const void*))                                    \
  ENTRY(unload, "hipModuleUnload", (void*))                                                  \
  ENTRY(function_of, "hipModuleGetFunction", (void**, void*, const char*))                   \
  ENTRY(launch, "hipModuleLaunchCooperativeKernel",                                          \
        (void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, \
         void**))

#define OUT_OF_MEMORY 2                   // hipErrorOutOfMemory
#define HOST_MAPPED_COHERENT 0x40000002u  // hipHostMallocMapped | hipHostMallocCoherent
#define TO_DEVICE 1                       // hipMemcpyHostToDevice
#define TO_HOST 2                         // hipMemcpyDeviceToHost

struct loaded {
  void *module, *function;
};

struct ark_device {
  void* library;
  const char* (*words)(int);
#define MEMBER(name, symbol, arguments) int(*name) arguments;
  FUNCTIONS(MEMBER)
#undef MEMBER
  struct loaded kernels[];  // of the model
};

static int failed(ark_instance* i, int status, int code, const char* doing) {
  const char* words = i->device->words(code);
  return ark_fail(i, status, "%s: HIP says \"%s\" (%d)", doing, words == NULL ? "unknown" : words,
                  code);
}

static int open_library(ark_instance* i) {
  struct ark_device* d = i->device;
  d->library = dlopen("libamdhip64.so", RTLD_NOW | RTLD_LOCAL);
  if (d->library == NULL) {
    return ark_fail(i, ARK_NO_DEVICE,
                    "ROCm was not found (%s); install it, or name its folder in "
                    "LD_LIBRARY_PATH",
                    dlerror());
  }
#define SYMBOL(name, symbol, arguments) {symbol, &d->name},
  const ark_symbol symbols[] = {{"hipGetErrorString", &d->words}, FUNCTIONS(SYMBOL)};
#undef SYMBOL
  const size_t count = sizeof symbols / sizeof *symbols;
  return ark_find_symbols(i, d->library, symbols, count, "libamdhip64", "ROCm");
}

int ark_device_open(ark_instance* i) {
  const size_t kernels = i->model->kernel_count * sizeof(struct loaded);
  struct ark_device* d = i->device = calloc(1, sizeof *d + kernels);
  if (d == NULL) return ark_fail(i, ARK_NO_MEMORY, "the system gave no memory");
  const int status = open_library(i);
  if (status != ARK_OK) return status;
  int code = d->init(0);
  if (code == 0) code = d->select(0);
  if (code != 0) return failed(i, ARK_NO_DEVICE, code, "opening the first GPU");
  for (uint32_t k = 0; code == 0 && k < i->model->kernel_count; ++k) {
    code = d->load(&d->kernels[k].module, i->model->kernels[k].image);
    if (code == 0) code = d->function_of(&d->kernels[k].function, d->kernels[k].module, "ark_loop");
  }
  return code == 0 ? ARK_OK : failed(i, ARK_NO_DEVICE, code, i->model->made_for);
}

void ark_device_close(ark_instance* i) {
  struct ark_device* d = i->device;
  if (d == NULL) return;
  for (uint32_t k = 0; k < i->model->kernel_count; ++k) {
    if (d->kernels[k].module != NULL) d->unload(d->kernels[k].module);
  }
  if (d->library != NULL) dlclose(d->library);
  free(d);
  i->device = NULL;
}

// HIP's current device is per thread, so every function selects it.
int ark_device_alloc(ark_instance* i, uint64_t nbytes, int mapped, ark_memory* made) {
  struct ark_device* d = i->device;
  const size_t size = nbytes < 256 ? 256 : (size_t)nbytes;
  void* on_device = NULL;
  int code = d->select(0);
  if (code == 0 && mapped) code = d->alloc_host(&made->host, size, HOST_MAPPED_COHERENT);
  if (code == 0 && mapped) memset(made->host, 0, size);
  if (code == 0) {
    code = mapped ? d->host_address(&on_device, made->host, 0) : d->alloc(&on_device, size);
  }
  made->address = (uintptr_t)on_device;
  if (code == 0 && !mapped) code = d->fill(on_device, 0, size);
  if (code == 0) return ARK_OK;
  return failed(i, code == OUT_OF_MEMORY ? ARK_NO_MEMORY : ARK_NO_DEVICE, code, "allocating");
}

void ark_device_free(ark_instance* i, ark_memory* memory) {
  struct ark_device* d = i->device;
  d->select(0);
  if (memory->host != NULL) {
    d->free_host(memory->host);
  } else if (memory->address != 0) {
    d->release_memory((void*)(uintptr_t)memory->address);
  }
}

int ark_device_write(ark_instance* i, uint64_t to, const void* from, size_t nbytes) {
  struct ark_device* d = i->device;
  if (nbytes == 0) return ARK_OK;
  int code = d->select(0);
  if (code == 0) code = d->copy((void*)(uintptr_t)to, from, nbytes, TO_DEVICE);
  return code == 0 ? ARK_OK : failed(i, ARK_NO_DEVICE, code, "copying to the GPU");
}

int ark_device_read(ark_instance* i, void* to, uint64_t from, size_t nbytes) {
  struct ark_device* d = i->device;
  if (nbytes == 0) return ARK_OK;
  int code = d->select(0);
  if (code == 0) code = d->copy(to, (const void*)(uintptr_t)from, nbytes, TO_HOST);
  return code == 0 ? ARK_OK : failed(i, ARK_NO_DEVICE, code, "copying from the GPU");
}

int ark_device_zero(ark_instance* i, uint64_t at, size_t nbytes) {
  struct ark_device* d = i->device;
  if (nbytes == 0) return ARK_OK;
  int code = d->select(0);
  if (code == 0) code = d->fill((void*)(uintptr_t)at, 0, nbytes);
  return code == 0 ? ARK_OK : failed(i, ARK_NO_DEVICE, code, "clearing memory of the GPU");
}

int ark_device_map(ark_instance* i, const ark_box_map* map, uint64_t address, void* made) {
  (void)map, (void)address, (void)made;
  return ark_fail(i, ARK_NO_DEVICE, "AMD GPUs have no tensor map copies; export the model again");
}

int ark_device_run(ark_instance* i, uint32_t number, const struct ArkParams* params) {
  struct ark_device* d = i->device;
  const ark_model* m = i->model;
  const ark_kernel* kernel = &m->kernels[number];
  struct ArkParams copy = *params;
  void* arguments[] = {&copy};
  int code = d->select(0);
  // The launch is cooperative: the driver refuses it unless all blocks are resident together.
  if (code == 0) {
    code = d->launch(d->kernels[number].function, m->processors, 1, 1, kernel->threads, 1, 1,
                     kernel->shared_bytes, NULL, arguments);
  }
  if (code == 0) code = d->synchronize();
  return code == 0 ? ARK_OK : failed(i, ARK_NO_DEVICE, code, "running the loop kernel");
}
