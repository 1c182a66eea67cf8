// What an exported model consists of. The generated source defines one; ark.c walks it.
#ifndef ARK_MODEL_H
#define ARK_MODEL_H

#include "ark.h"
#include "layout.h"

// In tables, addresses are (segment + 1) << ARK_SEGMENT_SHIFT plus the offset there.
#define ARK_SEGMENT_SHIFT 48

// One piece of memory. external: the caller's. mapped: the host sees it too. clear: bytes zeroed
// before every launch.
typedef struct {
  const char* name;
  uint64_t nbytes;
  uint64_t clear;
  int external;
  int mapped;
} ark_segment;

// Memory of the device. host: where the host sees it, null where it does not.
typedef struct {
  uint64_t address;
  void* host;
} ark_memory;

typedef struct ark_device ark_device;  // what the device's own source keeps of it

// dtype: as safetensors spells it. parameter: it comes from the weights file.
typedef struct {
  const char* name;
  const char* dtype;
  uint64_t offset, nbytes;
  const uint64_t* shape;
  uint32_t rank, segment;
  int parameter;
} ark_tensor;

// stops: tokens that end a text. begins: a phase of its own takes the prompt's last chunk.
typedef struct {
  uint32_t context, chunk, vocabulary, begins, stop_count, stop_room;
  const int32_t* stops;
} ark_decoder;

// A loop kernel. loop: where the host's cores run it; else image: its machine code, which is loaded
// when an instance is made. threads, shared_bytes: of a block. last_phase: it runs the phases
// behind those of the kernel before, up to this one.
typedef struct {
  int (*loop)(const struct ArkParams* params, int processors, void (*look)(void));
  const void* image;
  uint32_t threads, shared_bytes, last_phase;
} ark_kernel;

// How a device that copies boxes sees a matrix: where it lies, as tables say it; the type; elements
// of each dimension, innermost first; bytes from one index to the next, of dimensions 1 and up;
// elements of a copy. Of windows (steps[0] is not 0): channels and places of a copy, the place
// before which they begin and end (across, down), and the steps between them. Last, bytes that come
// to the cache at a time.
typedef struct {
  uint64_t address;
  const char* dtype;
  uint32_t rank;
  uint64_t dims[5], strides[4];
  uint32_t box[5];
  int32_t lower[2], upper[2];
  uint32_t steps[5];
  uint32_t fetched;
} ark_box_map;

// made_for: what to say where a kernel cannot be loaded.
struct ark_model {
  const ark_kernel* kernels;
  const ark_box_map* maps;
  uint32_t kernel_count, map_count;
  const char* made_for;
  const ark_segment* segments;
  const ark_tensor* tensors;
  const char* const* op_names;
  const uint64_t *tasks, *counter_ops, *fetches, *growths, *ranges, *lists;
  uint32_t segment_count, tensor_count, op_count;
  uint32_t task_count, counter_op_count, fetch_count, growth_count, range_count, list_count;
  uint32_t counter_count, counter_stride, barrier_counter, barrier_step, processors, phase_count;
  uint64_t budget_ns;
  const ark_decoder* decoder;  // null where the model is none
};

// The arrays of tables that a model has, in the order of ArkParams' first members, and the lists.
enum { ARK_TABLES = 6 };
enum { ARK_MAP_BYTES = 128 };

struct ark_instance {
  const ark_model* model;
  ark_device* device;
  ark_memory* bases;      // by segment; address 0 where an external one has no memory
  unsigned char* loaded;  // by tensor: 1 where a parameter has its value
  uint32_t* ends;         // of the phases, in iterations: of the last launch
  ark_memory tables[ARK_TABLES];
  ark_memory counters, control, host, maps;
  int placed;  // do the tables hold the present addresses?
  char error[512];
};

// What every call begins with: forgets the paragraph of the call before. given: are the pointers
// that the call needs none of them null?
int ark_begin(ark_instance* instance, int given);

// Keeps the paragraph and gives the status back.
int ark_fail(ark_instance* instance, int status, const char* format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 3, 4)))
#endif
    ;

#endif
