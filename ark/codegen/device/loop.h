// The loop that every processor runs, the same text on every vendor. It stands on the device ABI
// (docs/device-abi.md), the shared structures of ark/codegen/layout.py, and on ark_dispatch, the
// switch over task kinds that the writer generates.

// Runs a task's body; false if the processor is to leave instead.
ARK_DEVICE bool ark_dispatch(ArkCtx& c, const ArkTask& task);
#if defined(ARK_FLOWS)
// Runs the first task's body for so many tasks, one after the other.
ARK_DEVICE void ark_dispatch_run(ArkCtx& c, const ArkTask* tasks, ark_u32 count);
#endif

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
// `turn` of ark_agree_next is odd and even by turns where votes follow each other without a
// barrier.
#if !defined(ARK_HAS_AGREE)
ARK_DEVICE bool ark_agree(bool v) { return ark_all(v); }
ARK_DEVICE bool ark_agree_next(bool v, ark_u32) { return ark_all(v); }
#endif

// The first warp, when its first lane has been away alone: what that lane says. A backend whose
// lanes may stay apart from there on says how they come together again.
#if !defined(ARK_HAS_REJOIN)
ARK_DEVICE bool ark_rejoin(bool v) { return v; }
#endif

// Waits for the running task: all computing threads; false if the processor is to leave. Of a
// vendor's own bodies some call it themselves (ARK_BODIES_ENTER), with loads under way.
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
// Leader: warps with a list of their own may begin the iteration too.
ARK_DEVICE void ark_movers_begin(ark_u32 iteration);
#endif

#if defined(ARK_FLOWS)
// The tasks between which warps do not meet: each warp by itself. Nothing in a run waits or fails.
// Where times are kept each task is called for alone.
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

// The loop of the variant `block`: all computing threads take each task together; tasks that say so
// (ARK_FLOWS) the warps take without meeting between them.
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
  ark_u32 held = ARK_NO_TASK;  // the first task of a list that the slots still hold as a whole
  for (ark_u32 iteration = p->first;; ++iteration) {
    // What the list says is known before the iteration may begin.
    const ArkRange range = ark_range(p, processor, iteration, phases);
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
      ark_copies_done();
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
      // What is published as packets arrives by itself; a signal says that all has.
      if (task.wait_end == task.signal_end) {
        if (!ark_agree_next(!ark_failed(c), i)) return;
      } else {
        if (!ark_all(!ark_failed(c))) return;
        ark_signal_task(team, loop, i);
      }
      if (traces && leader) ark_trace(c, task, traced, begin);
      if (traces) ark_sync();
    }
    stage_base = ark_next_stage(stage_base, range);
    // A loop must not end in the leader's work alone: a compiler may join it to the next round's,
    // past the barrier in which the leader's own warp then waits for it.
    ark_sync();
  }
}
