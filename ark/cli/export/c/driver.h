// Finds functions in the library of a device's driver, which is opened when an instance is created.
// Used by a device's source file.
#ifndef ARK_DRIVER_H
#define ARK_DRIVER_H

#include <dlfcn.h>
#include <stddef.h>
#include <string.h>

#include "device.h"

// The name of a function in the driver's library, and the pointer that is to be set to the
// function.
typedef struct {
  const char* name;
  void* function;
} ark_symbol;

// Sets the pointers of `symbols` to the functions of the opened library. library, product: names
// for the error text if a function is missing because the driver is too old.
static inline int ark_find_symbols(ark_instance* i, void* opened, const ark_symbol* symbols,
                                   size_t count, const char* library, const char* product) {
  for (size_t n = 0; n < count; ++n) {
    void* found = dlsym(opened, symbols[n].name);
    if (found == NULL) {
      return ark_fail(i, ARK_NO_DEVICE, "%s has no %s; install a newer %s", library,
                      symbols[n].name, product);
    }
    // ISO C does not convert an object pointer to a function pointer, so the pointer's bytes are
    // copied.
    memcpy(symbols[n].function, &found, sizeof found);
  }
  return ARK_OK;
}

#endif
