// The loop that every processor runs, the same text on every vendor. It stands on the device ABI
// (docs/device-abi.md), the shared structures of ark/codegen/layout.py, and on ark_dispatch, the
// switch over task kinds that the writer generates.

// An address of device memory as a pointer. A backend may say more: that it is not shared memory.
#if !defined(ARK_POINTER)
#define ARK_POINTER(type, address) reinterpret_cast<type*>(address)
#endif

// After so many stages their count begins again: a multiple of what any stream's slots, the phases
// of their barriers and the warps repeat by, so that 32 bits do for ever.
constexpr ark_u32 ARK_STAGE_UNIT =
    2u * ARK_WARPS * (ARK_RING_BYTES > 0 ? ARK_RING_BYTES / ARK_STAGE_BYTES : 1);
constexpr ark_u32 ARK_STAGE_PERIOD = (1u << 30) / ARK_STAGE_UNIT * ARK_STAGE_UNIT;

// What a task body sees besides its task.
struct ArkCtx {
  const ArkParams* p;
  char* scratch;             // shared memory of this processor, ARK_SCRATCH_BYTES
  const ArkFetch* fetches;   // this processor's operand stream in this phase
  ark_u32 processor;
  ark_u32 iteration;         // since launch
  ark_u32 phase;
  ark_u32 phase_iteration;   // since the phase began
  ark_u32 stage_base;        // stages consumed in earlier iterations, up to ARK_STAGE_PERIOD
  ark_u32 task;              // index of the running task
  ark_u32 op;
  bool failed;               // a wait inside the body gave up
};

ARK_DEVICE ark_u32* ark_words(ark_u64 address) { return ARK_POINTER(ark_u32, address); }

ARK_DEVICE ArkControl* ark_control(const ArkParams* p) {
  return ARK_POINTER(ArkControl, p->control);
}

ARK_DEVICE ArkHost* ark_host(const ArkParams* p) { return ARK_POINTER(ArkHost, p->host); }

// Records the first failure of this launch for the host and raises the abort word for everybody.
ARK_DEVICE void ark_fail(ArkCtx& c, ark_u32 why, ark_u32 counter, ark_u32 expected, ark_u32 seen) {
  ArkControl* control = ark_control(c.p);
  if (ark_cas(&control->error, 0u, why) == 0u) {
    ArkHost* host = ark_host(c.p);
    host->error_task = c.task;
    host->error_op = c.op;
    host->error_counter = counter;
    host->error_expected = expected;
    host->error_seen = seen;
    host->error_processor = c.processor;
    host->error_iteration = c.iteration;
    ark_store_host(&host->error, why);
  }
  ark_add_release(&control->abort, 1u, false);
  c.failed = true;
}

ARK_DEVICE bool ark_aborted(const ArkParams* p) {
  return ark_load_acquire(&ark_control(p)->abort, false) != 0u ||
         ark_load_host(&ark_host(p)->abort) != 0u;
}

// A bounded spin: call once per failed poll; false means give up (budget spent or aborted).
struct ArkSpin {
  ark_u32 spins;
  ark_u64 start;
};

enum ArkVerdict { ARK_KEEP, ARK_TIMEOUT, ARK_ABORTED };

ARK_DEVICE ArkVerdict ark_spin(const ArkParams* p, ArkSpin& s, ark_u64 budget_ns) {
  ark_pause(s.spins);
  if ((++s.spins & ARK_SPIN_CHECK) != 0u) return ARK_KEEP;
  if (ark_aborted(p)) return ARK_ABORTED;
  const ark_u64 now = ark_time_ns();
  if (s.start == 0) s.start = now;
  return now - s.start > budget_ns ? ARK_TIMEOUT : ARK_KEEP;
}

// Waits until a counter has reached `want` (wrap-safe); false after a failure.
ARK_DEVICE bool ark_wait(ArkCtx& c, ark_u32* word, ark_u32 want, bool system, ark_u32 why,
                         ark_u32 counter) {
  ArkSpin spin{0u, 0u};
  for (;;) {
    const ark_u32 seen = ark_load_acquire(word, system);
    if (static_cast<ark_i32>(seen - want) >= 0) return true;
    const ArkVerdict verdict = ark_spin(c.p, spin, c.p->budget_ns);
    if (verdict == ARK_KEEP) continue;
    if (verdict == ARK_TIMEOUT) ark_fail(c, why, counter, want, seen);
    return false;
  }
}

// Reads one packet {value, epoch}: the load is the wait.
ARK_DEVICE float ark_packet(ArkCtx& c, const ark_u64* packet, bool system) {
  ArkSpin spin{0u, 0u};
  const ark_u32 epoch = c.iteration + 1u;
  while (!c.failed) {
    const ark_u64 seen = ark_packet_load(packet, system);
    if (static_cast<ark_u32>(seen >> 32) == epoch) {
      return ark_bits_float(static_cast<ark_u32>(seen));
    }
    const ArkVerdict verdict = ark_spin(c.p, spin, c.p->budget_ns);
    if (verdict == ARK_KEEP) continue;
    if (verdict == ARK_TIMEOUT) {
      ark_fail(c, 2u, 0u, epoch, static_cast<ark_u32>(seen >> 32));
    }
    c.failed = true;
  }
  return 0.0f;
}

ARK_DEVICE void ark_publish(ArkCtx& c, ark_u64* packet, float value, bool system) {
  const ark_u64 word = (static_cast<ark_u64>(c.iteration + 1u) << 32) | ark_float_bits(value);
  ark_packet_store(packet, word, system);
}

ARK_DEVICE void ark_dispatch(ArkCtx& c, const ArkTask& task);

// A task's record and edges are read while the tasks before it run, so that no task begins with a
// trip to memory. Of four records in shared memory one is in use, two are ahead, and the fourth may
// still be read by threads that signal the task before.
constexpr ark_u32 ARK_RECORDS = 4u;
constexpr int ARK_RECORD_WORDS = sizeof(ArkTask) / 4;
constexpr int ARK_RECORD_SHARE = (ARK_RECORD_WORDS + ARK_THREADS - 1) / ARK_THREADS;
static_assert(ARK_RECORDS * sizeof(ArkTask) == ARK_LOOP_BYTES, "the loop's share of scratch");

struct ArkRecord {
  ark_u32 words[ARK_RECORD_SHARE];  // this thread's share of a record on its way
};

ARK_DEVICE void ark_read_record(ArkRecord& r, const ArkTask* task) {
  const ark_u32* words = reinterpret_cast<const ark_u32*>(task);
  for (int i = 0; i < ARK_RECORD_SHARE; ++i) {
    const int w = ark_tid() + i * ARK_THREADS;
    if (w < ARK_RECORD_WORDS) r.words[i] = words[w];
  }
}
ARK_DEVICE void ark_keep_record(const ArkRecord& r, ArkTask* task) {
  ark_u32* words = reinterpret_cast<ark_u32*>(task);
  for (int i = 0; i < ARK_RECORD_SHARE; ++i) {
    const int w = ark_tid() + i * ARK_THREADS;
    if (w < ARK_RECORD_WORDS) words[w] = r.words[i];
  }
}

// This thread's first edge of a range, if it has one.
ARK_DEVICE ArkEdge ark_first_edge(const ArkParams* p, ark_u32 begin, ark_u32 end) {
  ArkEdge e = {};
  if (begin + ark_tid() < end) e = ARK_POINTER(const ArkEdge, p->edges)[begin + ark_tid()];
  return e;
}

// All waits of a task, one thread each; `e` is this thread's first edge.
ARK_DEVICE bool ark_wait_task(ArkCtx& c, const ArkTask& task, ArkEdge e) {
  const ArkEdge* edges = ARK_POINTER(const ArkEdge, c.p->edges);
  if (task.wait_begin == task.wait_end) return true;
  bool ok = true;
  for (ark_u32 w = task.wait_begin + ark_tid(); w < task.wait_end; w += ARK_THREADS) {
    if (w >= task.wait_begin + ARK_THREADS) e = edges[w];
    const ark_u32 want = e.step * c.phase_iteration + e.value;
    ok = ok && ark_wait(c, ark_words(e.address), want, (e.flags & 1u) != 0u, 1u, e.counter);
  }
  return ark_all(ok);
}

ARK_DEVICE void ark_signal_task(ArkCtx& c, const ArkTask& task, ArkEdge e) {
  const ArkEdge* edges = ARK_POINTER(const ArkEdge, c.p->edges);
  for (ark_u32 s = task.signal_begin + ark_tid(); s < task.signal_end; s += ARK_THREADS) {
    if (s >= task.signal_begin + ARK_THREADS) e = edges[s];
    // The host learns of an iteration's end before the gate lets the next one begin.
    if ((e.flags & 2u) != 0u) ark_store_host(&ark_host(c.p)->done, c.iteration + 1u);
    ark_add_release(ark_words(e.address), e.value, (e.flags & 1u) != 0u);
  }
}

// Leader only: may this processor begin the iteration? The gate opens when all of the iteration
// before it is done on every rank; in persistent mode processor 0 also asks the host.
ARK_DEVICE bool ark_may_begin(ArkCtx& c) {
  ArkControl* control = ark_control(c.p);
  const bool system = c.p->world > 1u;
  if (!ark_wait(c, ark_words(c.p->gate), c.iteration * c.p->world, system, 4u, 0u)) return false;
  if (c.p->persistent && c.processor == 0u) {
    ArkHost* host = ark_host(c.p);
    ArkSpin spin{0u, 0u};
    for (;;) {
      const ark_u32 target = ark_load_host(&host->target);
      if (target > c.iteration) {
        ark_add_release(&control->go, 1u, false);
        break;
      }
      const bool quit = ark_load_host(&host->quit) != 0u;
      if (quit || ark_spin(c.p, spin, c.p->idle_ns) != ARK_KEEP) {
        ark_add_release(&control->go, 0x40000000u, false);
        ark_store_host(&host->quit, 1u);
        return false;
      }
    }
    return true;
  }
  if (c.p->persistent) {
    // The host may be silent for long: this wait ends when processor 0 releases or gives up.
    ArkSpin spin{0u, 0u};
    for (;;) {
      const ark_u32 go = ark_load_acquire(&control->go, false);
      if (go >= 0x40000000u) return false;
      if (go > c.iteration) return true;
      if (ark_spin(c.p, spin, c.p->idle_ns + c.p->budget_ns) != ARK_KEEP) return false;
    }
  }
  return c.iteration < ark_load_acquire(&control->limit, false);
}

ARK_DEVICE void ark_run(const ArkParams* p, ark_u32 processor, char* scratch) {
  ArkCtx c;
  c.p = p;
  c.scratch = scratch + ARK_LOOP_BYTES;
  c.processor = processor;
  c.stage_base = 0u;
  c.task = 0xffffffffu;
  c.op = 0xffffffffu;
  c.failed = false;
  const ark_u32 phase0 = ark_control(p)->phase0;
  const ArkRange* ranges = ARK_POINTER(const ArkRange, p->ranges);
  const ArkTask* tasks = ARK_POINTER(const ArkTask, p->tasks);
  ArkTask* records = reinterpret_cast<ArkTask*>(scratch);
  ArkRecord ahead;
  ark_u32 traced = 0u;
  for (c.iteration = 0u;; ++c.iteration) {
    bool go = true;
    if (ark_tid() == 0) go = ark_may_begin(c);
    if (!ark_all(go)) return;
    c.phase = c.iteration < phase0 ? 0u : ARK_PHASES - 1u;
    c.phase_iteration = c.phase == 0u ? c.iteration : c.iteration - phase0;
    const ArkRange range = ranges[c.phase * p->processors + processor];
    c.fetches = ARK_POINTER(const ArkFetch, p->fetches) + range.fetch_begin;
    const ark_u32 end = range.task_end;
    for (ark_u32 i = range.task_begin; i < end && i < range.task_begin + 2u; ++i) {
      ark_read_record(ahead, tasks + i);
      ark_keep_record(ahead, records + i % ARK_RECORDS);
    }
    ark_sync();
    ArkEdge wait = {};
    for (ark_u32 i = range.task_begin; i < end; ++i) {
      const ArkTask& task = records[i % ARK_RECORDS];
      if (i == range.task_begin) wait = ark_first_edge(p, task.wait_begin, task.wait_end);
      const ArkEdge signal = ark_first_edge(p, task.signal_begin, task.signal_end);
      ArkEdge next_wait = {};
      if (i + 1u < end) {
        const ArkTask& next = records[(i + 1u) % ARK_RECORDS];
        next_wait = ark_first_edge(p, next.wait_begin, next.wait_end);
      }
      if (i + 2u < end) ark_read_record(ahead, tasks + i + 2u);
      c.task = task.index;
      c.op = task.op;
      if (!ark_wait_task(c, task, wait)) return;
      const ark_u64 begin = p->trace ? ark_time_ns() : 0u;
      ark_dispatch(c, task);
      if (i + 2u < end) ark_keep_record(ahead, records + (i + 2u) % ARK_RECORDS);
      if (!ark_all(!c.failed)) return;
      ark_signal_task(c, task, signal);
      wait = next_wait;
      if (p->trace && ark_tid() == 0 && traced < p->trace_capacity) {
        ArkTrace* record = ARK_POINTER(ArkTrace, p->trace) +
                           static_cast<ark_u64>(processor) * p->trace_capacity + traced++;
        record->task = task.index;
        record->iteration = c.iteration;
        record->begin = begin;
        record->end = ark_time_ns();
      }
    }
    c.stage_base += range.fetch_end - range.fetch_begin;
    if (c.stage_base >= ARK_STAGE_PERIOD) c.stage_base -= ARK_STAGE_PERIOD;
  }
}
