// The parts of an exported model. The generated source defines a model; ark.c uses it.
#ifndef ARK_MODEL_H
#define ARK_MODEL_H

#include "ark.h"
#include "layout.h"

// An address in a table is (segment + 1) << ARK_SEGMENT_SHIFT, plus the offset in the segment.
#define ARK_SEGMENT_SHIFT 48

// A segment: one allocation of memory. external: the caller provides it. mapped: the host can
// access it too. clear: the number of bytes that are zeroed before every launch.
typedef struct {
  const char* name;
  uint64_t nbytes;
  uint64_t clear;
  int external;
  int mapped;
} ark_segment;

// An allocation of device memory. address: on the device. host: its address on the host; null if
// the host cannot access it.
typedef struct {
  uint64_t address;
  void* host;
} ark_memory;

typedef struct ark_device ark_device;  // state of the device's own source file

// A tensor that callers can access by name. dtype: in safetensors' spelling. parameter: nonzero if
// the weights file contains it.
typedef struct {
  const char* name;
  const char* dtype;
  uint64_t offset, nbytes;
  const uint64_t* shape;
  uint32_t rank, segment;
  int parameter;
} ark_tensor;

// The properties of a decoder. stops: an array of stop_room elements, as many as the plan's tensor
// of stop tokens has. The first stop_count elements are the token ids that end a text; the others
// are -1. begins: nonzero if a separate phase computes the last chunk of a prompt.
typedef struct {
  uint32_t context, chunk, vocabulary, begins, stop_count, stop_room;
  const int32_t* stops;
} ark_decoder;

// A loop kernel. loop: the function, if the host's cores run it. image: otherwise its machine code,
// which is loaded when an instance is created. threads, shared_bytes: the threads and the shared
// memory of a block. last_phase: the last phase that this kernel runs; its first phase is the one
// after the last phase of the preceding kernel.
typedef struct {
  int (*loop)(const struct ArkParams* params, int processors, void (*look)(void));
  const void* image;
  uint32_t threads, shared_bytes, last_phase;
} ark_kernel;

// Describes a matrix of which a device copies boxes (rectangular parts). In the order of the
// fields: its address in a table's encoding; its type; the sizes of its dimensions, innermost
// first; the strides in bytes of dimensions 1 and higher; the size of a box. The next fields are
// for convolution windows of an image (steps[0] is not 0): the channels and positions that one copy
// loads, the bounds of the windows' positions (across, down), and the steps between windows. The
// last field is the number of bytes that are loaded into the cache at a time.
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

// An exported model. made_for: the error text if one of its kernels cannot be loaded on this
// device.
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
  const ark_decoder* decoder;  // null if the model is not a decoder
};

// The number of a model's tables (arrays that the loop kernel reads). The tables are in the order
// of the first fields of ArkParams, except the last one, which has the lists of operands.
enum { ARK_TABLES = 6 };
enum { ARK_MAP_BYTES = 128 };

struct ark_instance {
  const ark_model* model;
  ark_device* device;
  ark_memory* bases;      // by segment number; address 0 for an external segment without memory
  unsigned char* loaded;  // by tensor number: 1 if a parameter has its value
  uint32_t* ends;         // the iterations at which the phases of the last launch end
  ark_memory tables[ARK_TABLES];
  ark_memory counters, control, host, maps;
  int placed;  // 1 if the tables contain the present addresses
  char error[512];
};

// Called first by every function: clears the error text of the preceding call. given: 1 if none of
// the pointers that the function needs is null.
int ark_begin(ark_instance* instance, int given);

// Stores an error text in the instance and returns the status.
int ark_fail(ark_instance* instance, int status, const char* format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 3, 4)))
#endif
    ;

#endif
