// Prefetches weights while a block waits, without delaying the wait (CDNA). One wave, which does
// not poll, loads a dword of each cache line of the weights that the processor reads next. It does
// so at a fixed rate, until the waves that poll tell it in shared memory that the wait is over. All
// these loads write one register, which the compiler does not use (entry.h) and nothing reads. So
// nothing waits for them earlier than for the loads behind them.

constexpr int ARK_PREFETCHER = ARK_WARPS - 2;  // the wave; counters are polled by the last one
constexpr int ARK_SIGNALLER = 1;  // the wave that signals early; the first one copies records

#if defined(__GFX9__)
constexpr int ARK_PREFETCHES = 48;      // loads in one wait, one line per lane: 384 KB
constexpr int ARK_PREFETCH_PAUSES = 4;  // pauses between two loads

// Tells the prefetching wave that task `running` need not wait any more.
ARK_DEVICE void ark_wait_ends(ark_u32 running) {
  __hip_atomic_store(&ark_waited, running + 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}
ARK_DEVICE bool ark_wait_ended(ark_u32 running) {
  const ark_u32 last =
      __hip_atomic_load(&ark_waited, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
  return __builtin_amdgcn_readfirstlane(last) == running + 1u;
}

// Prefetches until the wait of task `running` ends: this task's weights from line `done` on (none
// if `done` is negative), then those of the next task. Records of later tasks are not in shared
// memory.
ARK_DEVICE void ark_prefetch(ArkCtx& c, const ArkLoop& loop, ark_u32 running, int done) {
  int asked = 0;
#pragma unroll 1
  for (ark_u32 ahead = done < 0 ? 1u : 0u; ahead <= 1u; ++ahead) {
    const ark_u32 task = running + ahead;
    if (task >= c.task_end) return;
    const ArkLines lines = ark_lines(c, loop.tasks[task % ARK_SLOTS]);
    const int earlier = ark_prefetched.task == task ? ark_prefetched.lines : 0;
    int first = ahead == 0u && done > earlier ? done : earlier;
    first = __builtin_amdgcn_readfirstlane(first);
#pragma unroll 1
    for (; first < lines.count; first += ARK_LANES) {
      const int line = first + ark_lane();
      if (asked == ARK_PREFETCHES || ark_wait_ended(running)) return;
      const auto* from = lines.first + (line < lines.count ? line : lines.count - 1) * 128;
      asm volatile("global_load_dword v252, %0, off" ::"v"(from) : "v252");
      ++asked;
      if (ark_lane() == 0) ark_prefetched = {task, first + ARK_LANES};
#pragma unroll 1
      for (int pause = 0; pause < ARK_PREFETCH_PAUSES; ++pause) {
        if (ark_wait_ended(running)) return;
        ark_pause(0u);
      }
    }
  }
}

// Polls the running task's counters once. Returns true if the threads of this wave need not wait.
// Called before the wave loads weights, because loads return in order: if the task begins late, a
// poll behind the weights would delay it.
ARK_DEVICE bool ark_poll_first(ArkCtx& c) {
  const ArkLoop& loop = *reinterpret_cast<const ArkLoop*>(ARK_SCRATCH(c) - ARK_LOOP_BYTES);
  const ark_u32 running = ark_warp_load(&c.warps[ark_warp()]);
  const ArkTask& task = loop.tasks[running % ARK_SLOTS];
  const ArkTeam team = ark_turned_team();
  const ark_u32 first = task.wait_begin + team.thread;
  if (ark_warp_all(first >= task.wait_end)) return true;
  bool ready = true, system = false;
  if (first < task.wait_end) {
    const ArkCounterOp e = ark_counter_op(loop, running, first);
    const ark_u32 want = e.step * c.phase_iteration + e.value;
    system = (e.flags & 1u) != 0u;
    ready = static_cast<ark_i32>(ark_poll(ark_words(e.address), system) - want) >= 0;
    ready = ready && !(system && ARK_SIGNAL_WORDS > 1u) && first + team.threads >= task.wait_end;
  }
  if (!ark_warp_all(ready)) return false;
  ark_polled(ark_ballot(system) != 0u);
  return true;
}

// Like ark_enter, with prefetches meanwhile. ready: the result of ark_poll_first. done: see
// ark_prefetch.
ARK_DEVICE bool ark_enter_prefetching(ArkCtx& c, bool ready, int done) {
  ArkLoop& loop = *reinterpret_cast<ArkLoop*>(ARK_SCRATCH(c) - ARK_LOOP_BYTES);
  const ark_u32 running = ark_warp_load(&c.warps[ark_warp()]);
  const ArkTask& task = loop.tasks[running % ARK_SLOTS];
  bool go = true;
  if (task.wait_begin != task.wait_end) {
    if (ark_warp() == ARK_PREFETCHER) ark_prefetch(c, loop, running, done);
    if (!ready) go = ark_wait_task(ark_turned_team(), loop, running);
    if (ark_turned_team().thread == 0u) ark_wait_ends(running);
    go = ark_agree(go);
  }
  if (ARK_PARAMS(c)->trace && ark_tid() == 0) loop.begun = ark_time_ns();
  return go;
}

// Called by all threads when a body has stored its results: signals the running task's counters.
// The loop would first copy records of later tasks, which another wave does meanwhile. It finds no
// signals any more, because the record says so until the task's last vote.
ARK_DEVICE void ark_signal_early(ArkCtx& c) {
  ArkLoop& loop = *reinterpret_cast<ArkLoop*>(ARK_SCRATCH(c) - ARK_LOOP_BYTES);
  const ark_u32 running = ark_warp_load(&c.warps[ark_warp()]) & ~ARK_GAVE_UP;
  ArkTask& task = loop.tasks[running % ARK_SLOTS];
  const ark_u32 first = task.wait_end, end = task.signal_end;
  if (first == end || end - first > ARK_SLOT_COUNTER_OPS) return;
  const ark_u32 at = first + static_cast<ark_u32>(ark_lane());
  const bool signals = ark_warp() == ARK_SIGNALLER && at < end;
  ArkCounterOp own = {};
  if (signals) own = ark_counter_op(loop, running, at);
  ark_drain();
  const bool mine = ark_warp_all(!ark_failed(c));
  if (ark_lane() == 0) ark_votes[ark_warp()] = mine ? 1u : 0u;
  ark_sync();
  ark_u32 all = 1u;
  for (int w = 0; w < ARK_WARPS; ++w) all &= ark_votes[w];
  if (__builtin_amdgcn_readfirstlane(all) == 0u) return;
  if (ark_tid() == 0) {
    const char* place = reinterpret_cast<const char*>(&task.signal_end);
    ark_signalled = {running + 1u, end, static_cast<ark_u32>(place - ark_lds)};
    task.signal_end = first;
  }
  ark_sync();
  ARK_BLOCK_ARRIVED();
  if (signals) ark_signal(c, own);
}

// Called by waves that wait for packets, or have none to wait for, before the wait. Prefetches the
// next task's weights until one wave has called ark_packets_arrived.
ARK_DEVICE void ark_prefetch_for_packets(ArkCtx& c) {
  if (ark_warp() != ARK_PREFETCHER) return;
  const ArkLoop& loop = *reinterpret_cast<const ArkLoop*>(ARK_SCRATCH(c) - ARK_LOOP_BYTES);
  ark_prefetch(c, loop, ark_warp_load(&c.warps[ark_warp()]) & ~ARK_GAVE_UP, -1);
}
ARK_DEVICE void ark_packets_arrived(ArkCtx& c) {
  if (ark_tid() == 0) ark_wait_ends(ark_warp_load(&c.warps[0]) & ~ARK_GAVE_UP);
}
#else
ARK_DEVICE bool ark_poll_first(ArkCtx&) { return false; }
ARK_DEVICE bool ark_enter_prefetching(ArkCtx& c, bool, int) { return ark_enter(c); }
ARK_DEVICE void ark_prefetch_for_packets(ArkCtx&) {}
ARK_DEVICE void ark_packets_arrived(ArkCtx&) {}
ARK_DEVICE void ark_signal_early(ArkCtx&) {}
#endif
