// The loop that every processor runs, the same text on every vendor. It stands on the device ABI
// (docs/device-abi.md), the shared structures of ark/codegen/layout.py, and on ark_dispatch, the
// switch over task kinds that the writer generates.

// An address of device memory as a pointer. A backend may say more: that it is not shared memory.
#if !defined(ARK_POINTER)
#define ARK_POINTER(type, address) reinterpret_cast<type*>(address)
#endif
// A copy of the structure at an address of device memory, where the other side of a branch takes it
// from shared memory. A backend whose two memories have instructions of their own says how.
#if !defined(ARK_DEVICE_COPY)
#define ARK_DEVICE_COPY(type, address) (*ARK_POINTER(const type, address))
#endif

// After so many stages their count begins again: a multiple of what any stream's slots, the phases
// of their barriers and the warps repeat by, so that 32 bits do for ever.
constexpr ark_u32 ARK_STAGE_UNIT =
    2u * ARK_WARPS * (ARK_RING_BYTES > 0 ? ARK_RING_BYTES / ARK_STAGE_BYTES : 1);
constexpr ark_u32 ARK_STAGE_PERIOD = (1u << 30) / ARK_STAGE_UNIT * ARK_STAGE_UNIT;

// A warp's own word: the running task's place in the table, and whether a wait inside the body gave
// up. No other warp touches it; they learn of a failure from the abort word, and from the vote at
// the task's end.
constexpr ark_u32 ARK_NO_TASK = 0x7fffffffu;
constexpr ark_u32 ARK_GAVE_UP = 0x80000000u;

// What a task body sees besides its task; one per processor, in its shared memory.
struct ArkCtx {
  const ArkParams* p;
  char* scratch;            // shared memory of this processor, ARK_SCRATCH_BYTES
  const ArkFetch* fetches;  // this processor's operand stream in this phase
  ark_u32 processor;
  ark_u32 iteration;  // since launch
  ark_u32 phase;
  ark_u32 phase_iteration;         // since the phase began
  ark_u32 task_end;                // of this processor's list in this phase
  ark_u32 stage_base;              // stages consumed in earlier iterations, up to ARK_STAGE_PERIOD
  ark_u32 warps[ARK_BLOCK_WARPS];  // of all roles
};

// A backend may know without looking where shared memory and the parameters are.
#if !defined(ARK_SCRATCH)
#define ARK_SCRATCH(ctx) ((ctx).scratch)
#define ARK_PARAMS(ctx) ((ctx).p)
#endif

ARK_DEVICE bool ark_failed(const ArkCtx& c) {
  return (ark_warp_load(&c.warps[ark_warp()]) & ARK_GAVE_UP) != 0u;
}
ARK_DEVICE void ark_give_up(ArkCtx& c) {
  ark_u32* mine = &c.warps[ark_warp()];
  ark_warp_store(mine, ark_warp_load(mine) | ARK_GAVE_UP);
}

ARK_DEVICE const ArkFetch& ark_fetch(const ArkCtx& c, ark_u32 stage) {
  return ARK_POINTER(const ArkFetch, reinterpret_cast<ark_u64>(c.fetches))[stage];
}

ARK_DEVICE ark_u32* ark_words(ark_u64 address) { return ARK_POINTER(ark_u32, address); }

ARK_DEVICE ArkControl* ark_control(const ArkParams* p) {
  return ARK_POINTER(ArkControl, p->control);
}

ARK_DEVICE ArkHost* ark_host(const ArkParams* p) { return ARK_POINTER(ArkHost, p->host); }

// Records the first failure of this launch for the host and raises the abort word for everybody.
ARK_COLD void ark_fail(ArkCtx& c, ark_u32 why, ark_u32 counter, ark_u32 expected, ark_u32 seen) {
  ArkControl* control = ark_control(ARK_PARAMS(c));
  if (ark_cas(&control->error, 0u, why) == 0u) {
    ArkHost* host = ark_host(ARK_PARAMS(c));
    const ark_u32 at = ark_warp_load(&c.warps[ark_warp()]) & ~ARK_GAVE_UP;
    const ArkTask* task = ARK_POINTER(const ArkTask, ARK_PARAMS(c)->tasks) + at;
    host->error_task = at == ARK_NO_TASK ? 0xffffffffu : task->index;
    host->error_op = at == ARK_NO_TASK ? 0xffffffffu : task->op;
    host->error_counter = counter;
    host->error_expected = expected;
    host->error_seen = seen;
    host->error_processor = c.processor;
    host->error_iteration = c.iteration;
    ark_store_host(&host->error, why);
  }
  ark_add_release(&control->abort, 1u, false);
  ark_give_up(c);
}

// Asking the host is slow, and slows everybody where many ask: once in so many polls. A backend
// whose host memory is near says 0.
#if !defined(ARK_HOST_CHECK)
#define ARK_HOST_CHECK 0xffffu
#endif

ARK_DEVICE bool ark_aborted(const ArkParams* p, bool ask_host) {
  if (ark_load_acquire(&ark_control(p)->abort, false) != 0u) return true;
  if (!ask_host || ark_peek_host(&ark_host(p)->abort) == 0u) return false;
  ark_add_release(&ark_control(p)->abort, 1u, false);
  return true;
}

// A bounded spin: call once per failed poll; anything but ARK_KEEP means give up.
struct ArkSpin {
  ark_u32 spins;
  ark_u64 start;
};

enum ArkVerdict { ARK_KEEP, ARK_TIMEOUT, ARK_ABORTED };

// Says to a reader of the machine code that all stores of the block have arrived here.
#if !defined(ARK_BLOCK_ARRIVED)
#define ARK_BLOCK_ARRIVED()
#endif

// The clock of budgets. A backend whose processors can be stopped says another, which leaves out
// the time for which they were.
#if !defined(ARK_SPIN_TIME)
#define ARK_SPIN_TIME() ark_time_ns()
#endif

// The rare part of a spin: when it began, 0 if aborted, 1 past the budget.
ARK_COLD ark_u64 ark_spin_check(const ArkParams* p, ArkSpin s, ark_u64 budget_ns) {
  if (ark_aborted(p, (s.spins & ARK_HOST_CHECK) == 0u)) return 0u;
  const ark_u64 now = ARK_SPIN_TIME();
  if (s.start == 0u) return now;
  return now - s.start > budget_ns ? 1u : s.start;
}
ARK_DEVICE ArkVerdict ark_spin(const ArkParams* p, ArkSpin& s, ark_u64 budget_ns) {
  ark_pause(s.spins);
  if ((++s.spins & ARK_SPIN_CHECK) != 0u) return ARK_KEEP;
  s.start = ark_spin_check(p, s, budget_ns);
  return s.start > 1u ? ARK_KEEP : s.start == 1u ? ARK_TIMEOUT : ARK_ABORTED;
}

// One poll of a counter, and what follows the one that found it. Where an acquire costs caches
// their contents, a poll is none, and the last one becomes one.
#if !defined(ARK_HAS_POLL)
ARK_DEVICE ark_u32 ark_poll(const ark_u32* word, bool system) {
  return ark_load_acquire(word, system);
}
ARK_DEVICE void ark_polled(bool) {}
#endif

// Waits until a counter has reached `want` (wrap-safe); false after a failure.
ARK_DEVICE bool ark_wait(ArkCtx& c, ark_u32* word, ark_u32 want, bool system, ark_u32 why,
                         ark_u32 counter, ark_u64 budget_ns) {
  ArkSpin spin{0u, 0u};
  for (;;) {
    const ark_u32 seen = ark_poll(word, system);
    if (static_cast<ark_i32>(seen - want) >= 0) {
      ark_polled(system);
      return true;
    }
    const ArkVerdict verdict = ark_spin(ARK_PARAMS(c), spin, budget_ns);
    if (verdict == ARK_KEEP) continue;
    if (verdict == ARK_TIMEOUT) ark_fail(c, why, counter, want, seen);
    return false;
  }
}

// A packet {value, epoch} is of this iteration.
ARK_DEVICE bool ark_packet_ready(const ArkCtx& c, ark_u64 seen) {
  return static_cast<ark_u32>(seen >> 32) == c.iteration + 1u;
}

// Reads one packet: the load is the wait.
ARK_COLD float ark_wait_packet(ArkCtx& c, const ark_u64* packet, bool system) {
  ArkSpin spin{0u, 0u};
  while (!ark_failed(c)) {
    const ark_u64 seen = ark_packet_load(packet, system);
    if (ark_packet_ready(c, seen)) return ark_bits_float(static_cast<ark_u32>(seen));
    const ArkVerdict verdict = ark_spin(ARK_PARAMS(c), spin, ARK_PARAMS(c)->budget_ns);
    if (verdict == ARK_KEEP) continue;
    if (verdict == ARK_TIMEOUT) {
      ark_fail(c, 2u, 0u, c.iteration + 1u, static_cast<ark_u32>(seen >> 32));
    }
    ark_give_up(c);
  }
  return 0.0f;
}

ARK_DEVICE void ark_publish_packet(ArkCtx& c, ark_u64* packet, float value, bool system) {
  const ark_u64 word = (static_cast<ark_u64>(c.iteration + 1u) << 32) | ark_float_bits(value);
  ark_packet_store(packet, word, system);
}

// Runs a task's body; false if the processor is to leave instead.
ARK_DEVICE bool ark_dispatch(ArkCtx& c, const ArkTask& task);

// A task's record and counter operations are copied to shared memory while the tasks before it run,
// so that no task begins with a trip to memory. Of four slots one is in use, the next two are
// filled, and the fourth may still be read by threads that signal the task before.
constexpr ark_u32 ARK_SLOTS = 4u;
constexpr ark_u32 ARK_SLOT_COUNTER_OPS = 8u;

struct ArkLoop {
  ArkTask tasks[ARK_SLOTS];
  ArkCounterOp counter_ops[ARK_SLOTS][ARK_SLOT_COUNTER_OPS];
  ArkCtx ctx;
  ark_u64 begun;  // when the running task had been waited for, if that is traced
};
static_assert(sizeof(ArkLoop) <= ARK_LOOP_BYTES, "the loop's share of scratch");
static_assert(sizeof(ArkTask) <= 256 && sizeof(ArkCounterOp) * ARK_SLOT_COUNTER_OPS <= 256, "");

#ifndef ARK_HAS_COPY_AHEAD
// 8 bytes from memory to shared memory; there after ark_copies_done() and a barrier.
ARK_DEVICE void ark_copy_ahead(ark_u64* to, const ark_u64* from) { *to = *from; }
ARK_DEVICE void ark_copies_done() {}
#endif

// The threads that share a piece of the loop's own work: all computing ones, or a warp.
struct ArkTeam {
  ark_u32 thread;
  ark_u32 threads;
};
ARK_DEVICE ArkTeam ark_block_team() {
  return ArkTeam{static_cast<ark_u32>(ark_tid()), static_cast<ark_u32>(ARK_THREADS)};
}

ARK_DEVICE void ark_copy_words(ArkTeam team, void* to, const void* from, ark_u32 words) {
  // What is copied has fewer words than a warp of 32 lanes: no loop, whose code would be in the way
  // of the tasks' own.
  for (ark_u32 i = team.thread; i < words; i += team.threads) {
    ark_copy_ahead(reinterpret_cast<ark_u64*>(to) + i, reinterpret_cast<const ark_u64*>(from) + i);
    if (ARK_LANES >= 32) break;
  }
}
ARK_DEVICE void ark_task_ahead(ArkTeam team, ArkLoop& loop, const ArkParams* p, ark_u32 i) {
  const ArkTask* task = ARK_POINTER(const ArkTask, p->tasks) + i;
  ark_copy_words(team, &loop.tasks[i % ARK_SLOTS], task, sizeof(ArkTask) / 8u);
}
// A task's waits and signals lie behind each other; few have more than fit.
ARK_DEVICE void ark_counter_ops_ahead(ArkTeam team, ArkLoop& loop, const ArkParams* p, ark_u32 i) {
  const ArkTask& task = loop.tasks[i % ARK_SLOTS];
  const ark_u32 count = task.signal_end - task.wait_begin;
  const ArkCounterOp* ops = ARK_POINTER(const ArkCounterOp, p->counter_ops) + task.wait_begin;
  const ark_u32 fit = count < ARK_SLOT_COUNTER_OPS ? count : ARK_SLOT_COUNTER_OPS;
  ark_copy_words(team, loop.counter_ops[i % ARK_SLOTS], ops, fit * (sizeof(ArkCounterOp) / 8u));
}
ARK_DEVICE ArkCounterOp ark_counter_op(const ArkLoop& loop, ark_u32 i, ark_u32 number) {
  const ark_u32 at = number - loop.tasks[i % ARK_SLOTS].wait_begin;
  if (at < ARK_SLOT_COUNTER_OPS) return loop.counter_ops[i % ARK_SLOTS][at];
  const ark_u64 ops = ARK_PARAMS(loop.ctx)->counter_ops;
  return ARK_DEVICE_COPY(ArkCounterOp, ops + static_cast<ark_u64>(number) * sizeof(ArkCounterOp));
}

// This thread's waits of task i; the team must agree on the result.
ARK_DEVICE bool ark_wait_task(ArkTeam team, ArkLoop& loop, ark_u32 i) {
  ArkCtx& c = loop.ctx;
  const ArkTask& task = loop.tasks[i % ARK_SLOTS];
  const ark_u64 budget = ARK_PARAMS(c)->budget_ns;
  bool ok = true;
  for (ark_u32 w = task.wait_begin + team.thread; w < task.wait_end; w += team.threads) {
    const ArkCounterOp e = ark_counter_op(loop, i, w);
    const ark_u32 want = e.step * c.phase_iteration + e.value;
    const bool system = (e.flags & 1u) != 0u;
    ok = ok && ark_wait(c, ark_words(e.address), want, system, 1u, e.counter, budget);
  }
  return ok;
}

#if defined(ARK_REMOTE)
// Counters of ranks on other hosts: device/proxy.h.
ARK_COLD bool ark_proxy_push(ArkCtx& c, ark_u64 source, ark_u64 target, ark_u32 size,
                             ark_u32& behind);
#endif
ARK_DEVICE void ark_signal(ArkCtx& c, const ArkCounterOp& e) {
#if defined(ARK_REMOTE)
  ark_u32 behind = 0u;
  if ((e.flags & 4u) != 0u) {
    ark_proxy_push(c, e.value, e.address, 0u, behind);
    return;
  }
#endif
  (void)c;
  ark_add_release(ark_words(e.address), e.value, (e.flags & 1u) != 0u);
}
ARK_DEVICE void ark_signal_task(ArkTeam team, ArkLoop& loop, ark_u32 i) {
  const ArkTask& task = loop.tasks[i % ARK_SLOTS];
  ARK_BLOCK_ARRIVED();
  for (ark_u32 s = task.signal_begin + team.thread; s < task.signal_end; s += team.threads) {
    const ArkCounterOp e = ark_counter_op(loop, i, s);
    ark_signal(loop.ctx, e);
  }
}

// The host has told the loop to end: nobody begins another iteration, every wait gives up.
ARK_COLD void ark_leave(ArkCtx& c) {
  ArkControl* control = ark_control(ARK_PARAMS(c));
  control->limit = 0u;
  ark_add_release(&control->abort, 1u, false);
  ark_add_release(&control->go, 0x40000000u, false);
}

// Leader only: may this processor begin the iteration? The barrier opens when all of the iteration
// before it is done on the ranks that begin it together: all of them, or this one. Once an
// iteration processor 0 asks the host whether to leave, before it waits for the barrier, so that
// the answer comes while it waits; in persistent mode it also asks for the iteration. The last
// processor, which often has least to do, tells the host which iterations are done; only in
// persistent mode the host may read results before the launch ends.
ARK_DEVICE bool ark_may_begin(ArkCtx& c, ark_u32 iteration) {
  const bool tells = c.processor + 1u == ARK_PARAMS(c)->processors;
  const bool over = ARK_PARAMS(c)->end != 0u && iteration == ARK_PARAMS(c)->end;
  if (over && !tells) return false;
  ArkControl* control = ark_control(ARK_PARAMS(c));
  const ark_u32 leave = c.processor == 0u ? ark_peek_host(&ark_host(ARK_PARAMS(c))->abort) : 0u;
  const bool system = ARK_PARAMS(c)->peers != 0u;
  const ark_u32 want = iteration * ARK_PARAMS(c)->together;
  // Longer than a task waits: whoever is stuck should report, not those who wait for its iteration.
  const ark_u64 budget = ARK_PARAMS(c)->budget_ns / 4u * 5u;
  if (!ark_wait(c, ark_words(ARK_PARAMS(c)->barrier), want, system, 4u, 0u, budget)) return false;
  if (tells && iteration != 0u) {
    ark_u32* done = &ark_host(ARK_PARAMS(c))->done;
    ARK_PARAMS(c)->persistent ? ark_store_host(done, iteration) : ark_post_host(done, iteration);
  }
  if (over) return false;
  if (leave != 0u) {
    ark_leave(c);
    return false;
  }
  if (ARK_PARAMS(c)->persistent && c.processor == 0u) {
    ArkHost* host = ark_host(ARK_PARAMS(c));
    ArkSpin spin{0u, 0u};
    for (;;) {
      const ark_u32 target = ark_load_host(&host->target);
      if (target > iteration) {
        ark_add_release(&control->go, 1u, false);
        break;
      }
      const bool quit = (ark_load_host(&host->quit) | ark_peek_host(&host->abort)) != 0u;
      if (quit || ark_spin(ARK_PARAMS(c), spin, ARK_PARAMS(c)->idle_ns) != ARK_KEEP) {
        ark_add_release(&control->go, 0x40000000u, false);
        ark_store_host(&host->quit, 1u);
        return false;
      }
    }
    return true;
  }
  if (ARK_PARAMS(c)->persistent) {
    // The host may be silent for long: this wait ends when processor 0 releases or gives up.
    ArkSpin spin{0u, 0u};
    for (;;) {
      const ark_u32 go = ark_load_acquire(&control->go, false);
      if (go >= 0x40000000u) return false;
      if (go > iteration) return true;
      const ark_u64 patience = ARK_PARAMS(c)->idle_ns + ARK_PARAMS(c)->budget_ns;
      if (ark_spin(ARK_PARAMS(c), spin, patience) != ARK_KEEP) return false;
    }
  }
  return iteration < ark_load_acquire(&control->limit, false);
}

// One thread: what bodies see of the loop, before the first iteration and before each.
ARK_DEVICE void ark_open_loop(ArkCtx& c, const ArkParams* p, ark_u32 processor, char* scratch) {
  c.p = p;
  c.scratch = scratch + ARK_LOOP_BYTES;
  c.processor = processor;
  c.iteration = 0u;
  for (int w = 0; w < ARK_BLOCK_WARPS; ++w) c.warps[w] = ARK_NO_TASK;
}
// The iterations at which phases end. The last one's has no end but the loop's.
struct ArkPhases {
  ark_u32 end[ARK_PHASES];
};
ARK_DEVICE ArkPhases ark_phases(const ArkParams* p) {
  ArkPhases phases = {};
  for (ark_u32 i = 0u; i + 1u < ARK_PHASES; ++i) phases.end[i] = ark_control(p)->phase_end[i];
  return phases;
}
ARK_DEVICE ark_u32 ark_phase(const ArkPhases& phases, ark_u32 iteration) {
  ark_u32 phase = 0u;
  for (ark_u32 i = 0u; i + 1u < ARK_PHASES; ++i) phase += iteration >= phases.end[i] ? 1u : 0u;
  return phase;
}
// The iteration, counted since its phase began.
ARK_DEVICE ark_u32 ark_phase_iteration(const ArkPhases& phases, ark_u32 iteration) {
  const ark_u32 phase = ark_phase(phases, iteration);
  ark_u32 begun = 0u;
  for (ark_u32 i = 0u; i + 1u < ARK_PHASES; ++i) {
    if (i + 1u == phase) begun = phases.end[i];
  }
  return iteration - begun;
}
ARK_DEVICE void ark_open_iteration(ArkCtx& c, ark_u32 iteration, const ArkPhases& phases,
                                   const ArkRange& range, ark_u32 stage_base) {
  c.iteration = iteration;
  c.phase = ark_phase(phases, iteration);
  c.phase_iteration = ark_phase_iteration(phases, iteration);
  c.task_end = range.task_end;
  c.fetches = ARK_POINTER(const ArkFetch, ARK_PARAMS(c)->fetches) + range.fetch_begin;
  c.stage_base = stage_base;
}
ARK_DEVICE const ArkRange& ark_range(const ArkParams* p, ark_u32 processor, ark_u32 iteration,
                                     const ArkPhases& phases) {
  const ark_u32 first = ark_phase(phases, iteration) * p->processors;
  return ARK_POINTER(const ArkRange, p->ranges)[first + processor];
}
// grown: what growing fetches have taken beyond one stage each.
ARK_DEVICE ark_u32 ark_next_stage(ark_u32 stage_base, const ArkRange& range, ark_u32 grown = 0u) {
  stage_base += range.fetch_end - range.fetch_begin + grown;
  return stage_base >= ARK_STAGE_PERIOD ? stage_base - ARK_STAGE_PERIOD : stage_base;
}

// One thread: a task's times, if there is room for them.
ARK_DEVICE void ark_trace(const ArkCtx& c, const ArkTask& task, ark_u32& traced, ark_u64 begin) {
  const ArkParams* p = ARK_PARAMS(c);
  if (traced >= p->trace_capacity) return;
  ArkTrace* record = ARK_POINTER(ArkTrace, p->trace) +
                     static_cast<ark_u64>(c.processor) * p->trace_capacity + traced++;
  record->task = task.index;
  record->iteration = c.iteration;
  record->begin = begin;
  record->end = ark_time_ns();
}

// A vote behind which no stores need have arrived. A backend may have one that waits for less.
#if !defined(ARK_HAS_AGREE)
ARK_DEVICE bool ark_agree(bool v) { return ark_all(v); }
#endif

// Waits for the running task: all computing threads; false if the processor is to leave. Of a
// vendor's own bodies some call it themselves (ARK_BODIES_ENTER), with loads under way.
ARK_DEVICE bool ark_enter_task(ArkLoop& loop, ark_u32 i) {
  const ArkTask& task = loop.tasks[i % ARK_SLOTS];
  if (task.wait_begin == task.wait_end) return true;
  return ark_agree(ark_wait_task(ark_block_team(), loop, i));
}
#if defined(ARK_BODIES_ENTER)
ARK_DEVICE bool ark_enter(ArkCtx& c) {
  ArkLoop& loop = *reinterpret_cast<ArkLoop*>(ARK_SCRATCH(c) - ARK_LOOP_BYTES);
  const bool go = ark_enter_task(loop, ark_warp_load(&c.warps[ark_warp()]));
  if (ARK_PARAMS(c)->trace && ark_tid() == 0) loop.begun = ark_time_ns();
  return go;
}
#endif

// The loop of the variant `block`: all computing threads take each task together.
ARK_DEVICE void ark_run(const ArkParams* p, ark_u32 processor, char* scratch) {
  ArkLoop& loop = *reinterpret_cast<ArkLoop*>(scratch);
  ArkCtx& c = loop.ctx;
  const ArkTeam team = ark_block_team();
  const bool leader = ark_tid() == 0;
  if (leader) ark_open_loop(c, p, processor, scratch);
  ark_sync();
  const ArkPhases phases = ark_phases(p);
  ark_u32 stage_base = 0u;
  ark_u32 traced = 0u;
  ark_u32 held = ARK_NO_TASK;  // the first task of a list that the slots still hold as a whole
  for (ark_u32 iteration = p->first;; ++iteration) {
    // What the list says is known before the iteration may begin.
    const ArkRange range = ark_range(p, processor, iteration, phases);
    const ark_u32 end = range.task_end;
    if (range.task_begin != held) {
      if (range.task_begin < end) ark_task_ahead(team, loop, p, range.task_begin);
      if (range.task_begin + 1u < end) ark_task_ahead(team, loop, p, range.task_begin + 1u);
      ark_copies_done();
      ark_sync();
      if (range.task_begin < end) ark_counter_ops_ahead(team, loop, p, range.task_begin);
      ark_copies_done();
      held = end - range.task_begin <= ARK_SLOTS ? range.task_begin : ARK_NO_TASK;
    }
    bool go = true;
    if (leader) {
      go = ark_may_begin(c, iteration);
      if (go) ark_open_iteration(c, iteration, phases, range, stage_base);
    }
    if (!ark_all(go)) return;
    for (ark_u32 i = range.task_begin; i < end; ++i) {
      const ArkTask& task = loop.tasks[i % ARK_SLOTS];
      if (i + 1u < end) ark_counter_ops_ahead(team, loop, p, i + 1u);
      if (i + 2u < end) ark_task_ahead(team, loop, p, i + 2u);
      ark_warp_store(&c.warps[ark_warp()], i);
#if defined(ARK_BODIES_ENTER)
      if (!ark_dispatch(c, task)) return;
      const ark_u64 begin = p->trace && leader ? loop.begun : 0u;
#else
      if (!ark_enter_task(loop, i)) return;
      const ark_u64 begin = p->trace ? ark_time_ns() : 0u;
      ark_dispatch(c, task);
#endif
      ark_copies_done();
      if (!ark_all(!ark_failed(c))) return;
      ark_signal_task(team, loop, i);
      if (p->trace && leader) ark_trace(c, task, traced, begin);
      if (p->trace) ark_sync();
    }
    stage_base = ark_next_stage(stage_base, range);
    // A loop must not end in the leader's work alone: a compiler may join it to the next round's,
    // past the barrier in which the leader's own warp then waits for it.
    ark_sync();
  }
}
