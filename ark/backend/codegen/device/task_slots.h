// Slots in shared memory that hold the next tasks of a processor's list, with their waits and
// signals.

// The number of slots. A slot is shared memory for one task's record and counter operations, which
// are copied while earlier tasks run, so that no task begins with a load from device memory. One
// slot holds the running task, and two hold its successors. The fourth holds its predecessor, whose
// signals some threads may still be sending.
constexpr ark_u32 ARK_SLOTS = 4u;

struct ArkLoop {
  ArkTask tasks[ARK_SLOTS];
  ArkCounterOp counter_ops[ARK_SLOTS][ARK_SLOT_COUNTER_OPS];
  ArkCtx ctx;
  ark_u64 begun;  // time after the running task's waits; only if a trace is recorded
};
static_assert(sizeof(ArkLoop) <= ARK_LOOP_BYTES, "the loop's share of scratch");
static_assert(sizeof(ArkTask) <= 256 && sizeof(ArkCounterOp) * ARK_SLOT_COUNTER_OPS <= 256, "");

#ifndef ARK_HAS_COPY_AHEAD
// Starts a copy of 8 bytes from device memory to shared memory. The bytes have arrived after
// ark_copies_done() and a barrier.
ARK_DEVICE void ark_copy_ahead(ark_u64* to, const ark_u64* from) { *to = *from; }
ARK_DEVICE void ark_copies_done() {}
#endif

// The threads that share some work of the loop itself, such as copying records: all computing
// threads, or one warp. thread: the number of this thread among them.
struct ArkTeam {
  ark_u32 thread;
  ark_u32 threads;
};
ARK_DEVICE ArkTeam ark_block_team() {
  return ArkTeam{static_cast<ark_u32>(ark_tid()), static_cast<ark_u32>(ARK_THREADS)};
}
// All computing threads, numbered so that the second warp comes first. Of two copies, one is made
// with this numbering and one with the usual numbering, so that different warps issue them.
ARK_DEVICE ArkTeam ark_turned_team() {
  constexpr ark_u32 THREADS = static_cast<ark_u32>(ARK_THREADS);
  return ArkTeam{(static_cast<ark_u32>(ark_tid()) + ARK_LANES) % THREADS, THREADS};
}

ARK_DEVICE void ark_copy_words(ArkTeam team, void* to, const void* from, ark_u32 words) {
  // If a warp has 32 lanes or more, each lane copies at most one word. Then there is no loop,
  // because its code would displace the tasks' code in the instruction cache.
  for (ark_u32 i = team.thread; i < words; i += team.threads) {
    ark_copy_ahead(reinterpret_cast<ark_u64*>(to) + i, reinterpret_cast<const ark_u64*>(from) + i);
    if (ARK_LANES >= 32) break;
  }
}
ARK_DEVICE void ark_task_ahead(ArkTeam team, ArkLoop& loop, const ArkParams* p, ark_u32 i) {
  const ArkTask* task = ARK_POINTER(const ArkTask, p->tasks) + i;
  ark_copy_words(team, &loop.tasks[i % ARK_SLOTS], task, sizeof(ArkTask) / 8u);
}
#if defined(ARK_HOLDS_RECORDS)
// Prefetches task records, on backends without asynchronous copies to shared memory. On these, a
// copy waits for its load and delays all later accesses of its warp. So the copy is split: at the
// end of a task, every thread of the last warp loads its word of the record three tasks ahead into
// a register, and at the end of the next task it stores the word to the record's slot in shared
// memory. Only the last warp does this, because other warps would have to wait for their own stores
// here.
constexpr bool ARK_RECORDS_LAST = true;
ARK_DEVICE void ark_task_word(ArkTeam, const ArkParams* p, ark_u32 i, ark_u32 end, ark_u64& word) {
  constexpr int WORDS = static_cast<int>(sizeof(ArkTask) / 8u);
  static_assert(WORDS <= ARK_LANES, "a thread has one word");
  if (ark_warp() != ARK_WARPS - 1 || i >= end) return;
  const int place = ark_lane() < WORDS ? ark_lane() : WORDS - 1;
  word = ARK_POINTER(const ark_u64, p->tasks)[static_cast<ark_u64>(i) * WORDS + place];
}
ARK_DEVICE void ark_task_arrives(ArkTeam, ArkLoop& loop, const ArkParams*, ark_u32 i, ark_u32 end,
                                 ark_u64 word) {
  if (ark_warp() != ARK_WARPS - 1 || i >= end) return;
  if (ark_lane() >= static_cast<int>(sizeof(ArkTask) / 8u)) return;
  reinterpret_cast<ark_u64*>(&loop.tasks[i % ARK_SLOTS])[ark_lane()] = word;
}
#else
constexpr bool ARK_RECORDS_LAST = false;
ARK_DEVICE void ark_task_word(ArkTeam, const ArkParams*, ark_u32, ark_u32, ark_u64&) {}
ARK_DEVICE void ark_task_arrives(ArkTeam team, ArkLoop& loop, const ArkParams* p, ark_u32 i,
                                 ark_u32 end, ark_u64) {
  if (i < end) ark_task_ahead(team, loop, p, i);
}
#endif
// Copies the counter operations (waits, then signals) of task i to its slot. A slot has room for
// those of most tasks; ark_counter_op reads any others from device memory.
ARK_DEVICE void ark_counter_ops_ahead(ArkTeam team, ArkLoop& loop, const ArkParams* p, ark_u32 i) {
  const ArkTask& task = loop.tasks[i % ARK_SLOTS];
  const ark_u32 count = task.signal_end - task.wait_begin;
  const ArkCounterOp* ops = ARK_POINTER(const ArkCounterOp, p->counter_ops) + task.wait_begin;
  const ark_u32 fit = count < ARK_SLOT_COUNTER_OPS ? count : ARK_SLOT_COUNTER_OPS;
  ark_copy_words(team, loop.counter_ops[i % ARK_SLOTS], ops, fit * (sizeof(ArkCounterOp) / 8u));
}

// Called while task i runs: copies the waits and signals of the next task and the record two tasks
// ahead, and loads this thread's word of the record three tasks ahead.
ARK_DEVICE void ark_look_ahead(ArkTeam team, ArkLoop& loop, const ArkParams* p, ark_u32 i,
                               ark_u32 end, ark_u64& word) {
  if (i + 1u < end) ark_counter_ops_ahead(team, loop, p, i + 1u);
  ark_task_arrives(team, loop, p, i + 2u, end, word);
  ark_task_word(team, p, i + 3u, end, word);
}

#if defined(ARK_FLOWS)
// A run is a sequence of tasks between which warps do not synchronise. Such tasks use no scratch
// memory, so the records of a run are stored in scratch memory.
static_assert(ARK_FLOWS * sizeof(ArkTask) <= ARK_SCRATCH_BYTES - ARK_LOOP_BYTES, "records");
ARK_DEVICE ArkTask* ark_flow_records(const ArkCtx& c) {
  return reinterpret_cast<ArkTask*>(ARK_SCRATCH(c));
}
// Called by all threads before a run, which is a sequence of `count` tasks between which warps do
// not synchronise. Task i is the first of the run; its record is already in its slot. Copies the
// records of the whole run to scratch memory. Copies the records and counter operations of the
// run's last task, and of the two tasks after it, to their slots. Afterwards no thread reads
// records of earlier tasks.
ARK_DEVICE void ark_flow_begins(ArkTeam team, ArkLoop& loop, const ArkParams* p, ark_u32 i,
                                ark_u32 count, ark_u32 end) {
  const ArkTask* tasks = ARK_POINTER(const ArkTask, p->tasks) + i;
  ark_u64* to = reinterpret_cast<ark_u64*>(ark_flow_records(loop.ctx));
  const ark_u64* from = reinterpret_cast<const ark_u64*>(tasks);
  const ark_u32 words = count * (sizeof(ArkTask) / 8u);
  for (ark_u32 w = team.thread; w < words; w += team.threads) ark_copy_ahead(to + w, from + w);
  ark_sync();
  for (ark_u32 k = count - 1u; k < count + 2u && i + k < end; ++k) {
    ark_task_ahead(team, loop, p, i + k);
  }
  ark_copies_done();
  ark_sync();
  ark_counter_ops_ahead(team, loop, p, i + count - 1u);
  if (i + count < end) ark_counter_ops_ahead(team, loop, p, i + count);
}
#endif
ARK_DEVICE ArkCounterOp ark_counter_op(const ArkLoop& loop, ark_u32 i, ark_u32 number) {
  const ark_u32 at = number - loop.tasks[i % ARK_SLOTS].wait_begin;
  if (at < ARK_SLOT_COUNTER_OPS) return loop.counter_ops[i % ARK_SLOTS][at];
  const ark_u64 ops = ARK_PARAMS(loop.ctx)->counter_ops;
  return ARK_DEVICE_COPY(ArkCounterOp, ops + static_cast<ark_u64>(number) * sizeof(ArkCounterOp));
}

// Performs this thread's share of the waits of task i. Returns false after a failure; the caller
// must combine the results of all threads of the team.
ARK_DEVICE bool ark_wait_task(ArkTeam team, ArkLoop& loop, ark_u32 i) {
  ArkCtx& c = loop.ctx;
  const ArkTask& task = loop.tasks[i % ARK_SLOTS];
  const ark_u64 budget = ARK_PARAMS(c)->budget_ns;
  bool ok = true;
  for (ark_u32 w = task.wait_begin + team.thread; w < task.wait_end; w += team.threads) {
    const ArkCounterOp e = ark_counter_op(loop, i, w);
    const ark_u32 want = e.step * c.phase_iteration + e.value;
    const bool system = (e.flags & 1u) != 0u;
    const ark_u32* word = ark_words(e.address);
    ok = ok && ark_wait<ARK_SIGNAL_WORDS>(c, word, want, system, 1u, e.counter, budget);
  }
  return ok;
}

#if defined(ARK_REMOTE)
// The declaration of ark_proxy_push (device/proxy.h), which here signals counters of ranks on other
// hosts.
ARK_BODY bool ark_proxy_push(ArkCtx& c, ark_u64 source, ark_u64 target, ark_u32 size,
                             ark_u32& behind);
#endif
// Signals a peer's counter over a link that supports stores but no atomic operations. This rank
// counts its signals in local memory, and stores the count in its own word of the peer's counter.
// If two processors signal at the same time, the larger count may be stored first and then be
// overwritten by the smaller one. So each processor reads the local count again after its store,
// and repeats the store if the count has grown. The last store then has the complete count. A
// smaller count in between only makes the peer wait longer. The local count is read by a
// compare-and-swap with itself, which orders the read after the store.
ARK_DEVICE void ark_signal_stored(const ArkCounterOp& e) {
  ark_u32* count = ark_words((static_cast<ark_u64>(e.counter) << 32) | e.step);
  ark_add_release(count, e.value, true);
  ark_u32 mine = ark_load_acquire(count, false);
  for (;;) {
    ark_store_host(ark_words(e.address), mine);
    const ark_u32 now = ark_cas(count, mine, mine);
    if (now == mine) return;
    mine = now;
  }
}
ARK_DEVICE void ark_signal(ArkCtx& c, const ArkCounterOp& e) {
#if defined(ARK_REMOTE)
  ark_u32 behind = 0u;
  if ((e.flags & 4u) != 0u) {
    ark_proxy_push(c, e.value, e.address, 0u, behind);
    return;
  }
#endif
  (void)c;
  if (ARK_SIGNAL_WORDS > 1 && (e.flags & 8u) != 0u) {
    ark_signal_stored(e);
    return;
  }
  ark_add_release(ark_words(e.address), e.value, (e.flags & 1u) != 0u);
}
ARK_DEVICE void ark_signal_task(ArkTeam team, ArkLoop& loop, ark_u32 i) {
  const ArkTask& task = loop.tasks[i % ARK_SLOTS];
  ARK_BLOCK_ARRIVED();
  for (ark_u32 s = task.wait_end + team.thread; s < task.signal_end; s += team.threads) {
    const ArkCounterOp e = ark_counter_op(loop, i, s);
    ark_signal(loop.ctx, e);
  }
}
