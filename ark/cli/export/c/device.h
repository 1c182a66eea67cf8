// The functions of the device for which a model was compiled. Each backend implements them in its
// own source file. Functions that can fail return an ark_status and store the error text in the
// instance.
#ifndef ARK_DEVICE_H
#define ARK_DEVICE_H

#include "model.h"

int ark_device_open(ark_instance* instance);

// Releases everything that ark_device_open acquired. All memory has been freed before.
void ark_device_close(ark_instance* instance);

// Allocates zeroed memory, 256-byte aligned. mapped: the host can access it too, while a kernel
// runs.
int ark_device_alloc(ark_instance* instance, uint64_t nbytes, int mapped, ark_memory* made);
void ark_device_free(ark_instance* instance, ark_memory* memory);

int ark_device_write(ark_instance* instance, uint64_t to, const void* from, size_t nbytes);
int ark_device_read(ark_instance* instance, void* to, uint64_t from, size_t nbytes);
int ark_device_zero(ark_instance* instance, uint64_t at, size_t nbytes);

// Writes the descriptor with which the device copies boxes of a matrix (such as a tensor map) to
// `made`, which has ARK_MAP_BYTES bytes. address: the matrix's address on the device.
int ark_device_map(ark_instance* instance, const ark_box_map* map, uint64_t address, void* made);

// Runs one of the model's kernels. Returns when it has ended.
int ark_device_run(ark_instance* instance, uint32_t kernel, const struct ArkParams* params);

#endif
