// The loop that every processor runs. Its text is the same for every vendor. It uses the device ABI
// (docs/device-abi.md), the structures of ark/backend/codegen/layout.py, and ark_dispatch, a switch
// over task kinds that ark.backend.codegen.writer generates.

// Runs a task's body. Returns false if a wait has failed or the launch was aborted; the processor
// must then leave the loop.
ARK_DEVICE bool ark_dispatch(ArkCtx& c, const ArkTask& task);
#if defined(ARK_FLOWS)
// Runs `count` consecutive tasks with the same body, one after the other.
ARK_DEVICE void ark_dispatch_run(ArkCtx& c, const ArkTask* tasks, ark_u32 count);
#endif

// Called by one thread: records when a task began and ended, if the trace has room.
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

// A vote of all computing threads: returns true in every thread if `v` is true in all of them.
// Unlike ark_all, it need not wait until earlier stores have arrived in memory, so a backend can
// implement it faster. ark_agree_next and ark_all_next are for votes that follow each other without
// a barrier; their argument `turn` must alternate between odd and even numbers.
#if !defined(ARK_HAS_AGREE)
ARK_DEVICE bool ark_agree(bool v) { return ark_all(v); }
ARK_DEVICE bool ark_agree_next(bool v, ark_u32) { return ark_all(v); }
ARK_DEVICE bool ark_all_next(bool v, ark_u32) { return ark_all(v); }
#endif

// Called by the first warp after a branch that only its first lane has executed: returns the first
// lane's value of v in all lanes. On a backend whose lanes can stay diverged after a branch, it
// also makes the lanes converge.
#if !defined(ARK_HAS_REJOIN)
ARK_DEVICE bool ark_rejoin(bool v) { return v; }
#endif

// Called by all computing threads: performs the waits of task i. Returns false if a wait has failed
// or the launch was aborted; the processor must then leave the loop. Some bodies of backends call
// it themselves (ARK_BODIES_ENTER), after they have started loads.
ARK_DEVICE bool ark_enter_task(ArkTeam team, ArkLoop& loop, ark_u32 i) {
  const ArkTask& task = loop.tasks[i % ARK_SLOTS];
  if (task.wait_begin == task.wait_end) return true;
  return ark_agree(ark_wait_task(team, loop, i));
}
#if defined(ARK_BODIES_ENTER)
ARK_DEVICE bool ark_enter(ArkCtx& c) {
  ArkLoop& loop = *reinterpret_cast<ArkLoop*>(ARK_SCRATCH(c) - ARK_LOOP_BYTES);
  const ark_u32 running = ark_warp_load(&c.warps[ark_warp()]);
  const bool go = ark_enter_task(ark_turned_team(), loop, running);
  if (ARK_PARAMS(c)->trace && ark_tid() == 0) loop.begun = ark_time_ns();
  return go;
}
#endif

#if defined(ARK_MOVERS)
// Called by the leader (thread 0): allows moving warps, which have a task list of their own, to
// begin the iteration.
ARK_DEVICE void ark_movers_begin(ark_u32 iteration);
#endif

#if defined(ARK_LOADS)
// Called by all computing threads before the waits of task i. Tells the loading warps, which
// process the task list independently, that all tasks before task i have ended.
ARK_DEVICE void ark_task_reached(const ArkCtx& c, ark_u32 i);
#endif

#if defined(ARK_FLOWS)
// Runs consecutive tasks between which warps do not synchronise: each warp runs all of them at its
// own pace. None of these tasks waits or can fail. If a trace is recorded, each task is dispatched
// separately.
ARK_DEVICE void ark_flow_run(ArkCtx& c, const ArkParams* p, ark_u32 count, ark_u32& traced) {
  const ArkTask* tasks = ark_flow_records(c);
  for (ark_u32 k = 0u; k < count;) {
    const ark_u64 begin = p->trace ? ark_time_ns() : 0u;
    const ark_u32 same = p->trace ? 1u : tasks[k].flow >> 8 & 255u;
    ark_dispatch_run(c, tasks + k, same);
    if (p->trace && ark_tid() == 0) ark_trace(c, tasks[k], traced, begin);
    k += same;
  }
}
#endif

// The loop of the variant `block`: all computing threads run each task together. In runs of tasks
// that allow it (ARK_FLOWS), warps do not synchronise between tasks.
ARK_DEVICE void ark_run(const ArkParams* p, ark_u32 processor, char* scratch) {
  ArkLoop& loop = *reinterpret_cast<ArkLoop*>(scratch);
  ArkCtx& c = loop.ctx;
  const ArkTeam team = ark_block_team();
  const bool leader = ark_tid() == 0;
  if (leader) ark_open_loop(c, p, processor, scratch);
  ark_sync();
  const ArkPhases phases = ark_phases(p);
  ark_u32 stage_base = 0u;
  const bool traces = p->trace != 0u;
  ark_u32 traced = 0u;
  ark_u32 held = ARK_NO_TASK;  // the first task of a list that is completely in the slots
  ArkRange range = {};
  ark_u32 ranged = ARK_PHASES;  // the phase that `range` belongs to
  for (ark_u32 iteration = p->first;; ++iteration) {
    // The range of tasks and the first records are loaded only if they have changed since the
    // previous iteration. They are loaded before the wait for the iteration barrier, to overlap
    // with it.
    if (ark_phase(phases, iteration) != ranged) {
      range = ark_range(p, processor, iteration, phases);
      ranged = ark_phase(phases, iteration);
    }
    const ark_u32 end = range.task_end;
    const ark_u32 limit = leader ? ark_known_limit(p) : 0u;
    if (range.task_begin != held) {
      if (range.task_begin < end) ark_task_ahead(team, loop, p, range.task_begin);
      if (range.task_begin + 1u < end) {
        ark_task_ahead(ark_turned_team(), loop, p, range.task_begin + 1u);
      }
      ark_copies_done();
      ark_sync();
      if (range.task_begin < end) ark_counter_ops_ahead(team, loop, p, range.task_begin);
      held = end - range.task_begin <= ARK_SLOTS ? range.task_begin : ARK_NO_TASK;
    }
    bool go = true;
    if (ark_warp() == 0) {
      if (leader) {
        go = ark_may_begin(c, iteration, limit);
        if (go) ark_open_iteration(c, iteration, phases, range, stage_base);
      }
      go = ark_rejoin(go);
    }
    ark_copies_done();
    if (!ark_agree(go)) return;
#if defined(ARK_MOVERS)
    if (leader) ark_movers_begin(iteration);
#endif
    ark_u64 word = 0u;
    ark_task_word(team, p, range.task_begin + 2u, end, word);
    for (ark_u32 i = range.task_begin; i < end; ++i) {
#if defined(ARK_FLOWS)
      const ark_u32 count = loop.tasks[i % ARK_SLOTS].flow & 255u;
      if (count != 0u) {
        ark_flow_begins(team, loop, p, i, count, end);
        ark_task_word(team, p, i + count + 2u, end, word);
        ark_warp_store(&c.warps[ark_warp()], i);
        ark_flow_run(c, p, count, traced);
        ark_copies_done();
        i += count - 1u;
        if (!ark_all(!ark_failed(c))) return;
        ark_signal_task(team, loop, i);
        if (traces) ark_sync();
        continue;
      }
#endif
      const ArkTask& task = loop.tasks[i % ARK_SLOTS];
      if (!ARK_RECORDS_LAST) ark_look_ahead(team, loop, p, i, end, word);
      ark_warp_store(&c.warps[ark_warp()], i);
#if defined(ARK_LOADS)
      ark_task_reached(c, i);
#endif
#if defined(ARK_BODIES_ENTER)
      if (!ark_dispatch(c, task)) return;
      const ark_u64 begin = traces && leader ? loop.begun : 0u;
#else
      if (!ark_enter_task(team, loop, i)) return;
      const ark_u64 begin = traces ? ark_time_ns() : 0u;
      ark_dispatch(c, task);
#endif
      if (ARK_RECORDS_LAST) ark_look_ahead(team, loop, p, i, end, word);
      ark_copies_done();
      // A task without signals has published its results as packets, whose readers need no other
      // ordering, so a vote without a memory fence suffices. Before a signal, all stores of the
      // task must have arrived, so ark_all is used.
      if (task.wait_end == task.signal_end) {
        if (!ark_agree_next(!ark_failed(c), i)) return;
      } else {
        if (!ark_all_next(!ark_failed(c), i)) return;
        ark_signal_task(team, loop, i);
      }
      if (traces && leader) ark_trace(c, task, traced, begin);
      if (traces) ark_sync();
    }
    stage_base = ark_next_stage(stage_base, range);
    // This barrier prevents a deadlock. Without it the loop body would end with code for the leader
    // only, and a compiler could merge this code with the leader's code at the start of the next
    // round. The leader would then run ahead of the other threads of its warp, which wait in a
    // barrier that the warp must reach as a whole.
    ark_sync();
  }
}
