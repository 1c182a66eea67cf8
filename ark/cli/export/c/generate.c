// The test program. WEIGHTS COUNT TOKEN [TOKEN ...]: prints up to COUNT tokens that continue the
// given tokens.
#include "exported.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

static int number(const char* text, long most, long* value) {
  char* end;
  errno = 0;
  *value = strtol(text, &end, 10);
  return end != text && *end == 0 && errno == 0 && *value >= 0 && *value <= most;
}

static int complain(const ark_instance* instance, int status) {
  fprintf(stderr, "error %d (%s): %s\n", status, ark_status_text(status), ark_error(instance));
  return 1;
}

static int generate(ark_instance* instance, const char* weights, const int32_t* prompt,
                    size_t length, int32_t* tokens, size_t most) {
  size_t made = 0;
  int status = ark_load(instance, weights);
  if (status == ARK_OK) status = ark_generate(instance, prompt, length, tokens, most, &made);
  if (status != ARK_OK) return complain(instance, status);
  for (size_t n = 0; n < made; ++n) printf(n + 1 < made ? "%d " : "%d\n", tokens[n]);
  return 0;
}

int main(int argc, char** argv) {
  long most = 0, token = 0;
  if (argc < 4 || !number(argv[2], 1 << 20, &most) || most == 0) {
    fprintf(stderr, "usage: %s WEIGHTS COUNT TOKEN [TOKEN ...]\n", argv[0]);
    return 2;
  }
  const size_t length = (size_t)argc - 3;
  int32_t* prompt = malloc(length * sizeof *prompt);
  int32_t* tokens = malloc((size_t)most * sizeof *tokens);
  ark_instance* instance = NULL;
  int code = prompt == NULL || tokens == NULL;
  for (size_t n = 0; code == 0 && n < length; ++n) {
    if (!number(argv[n + 3], INT32_MAX, &token)) {
      fprintf(stderr, "%s is no token id\n", argv[n + 3]);
      code = 2;
    }
    prompt[n] = (int32_t)token;
  }
  if (code == 0) {
    const int status = ark_create(&EXPORTED_MODEL, &instance);
    code = status == ARK_OK ? generate(instance, argv[1], prompt, length, tokens, (size_t)most)
                            : complain(instance, status);
  }
  ark_destroy(instance);
  free(prompt);
  free(tokens);
  return code;
}
