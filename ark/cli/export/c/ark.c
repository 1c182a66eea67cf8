// An instance of an exported model: its memory, its tables with addresses filled in, and its
// launches.
#include "device.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "tables are written for little-endian machines"
#endif

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
    case ARK_NO_DEVICE:
      return "the device or its driver is not there, or has failed";
    default:
      return "no status of this library";
  }
}

#define NO_INSTANCE "there is no instance"
static _Thread_local char not_made[sizeof((ark_instance*)0)->error] = NO_INSTANCE;

const char* ark_error(const ark_instance* instance) {
  return instance == NULL ? not_made : instance->error;
}

int ark_fail(ark_instance* instance, int status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(instance->error, sizeof instance->error, format, arguments);
  va_end(arguments);
  return status;
}

int ark_begin(ark_instance* instance, int given) {
  if (instance == NULL) return ARK_BAD_ARGUMENT;
  instance->error[0] = 0;
  return given ? ARK_OK : ark_fail(instance, ARK_BAD_ARGUMENT, "a pointer is null");
}

// A table is an array that the loop kernel reads, such as its tasks or the signals of its counters.
typedef struct {
  const uint64_t* words;
  size_t nbytes;
} table;

static table table_of(const ark_model* m, int number) {
  switch (number) {
    case 0:
      return (table){m->tasks, m->task_count * sizeof(struct ArkTask)};
    case 1:
      return (table){m->counter_ops, m->counter_op_count * sizeof(struct ArkCounterOp)};
    case 2:
      return (table){m->fetches, m->fetch_count * sizeof(struct ArkFetch)};
    case 3:
      return (table){m->growths, m->growth_count * sizeof(struct ArkGrowth)};
    case 4:
      return (table){m->ranges, m->range_count * sizeof(struct ArkRange)};
    default:
      return (table){m->lists, m->list_count * sizeof(uint64_t)};
  }
}

static int allocate(ark_instance* i) {
  const ark_model* m = i->model;
  int status = ark_device_open(i);
  for (int t = 0; status == ARK_OK && t < ARK_TABLES; ++t) {
    status = ark_device_alloc(i, table_of(m, t).nbytes, 0, &i->tables[t]);
  }
  const uint64_t counters = (uint64_t)m->counter_count * m->counter_stride;
  if (status == ARK_OK) status = ark_device_alloc(i, counters, 0, &i->counters);
  const uint64_t control = sizeof(struct ArkControl) + m->phase_count * sizeof(uint32_t);
  if (status == ARK_OK) status = ark_device_alloc(i, control, 0, &i->control);
  if (status == ARK_OK) status = ark_device_alloc(i, sizeof(struct ArkHost), 1, &i->host);
  const uint64_t maps = (uint64_t)m->map_count * ARK_MAP_BYTES;
  if (status == ARK_OK && maps != 0) status = ark_device_alloc(i, maps, 0, &i->maps);
  for (uint32_t s = 0; status == ARK_OK && s < m->segment_count; ++s) {
    const ark_segment* segment = &m->segments[s];
    if (segment->external) continue;
    status = ark_device_alloc(i, segment->nbytes, segment->mapped, &i->bases[s]);
  }
  return status;
}

int ark_create(const ark_model* model, ark_instance** made) {
  strcpy(not_made, made == NULL || model == NULL ? "a pointer is null" : NO_INSTANCE);
  if (made == NULL) return ARK_BAD_ARGUMENT;
  *made = NULL;
  if (model == NULL) return ARK_BAD_ARGUMENT;
  ark_instance* i = calloc(1, sizeof *i);
  if (i == NULL) {
    strcpy(not_made, "the system gave no memory");
    return ARK_NO_MEMORY;
  }
  i->model = model;
  i->bases = calloc(model->segment_count + 1, sizeof *i->bases);
  i->loaded = calloc(model->tensor_count + 1, 1);
  i->ends = calloc(model->phase_count + 1, sizeof *i->ends);
  const int status = i->bases && i->loaded && i->ends
                         ? allocate(i)
                         : ark_fail(i, ARK_NO_MEMORY, "the system gave no memory");
  if (status != ARK_OK) {
    memcpy(not_made, i->error, sizeof not_made);
    ark_destroy(i);
    return status;
  }
  *made = i;
  return ARK_OK;
}

static void let_go(ark_instance* i, ark_memory* memory) {
  if (memory->address != 0 || memory->host != NULL) ark_device_free(i, memory);
}

void ark_destroy(ark_instance* i) {
  if (i == NULL) return;
  for (uint32_t s = 0; i->bases != NULL && s < i->model->segment_count; ++s) {
    if (!i->model->segments[s].external) let_go(i, &i->bases[s]);
  }
  for (int t = 0; t < ARK_TABLES; ++t) let_go(i, &i->tables[t]);
  let_go(i, &i->counters);
  let_go(i, &i->control);
  let_go(i, &i->host);
  let_go(i, &i->maps);
  ark_device_close(i);
  free(i->bases);
  free(i->loaded);
  free(i->ends);
  free(i);
}

// The tensor of that name. If there is none, sets the error text and returns null.
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
  const int begun = ark_begin(i, memory != NULL);
  if (begun != ARK_OK) return begun;
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
  i->bases[tensor->segment].address = (uintptr_t)memory;
  i->placed = 0;
  return ARK_OK;
}

int ark_write(ark_instance* i, const char* name, const void* values, size_t nbytes) {
  const int begun = ark_begin(i, values != NULL);
  if (begun != ARK_OK) return begun;
  const ark_tensor* tensor = find(i, name);
  if (tensor == NULL) return no_tensor(i, name);
  if (nbytes > tensor->nbytes || (tensor->parameter && nbytes != tensor->nbytes)) {
    return ark_fail(i, ARK_BAD_SIZE, "%s has %llu bytes, but %zu were given", name,
                    (unsigned long long)tensor->nbytes, nbytes);
  }
  const ark_memory* base = &i->bases[tensor->segment];
  if (base->address == 0) {
    return ark_fail(i, ARK_NOT_BOUND, "%s has no memory; bind it first", name);
  }
  if (base->host != NULL) {
    memcpy((unsigned char*)base->host + tensor->offset, values, nbytes);
  } else {
    const int status = ark_device_write(i, base->address + tensor->offset, values, nbytes);
    if (status != ARK_OK) return status;
  }
  i->loaded[tensor - i->model->tensors] = 1;
  return ARK_OK;
}

int ark_read(ark_instance* i, const char* name, void* values, size_t nbytes) {
  const int begun = ark_begin(i, values != NULL);
  if (begun != ARK_OK) return begun;
  const ark_tensor* tensor = find(i, name);
  if (tensor == NULL) return no_tensor(i, name);
  if (nbytes != tensor->nbytes) {
    return ark_fail(i, ARK_BAD_SIZE, "%s has %llu bytes, but %zu were asked for", name,
                    (unsigned long long)tensor->nbytes, nbytes);
  }
  const ark_memory* base = &i->bases[tensor->segment];
  if (base->address == 0) {
    return ark_fail(i, ARK_NOT_BOUND, "%s has no memory; bind it first", name);
  }
  if (base->host == NULL) return ark_device_read(i, values, base->address + tensor->offset, nbytes);
  memcpy(values, (const unsigned char*)base->host + tensor->offset, nbytes);
  return ARK_OK;
}

int ark_size(const ark_instance* i, const char* name, size_t* nbytes) {
  ark_instance* told = (ark_instance*)i;  // valid, because ark_create allocated the instance
  const int begun = ark_begin(told, nbytes != NULL);
  if (begun != ARK_OK) return begun;
  const ark_tensor* tensor = find(i, name);
  if (tensor == NULL) return no_tensor(told, name);
  *nbytes = (size_t)tensor->nbytes;
  return ARK_OK;
}

// Decodes an address of a table: a word holds (segment + 1) << ARK_SEGMENT_SHIFT plus the offset in
// the segment. Returns the device address; 0, which stands for no address, stays 0.
static uint64_t placed(const ark_instance* i, uint64_t word) {
  const uint64_t segment = word >> ARK_SEGMENT_SHIFT;
  if (segment == 0) return 0;
  const uint64_t offset = word & (((uint64_t)1 << ARK_SEGMENT_SHIFT) - 1);
  // The segments after the model's own are the counters, the lists of operands and the box maps.
  if (segment == i->model->segment_count + 1u) return i->counters.address + offset;
  if (segment == i->model->segment_count + 2u) return i->tables[5].address + offset;
  if (segment == i->model->segment_count + 3u) return i->maps.address + offset;
  return i->bases[segment - 1].address + offset;
}

static void place_operands(const ark_instance* i, struct ArkTask* tasks) {
  const size_t operands = sizeof tasks->operand / sizeof tasks->operand[0];
  for (uint32_t n = 0; n < i->model->task_count; ++n) {
    for (size_t o = 0; o < operands; ++o) tasks[n].operand[o] = placed(i, tasks[n].operand[o]);
  }
}

static void place_growths(const ark_instance* i, struct ArkGrowth* growths) {
  for (uint32_t n = 0; n < i->model->growth_count; ++n) {
    growths[n].address = placed(i, growths[n].address);
    growths[n].beside = placed(i, growths[n].beside);
    growths[n].length = placed(i, growths[n].length);
    growths[n].table = placed(i, growths[n].table);
  }
}

// Replaces the encoded addresses in a copy of table `number` by device addresses.
static void place_table(const ark_instance* i, int number, void* copy) {
  const ark_model* m = i->model;
  struct ArkCounterOp* counter_ops = copy;
  struct ArkFetch* fetches = copy;
  uint64_t* lists = copy;
  if (number == 0) place_operands(i, copy);
  for (uint32_t n = 0; number == 1 && n < m->counter_op_count; ++n) {
    counter_ops[n].address = placed(i, counter_ops[n].address);
  }
  for (uint32_t n = 0; number == 2 && n < m->fetch_count; ++n) {
    fetches[n].address = placed(i, fetches[n].address);
  }
  if (number == 3) place_growths(i, copy);
  for (uint32_t n = 0; number == 5 && n < m->list_count; ++n) lists[n] = placed(i, lists[n]);
}

static int place_maps(ark_instance* i) {
  int status = ARK_OK;
  for (uint32_t n = 0; status == ARK_OK && n < i->model->map_count; ++n) {
    const ark_box_map* map = &i->model->maps[n];
    unsigned char made[ARK_MAP_BYTES];
    status = ark_device_map(i, map, placed(i, map->address), made);
    const uint64_t to = i->maps.address + (uint64_t)n * ARK_MAP_BYTES;
    if (status == ARK_OK) status = ark_device_write(i, to, made, sizeof made);
  }
  return status;
}

static int place_tables(ark_instance* i) {
  int status = place_maps(i);
  for (int t = 0; status == ARK_OK && t < ARK_TABLES; ++t) {
    const table from = table_of(i->model, t);
    if (from.nbytes == 0) continue;
    void* copy = malloc(from.nbytes);
    if (copy == NULL) return ark_fail(i, ARK_NO_MEMORY, "no memory for the tables");
    memcpy(copy, from.words, from.nbytes);
    place_table(i, t, copy);
    status = ark_device_write(i, i->tables[t].address, copy, from.nbytes);
    free(copy);
  }
  i->placed = status == ARK_OK;
  return status;
}

// ARK_OK if everything that a launch reads has a value and an address.
static int check_ready(ark_instance* i) {
  const ark_model* m = i->model;
  for (uint32_t t = 0; t < m->tensor_count; ++t) {
    if (m->tensors[t].parameter && !i->loaded[t]) {
      return ark_fail(i, ARK_NOT_LOADED, "the parameter %s has no value; call ark_load first",
                      m->tensors[t].name);
    }
  }
  for (uint32_t s = 0; s < m->segment_count; ++s) {
    if (i->bases[s].address == 0) {
      return ark_fail(i, ARK_NOT_BOUND, "%s has no memory; call ark_bind first",
                      m->segments[s].name);
    }
  }
  return ARK_OK;
}

static int explain(ark_instance* i) {
  const struct ArkHost* host = i->host.host;
  const char* kind = host->error < ARK_ERROR_KINDS ? ark_error_kinds[host->error] : "unknown";
  const char* op = host->error_op < i->model->op_count ? i->model->op_names[host->error_op] : "?";
  return ark_fail(i, ARK_GAVE_UP,
                  "the loop kernel gave up (%s) in iteration %u, task %u of op %s: it saw %u and "
                  "expected %u",
                  kind, host->error_iteration, host->error_task, op, host->error_seen,
                  host->error_expected);
}

// Launches the kernels that have iterations to run, one after the other. If none has, launches the
// last kernel. ends: the iterations at which phases end.
static int run_kernels(ark_instance* i, struct ArkParams* params, const uint32_t* ends) {
  const ark_model* m = i->model;
  const struct ArkHost* host = i->host.host;
  uint32_t begin = 0, launched = 0;
  int status = ARK_OK;
  for (uint32_t k = 0; status == ARK_OK && host->error == 0 && k < m->kernel_count; ++k) {
    const uint32_t end = ends[m->kernels[k].last_phase];
    const int last = k + 1 == m->kernel_count;
    if (end == begin && !(last && launched == 0)) continue;
    params->first = begin;
    params->end = last ? 0 : end;
    status = ark_device_run(i, k, params);
    begin = end;
    ++launched;
  }
  return status;
}

int ark_execute(ark_instance* i, const uint32_t* iterations, size_t phases, uint32_t* done) {
  const int begun = ark_begin(i, iterations != NULL);
  if (begun != ARK_OK) return begun;
  const ark_model* m = i->model;
  if (phases != m->phase_count) {
    return ark_fail(i, ARK_BAD_ARGUMENT,
                    "the model has %u phases, but iterations of %zu were given", m->phase_count,
                    phases);
  }
  const int ready = check_ready(i);
  if (ready != ARK_OK) return ready;
  int status = i->placed ? ARK_OK : place_tables(i);
  uint64_t end = 0;
  struct ArkControl control;
  memset(&control, 0, sizeof control);
  for (size_t p = 0; p < phases; ++p) {
    end += iterations[p];
    if (end > UINT32_MAX) return ark_fail(i, ARK_BAD_ARGUMENT, "too many iterations");
    i->ends[p] = (uint32_t)end;
  }
  control.limit = (uint32_t)end;
  struct ArkHost* host = i->host.host;
  memset(host, 0, sizeof *host);
  if (status == ARK_OK) {
    status = ark_device_write(i, i->control.address, &control, sizeof control);
  }
  if (status == ARK_OK) {  // the iterations at which phases end follow ArkControl in memory
    const uint64_t behind = i->control.address + sizeof control;
    status = ark_device_write(i, behind, i->ends, phases * sizeof *i->ends);
  }
  const size_t counters = (size_t)m->counter_count * m->counter_stride;
  if (status == ARK_OK) status = ark_device_zero(i, i->counters.address, counters);
  for (uint32_t s = 0; status == ARK_OK && s < m->segment_count; ++s) {
    status = ark_device_zero(i, i->bases[s].address, (size_t)m->segments[s].clear);
  }
  struct ArkParams params;
  memset(&params, 0, sizeof params);
  params.tasks = i->tables[0].address;
  params.counter_ops = i->tables[1].address;
  params.fetches = i->tables[2].address;
  params.growths = i->tables[3].address;
  params.ranges = i->tables[4].address;
  params.barrier = i->counters.address + (uint64_t)m->barrier_counter * m->counter_stride;
  params.control = i->control.address;
  params.host = i->host.address;
  params.processors = m->processors;
  params.barrier_step = m->barrier_step;
  params.budget_ns = m->budget_ns;
  if (status == ARK_OK) status = run_kernels(i, &params, i->ends);
  if (status != ARK_OK) return status;
  if (done != NULL) *done = host->done;
  return host->error != 0 ? explain(i) : ARK_OK;
}
