// A compiled model: create, load, bind, execute, read, destroy.
//
// Every function returns an ark_status; ark_error says in words what went wrong last with an
// instance. An instance serves one call at a time; different instances are independent.
#ifndef ARK_H
#define ARK_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ark_model ark_model;        // what was exported: constant data
typedef struct ark_instance ark_instance;  // a model with its memory

typedef enum ark_status {
  ARK_OK = 0,
  ARK_BAD_ARGUMENT = 1,  // a null pointer, a number out of range, memory that is not aligned
  ARK_NO_MEMORY = 2,     // the system gave no memory
  ARK_BAD_FILE = 3,      // the weights file cannot be read or is not this model's
  ARK_NO_TENSOR = 4,     // the model has no tensor of that name
  ARK_BAD_SIZE = 5,      // the bytes given are not the tensor's
  ARK_NOT_LOADED = 6,    // execute before every parameter has a value
  ARK_NOT_BOUND = 7,     // execute before every external tensor has memory
  ARK_NO_THREADS = 8,    // the system refused to start a thread for each processor
  ARK_GAVE_UP = 9,       // a wait inside the loop kernel ran out of its time
  ARK_NO_DEVICE = 10     // the device or its driver is not there, or has failed
} ark_status;

// A sentence about a status; never null.
const char* ark_status_text(int status);

// What went wrong in the last call with this instance, "" if nothing did; valid until the next
// call. Of a null instance: why this thread's last ark_create made none.
const char* ark_error(const ark_instance* instance);

// Makes an instance with zeroed memory. On failure *made is null.
int ark_create(const ark_model* model, ark_instance** made);

// Reads every parameter from a safetensors file. The file must hold exactly the model's parameters,
// with their types and shapes; otherwise no parameter is loaded.
int ark_load(ark_instance* instance, const char* path);

// Gives an external tensor its memory, which stays the caller's: nbytes of it, 16-byte aligned,
// until the instance is destroyed or the tensor is bound anew. It is memory of the device that the
// model was compiled for.
int ark_bind(ark_instance* instance, const char* name, void* memory, size_t nbytes);

// Copies values into a tensor from its first element on: at most as many bytes as it has. A
// parameter must be written whole.
int ark_write(ark_instance* instance, const char* name, const void* values, size_t nbytes);

// Copies a whole tensor out; nbytes must be its size.
int ark_read(ark_instance* instance, const char* name, void* values, size_t nbytes);

// A tensor's size in bytes.
int ark_size(const ark_instance* instance, const char* name, size_t* nbytes);

// Runs each of the model's phases for so many iterations, and returns when all have ended. The
// model itself may end early (a stop token); *done (may be null) says how many iterations ran.
int ark_execute(ark_instance* instance, const uint32_t* iterations, size_t phases, uint32_t* done);

// Gives everything back; a null instance is allowed.
void ark_destroy(ark_instance* instance);

// For decoders (models exported from a checkpoint): continues a prompt of token ids, greedily.
// tokens has room for `most` ids; *made says how many were written, a stop token included. Fewer
// than `most` come where a stop token was drawn or the context is full.
int ark_generate(ark_instance* instance, const int32_t* prompt, size_t prompt_length,
                 int32_t* tokens, size_t most, size_t* made);

#ifdef __cplusplus
}
#endif
#endif
