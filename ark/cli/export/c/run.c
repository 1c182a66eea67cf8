// The test program. WEIGHTS INPUT ... OUTPUT ...: reads each input from a file of raw bytes, runs
// the network once, and writes the outputs to such files.
#include "exported.h"

#include <stdio.h>
#include <stdlib.h>

static const char* const inputs[] = {EXPORTED_INPUTS NULL};
static const char* const outputs[] = {EXPORTED_OUTPUTS NULL};
enum {
  INPUTS = sizeof inputs / sizeof *inputs - 1,
  OUTPUTS = sizeof outputs / sizeof *outputs - 1,
};

static int complain(const ark_instance* instance, int status) {
  fprintf(stderr, "error %d (%s): %s\n", status, ark_status_text(status), ark_error(instance));
  return 1;
}

// Reads a whole file, which must have exactly `size` bytes, or writes it.
static int transfer(const char* path, void* bytes, size_t size, int reads) {
  FILE* file = fopen(path, reads ? "rb" : "wb");
  int fine = file != NULL;
  if (fine && reads) fine = fread(bytes, 1, size, file) == size && fgetc(file) == EOF;
  if (fine && !reads) fine = fwrite(bytes, 1, size, file) == size;
  if (file != NULL && fclose(file) != 0) fine = 0;
  if (!fine)
    fprintf(stderr, "%s: %zu bytes could not be %s\n", path, size, reads ? "read" : "written");
  return fine;
}

static int move(ark_instance* instance, const char* name, const char* path, int reads) {
  size_t size = 0;
  int status = ark_size(instance, name, &size);
  if (status != ARK_OK) return complain(instance, status);
  void* bytes = malloc(size);
  int code = bytes == NULL;
  if (code == 0 && reads && !transfer(path, bytes, size, 1)) code = 1;
  if (code == 0) {
    status = reads ? ark_write(instance, name, bytes, size) : ark_read(instance, name, bytes, size);
    if (status != ARK_OK) code = complain(instance, status);
  }
  if (code == 0 && !reads && !transfer(path, bytes, size, 0)) code = 1;
  free(bytes);
  return code;
}

static int run(ark_instance* instance, char** files) {
  const uint32_t once = 1;
  int status = ark_load(instance, files[0]);
  if (status != ARK_OK) return complain(instance, status);
  for (int n = 0; n < INPUTS; ++n) {
    if (move(instance, inputs[n], files[1 + n], 1) != 0) return 1;
  }
  status = ark_execute(instance, &once, 1, NULL);
  if (status != ARK_OK) return complain(instance, status);
  for (int n = 0; n < OUTPUTS; ++n) {
    if (move(instance, outputs[n], files[1 + INPUTS + n], 0) != 0) return 1;
  }
  return 0;
}

int main(int argc, char** argv) {
  if (argc != 2 + INPUTS + OUTPUTS) {
    fprintf(stderr, "usage: %s WEIGHTS and %d input and %d output files\n", argv[0], (int)INPUTS,
            (int)OUTPUTS);
    return 2;
  }
  ark_instance* instance = NULL;
  const int status = ark_create(&EXPORTED_MODEL, &instance);
  const int code = status == ARK_OK ? run(instance, argv + 1) : complain(instance, status);
  ark_destroy(instance);
  return code;
}
