// An instance of an exported model: its memory, its tables with addresses in place, its launches.
#include "model.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "tables are written for little-endian machines"
#endif

#define ALIGNMENT 256

const char* ark_status_text(int status) {
  switch (status) {
    case ARK_OK:
      return "success";
    case ARK_BAD_ARGUMENT:
      return "an argument is not allowed";
    case ARK_NO_MEMORY:
      return "the system gave no memory";
    case ARK_BAD_FILE:
      return "the weights file cannot be read or is not this model's";
    case ARK_NO_TENSOR:
      return "the model has no tensor of that name";
    case ARK_BAD_SIZE:
      return "the bytes given are not the tensor's";
    case ARK_NOT_LOADED:
      return "a parameter has no value yet";
    case ARK_NOT_BOUND:
      return "an external tensor has no memory yet";
    case ARK_NO_THREADS:
      return "the system refused to start a thread for each processor";
    case ARK_GAVE_UP:
      return "a wait inside the loop kernel ran out of its time";
    default:
      return "no status of this library";
  }
}

const char* ark_error(const ark_instance* instance) {
  return instance == NULL ? "there is no instance" : instance->error;
}

int ark_fail(ark_instance* instance, int status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(instance->error, sizeof instance->error, format, arguments);
  va_end(arguments);
  return status;
}

static void* zeroed(uint64_t nbytes) {
  if (nbytes > SIZE_MAX - ALIGNMENT) return NULL;
  const size_t size = nbytes == 0 ? ALIGNMENT : (size_t)nbytes;
  const size_t whole = (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  void* memory = aligned_alloc(ALIGNMENT, whole);
  if (memory != NULL) memset(memory, 0, whole);
  return memory;
}

int ark_create(const ark_model* model, ark_instance** made) {
  if (made == NULL) return ARK_BAD_ARGUMENT;
  *made = NULL;
  if (model == NULL) return ARK_BAD_ARGUMENT;
  ark_instance* i = calloc(1, sizeof *i);
  if (i == NULL) return ARK_NO_MEMORY;
  i->model = model;
  i->bases = calloc(model->segment_count + 1, sizeof *i->bases);
  i->loaded = calloc(model->tensor_count + 1, 1);
  i->tasks = zeroed((uint64_t)model->task_count * sizeof *i->tasks);
  i->counter_ops = zeroed((uint64_t)model->counter_op_count * sizeof *i->counter_ops);
  i->fetches = zeroed((uint64_t)model->fetch_count * sizeof *i->fetches);
  i->growths = zeroed((uint64_t)model->growth_count * sizeof *i->growths);
  i->ranges = zeroed((uint64_t)model->range_count * sizeof *i->ranges);
  i->lists = zeroed((uint64_t)model->list_count * sizeof *i->lists);
  i->counters = zeroed((uint64_t)model->counter_count * model->counter_stride);
  i->control = zeroed(sizeof *i->control);
  i->host = zeroed(sizeof *i->host);
  int whole = i->bases && i->loaded && i->tasks && i->counter_ops && i->fetches && i->growths &&
              i->ranges && i->lists && i->counters && i->control && i->host;
  for (uint32_t s = 0; whole && s < model->segment_count; ++s) {
    if (model->segments[s].external) continue;
    i->bases[s] = zeroed(model->segments[s].nbytes);
    whole = i->bases[s] != NULL;
  }
  if (!whole) {
    ark_destroy(i);
    return ARK_NO_MEMORY;
  }
  *made = i;
  return ARK_OK;
}

void ark_destroy(ark_instance* i) {
  if (i == NULL) return;
  for (uint32_t s = 0; i->bases != NULL && s < i->model->segment_count; ++s) {
    if (!i->model->segments[s].external) free(i->bases[s]);
  }
  free(i->bases);
  free(i->loaded);
  free(i->tasks);
  free(i->counter_ops);
  free(i->fetches);
  free(i->growths);
  free(i->ranges);
  free(i->lists);
  free(i->counters);
  free(i->control);
  free(i->host);
  free(i);
}

// The tensor of that name, null (and the error's text) if there is none.
static const ark_tensor* find(const ark_instance* i, const char* name) {
  for (uint32_t t = 0; name != NULL && t < i->model->tensor_count; ++t) {
    if (strcmp(i->model->tensors[t].name, name) == 0) return &i->model->tensors[t];
  }
  return NULL;
}

static int no_tensor(ark_instance* i, const char* name) {
  return ark_fail(i, ARK_NO_TENSOR, "the model has no tensor \"%s\"", name == NULL ? "" : name);
}

int ark_bind(ark_instance* i, const char* name, void* memory, size_t nbytes) {
  if (i == NULL || memory == NULL) return ARK_BAD_ARGUMENT;
  const ark_tensor* tensor = find(i, name);
  if (tensor == NULL) return no_tensor(i, name);
  if (!i->model->segments[tensor->segment].external) {
    return ark_fail(i, ARK_BAD_ARGUMENT, "%s has memory of its own; write it instead", name);
  }
  if (nbytes != tensor->nbytes) {
    return ark_fail(i, ARK_BAD_SIZE, "%s has %llu bytes, but %zu were bound", name,
                    (unsigned long long)tensor->nbytes, nbytes);
  }
  if ((uintptr_t)memory % 16 != 0) {
    return ark_fail(i, ARK_BAD_ARGUMENT, "the memory for %s is not 16-byte aligned", name);
  }
  i->bases[tensor->segment] = memory;
  i->placed = 0;
  return ARK_OK;
}

int ark_write(ark_instance* i, const char* name, const void* values, size_t nbytes) {
  if (i == NULL || values == NULL) return ARK_BAD_ARGUMENT;
  const ark_tensor* tensor = find(i, name);
  if (tensor == NULL) return no_tensor(i, name);
  if (nbytes > tensor->nbytes || (tensor->parameter && nbytes != tensor->nbytes)) {
    return ark_fail(i, ARK_BAD_SIZE, "%s has %llu bytes, but %zu were given", name,
                    (unsigned long long)tensor->nbytes, nbytes);
  }
  unsigned char* base = i->bases[tensor->segment];
  if (base == NULL) return ark_fail(i, ARK_NOT_BOUND, "%s has no memory; bind it first", name);
  memcpy(base + tensor->offset, values, nbytes);
  i->loaded[tensor - i->model->tensors] = 1;
  return ARK_OK;
}

int ark_read(const ark_instance* i, const char* name, void* values, size_t nbytes) {
  if (i == NULL || values == NULL) return ARK_BAD_ARGUMENT;
  const ark_tensor* tensor = find(i, name);
  if (tensor == NULL) return ARK_NO_TENSOR;
  if (nbytes != tensor->nbytes) return ARK_BAD_SIZE;
  const unsigned char* base = i->bases[tensor->segment];
  if (base == NULL) return ARK_NOT_BOUND;
  memcpy(values, base + tensor->offset, nbytes);
  return ARK_OK;
}

int ark_size(const ark_instance* i, const char* name, size_t* nbytes) {
  if (i == NULL || nbytes == NULL) return ARK_BAD_ARGUMENT;
  const ark_tensor* tensor = find(i, name);
  if (tensor == NULL) return ARK_NO_TENSOR;
  *nbytes = (size_t)tensor->nbytes;
  return ARK_OK;
}

// The address that a table's word stands for; 0 stays 0.
static uint64_t placed(const ark_instance* i, uint64_t word) {
  const uint64_t segment = word >> ARK_SEGMENT_SHIFT;
  if (segment == 0) return 0;
  const uint64_t offset = word & (((uint64_t)1 << ARK_SEGMENT_SHIFT) - 1);
  // Behind the model's own segments: the counters, then the lists of operands.
  if (segment == i->model->segment_count + 1u) return (uintptr_t)i->counters + offset;
  if (segment == i->model->segment_count + 2u) return (uintptr_t)i->lists + offset;
  return (uintptr_t)i->bases[segment - 1] + offset;
}

static void place_tables(ark_instance* i) {
  const ark_model* m = i->model;
  memcpy(i->tasks, m->tasks, m->task_count * sizeof *i->tasks);
  memcpy(i->counter_ops, m->counter_ops, m->counter_op_count * sizeof *i->counter_ops);
  memcpy(i->fetches, m->fetches, m->fetch_count * sizeof *i->fetches);
  memcpy(i->growths, m->growths, m->growth_count * sizeof *i->growths);
  memcpy(i->ranges, m->ranges, m->range_count * sizeof *i->ranges);
  const size_t operands = sizeof i->tasks->operand / sizeof i->tasks->operand[0];
  for (uint32_t n = 0; n < m->task_count; ++n) {
    for (size_t o = 0; o < operands; ++o) {
      i->tasks[n].operand[o] = placed(i, i->tasks[n].operand[o]);
    }
  }
  for (uint32_t n = 0; n < m->counter_op_count; ++n) {
    i->counter_ops[n].address = placed(i, i->counter_ops[n].address);
  }
  for (uint32_t n = 0; n < m->fetch_count; ++n) {
    i->fetches[n].address = placed(i, i->fetches[n].address);
  }
  for (uint32_t n = 0; n < m->growth_count; ++n) {
    struct ArkGrowth* growth = &i->growths[n];
    growth->address = placed(i, growth->address);
    growth->beside = placed(i, growth->beside);
    growth->length = placed(i, growth->length);
  }
  for (uint32_t n = 0; n < m->list_count; ++n) i->lists[n] = placed(i, m->lists[n]);
  i->placed = 1;
}

// Whether everything that a launch reads has a value and a place.
static int check_ready(ark_instance* i) {
  const ark_model* m = i->model;
  for (uint32_t t = 0; t < m->tensor_count; ++t) {
    if (m->tensors[t].parameter && !i->loaded[t]) {
      return ark_fail(i, ARK_NOT_LOADED, "the parameter %s has no value; call ark_load first",
                      m->tensors[t].name);
    }
  }
  for (uint32_t s = 0; s < m->segment_count; ++s) {
    if (i->bases[s] == NULL) {
      return ark_fail(i, ARK_NOT_BOUND, "%s has no memory; call ark_bind first",
                      m->segments[s].name);
    }
  }
  return ARK_OK;
}

static int explain(ark_instance* i) {
  const struct ArkHost* host = i->host;
  const char* kind = host->error < ARK_ERROR_KINDS ? ark_error_kinds[host->error] : "unknown";
  const char* op = host->error_op < i->model->op_count ? i->model->op_names[host->error_op] : "?";
  return ark_fail(i, ARK_GAVE_UP,
                  "the loop kernel gave up (%s) in iteration %u, task %u of op %s: it saw %u and "
                  "expected %u",
                  kind, host->error_iteration, host->error_task, op, host->error_seen,
                  host->error_expected);
}

int ark_execute(ark_instance* i, const uint32_t* iterations, size_t phases, uint32_t* done) {
  if (i == NULL || iterations == NULL) return ARK_BAD_ARGUMENT;
  const ark_model* m = i->model;
  if (phases != m->phase_count) {
    return ark_fail(i, ARK_BAD_ARGUMENT,
                    "the model has %u phases, but iterations of %zu were given", m->phase_count,
                    phases);
  }
  const int ready = check_ready(i);
  if (ready != ARK_OK) return ready;
  if (!i->placed) place_tables(i);
  uint64_t end = 0;
  memset(i->control, 0, sizeof *i->control);
  memset(i->host, 0, sizeof *i->host);
  memset(i->counters, 0, (size_t)m->counter_count * m->counter_stride);
  for (size_t p = 0; p < phases; ++p) {
    end += iterations[p];
    if (end > UINT32_MAX) return ark_fail(i, ARK_BAD_ARGUMENT, "too many iterations");
    if (p + 1 < phases) i->control->phase_end[p] = (uint32_t)end;
  }
  for (uint32_t s = 0; s < m->segment_count; ++s) {
    memset(i->bases[s], 0, (size_t)m->segments[s].clear);
  }
  i->control->limit = (uint32_t)end;
  struct ArkParams params;
  memset(&params, 0, sizeof params);
  params.tasks = (uintptr_t)i->tasks;
  params.counter_ops = (uintptr_t)i->counter_ops;
  params.fetches = (uintptr_t)i->fetches;
  params.growths = (uintptr_t)i->growths;
  params.ranges = (uintptr_t)i->ranges;
  params.barrier = (uintptr_t)(i->counters + (size_t)m->barrier_counter * m->counter_stride);
  params.control = (uintptr_t)i->control;
  params.host = (uintptr_t)i->host;
  params.processors = m->processors;
  params.together = m->together;
  params.budget_ns = m->budget_ns;
  if (m->loop(&params, (int)m->processors) != 0) {
    return ark_fail(i, ARK_NO_THREADS, "%u threads are needed, and the system refused one",
                    m->processors);
  }
  if (done != NULL) *done = i->host->done;
  if (i->host->error != 0) return explain(i);
  i->error[0] = 0;
  return ARK_OK;
}
