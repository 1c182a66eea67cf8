// The interface of a compiled model: create, load, bind, execute, read, destroy. Every function
// returns an ark_status. ark_error describes the last error of an instance. An instance serves one
// call at a time; different instances are independent.
#ifndef ARK_H
#define ARK_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ark_model ark_model;        // an exported model: constant data
typedef struct ark_instance ark_instance;  // a model with its memory

typedef enum ark_status {
  ARK_OK = 0,
  ARK_BAD_ARGUMENT = 1,  // a null pointer, a number out of range, or unaligned memory
  ARK_NO_MEMORY = 2,     // host or device memory could not be allocated
  ARK_BAD_FILE = 3,      // the weights file cannot be read or belongs to another model
  ARK_NO_TENSOR = 4,     // the model has no tensor of that name
  ARK_BAD_SIZE = 5,      // the number of bytes is not the tensor's
  ARK_NOT_LOADED = 6,    // ark_execute was called before every parameter had a value
  ARK_NOT_BOUND = 7,     // ark_execute was called before every external tensor had memory
  ARK_NO_THREADS = 8,    // the system refused to start a thread for each processor
  ARK_GAVE_UP = 9,       // a wait inside the loop kernel exceeded its time limit
  ARK_NO_DEVICE = 10     // the device or its driver is missing or has failed
} ark_status;

// Describes a status in a sentence. Never returns null.
const char* ark_status_text(int status);

// Describes the error of the last call with this instance; "" if it succeeded. Valid until the next
// call. For a null instance: describes why the last ark_create of this thread failed.
const char* ark_error(const ark_instance* instance);

// Creates an instance with zeroed memory. On failure *made is null.
int ark_create(const ark_model* model, ark_instance** made);

// Reads all parameters from a safetensors file. The file must contain exactly the model's
// parameters, with their types and shapes; otherwise no parameter is loaded.
int ark_load(ark_instance* instance, const char* path);

// Gives an external tensor its memory: nbytes bytes, 16-byte aligned, on the device for which the
// model was compiled. The caller owns the memory and must keep it until the instance is destroyed
// or other memory is bound.
int ark_bind(ark_instance* instance, const char* name, void* memory, size_t nbytes);

// Copies values into a tensor, from its first element on, at most as many bytes as it has. A
// parameter must be written completely.
int ark_write(ark_instance* instance, const char* name, const void* values, size_t nbytes);

// Copies a whole tensor to the caller's memory. nbytes must be the tensor's size.
int ark_read(ark_instance* instance, const char* name, void* values, size_t nbytes);

// A tensor's size in bytes.
int ark_size(const ark_instance* instance, const char* name, size_t* nbytes);

// Runs the given number of iterations of each of the model's phases, and returns when all have
// ended. The model may end earlier (at a stop token). *done (may be null) is set to the number of
// iterations that ran.
int ark_execute(ark_instance* instance, const uint32_t* iterations, size_t phases, uint32_t* done);

// Frees everything. The instance may be null.
void ark_destroy(ark_instance* instance);

// For decoders (models exported from a checkpoint): continues a prompt of token ids, always with
// the most probable token. tokens must have room for `most` ids. *made is set to the number of new
// tokens, including a stop token. It is less than `most` if a stop token was chosen or the context
// is full.
int ark_generate(ark_instance* instance, const int32_t* prompt, size_t prompt_length,
                 int32_t* tokens, size_t most, size_t* made);

#ifdef __cplusplus
}
#endif
#endif
