// A strict reader of safetensors files, which consist of 8 bytes of length, a JSON header, and the
// tensors' bytes without holes. Everything in the file is compared with the model before it is
// used.
#define _POSIX_C_SOURCE 200809L
#include "device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LONGEST_HEADER 100000000u
#define PIECE ((size_t)1 << 20)  // bytes of a file that are read at a time

typedef struct {
  const char *at, *end;
} Cursor;

typedef struct {
  uint64_t begin, end;
  uint32_t tensor;
} Entry;

typedef struct {
  ark_instance* instance;
  const char* path;
  Entry* entries;
  unsigned char* seen;  // by tensor number: 1 if the header has listed it
  uint32_t count;
} Reader;

static int bad(Reader* r, const char* what) {
  return ark_fail(r->instance, ARK_BAD_FILE, "%s is not this model's weights: %s", r->path, what);
}

static int bad_tensor(Reader* r, uint32_t tensor, const char* what) {
  return ark_fail(r->instance, ARK_BAD_FILE, "%s is not this model's weights: tensor %s %s",
                  r->path, r->instance->model->tensors[tensor].name, what);
}

static void skip_space(Cursor* c) {
  while (c->at < c->end && memchr(" \t\r\n", *c->at, 4) != NULL) ++c->at;
}

// Skips spaces. If the next character is `wanted`, consumes it and returns 1.
static int take(Cursor* c, char wanted) {
  skip_space(c);
  if (c->at == c->end || *c->at != wanted) return 0;
  ++c->at;
  return 1;
}

// Reads a string; the result is its bytes between the quotes. Escapes are allowed only in texts
// that are not used.
static int take_string(Cursor* c, int escapes, const char** text, size_t* length) {
  if (!take(c, '"')) return 0;
  *text = c->at;
  for (; c->at < c->end && *c->at != '"'; ++c->at) {
    if ((unsigned char)*c->at < 0x20) return 0;
    if (*c->at == '\\') {
      if (!escapes || ++c->at == c->end || memchr("\"\\/bfnrtu", *c->at, 9) == NULL) return 0;
    }
  }
  *length = (size_t)(c->at - *text);
  return take(c, '"');
}

static int is_text(const char* text, size_t length, const char* wanted) {
  return strlen(wanted) == length && memcmp(text, wanted, length) == 0;
}

static int take_number(Cursor* c, uint64_t* value) {
  skip_space(c);
  const char* first = c->at;
  *value = 0;
  for (; c->at < c->end && *c->at >= '0' && *c->at <= '9'; ++c->at) {
    const uint64_t digit = (uint64_t)(*c->at - '0');
    if (*value > (UINT64_MAX - digit) / 10) return 0;
    *value = *value * 10 + digit;
  }
  const size_t digits = (size_t)(c->at - first);
  return digits > 0 && (digits == 1 || *first != '0');
}

// Reads a list of integers, [a, b, ...]. Fails if their number is not `wanted`.
static int take_numbers(Cursor* c, uint64_t* values, uint32_t wanted) {
  if (!take(c, '[')) return 0;
  for (uint32_t n = 0; n < wanted; ++n) {
    if ((n > 0 && !take(c, ',')) || !take_number(c, &values[n])) return 0;
  }
  return take(c, ']');
}

static int take_metadata(Cursor* c) {
  const char* text;
  size_t length;
  if (!take(c, '{')) return 0;
  if (take(c, '}')) return 1;
  do {
    if (!take_string(c, 1, &text, &length) || !take(c, ':')) return 0;
    if (!take_string(c, 1, &text, &length)) return 0;
  } while (take(c, ','));
  return take(c, '}');
}

static int take_shape(Reader* r, Cursor* c, uint32_t number) {
  const ark_tensor* tensor = &r->instance->model->tensors[number];
  uint64_t shape[16];
  if (tensor->rank > 16 || !take_numbers(c, shape, tensor->rank) ||
      memcmp(shape, tensor->shape, tensor->rank * sizeof *shape) != 0) {
    return bad_tensor(r, number, "has another shape");
  }
  return ARK_OK;
}

// Reads {"dtype": ..., "shape": ..., "data_offsets": ...}. The keys may be in any order, each once.
static int take_entry(Reader* r, Cursor* c, uint32_t number) {
  const ark_tensor* tensor = &r->instance->model->tensors[number];
  const char* text;
  size_t length;
  unsigned fields = 0;
  if (!take(c, '{')) return bad_tensor(r, number, "is no object");
  do {
    if (!take_string(c, 0, &text, &length) || !take(c, ':')) {
      return bad_tensor(r, number, "has a field that cannot be read");
    }
    unsigned field;
    if (is_text(text, length, "dtype")) {
      field = 1;
      if (!take_string(c, 0, &text, &length) || !is_text(text, length, tensor->dtype)) {
        return bad_tensor(r, number, "has another type");
      }
    } else if (is_text(text, length, "shape")) {
      field = 2;
      const int status = take_shape(r, c, number);
      if (status != ARK_OK) return status;
    } else if (is_text(text, length, "data_offsets")) {
      field = 4;
      uint64_t range[2];
      if (!take_numbers(c, range, 2) || range[1] < range[0] ||
          range[1] - range[0] != tensor->nbytes) {
        return bad_tensor(r, number, "has offsets that do not fit its size");
      }
      r->entries[r->count] = (Entry){range[0], range[1], number};
    } else {
      return bad_tensor(r, number, "has an unknown field");
    }
    if (fields & field) return bad_tensor(r, number, "has a field twice");
    fields |= field;
  } while (take(c, ','));
  if (!take(c, '}') || fields != 7) return bad_tensor(r, number, "lacks a field or its end");
  ++r->count;
  return ARK_OK;
}

// The index of the parameter with that name; the number of tensors if there is none.
static uint32_t find(const ark_model* model, const char* text, size_t length) {
  uint32_t t = 0;
  while (t < model->tensor_count &&
         !(model->tensors[t].parameter && is_text(text, length, model->tensors[t].name))) {
    ++t;
  }
  return t;
}

static int take_header(Reader* r, Cursor* c) {
  const ark_model* model = r->instance->model;
  int metadata = 0;
  if (!take(c, '{')) return bad(r, "its header is no JSON object");
  if (!take(c, '}')) {
    do {
      const char* name;
      size_t length;
      if (!take_string(c, 0, &name, &length) || !take(c, ':')) {
        return bad(r, "its header has a name that cannot be read");
      }
      if (is_text(name, length, "__metadata__")) {
        if (metadata++ || !take_metadata(c)) return bad(r, "its metadata cannot be read");
        continue;
      }
      const uint32_t number = find(model, name, length);
      if (number == model->tensor_count) return bad(r, "it has a tensor that the model has not");
      if (r->seen[number]) return bad_tensor(r, number, "is there twice");
      r->seen[number] = 1;
      const int status = take_entry(r, c, number);
      if (status != ARK_OK) return status;
    } while (take(c, ','));
    if (!take(c, '}')) return bad(r, "its header does not end");
  }
  skip_space(c);
  if (c->at != c->end) return bad(r, "its header goes on behind its end");
  for (uint32_t t = 0; t < model->tensor_count; ++t) {
    if (model->tensors[t].parameter && !r->seen[t]) return bad_tensor(r, t, "is missing");
  }
  return ARK_OK;
}

static int by_begin(const void* left, const void* right) {
  const Entry *a = left, *b = right;
  if (a->begin != b->begin) return a->begin < b->begin ? -1 : 1;
  return (a->end > b->end) - (a->end < b->end);
}

// Copies a tensor's bytes from the file to the device, through the buffer `room`.
static int read_tensor(Reader* r, FILE* file, const ark_tensor* tensor, char* room) {
  const uint64_t base = r->instance->bases[tensor->segment].address + tensor->offset;
  for (uint64_t at = 0; at < tensor->nbytes; at += PIECE) {
    const uint64_t left = tensor->nbytes - at;
    const size_t size = left < PIECE ? (size_t)left : PIECE;
    if (fread(room, 1, size, file) != size) return bad(r, "its end could not be read");
    const int status = ark_device_write(r->instance, base + at, room, size);
    if (status != ARK_OK) return status;
  }
  return ARK_OK;
}

// Reads the bytes of all tensors in the order in which they are in the file. The file was checked
// before: it has no holes and no overlaps.
static int read_data(Reader* r, FILE* file, uint64_t nbytes, char* room) {
  ark_instance* i = r->instance;
  uint64_t at = 0;
  if (r->count > 0) qsort(r->entries, r->count, sizeof *r->entries, by_begin);
  for (uint32_t n = 0; n < r->count; ++n) {
    if (r->entries[n].begin != at) return bad(r, "its tensors overlap or leave a hole");
    at = r->entries[n].end;
  }
  if (at != nbytes) return bad(r, "it has more or fewer bytes than its tensors");
  for (uint32_t t = 0; t < i->model->tensor_count; ++t) {
    if (i->model->tensors[t].parameter) i->loaded[t] = 0;
  }
  for (uint32_t n = 0; n < r->count; ++n) {
    const ark_tensor* tensor = &i->model->tensors[r->entries[n].tensor];
    const int status = read_tensor(r, file, tensor, room);
    if (status != ARK_OK) return status;
  }
  for (uint32_t n = 0; n < r->count; ++n) i->loaded[r->entries[n].tensor] = 1;
  return ARK_OK;
}

static int read_file(Reader* r, FILE* file) {
  unsigned char prefix[8];
  if (fseeko(file, 0, SEEK_END) != 0) return bad(r, "it is no file that can be searched");
  const off_t size = ftello(file);
  if (size < 8 || fseeko(file, 0, SEEK_SET) != 0 || fread(prefix, 1, 8, file) != 8) {
    return bad(r, "it is shorter than 8 bytes");
  }
  uint64_t header = 0;
  for (int n = 7; n >= 0; --n) header = header << 8 | prefix[n];
  if (header > LONGEST_HEADER || header > (uint64_t)size - 8) {
    return bad(r, "its header is longer than the file or than 100 MB");
  }
  char* text = malloc((size_t)header + 1);
  if (text == NULL) return ark_fail(r->instance, ARK_NO_MEMORY, "no memory for the file's header");
  int status;
  if (fread(text, 1, (size_t)header, file) != header) {
    status = bad(r, "its header could not be read");
  } else {
    Cursor cursor = {text, text + header};
    status = take_header(r, &cursor);
  }
  free(text);
  if (status != ARK_OK) return status;
  char* room = malloc(PIECE);
  if (room == NULL) return ark_fail(r->instance, ARK_NO_MEMORY, "no memory to read the file");
  status = read_data(r, file, (uint64_t)size - 8 - header, room);
  free(room);
  return status;
}

int ark_load(ark_instance* i, const char* path) {
  const int begun = ark_begin(i, path != NULL);
  if (begun != ARK_OK) return begun;
  FILE* file = fopen(path, "rb");
  if (file == NULL) return ark_fail(i, ARK_BAD_FILE, "%s cannot be opened", path);
  Reader r = {i, path, NULL, NULL, 0};
  r.entries = calloc(i->model->tensor_count + 1, sizeof *r.entries);
  r.seen = calloc(i->model->tensor_count + 1, 1);
  const int status = r.entries != NULL && r.seen != NULL
                         ? read_file(&r, file)
                         : ark_fail(i, ARK_NO_MEMORY, "no memory to read %s", path);
  free(r.entries);
  free(r.seen);
  fclose(file);
  return status;
}
