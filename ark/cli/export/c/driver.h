// How a device's source finds the functions of its driver's library, which is opened when an
// instance is made.
#ifndef ARK_DRIVER_H
#define ARK_DRIVER_H

#include <dlfcn.h>
#include <stddef.h>
#include <string.h>

#include "device.h"

// A name in the library, and the pointer to a function that is to be set.
typedef struct {
  const char* name;
  void* function;
} ark_symbol;

// library, product: what is called too old where a function is missing.
static inline int ark_find_symbols(ark_instance* i, void* opened, const ark_symbol* symbols,
                                   size_t count, const char* library, const char* product) {
  for (size_t n = 0; n < count; ++n) {
    void* found = dlsym(opened, symbols[n].name);
    if (found == NULL) {
      return ark_fail(i, ARK_NO_DEVICE, "%s has no %s; install a newer %s", library,
                      symbols[n].name, product);
    }
    // ISO C has no conversion from an object's address to a function's.
    memcpy(symbols[n].function, &found, sizeof found);
  }
  return ARK_OK;
}

#endif
