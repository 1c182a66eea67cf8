// The entry point of the simulated mesh of cores. A core accesses only its own memory. In a
// superstep the simulated cores compute one after another. Then all messages are copied before the
// first one is delivered, as if they were sent at the same time.

struct MeshMessage {
  ark_u64 from, to;  // addresses
  ark_u32 bytes;
  ark_u32 changed;  // deliver only bytes that the source has changed in this iteration
};
static_assert(sizeof(MeshMessage) == 24, "MeshMessage");

struct MeshParams {
  ark_u64 cores;       // ArkParams of each core, contiguous
  ark_u64 steps;       // by phase, its supersteps
  ark_u64 tasks;       // by phase, core and superstep: the first task, then the end
  ark_u64 exchanges;   // by phase and superstep: the first message, then the end
  ark_u64 messages;    // MeshMessage
  ark_u64 inputs;      // MeshMessage from the host, at the launch's start
  ark_u64 outputs;     // MeshMessage to the host, when a phase has ended
  ark_u64 ends;        // by phase: the first message of `outputs`, then the end
  ark_u64 posts;       // MeshMessage to host-mapped memory, sent after every iteration
  ark_u64 post_ends;   // by phase: the first message of `posts`, then the end
  ark_u64 copies;      // MeshMessage to a core's copy of the iteration's initial state
  ark_u64 staging;     // room for the bytes of the largest exchange
  ark_u64 remembered;  // bytes from a core's memory to its copy of the initial state
  ark_u64 control;     // ArkControl of the launch, followed by the ends of the phases
  ark_u64 host;        // ArkHost
  ark_u64 counts;      // two words: supersteps so far, and bytes exchanged in them
  ark_u64 idle_ns;     // longest wait for the host's permission in persistent mode
  ark_u32 count;       // number of cores
  ark_u32 phases;
  ark_u32 persistent;
  ark_u32 first;  // iteration
  ark_u32 input_count;
  ark_u32 copy_count;
};

static void mesh_copy(const MeshMessage* each, ark_u32 count) {
  for (ark_u32 i = 0u; i < count; ++i) {
    memcpy(ARK_POINTER(char, each[i].to), ARK_POINTER(const char, each[i].from), each[i].bytes);
  }
}

// Delivers the messages of a superstep. All messages are read from the senders' memory before the
// first one is written to a receiver, as if they were sent at the same time.
static void mesh_exchange(const MeshParams* m, const MeshMessage* each, ark_u32 count) {
  char* staged = ARK_POINTER(char, m->staging);
  for (ark_u32 i = 0u; i < count; staged += each[i].bytes, ++i) {
    memcpy(staged, ARK_POINTER(const char, each[i].from), each[i].bytes);
  }
  staged = ARK_POINTER(char, m->staging);
  ark_u64& sent = ARK_POINTER(ark_u64, m->counts)[1];
  for (ark_u32 i = 0u; i < count; staged += each[i].bytes, ++i) {
    char* to = ARK_POINTER(char, each[i].to);
    if (each[i].changed == 0u) {
      memcpy(to, staged, each[i].bytes);
      sent += each[i].bytes;
      continue;
    }
    const char* before = ARK_POINTER(const char, each[i].from + m->remembered);
    if (memcmp(staged, before, each[i].bytes) == 0) continue;
    for (ark_u32 b = 0u; b < each[i].bytes; ++b) {
      if (staged[b] == before[b]) continue;
      to[b] = staged[b];
      ++sent;
    }
  }
}

static const ArkParams* mesh_core(const MeshParams* m, ark_u32 core) {
  return ARK_POINTER(const ArkParams, m->cores) + core;
}

// A core that has failed reports it in its own control block. Copies the error of that core to the
// host's block of the launch.
static bool mesh_failed(const MeshParams* m, ark_u32 core) {
  const ArkControl* own = ark_control(mesh_core(m, core));
  if (own->error == 0u) return false;
  ArkHost* host = ARK_POINTER(ArkHost, m->host);
  const ArkHost* said = ark_host(mesh_core(m, core));
  host->error_task = said->error_task;
  host->error_op = said->error_op;
  host->error_counter = said->error_counter;
  host->error_expected = said->error_expected;
  host->error_seen = said->error_seen;
  host->error_processor = core;
  host->error_iteration = said->error_iteration;
  ark_store_host(&host->error, own->error);
  return true;
}

// Runs the tasks of one core in one superstep. Returns false after a failure.
static bool mesh_compute(const MeshParams* m, ark_u32 core, ark_u32 iteration, ark_u32 begin,
                         ark_u32 end, char* scratch) {
  if (begin == end) return true;
  const ArkParams* p = mesh_core(m, core);
  ArkLoop& loop = *reinterpret_cast<ArkLoop*>(scratch);
  ArkCtx& c = loop.ctx;
  ark_open_loop(c, p, core, scratch);
  const ArkPhases phases = ark_phases(p);
  ark_open_iteration(c, iteration, phases, ark_range(p, 0u, iteration, phases), 0u);
  for (ark_u32 i = begin; i < end; ++i) {
    ark_warp_store(&c.warps[0], i);
    ark_dispatch(c, ARK_POINTER(const ArkTask, p->tasks)[i]);
    if (mesh_failed(m, core)) return false;
  }
  return true;
}

static bool mesh_iteration(const MeshParams* m, ark_u32 phase, ark_u32 iteration, char* scratch) {
  const ark_u32* steps = ARK_POINTER(const ark_u32, m->steps);
  ark_u32 before = 0u;  // supersteps of earlier phases
  for (ark_u32 i = 0u; i < phase; ++i) before += steps[i];
  const ark_u32* tasks = ARK_POINTER(const ark_u32, m->tasks) + (before + phase) * m->count;
  const ark_u32* exchanges = ARK_POINTER(const ark_u32, m->exchanges) + before;
  const MeshMessage* messages = ARK_POINTER(const MeshMessage, m->messages);
  for (ark_u32 step = 0u; step < steps[phase]; ++step) {
    for (ark_u32 core = 0u; core < m->count; ++core) {
      const ark_u32* at = tasks + core * (steps[phase] + 1u) + step;
      if (!mesh_compute(m, core, iteration, at[0], at[1], scratch)) return false;
    }
    mesh_exchange(m, messages + exchanges[step], exchanges[step + 1u] - exchanges[step]);
    ++ARK_POINTER(ark_u64, m->counts)[0];
  }
  mesh_copy(ARK_POINTER(const MeshMessage, m->copies), m->copy_count);
  return true;
}

// Copies the messages of a phase from the cores to the host's memory.
static void mesh_out(ark_u64 messages, ark_u64 ends, ark_u32 phase) {
  const ark_u32* range = ARK_POINTER(const ark_u32, ends) + phase;
  mesh_copy(ARK_POINTER(const MeshMessage, messages) + range[0], range[1] - range[0]);
}

static void mesh_in(const MeshParams* m) {
  mesh_copy(ARK_POINTER(const MeshMessage, m->inputs), m->input_count);
  mesh_copy(ARK_POINTER(const MeshMessage, m->copies), m->copy_count);
}

// In persistent mode, waits until the host allows this iteration to run. Returns false if the loop
// is to end instead.
static bool mesh_released(const MeshParams* m, ark_u32 iteration, bool& waited) {
  ArkHost* host = ARK_POINTER(ArkHost, m->host);
  const ark_u64 start = ark_time_ns();
  for (ark_u32 spins = 0u; ark_load_host(&host->target) <= iteration; ark_pause(++spins)) {
    waited = true;
    if ((ark_load_host(&host->quit) | ark_load_host(&host->abort)) != 0u) return false;
    if (ark_time_ns() - start > m->idle_ns) {
      ark_store_host(&host->quit, 1u);
      return false;
    }
  }
  return true;
}

static void mesh_loop(const MeshParams* m, char* scratch) {
  ArkControl* control = ARK_POINTER(ArkControl, m->control);
  const ark_u32* ends = reinterpret_cast<const ark_u32*>(control + 1);
  ArkHost* host = ARK_POINTER(ArkHost, m->host);
  bool fresh = true;  // the host may have written since the cores were filled
  for (ark_u32 iteration = m->first; iteration < control->limit; ++iteration) {
    if (m->persistent != 0u && !mesh_released(m, iteration, fresh)) return;
    if (ark_load_host(&host->abort) != 0u) {
      control->limit = 0u;
      return;
    }
    if (fresh) mesh_in(m);
    ark_u32 phase = 0u;
    for (ark_u32 i = 0u; i + 1u < m->phases; ++i) phase += iteration >= ends[i];
    if (!mesh_iteration(m, phase, iteration, scratch)) return;
    for (ark_u32 core = 0u; core < m->count; ++core) {
      const ark_u32 limit = ark_control(mesh_core(m, core))->limit;
      if (limit < control->limit) control->limit = limit;
    }
    const ark_u32 next = iteration + 1u;
    const bool idles = m->persistent != 0u && ark_load_host(&host->target) <= next;
    const bool over = phase + 1u < m->phases && next >= ends[phase];
    if (idles || over || next >= control->limit) mesh_out(m->outputs, m->ends, phase);
    mesh_out(m->posts, m->post_ends, phase);
    fresh = idles;
    ark_store_host(&host->done, next);
  }
}

extern "C" int ark_loop(const MeshParams* m, int) {
  char* scratch = static_cast<char*>(aligned_alloc(64, (ARK_SCRATCH_BYTES + 127) / 64 * 64));
  if (scratch == nullptr) return 1;
  mesh_loop(m, scratch);
  free(scratch);
  return 0;
}
