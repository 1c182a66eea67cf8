// Implements the device interface of exported models for the host's own cores.
#include "device.h"

#include <stdlib.h>
#include <string.h>

#define ALIGNMENT 256

int ark_device_open(ark_instance* i) {
  i->device = NULL;
  return ARK_OK;
}

void ark_device_close(ark_instance* i) { (void)i; }

int ark_device_alloc(ark_instance* i, uint64_t nbytes, int mapped, ark_memory* made) {
  (void)mapped;
  void* memory = NULL;
  if (nbytes <= SIZE_MAX - ALIGNMENT) {
    const size_t size = nbytes == 0 ? ALIGNMENT : (size_t)nbytes;
    const size_t whole = (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    memory = aligned_alloc(ALIGNMENT, whole);
    if (memory != NULL) memset(memory, 0, whole);
  }
  if (memory == NULL) {
    return ark_fail(i, ARK_NO_MEMORY, "%llu bytes were asked for, which the system has not",
                    (unsigned long long)nbytes);
  }
  made->address = (uintptr_t)memory;
  made->host = memory;
  return ARK_OK;
}

void ark_device_free(ark_instance* i, ark_memory* memory) {
  (void)i;
  free(memory->host);
}

int ark_device_write(ark_instance* i, uint64_t to, const void* from, size_t nbytes) {
  (void)i;
  memcpy((void*)(uintptr_t)to, from, nbytes);
  return ARK_OK;
}

int ark_device_read(ark_instance* i, void* to, uint64_t from, size_t nbytes) {
  (void)i;
  memcpy(to, (const void*)(uintptr_t)from, nbytes);
  return ARK_OK;
}

int ark_device_zero(ark_instance* i, uint64_t at, size_t nbytes) {
  (void)i;
  memset((void*)(uintptr_t)at, 0, nbytes);
  return ARK_OK;
}

int ark_device_map(ark_instance* i, const ark_box_map* map, uint64_t address, void* made) {
  (void)map, (void)address, (void)made;
  return ark_fail(i, ARK_BAD_ARGUMENT, "cores copy no boxes; export the model again");
}

int ark_device_run(ark_instance* i, uint32_t kernel, const struct ArkParams* params) {
  const int processors = (int)i->model->processors;
  if (i->model->kernels[kernel].loop(params, processors, 0) == 0) return ARK_OK;
  return ark_fail(i, ARK_NO_THREADS, "%u threads are needed, and the system refused one",
                  i->model->processors);
}
