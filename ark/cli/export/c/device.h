// What an instance asks of the device that its model was compiled for. Each backend has a source of
// its own; functions that can fail return an ark_status and leave the paragraph at the instance.
#ifndef ARK_DEVICE_H
#define ARK_DEVICE_H

#include "model.h"

int ark_device_open(ark_instance* instance);

// Lets everything go that ark_device_open took; its memory was freed before.
void ark_device_close(ark_instance* instance);

// Zeroed memory, 256-byte aligned. mapped: the host sees it too, while a kernel runs.
int ark_device_alloc(ark_instance* instance, uint64_t nbytes, int mapped, ark_memory* made);
void ark_device_free(ark_instance* instance, ark_memory* memory);

int ark_device_write(ark_instance* instance, uint64_t to, const void* from, size_t nbytes);
int ark_device_read(ark_instance* instance, void* to, uint64_t from, size_t nbytes);
int ark_device_zero(ark_instance* instance, uint64_t at, size_t nbytes);

// What the device must know to copy boxes of a matrix at an address: ARK_MAP_BYTES in its own form.
int ark_device_map(ark_instance* instance, const ark_box_map* map, uint64_t address, void* made);

// Runs one of the model's kernels and returns when it has left the device.
int ark_device_run(ark_instance* instance, uint32_t kernel, const struct ArkParams* params);

#endif
