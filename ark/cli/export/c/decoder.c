// The token loop of a decoder: continues a prompt of token ids.
#include "model.h"

#include <stdlib.h>
#include <string.h>

// The number of iterations of each phase for a prompt of `prompt` tokens and `fresh` new tokens.
static size_t split(const ark_decoder* d, uint32_t prompt, uint32_t fresh, uint32_t* each) {
  if (d->chunk == 0) {
    each[0] = fresh;
    return 1;
  }
  if (!d->begins) {
    each[0] = (prompt - 1 + d->chunk - 1) / d->chunk;
    each[1] = fresh;
    return 2;
  }
  each[0] = prompt > 1 ? (prompt + d->chunk - 1) / d->chunk - 1 : 0;
  each[1] = prompt > 1;
  each[2] = prompt > 1 ? fresh - 1 : fresh;
  return 3;
}

static int check_prompt(ark_instance* i, const int32_t* prompt, size_t length) {
  const ark_decoder* d = i->model->decoder;
  if (length < 1 || length >= d->context || (length > 1 && d->chunk == 0)) {
    return ark_fail(i, ARK_BAD_ARGUMENT,
                    "the prompt has %zu tokens; it must have at least 1 and at most %u", length,
                    d->chunk == 0 ? 1 : d->context - 1);
  }
  for (size_t n = 0; n < length; ++n) {
    if (prompt[n] < 0 || (uint32_t)prompt[n] >= d->vocabulary) {
      return ark_fail(i, ARK_BAD_ARGUMENT,
                      "the prompt has the token %d; the vocabulary's are 0 to %u", prompt[n],
                      d->vocabulary - 1);
    }
  }
  return ARK_OK;
}

// Writes the state before the first token: the prompt, the settings of greedy sampling, and the
// stop tokens.
static int write_state(ark_instance* i, const int32_t* prompt, uint32_t length, uint32_t total,
                       int32_t* output) {
  const ark_decoder* d = i->model->decoder;
  const int32_t position = 0;
  const int32_t settings[7] = {0, 0, 0, (int32_t)length - 1, (int32_t)total, (int32_t)d->stop_count,
                               0};
  const size_t bytes = (size_t)d->context * sizeof *output;
  memset(output, 0xff, bytes);
  int status = ark_write(i, "tokens", prompt, length * sizeof *prompt);
  if (status == ARK_OK) status = ark_write(i, "position", &position, sizeof position);
  if (status == ARK_OK) status = ark_write(i, "settings", settings, sizeof settings);
  if (status == ARK_OK) {
    status = ark_write(i, "stops", d->stops, (size_t)d->stop_room * sizeof *d->stops);
  }
  if (status == ARK_OK) status = ark_write(i, "output", output, bytes);
  return status;
}

static int is_stop(const ark_decoder* d, int32_t token) {
  for (uint32_t n = 0; n < d->stop_count; ++n) {
    if (d->stops[n] == token) return 1;
  }
  return 0;
}

int ark_generate(ark_instance* i, const int32_t* prompt, size_t prompt_length, int32_t* tokens,
                 size_t most, size_t* made) {
  const int begun = ark_begin(i, prompt != NULL && tokens != NULL && made != NULL);
  if (begun != ARK_OK) return begun;
  if (most < 1) return ark_fail(i, ARK_BAD_ARGUMENT, "there is no room for a token");
  *made = 0;
  const ark_decoder* d = i->model->decoder;
  if (d == NULL) return ark_fail(i, ARK_BAD_ARGUMENT, "the model is no decoder; use ark_execute");
  int status = check_prompt(i, prompt, prompt_length);
  if (status != ARK_OK) return status;
  const uint32_t length = (uint32_t)prompt_length, room = d->context - length;
  const uint32_t fresh = most < room ? (uint32_t)most : room;
  int32_t* output = malloc((size_t)d->context * sizeof *output);
  if (output == NULL) return ark_fail(i, ARK_NO_MEMORY, "no memory for the tokens");
  uint32_t each[3];
  const size_t phases = split(d, length, fresh, each);
  status = write_state(i, prompt, length, length + fresh, output);
  if (status == ARK_OK) status = ark_execute(i, each, phases, NULL);
  if (status == ARK_OK) {
    status = ark_read(i, "output", output, (size_t)d->context * sizeof *output);
  }
  while (status == ARK_OK && *made < fresh && output[length + *made] >= 0) {
    tokens[*made] = output[length + *made];
    ++*made;
  }
  free(output);
  if (status == ARK_OK && *made < fresh && (*made == 0 || !is_stop(d, tokens[*made - 1]))) {
    return ark_fail(i, ARK_GAVE_UP, "the loop ended after %zu of %u tokens without a stop token",
                    *made, fresh);
  }
  return status;
}
